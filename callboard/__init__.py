"""A control plane for the Ray actors of RL training.

Importing this package is cheap: a public name loads its module when it is first asked for
(PEP 562), so a trainer that only describes a job pays for neither gRPC nor Ray.
"""

from types import MappingProxyType
from typing import TYPE_CHECKING

from callboard._lazy import lazily
from callboard._version import __version__ as __version__

if TYPE_CHECKING:
    # What a type checker sees; a test keeps it equal to _PUBLIC.
    from callboard.agents.worker_process import StopNotice as StopNotice
    from callboard.client import Client as Client
    from callboard.client import JobEnded as JobEnded
    from callboard.client import JobHandle as JobHandle
    from callboard.client import LogLine as LogLine
    from callboard.client import NoActor as NoActor
    from callboard.client import NoController as NoController
    from callboard.client import NoRay as NoRay
    from callboard.client import RequestTooLarge as RequestTooLarge
    from callboard.client import SeveralControllers as SeveralControllers
    from callboard.client import SyncClient as SyncClient
    from callboard.client import SyncJobHandle as SyncJobHandle
    from callboard.client import Unreachable as Unreachable
    from callboard.client import WaitTimeout as WaitTimeout
    from callboard.client import WorkerGone as WorkerGone
    from callboard.client import WorkerHandle as WorkerHandle
    from callboard.model import ComponentSpec as ComponentSpec
    from callboard.model import InvalidInput as InvalidInput
    from callboard.model import JobSpec as JobSpec
    from callboard.model import PgPoolSpec as PgPoolSpec
    from callboard.model import PoolSpec as PoolSpec
    from callboard.model import PreemptionPolicy as PreemptionPolicy
    from callboard.placement import Cluster as Cluster
    from callboard.placement import ComponentPlacement as ComponentPlacement
    from callboard.placement import FlexiblePlacementStrategy as FlexiblePlacementStrategy
    from callboard.placement import HybridComponentPlacement as HybridComponentPlacement
    from callboard.placement import ModelParallelComponentPlacement as ModelParallelComponentPlacement
    from callboard.placement import NodePlacementStrategy as NodePlacementStrategy
    from callboard.placement import PackedPlacementStrategy as PackedPlacementStrategy
    from callboard.placement import Placement as Placement
    from callboard.placement import component_placement_for as component_placement_for
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

# The public names and where each one lives.
_PUBLIC = MappingProxyType(
    {
        "AlreadyExists": "callboard.wire.refusals",
        "CallboardError": "callboard.wire.refusals",
        "Client": "callboard.client",
        "Cluster": "callboard.placement",
        "ComponentPlacement": "callboard.placement",
        "ComponentSpec": "callboard.model",
        "DeadlineExceeded": "callboard.wire.refusals",
        "EtagMismatch": "callboard.wire.refusals",
        "FlexiblePlacementStrategy": "callboard.placement",
        "HybridComponentPlacement": "callboard.placement",
        "InvalidInput": "callboard.model",
        "InvalidRequest": "callboard.wire.refusals",
        "InventoryChanged": "callboard.wire.refusals",
        "JobEnded": "callboard.client",
        "JobHandle": "callboard.client",
        "LogLine": "callboard.client",
        "JobSpec": "callboard.model",
        "LimitReached": "callboard.wire.refusals",
        "ModelParallelComponentPlacement": "callboard.placement",
        "NoActor": "callboard.client",
        "NoController": "callboard.client",
        "NoRay": "callboard.client",
        "NodePlacementStrategy": "callboard.placement",
        "NotFound": "callboard.wire.refusals",
        "PackedPlacementStrategy": "callboard.placement",
        "PgPoolSpec": "callboard.model",
        "Placement": "callboard.placement",
        "PoolInUse": "callboard.wire.refusals",
        "PoolSpec": "callboard.model",
        "PreemptionPolicy": "callboard.model",
        "PreemptionRefused": "callboard.wire.refusals",
        "QuotaExceeded": "callboard.wire.refusals",
        "RequestTooLarge": "callboard.client",
        "RevisionCompacted": "callboard.wire.refusals",
        "SeveralControllers": "callboard.client",
        "StopNotice": "callboard.agents.worker_process",
        "SyncClient": "callboard.client",
        "SyncJobHandle": "callboard.client",
        "Unavailable": "callboard.wire.refusals",
        "Unreachable": "callboard.client",
        "Unschedulable": "callboard.wire.refusals",
        "WaitTimeout": "callboard.client",
        "WorkerGone": "callboard.client",
        "WorkerHandle": "callboard.client",
        "WrongState": "callboard.wire.refusals",
        "component_placement_for": "callboard.placement",
    }
)


__getattr__, __dir__ = lazily(__name__, _PUBLIC)
