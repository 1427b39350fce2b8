"""Reports of an agent as events.

Long texts are cut rather than refused: a report that can't be taken would be sent again for ever.
"""

from __future__ import annotations

from callboard.controller.convert.workers import STOP_OUTCOMES, USER_FAULTS
from callboard.scheduler.records.commands import Command, CreateGroup, ReservePort, StartWorker
from callboard.scheduler.records.events import (
    Event,
    GroupFailed,
    GroupFound,
    GroupReady,
    GroupRemoved,
    PortReserved,
    WorkerExited,
    WorkerFinished,
    WorkerStarted,
    WorkerStartFailed,
    WorkerStopped,
)
from callboard.scheduler.records.states import StopOutcome
from callboard.v1 import agent_pb2

MAX_TRACEBACK = 64 << 10
MAX_STDERR_TAIL = 4 << 10
MAX_MESSAGE = 2_000
MAX_CHECKPOINT_BYTES = 1 << 20
MAX_AGO_MS = 600_000
"""Bounds that the protocol states; what a worker printed or left must not fill the journal."""


def event_of(report: agent_pb2.Report, node_id: str, now_ms: int, cause: str) -> Event | None:
    """The event of a report about a worker or a placement group; None for one that is about something else."""
    what = report.WhichOneof("content")
    if what is None or what not in _MAKERS:
        return None
    return _MAKERS[what](report, node_id, now_ms, cause)


def refused_event(command: Command, node_id: str, message: str, now_ms: int, cause: str) -> Event | None:
    """What it means that the agent refused ``command``; None when it stays owed and is sent again (PG-05)."""
    why = f"the agent of {node_id} refused: {_cut(message)}"
    if isinstance(command, StartWorker):
        return WorkerStartFailed(
            now_ms=now_ms, cause=cause, node_id=node_id, generation=command.worker.generation, message=why
        )
    if isinstance(command, ReservePort):
        # Its agent is older, or has no port left: the workers start with one that nobody looked at.
        return PortReserved(now_ms=now_ms, cause=cause, node_id=node_id, generation=command.worker.generation)
    if isinstance(command, CreateGroup):
        return GroupFailed(now_ms=now_ms, cause=cause, group_id=command.group_id, attempt=command.attempt, message=why)
    return None


def _started(report: agent_pb2.Report, node_id: str, now_ms: int, cause: str) -> Event:
    ready = report.worker_ready
    return WorkerStarted(
        now_ms=now_ms,
        cause=cause,
        node_id=node_id,
        generation=ready.generation,
        pid=ready.pid,
        pid_start_ms=ready.pid_start_ms,
        actor_name=_cut(ready.actor_name),
        start_ms=ready.start_ms,
        visible_devices=_cut(ready.visible_devices),
        warm=ready.warm,
        cold_reason=_cut(ready.cold_reason),
        can_checkpoint="checkpoint" in ready.hooks,
    )


def _start_failed(report: agent_pb2.Report, node_id: str, now_ms: int, cause: str) -> Event:
    failed = report.worker_start_failed
    return WorkerStartFailed(
        now_ms=now_ms,
        cause=cause,
        node_id=node_id,
        generation=failed.generation,
        message=_cut(failed.message) or "the start failed",
        traceback=failed.traceback[-MAX_TRACEBACK:],
        user_fault=failed.failure in USER_FAULTS,
        died=failed.failure == agent_pb2.START_FAILURE_DIED,
        quarantined=failed.quarantined,
        stderr_tail=failed.stderr_tail[-MAX_STDERR_TAIL:],
    )


def _port_reserved(report: agent_pb2.Report, node_id: str, now_ms: int, cause: str) -> Event:
    reserved = report.port_reserved
    port = reserved.port if 0 < reserved.port <= 65_535 else 0
    return PortReserved(now_ms=now_ms, cause=cause, node_id=node_id, generation=reserved.generation, port=port)


