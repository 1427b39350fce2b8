"""The commands: what the agent of one node has to do, idempotent by id.

A command carries all that its agent is told, as it was when it was decided: whoever sends it later asks no state.
Ids are made of what the command is about, so the command that is owed after a restart is the one that was sent before.
"""

from __future__ import annotations

from callboard.model.frozen import dataclass, quick
from callboard.model.specs import ComponentSpec
from callboard.scheduler.records.job_records import CheckpointRecord, WorkerRecord
from callboard.scheduler.records.pool_records import BundleRecord
from callboard.scheduler.records.states import StopKind


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Start one worker on ``node_id``.

    Attributes:
        strict: no copy of it may outlive its lease (R5).
        master_address: of the node of rank 0: in Ray, else where its agent's stream comes from, else its name.
        preload: modules that its process may have imported already, by its pool.
    """

    command_id: str
    node_id: str
    worker: WorkerRecord
    component: ComponentSpec
    job_name: str
    strict: bool
    node_group: str
    ray_group_id: str
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_node_id: str
    master_address: str
    master_port: int
    start_timeout_ms: int
    checkpoint: CheckpointRecord | None = None
    preload: tuple[str, ...] = ()


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class ReservePort:
    """Reserve a port on ``node_id`` for the rendezvous of a worker, which is the first of its component, and its
    peers."""

    command_id: str
    node_id: str
    worker: WorkerRecord


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class StopWorker:
    """Stop one worker and prove its process tree gone; of several for one worker the earliest end holds.

    Attributes:
        cancel_timeout_ms: what is left until it is killed.
    """

    command_id: str
    node_id: str
    generation: int
    job: str
    component: str
    rank: int
    cancel_timeout_ms: int
    kill_timeout_ms: int
    checkpoint: bool
    reason: str
    stop_kind: StopKind | None = None


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class CreateGroup:
    """Make one placement group; ``node_id`` is the agent that asks Ray.

    Attributes:
        ray_node_ids: of each bundle the id of its node in Ray; empty: not known.
    """

    command_id: str
    node_id: str
    group_id: str
    attempt: int
    bundles: tuple[BundleRecord, ...]
    ray_node_ids: tuple[str, ...]
    timeout_ms: int
    certain: bool = False
    """It must have these very devices; otherwise Ray may give it others, which the agent reports."""


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveGroup:
    """Remove one placement group; ``node_id`` is the agent that asks Ray."""

    command_id: str
    node_id: str
    group_id: str
    ray_id: str
    attempt: int


Command = StartWorker | ReservePort | StopWorker | CreateGroup | RemoveGroup
"""Everything an agent may be told by the scheduler."""
