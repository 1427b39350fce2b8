"""The stream's enums about workers, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from callboard.scheduler.records.states import StopKind, StopOutcome, WorkerState
from callboard.v1 import agent_pb2

WORKER_STATES: Mapping[int, WorkerState] = MappingProxyType(
    {
        agent_pb2.AGENT_WORKER_STATE_STARTING: WorkerState.STARTING,
        agent_pb2.AGENT_WORKER_STATE_READY: WorkerState.READY,
        agent_pb2.AGENT_WORKER_STATE_STOPPING: WorkerState.STOPPING,
        agent_pb2.AGENT_WORKER_STATE_QUARANTINED: WorkerState.QUARANTINED,
    }
)
"""What an agent says of a worker it still answers for."""

STOP_OUTCOMES: Mapping[int, StopOutcome] = MappingProxyType(
    {
        agent_pb2.STOP_OUTCOME_COOPERATIVE: StopOutcome.COOPERATIVE,
        agent_pb2.STOP_OUTCOME_KILLED: StopOutcome.KILLED,
        agent_pb2.STOP_OUTCOME_QUARANTINED: StopOutcome.QUARANTINED,
        agent_pb2.STOP_OUTCOME_ALREADY_GONE: StopOutcome.ALREADY_GONE,
    }
)
"""How a stop ended."""

STOP_KINDS: Mapping[StopKind | None, agent_pb2.StopKind.ValueType] = MappingProxyType(
    {None: agent_pb2.STOP_KIND_UNSPECIFIED}
    | {kind: agent_pb2.StopKind.Value(f"STOP_KIND_{kind.value}") for kind in StopKind}
)
"""What a stop is for."""

USER_FAULTS = frozenset({agent_pb2.START_FAILURE_IMPORT, agent_pb2.START_FAILURE_CONSTRUCTOR})
"""Failures of the user's own code: starting again helps nobody."""
