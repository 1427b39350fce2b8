"""The SDK: submit jobs, wait for them, call their workers.

Importing this package is cheap; what needs gRPC is loaded when it is first used.
"""

from typing import TYPE_CHECKING

from callboard._lazy import lazily, public_names

if TYPE_CHECKING:
    from callboard.client.calls.watching import LogLine as LogLine
    from callboard.client.client import Client as Client
    from callboard.client.errors import ClusterFailed as ClusterFailed
    from callboard.client.errors import JobEnded as JobEnded
    from callboard.client.errors import NoController as NoController
    from callboard.client.errors import NoRay as NoRay
    from callboard.client.errors import NoResult as NoResult
    from callboard.client.errors import OlderController as OlderController
    from callboard.client.errors import RequestTooLarge as RequestTooLarge
    from callboard.client.errors import SeveralControllers as SeveralControllers
    from callboard.client.errors import Unreachable as Unreachable
    from callboard.client.errors import WaitTimeout as WaitTimeout
    from callboard.client.errors import WorkerGone as WorkerGone
    from callboard.client.jobs import JobHandle as JobHandle
    from callboard.client.sync import SyncClient as SyncClient
    from callboard.client.sync import SyncJobHandle as SyncJobHandle
    from callboard.client.workers import CallOptions as CallOptions
    from callboard.client.workers import NoActor as NoActor
    from callboard.client.workers import TypedWorkerHandle as TypedWorkerHandle
    from callboard.client.workers import WorkerHandle as WorkerHandle
    from callboard.client.workers import connect_ray as connect_ray
    from callboard.model.faults import Fault as Fault
    from callboard.model.faults import InvalidInput as InvalidInput
    from callboard.security.tls import TlsFiles as TlsFiles
    from callboard.wire.refusals import AlreadyExists as AlreadyExists
    from callboard.wire.refusals import CallboardError as CallboardError
    from callboard.wire.refusals import DeadlineExceeded as DeadlineExceeded
    from callboard.wire.refusals import EtagMismatch as EtagMismatch
    from callboard.wire.refusals import InvalidRequest as InvalidRequest
    from callboard.wire.refusals import InventoryChanged as InventoryChanged
    from callboard.wire.refusals import LimitReached as LimitReached
    from callboard.wire.refusals import NotFound as NotFound
    from callboard.wire.refusals import PoolInUse as PoolInUse
    from callboard.wire.refusals import PreemptionRefused as PreemptionRefused
    from callboard.wire.refusals import QuotaExceeded as QuotaExceeded
    from callboard.wire.refusals import RevisionCompacted as RevisionCompacted
    from callboard.wire.refusals import Unavailable as Unavailable
    from callboard.wire.refusals import Unschedulable as Unschedulable
    from callboard.wire.refusals import WrongState as WrongState

_PUBLIC = public_names(
    {
        "callboard.client.client": """
            Client
        """,
        "callboard.client.errors": """
            ClusterFailed JobEnded NoController NoRay NoResult OlderController RequestTooLarge SeveralControllers
            Unreachable WaitTimeout WorkerGone
        """,
        "callboard.client.jobs": """
            JobHandle
        """,
        "callboard.client.calls.watching": """
            LogLine
        """,
        "callboard.client.sync": """
            SyncClient SyncJobHandle
        """,
        "callboard.client.workers": """
            CallOptions NoActor TypedWorkerHandle WorkerHandle connect_ray
        """,
        "callboard.model.faults": """
            Fault InvalidInput
        """,
        "callboard.security.tls": """
            TlsFiles
        """,
        "callboard.wire.refusals": """
            AlreadyExists CallboardError DeadlineExceeded EtagMismatch InvalidRequest
            InventoryChanged LimitReached NotFound PoolInUse PreemptionRefused QuotaExceeded
            RevisionCompacted Unavailable Unschedulable WrongState
        """,
    }
)


__getattr__, __dir__ = lazily(__name__, _PUBLIC)
