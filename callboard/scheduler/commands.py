"""What has to be done? Commands out: for the agent of one node each, idempotent by id.

Ids are made of what the command is about, so the command that is owed after a restart is the one that was sent before.
"""

from __future__ import annotations

from dataclasses import dataclass

from callboard.model.frozen import quick
from callboard.model.specs import ComponentSpec
from callboard.scheduler.pool_records import BundleRecord
from callboard.scheduler.records import CheckpointRecord, WorkerRecord


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Start one worker on ``node_id``."""

    command_id: str
    node_id: str
    worker: WorkerRecord
    component: ComponentSpec
    job_name: str
    ray_group_id: str
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_node_id: str
    start_timeout_ms: int
    checkpoint: CheckpointRecord | None = None


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class StopWorker:
    """Stop one worker and prove its process tree gone."""

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


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class CreateGroup:
    """Make one placement group; ``node_id`` is the agent that asks Ray."""

    command_id: str
    node_id: str
    group_id: str
    attempt: int
    bundles: tuple[BundleRecord, ...]
    timeout_ms: int


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveGroup:
    """Remove one placement group; ``node_id`` is the agent that asks Ray."""

    command_id: str
    node_id: str
    group_id: str
    ray_id: str
    attempt: int


Command = StartWorker | StopWorker | CreateGroup | RemoveGroup
"""Everything an agent may be told by the scheduler."""
