"""Which states are there, and which belong together? The words for what a node, job, worker or placement group is."""

from __future__ import annotations

from enum import StrEnum


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
