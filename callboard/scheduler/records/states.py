"""The states of nodes, jobs, workers and placement groups, their families, and which may follow which."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar


class NodeState(StrEnum):
    """State of a node. A cordon is a flag beside it, since it outlives a lost connection."""

    JOINING = "JOINING"
    READY = "READY"
    DRAINING = "DRAINING"
    SUSPECT = "SUSPECT"
    LOST = "LOST"
    LEFT = "LEFT"


class JobState(StrEnum):
    """State of a job."""

    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    PREEMPTING = "PREEMPTING"
    RECOVERING = "RECOVERING"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


ENDED = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
"""States a job never leaves."""


class WorkerState(StrEnum):
    """State of a worker."""

    ASSIGNED = "ASSIGNED"
    STARTING = "STARTING"
    READY = "READY"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    QUARANTINED = "QUARANTINED"
    LOST = "LOST"


LIVE = frozenset({WorkerState.ASSIGNED, WorkerState.STARTING, WorkerState.READY, WorkerState.STOPPING})
"""A worker in one of these may still become, be or have a process, and its end is awaited."""


HOLDING = LIVE | {WorkerState.QUARANTINED}
"""A worker in one of these keeps its room: nobody proved its process tree gone (I4)."""


class GroupKind(StrEnum):
    """Why a placement group exists."""

    RESERVED = "RESERVED"
    DYNAMIC = "DYNAMIC"
    PRIVATE = "PRIVATE"


class GroupState(StrEnum):
    """State of a placement group."""

    NOMINATED = "NOMINATED"
    CREATING = "CREATING"
    READY = "READY"
    REMOVING = "REMOVING"
    BACKOFF = "BACKOFF"


BOOKED = frozenset({GroupState.CREATING, GroupState.READY, GroupState.REMOVING})
"""A group in one of these may hold its bundles in Ray, so they are booked on their nodes."""


# To look a member up in its enumeration takes ten times as long as a name of a module (Python 3.11): every decision
# compares states some hundred times.
GROUP_BACKOFF = GroupState.BACKOFF
GROUP_CREATING = GroupState.CREATING
GROUP_NOMINATED = GroupState.NOMINATED
GROUP_READY = GroupState.READY
GROUP_REMOVING = GroupState.REMOVING
JOB_CANCELLED = JobState.CANCELLED
JOB_FAILED = JobState.FAILED
JOB_PENDING = JobState.PENDING
JOB_PREEMPTING = JobState.PREEMPTING
JOB_RECOVERING = JobState.RECOVERING
JOB_RUNNING = JobState.RUNNING
JOB_STARTING = JobState.STARTING
JOB_STOPPING = JobState.STOPPING
JOB_SUCCEEDED = JobState.SUCCEEDED
KIND_DYNAMIC = GroupKind.DYNAMIC
KIND_PRIVATE = GroupKind.PRIVATE
KIND_RESERVED = GroupKind.RESERVED
NODE_READY = NodeState.READY
WORKER_ASSIGNED = WorkerState.ASSIGNED
WORKER_LOST = WorkerState.LOST
WORKER_QUARANTINED = WorkerState.QUARANTINED
WORKER_READY = WorkerState.READY
WORKER_STARTING = WorkerState.STARTING
WORKER_STOPPED = WorkerState.STOPPED
WORKER_STOPPING = WorkerState.STOPPING


class StopOutcome(StrEnum):
    """How a stop ended."""

    COOPERATIVE = "COOPERATIVE"
    KILLED = "KILLED"
    QUARANTINED = "QUARANTINED"
    ALREADY_GONE = "ALREADY_GONE"


class StopKind(StrEnum):
    """What a worker is stopped for."""

    PREEMPT = "PREEMPT"
    DRAIN = "DRAIN"
    CANCEL = "CANCEL"
    COMPLETE = "COMPLETE"
    FAILURE = "FAILURE"
    SCALE = "SCALE"


class Rule(StrEnum):
    """What allowed a preemption."""

    LABEL = "LABEL"
    SAME_POOL = "SAME_POOL"
    CROSS_POOL = "CROSS_POOL"
    RECLAIM = "RECLAIM"
    RESERVED = "RESERVED"
    MANUAL = "MANUAL"
    DRAIN = "DRAIN"


class Removal(StrEnum):
    """Why a placement group was removed."""

    IDLE = "IDLE"
    TRIMMED = "TRIMMED"
    JOB_ENDED = "JOB_ENDED"
    NODE_LOST = "NODE_LOST"
    FAILED = "FAILED"
    POOL_DELETED = "POOL_DELETED"
    REQUESTED = "REQUESTED"


_State = TypeVar("_State", JobState, WorkerState, GroupState, NodeState)

JOB_MOVES: Mapping[JobState, frozenset[JobState]] = {
    JobState.PENDING: frozenset({JobState.STARTING, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}),
    JobState.STARTING: frozenset(
        {JobState.RUNNING, JobState.PREEMPTING, JobState.RECOVERING, JobState.STOPPING, JobState.PENDING}
    ),
    JobState.RUNNING: frozenset({JobState.PREEMPTING, JobState.RECOVERING, JobState.STOPPING}),
    JobState.PREEMPTING: frozenset({JobState.PENDING, JobState.STOPPING, JobState.CANCELLED}),
    JobState.RECOVERING: frozenset({JobState.PENDING, JobState.STOPPING, JobState.FAILED}),
    JobState.STOPPING: frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}

WORKER_MOVES: Mapping[WorkerState, frozenset[WorkerState]] = {
    # Straight to STOPPED: nothing was ever asked of an agent.
    WorkerState.ASSIGNED: frozenset({WorkerState.STARTING, WorkerState.STOPPED, WorkerState.LOST}),
    WorkerState.STARTING: frozenset(
        {WorkerState.READY, WorkerState.STOPPING, WorkerState.STOPPED, WorkerState.QUARANTINED, WorkerState.LOST}
    ),
    WorkerState.READY: frozenset(
        {WorkerState.STOPPING, WorkerState.STOPPED, WorkerState.QUARANTINED, WorkerState.LOST}
    ),
    WorkerState.STOPPING: frozenset({WorkerState.STOPPED, WorkerState.QUARANTINED, WorkerState.LOST}),
    WorkerState.QUARANTINED: frozenset({WorkerState.STOPPED, WorkerState.LOST}),
    WorkerState.STOPPED: frozenset(),
    WorkerState.LOST: frozenset(),
}

GROUP_MOVES: Mapping[GroupState, frozenset[GroupState]] = {
    GroupState.NOMINATED: frozenset({GroupState.CREATING}),
    GroupState.CREATING: frozenset({GroupState.READY, GroupState.REMOVING, GroupState.BACKOFF}),
    GroupState.READY: frozenset({GroupState.REMOVING}),
    GroupState.REMOVING: frozenset({GroupState.BACKOFF}),
    GroupState.BACKOFF: frozenset({GroupState.CREATING}),
}

NODE_MOVES: Mapping[NodeState, frozenset[NodeState]] = {
    NodeState.JOINING: frozenset({NodeState.READY, NodeState.SUSPECT, NodeState.LOST, NodeState.LEFT}),
    NodeState.READY: frozenset(
        {NodeState.JOINING, NodeState.DRAINING, NodeState.SUSPECT, NodeState.LOST, NodeState.LEFT}
    ),
    NodeState.DRAINING: frozenset(
        {NodeState.READY, NodeState.JOINING, NodeState.SUSPECT, NodeState.LOST, NodeState.LEFT}
    ),
    NodeState.SUSPECT: frozenset({NodeState.READY, NodeState.JOINING, NodeState.LOST, NodeState.LEFT}),
    NodeState.LOST: frozenset({NodeState.JOINING, NodeState.READY, NodeState.LEFT}),
    NodeState.LEFT: frozenset({NodeState.JOINING, NodeState.READY}),
}


def allowed(moves: Mapping[_State, frozenset[_State]], old: _State, new: _State) -> bool:
    """Whether ``new`` may follow ``old``. Staying is always allowed."""
    return old is new or new in moves[old]


def diagram(name: str, moves: Mapping[_State, frozenset[_State]]) -> str:
    """The table as a Mermaid state diagram, for the docs."""
    lines = ["stateDiagram-v2", f"    %% {name}"]
    order = list(moves)
    for old in order:
        lines.extend(f"    {old.value} --> {new.value}" for new in order if new in moves[old])
        if not moves[old]:
            lines.append(f"    {old.value} --> [*]")
    return "\n".join(lines)
