"""Reports of an agent as events.

Long texts are cut rather than refused: a report that can't be taken would be sent again for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from callboard.scheduler.records.commands import Command, CreateGroup, ReservePort, StartWorker
from callboard.scheduler.records.events import (
    Event,
    GroupFailed,
    GroupFound,
    GroupReady,
    GroupRemoved,
    Make,
    PortReserved,
    WorkerExited,
    WorkerFinished,
    WorkerProgressed,
    WorkerStarted,
    WorkerStartFailed,
    WorkerStopped,
)
from callboard.scheduler.records.states import StopOutcome
from callboard.v1 import agent_pb2
from callboard.wire.alike import record_of
from callboard.wire.enums import words_of

About = dict[str, Any]
"""What an event says of itself, and of which node or group."""

USER_FAULTS = frozenset({agent_pb2.START_FAILURE_IMPORT, agent_pb2.START_FAILURE_CONSTRUCTOR})
"""Failures of the user's own code: starting again helps nobody."""

STOP_OUTCOMES = words_of(agent_pb2.StopOutcome.DESCRIPTOR, StopOutcome)

MAX_TRACEBACK = 64 << 10
MAX_STDERR_TAIL = 4 << 10
MAX_MESSAGE = 2_000
MAX_CHECKPOINT_BYTES = 1 << 20
MAX_AGO_MS = 600_000
"""Bounds that the protocol states; what a worker printed or left must not fill the journal."""


def event_of(report: agent_pb2.Report, node_id: str) -> Make | None:
    """What makes the event of a report about a worker or a placement group; None where it is of something else."""
    what = report.WhichOneof("content")
    if what is None or what not in _MAKERS:
        return None
    said, maker = getattr(report, what), _MAKERS[what]
    whose = {"group_id": _cut(said.placement_group_id)} if what.startswith("placement_group_") else {"node_id": node_id}
    return lambda now_ms, cause: maker(said, {"now_ms": now_ms, "cause": cause, **whose})


def refused_event(command: Command, node_id: str, message: str) -> Make | None:
    """What makes the event of an agent's refusal of ``command``; None when it stays owed and is sent again (PG-05)."""
    why = f"the agent of {node_id} refused: {_cut(message)}"
    if isinstance(command, StartWorker):
        return partial(WorkerStartFailed, node_id=node_id, generation=command.worker.generation, message=why)
    if isinstance(command, ReservePort):
        # Its agent is older, or has no port left: the workers start with one that nobody looked at.
        return partial(PortReserved, node_id=node_id, generation=command.worker.generation)
    if isinstance(command, CreateGroup):
        return partial(GroupFailed, group_id=command.group_id, attempt=command.attempt, message=why)
    return None


def _started(ready: agent_pb2.WorkerReady, about: About) -> Event:
    return record_of(WorkerStarted, ready, _cut, **about, can_checkpoint="checkpoint" in ready.hooks)


def _start_failed(failed: agent_pb2.WorkerStartFailed, about: About) -> Event:
    return record_of(
        WorkerStartFailed,
        failed,
        **about,
        message=_cut(failed.message) or "the start failed",
        traceback=failed.traceback[-MAX_TRACEBACK:],
        user_fault=failed.failure in USER_FAULTS,
        died=failed.failure == agent_pb2.START_FAILURE_DIED,
        stderr_tail=failed.stderr_tail[-MAX_STDERR_TAIL:],
    )


def _port_reserved(reserved: agent_pb2.PortReserved, about: About) -> Event:
    return record_of(PortReserved, reserved, **about, port=reserved.port if 0 < reserved.port <= 65_535 else 0)


def _stopped(stopped: agent_pb2.WorkerStopped, about: About) -> Event:
    data, uri, lost = stopped.checkpoint.data, stopped.checkpoint.uri, _cut(stopped.checkpoint_lost)
    if len(data) > MAX_CHECKPOINT_BYTES:
        lost, data = f"its {len(data)} bytes are more than 1 MiB; write them to storage and return a URI", b""
    if len(uri) > MAX_MESSAGE:
        lost, uri = f"its URI has {len(uri)} characters; at most {MAX_MESSAGE} are kept", ""
    return record_of(
        WorkerStopped,
        stopped,
        _cut,
        **about,
        # An outcome that isn't said proves nothing.
        outcome=STOP_OUTCOMES.get(stopped.outcome, StopOutcome.QUARANTINED),
        checkpoint_data=data,
        checkpoint_uri=uri,
        checkpoint_lost=lost,
    )


def _exited(exited: agent_pb2.WorkerExited, about: About) -> Event:
    return record_of(
        WorkerExited,
        exited,
        **about,
        message=_cut(exited.message) or "the worker ended",
        stderr_tail=exited.stderr_tail[-MAX_STDERR_TAIL:],
        # A clock that jumped must not turn the order of failures around.
        ago_ms=min(max(0, exited.ago_ms), MAX_AGO_MS),
    )


def _finished(finished: agent_pb2.WorkerFinished, about: About) -> Event:
    return record_of(
        WorkerFinished,
        finished,
        **about,
        traceback=finished.traceback[-MAX_TRACEBACK:],
        stderr_tail=finished.stderr_tail[-MAX_STDERR_TAIL:],
    )


def _group_ready(ready: agent_pb2.PlacementGroupReady, about: About) -> Event:
    devices = tuple(tuple(each.indexes) for each in ready.devices)
    return record_of(GroupReady, ready, _cut, **about, ray_id=_cut(ready.ray_placement_group_id), devices=devices)


def _group_found(found: agent_pb2.PlacementGroupFound, about: About) -> Event:
    return record_of(GroupFound, found, _cut, **about, ray_id=_cut(found.ray_placement_group_id))


def _group_failed(failed: agent_pb2.PlacementGroupFailed, about: About) -> Event:
    message = _cut(failed.message) or "the placement group could not be made"
    return record_of(GroupFailed, failed, **about, message=message)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"


_MAKERS: Mapping[str, Callable[[Any, About], Event]] = MappingProxyType(
    {
        "worker_progress": lambda said, about: record_of(WorkerProgressed, said, _cut, **about),
        "worker_ready": _started,
        "worker_start_failed": _start_failed,
        "worker_stopped": _stopped,
        "worker_exited": _exited,
        "worker_finished": _finished,
        "port_reserved": _port_reserved,
        "placement_group_ready": _group_ready,
        "placement_group_failed": _group_failed,
        "placement_group_removed": lambda said, about: record_of(GroupRemoved, said, **about),
        "placement_group_found": _group_found,
    }
)