def _stopped(report: agent_pb2.Report, node_id: str, now_ms: int, cause: str) -> Event:
    stopped = report.worker_stopped
    data, uri, lost = stopped.checkpoint.data, stopped.checkpoint.uri, _cut(stopped.checkpoint_lost)
    if len(data) > MAX_CHECKPOINT_BYTES:
        lost, data = f"its {len(data)} bytes are more than 1 MiB; write them to storage and return a URI", b""
    if len(uri) > MAX_MESSAGE:
        lost, uri = f"its URI has {len(uri)} characters; at most {MAX_MESSAGE} are kept", ""
    return WorkerStopped(
        now_ms=now_ms,
        cause=cause,
        node_id=node_id,
        generation=stopped.generation,
        # An outcome that isn't said proves nothing.
        outcome=STOP_OUTCOMES.get(stopped.outcome, StopOutcome.QUARANTINED),
        checkpoint_data=data,
        checkpoint_uri=uri,
        took_ms=stopped.took_ms,
        detail=_cut(stopped.detail),
        checkpoint_lost=lost,
    )


def _exited(report: agent_pb2.Report, node_id: str, now_ms: int, cause: str) -> Event:
    exited = report.worker_exited
    return WorkerExited(
        now_ms=now_ms,
        cause=cause,
        node_id=node_id,
        generation=exited.generation,
        message=_cut(exited.message) or "the worker ended",
        quarantined=exited.quarantined,
        stderr_tail=exited.stderr_tail[-MAX_STDERR_TAIL:],
        # A clock that jumped must not turn the order of failures around.
        ago_ms=min(max(0, exited.ago_ms), MAX_AGO_MS),
    )


def _finished(report: agent_pb2.Report, node_id: str, now_ms: int, cause: str) -> Event:
    finished = report.worker_finished
    return WorkerFinished(
        now_ms=now_ms,
        cause=cause,
        node_id=node_id,
        generation=finished.generation,
        succeeded=finished.succeeded,
        traceback=finished.traceback[-MAX_TRACEBACK:],
        stderr_tail=finished.stderr_tail[-MAX_STDERR_TAIL:],
        exit_code=finished.exit_code,
    )


def _group_ready(report: agent_pb2.Report, _node_id: str, now_ms: int, cause: str) -> Event:
    ready = report.placement_group_ready
    return GroupReady(
        now_ms=now_ms,
        cause=cause,
        group_id=ready.placement_group_id,
        attempt=ready.attempt,
        ray_id=_cut(ready.ray_placement_group_id),
        ray_session=_cut(ready.ray_session),
        devices=tuple(tuple(each.indexes) for each in ready.devices),
    )


def _group_found(report: agent_pb2.Report, _node_id: str, now_ms: int, cause: str) -> Event:
    found = report.placement_group_found
    return GroupFound(
        now_ms=now_ms,
        cause=cause,
        group_id=_cut(found.placement_group_id),
        ray_id=_cut(found.ray_placement_group_id),
        ray_session=_cut(found.ray_session),
    )


def _group_failed(report: agent_pb2.Report, _node_id: str, now_ms: int, cause: str) -> Event:
    failed = report.placement_group_failed
    return GroupFailed(
        now_ms=now_ms,
        cause=cause,
        group_id=failed.placement_group_id,
        attempt=failed.attempt,
        message=_cut(failed.message) or "the placement group could not be made",
    )


def _group_removed(report: agent_pb2.Report, _node_id: str, now_ms: int, cause: str) -> Event:
    return GroupRemoved(now_ms=now_ms, cause=cause, group_id=report.placement_group_removed.placement_group_id)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"


_MAKERS = {
    "worker_ready": _started,
    "worker_start_failed": _start_failed,
    "worker_stopped": _stopped,
    "worker_exited": _exited,
    "worker_finished": _finished,
    "port_reserved": _port_reserved,
    "placement_group_ready": _group_ready,
    "placement_group_failed": _group_failed,
    "placement_group_removed": _group_removed,
    "placement_group_found": _group_found,
}
