"""Which state may follow which? The tables; whatever is not in them is a defect and changes nothing.

The diagrams in the docs are made from these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from callboard.scheduler.states import GroupState, JobState, NodeState, WorkerState

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
