"""A control plane for the Ray actors of RL training.

Submit a job and call its workers::

    import ray
    from callboard import ComponentSpec, JobSpec, SyncClient

    with SyncClient() as cb:
        cb.connect_ray()
        trainer = ComponentSpec("train", "my_pkg.workers:Trainer", workers=2, resources={"cpu": 1, "gpu": 1})
        job = cb.submit(JobSpec(pool="research", components=[trainer]))
        job.running(timeout=120)
        print(ray.get([worker.run.remote(3) for worker in job.workers("train")]))
        job.complete()

Where to look:
    Clients: `SyncClient` for scripts and notebooks, `Client` for asyncio programs. The methods are the same.
    Jobs: `JobSpec` and `ComponentSpec` describe one; `JobHandle` (or `SyncJobHandle`) waits for it, steers it and
        finds its workers.
    Workers: `WorkerHandle` calls one. A worker is a plain class; see docs/agents.md for its hooks.
    Pools: `PoolSpec`, `PgPoolSpec` and `PreemptionPolicy`.
    Placement: `Cluster`, `ComponentPlacement` and the placement strategies.
    Errors: `CallboardError` is the base of everything that a controller refuses; `JobEnded`, `WaitTimeout` and
        `WorkerGone` tell what became of a job or worker; `InvalidInput` lists every fault of an input.
    States and other enums are texts: `job.state == "RUNNING"`; `text_of(message)` reads those of messages.

Importing this package is cheap: each public name loads its module when it is first used, so a program that only
describes a job loads neither gRPC nor Ray.
"""

from typing import TYPE_CHECKING

from callboard._lazy import lazily, public_names
from callboard._version import __version__ as __version__

if TYPE_CHECKING:
    # What a type checker sees; a test keeps it equal to _PUBLIC.
    from callboard.agents.host.worker_process import StopNotice as StopNotice
    from callboard.agents.host.worker_program import Program as Program
    from callboard.agents.ray.private_ray import RayProgram as RayProgram
    from callboard.client import CallOptions as CallOptions
    from callboard.client import Client as Client
    from callboard.client import ClusterFailed as ClusterFailed
    from callboard.client import JobEnded as JobEnded
    from callboard.client import JobHandle as JobHandle
    from callboard.client import LogLine as LogLine
    from callboard.client import NoActor as NoActor
    from callboard.client import NoController as NoController
    from callboard.client import NoRay as NoRay
    from callboard.client import NoResult as NoResult
    from callboard.client import OlderController as OlderController
    from callboard.client import RequestTooLarge as RequestTooLarge
    from callboard.client import SeveralControllers as SeveralControllers
    from callboard.client import SyncClient as SyncClient
    from callboard.client import SyncJobHandle as SyncJobHandle
    from callboard.client import TypedWorkerHandle as TypedWorkerHandle
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
    from callboard.wire.enums import text_of as text_of
    from callboard.wire.refusals import AlreadyExists as AlreadyExists
    from callboard.wire.refusals import CallboardError as CallboardError
    from callboard.wire.refusals import DeadlineExceeded as DeadlineExceeded
    from callboard.wire.refusals import EtagMismatch as EtagMismatch
    from callboard.wire.refusals import InternalError as InternalError
    from callboard.wire.refusals import InvalidRequest as InvalidRequest
    from callboard.wire.refusals import InventoryChanged as InventoryChanged
    from callboard.wire.refusals import LimitReached as LimitReached
    from callboard.wire.refusals import NotAllowed as NotAllowed
    from callboard.wire.refusals import NotFound as NotFound
    from callboard.wire.refusals import PoolInUse as PoolInUse
    from callboard.wire.refusals import PreemptionRefused as PreemptionRefused
    from callboard.wire.refusals import QuotaExceeded as QuotaExceeded
    from callboard.wire.refusals import RevisionCompacted as RevisionCompacted
    from callboard.wire.refusals import Unavailable as Unavailable
    from callboard.wire.refusals import Unschedulable as Unschedulable
    from callboard.wire.refusals import WrongState as WrongState

# The public names and where each one lives.
_PUBLIC = public_names(
    {
        "callboard.agents.host.worker_process": """
            StopNotice
        """,
        "callboard.agents.host.worker_program": """
            Program
        """,
        "callboard.agents.ray.private_ray": """
            RayProgram
        """,
        "callboard.client": """
            CallOptions Client ClusterFailed JobEnded JobHandle LogLine NoActor NoController NoRay NoResult
            OlderController RequestTooLarge SeveralControllers SyncClient SyncJobHandle TypedWorkerHandle
            Unreachable WaitTimeout WorkerGone WorkerHandle
        """,
        "callboard.model": """
            ComponentSpec InvalidInput JobSpec PgPoolSpec PoolSpec PreemptionPolicy
        """,
        "callboard.placement": """
            Cluster ComponentPlacement FlexiblePlacementStrategy HybridComponentPlacement
            ModelParallelComponentPlacement NodePlacementStrategy PackedPlacementStrategy
            Placement component_placement_for
        """,
        "callboard.wire.enums": """
            text_of
        """,
        "callboard.wire.refusals": """
            AlreadyExists CallboardError DeadlineExceeded EtagMismatch InternalError
            InvalidRequest InventoryChanged LimitReached NotAllowed NotFound PoolInUse
            PreemptionRefused QuotaExceeded RevisionCompacted Unavailable Unschedulable
            WrongState
        """,
    }
)


__all__: list[str] = []  # `lazily` fills it: the names above.
__getattr__, __dir__ = lazily(__name__, _PUBLIC)
