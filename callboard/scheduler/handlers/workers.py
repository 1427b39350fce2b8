"""The reports about workers: a table of worker state × report → handler.

Reports may come twice, late or in another order; whatever a record has moved past changes nothing (I9). A pair that
is not in the table cannot happen and raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from callboard.scheduler.handlers import elastic, groups, starting, stopping
from callboard.scheduler.plan.preemption import stop_timeouts
from callboard.scheduler.records.events import (
    WorkerEvent,
    WorkerExited,
    WorkerFinished,
    WorkerProgressed,
    WorkerStarted,
    WorkerStartFailed,
    WorkerStopped,
)
from callboard.scheduler.records.job_records import CheckpointRecord, Failure, WorkerRecord, evolve
from callboard.scheduler.records.refusals import ImpossibleTransition
from callboard.scheduler.records.states import (
    JOB_RUNNING,
    JOB_STARTING,
    WORKER_QUARANTINED,
    WORKER_READY,
    WORKER_STARTING,
    WORKER_STOPPED,
    WORKER_STOPPING,
    StopKind,
    StopOutcome,
    WorkerState,
)
from callboard.scheduler.state.transaction import Transaction

Handler = Callable[[Transaction, WorkerRecord, Any], None]


def handle(tx: Transaction, event: WorkerEvent) -> None:
    """Carries out one report. A generation that is unknown is one that was finished with long ago."""
    _ghost(tx, event)
    worker = tx.state.workers.get(event.generation)
    if worker is None:
        return
    if worker.node_id != event.node_id:
        return
    handler = TABLE.get((worker.state, type(event)))
    if handler is None:
        raise ImpossibleTransition(
            f"{tx.worker_subject(worker)} is {worker.state} and its agent reports {type(event).__name__}; "
            f"generation {worker.generation}, last: {worker.reason}"
        )
    handler(tx, worker, event)


def overdue(tx: Transaction, worker: WorkerRecord) -> None:
    """An agent did not answer in time."""
    if worker.state is WORKER_STARTING:
        job = tx.state.jobs[worker.job]
        bounds = stop_timeouts(tx.state, tx.state.specs[worker.job].spec)
        reason = f"{worker.component}/{worker.rank} did not start in time on {worker.node_id}"
        stopping.stop_one(tx, worker, reason, StopKind.FAILURE, bounds, checkpoint=False)
        if not worker.extra or job.state is not JOB_RUNNING:
            stopping.note_failure(tx, job.uid, _failure(tx, worker, reason, died=False))
            stopping.recover(tx, job.uid, reason, counts=True)
    elif worker.state is WORKER_STOPPING:
        miss_checkpoint(tx, worker, f"its agent on {worker.node_id} did not answer in time")
        _gone_or_quarantined(tx, worker, "not proved gone in time", StopOutcome.QUARANTINED)
        _after_stop(tx, worker)


def leave(tx: Transaction, worker: WorkerRecord, reason: str, outcome: StopOutcome) -> WorkerRecord:
    """A worker is proved gone: its room is free (I4)."""
    stopped = tx.move_worker(worker.generation, WORKER_STOPPED, reason, outcome=outcome, deadline_ms=0)
    groups.let_go(tx, worker.group_id)
    return stopped


def _started(tx: Transaction, worker: WorkerRecord, event: WorkerStarted) -> None:
    tx.move_worker(
        worker.generation,
        WORKER_READY,
        "constructed and answering",
        **{name: getattr(event, name) for name in _STARTED},
        ready_ms=tx.now_ms,
        deadline_ms=0,
    )
    job = tx.state.jobs[worker.job]
    tx.draw("preloaded_starts" if event.preloaded else "warm_starts" if event.warm else "cold_starts")
    if worker.extra:
        if job.state is JOB_RUNNING:
            elastic.replaced(tx, worker)
        starting.announce(tx, job.uid, f"{worker.component}/{worker.rank} joined")
        return
    if job.state is JOB_STARTING and tx.state.all_ready(job):
        tx.move_job(job.uid, JOB_RUNNING, "every worker was constructed and answered", running_ms=tx.now_ms)
        elastic.grow(tx, job.uid)
        stopping.finish_if_all_returned(tx, job.uid)


def _progressed(tx: Transaction, worker: WorkerRecord, event: WorkerProgressed) -> None:
    tx.note_progress(worker, f"{worker.node_id} {event.message}")


def _start_failed(tx: Transaction, worker: WorkerRecord, event: WorkerStartFailed) -> None:
    _over(tx, worker, event)
    failure = _start_failure(tx, worker, event)
    stopping.note_failure(tx, worker.job, failure, traceback=event.traceback, stderr_tail=event.stderr_tail)
    # Nothing is awaited: it is gone, so its gang is not whole. A death that is reported after it counts all the same.
    elastic.lose(tx, worker.job, [worker], failure.reason, counts=True)


def _start_failure(tx: Transaction, worker: WorkerRecord, event: WorkerStartFailed) -> Failure:
    reason = f"{worker.component}/{worker.rank} on {worker.node_id}: {event.message}"
    return _failure(tx, worker, reason, died=event.died)


def _failure(tx: Transaction, worker: WorkerRecord, reason: str, *, died: bool, **more: Any) -> Failure:
    name = f"{worker.component}/{worker.rank}"
    return Failure(worker.attempt, tx.now_ms, name, worker.node_id, died=died, reason=reason, **more)


def _start_failed_while_stopping(tx: Transaction, worker: WorkerRecord, event: WorkerStartFailed) -> None:
    if event.died or event.user_fault:
        failure = _start_failure(tx, worker, event)
        stopping.note_failure(tx, worker.job, failure, traceback=event.traceback, stderr_tail=event.stderr_tail)
    _over(tx, worker, event)
    _after_stop(tx, worker)


def _stopped(tx: Transaction, worker: WorkerRecord, event: WorkerStopped) -> None:
    _keep_checkpoint(tx, worker, event)
    if event.outcome is StopOutcome.ALREADY_GONE and not (event.checkpoint_data or event.checkpoint_uri):
        miss_checkpoint(tx, worker, f"it was gone before it was asked: {event.detail or 'its agent knows no more'}")
    detail = f": {event.detail}" if event.detail else ""
    _gone_or_quarantined(tx, worker, f"{event.outcome.value.lower()} in {event.took_ms} ms{detail}", event.outcome)
    _after_stop(tx, worker)


def _stopped_unasked(tx: Transaction, worker: WorkerRecord, event: WorkerStopped) -> None:
    """Its node leaves, or its lease ended. What it left for the next attempt counts all the same."""
    _keep_checkpoint(tx, worker, event)
    _gone_or_quarantined(tx, worker, "stopped by its agent", event.outcome)
    reason = f"{worker.component}/{worker.rank} was stopped by its agent"
    reason += f": {event.detail}" if event.detail else ""
    stopping.note_failure(tx, worker.job, _failure(tx, worker, reason, died=True, counts=False))
    elastic.lose(tx, worker.job, [worker], reason, counts=False)


def miss_checkpoint(tx: Transaction, worker: WorkerRecord, why: str) -> None:
    """Notes the loss of a checkpoint by a worker that was asked for one and could have left it."""
    if worker.checkpoint and worker.can_checkpoint:
        stopping.lose_checkpoint(tx, worker, why)


def _keep_checkpoint(tx: Transaction, worker: WorkerRecord, event: WorkerStopped) -> None:
    if event.checkpoint_lost:
        stopping.lose_checkpoint(tx, worker, event.checkpoint_lost)
    if event.checkpoint_data or event.checkpoint_uri:
        tx.put(
            CheckpointRecord(
                job=worker.job,
                component=worker.component,
                rank=worker.rank,
                data=event.checkpoint_data,
                uri=event.checkpoint_uri,
                at_ms=tx.now_ms,
            )
        )
        tx.change_job(worker.job, checkpoint_ms=tx.now_ms)


def _gone_at_last(tx: Transaction, worker: WorkerRecord, event: WorkerStopped | WorkerExited) -> None:
    if not _is_proof(event):
        return
    leave(tx, worker, "proved gone at last", StopOutcome.KILLED)
    stopping.settle(tx, worker.job)
    job = tx.state.jobs.get(worker.job)
    if job is None or worker.attempt != job.attempt or job.end_ms or worker.extra:
        tx.drop("worker", worker.generation)


def _exited(tx: Transaction, worker: WorkerRecord, event: WorkerExited) -> None:
    _over(tx, worker, event)
    failure = _death(tx, worker, event)
    node = tx.state.nodes.get(worker.node_id)
    # A Ray node that ended takes its workers along: like the loss of a node, no fault of the job's.
    host_ended = node is not None and node.runtime == "ray" and node.ray is None
    failure = replace(failure, counts=not host_ended)
    stopping.note_failure(tx, worker.job, failure, stderr_tail=event.stderr_tail)
    elastic.lose(tx, worker.job, [worker], failure.reason, counts=not host_ended)


def _death(tx: Transaction, worker: WorkerRecord, event: WorkerExited) -> Failure:
    reason = f"{worker.component}/{worker.rank} on {worker.node_id} died: {event.message}"
    return replace(_failure(tx, worker, reason, died=True), at_ms=tx.now_ms - event.ago_ms)


def _exited_while_stopping(tx: Transaction, worker: WorkerRecord, event: WorkerExited) -> None:
    stopping.note_failure(tx, worker.job, _death(tx, worker, event), stderr_tail=event.stderr_tail)
    miss_checkpoint(tx, worker, f"it died before it was asked: {event.message}")
    _over(tx, worker, event)
    _after_stop(tx, worker)


def _finished(tx: Transaction, worker: WorkerRecord, event: WorkerFinished) -> None:
    if worker.finished:
        return
    if not event.succeeded:
        failure = _raised(tx, worker, event)
        replaced = elastic.replace_living(tx, worker, failure.reason, StopKind.FAILURE)
        if not replaced and not stopping.await_cause(tx, worker.job):
            stopping.recover(tx, worker.job, failure.reason, counts=True)
        return
    tx.put(evolve(worker, finished=True))
    tx.event("worker.finished", tx.worker_subject(worker), worker.state.value, "its entry method returned")
    stopping.finish_if_all_returned(tx, worker.job)


def _raised(tx: Transaction, worker: WorkerRecord, event: WorkerFinished) -> Failure:
    """Notes that the entry method of a worker raised."""
    name, said = f"{worker.component}/{worker.rank}", _error_of(event.traceback)
    reason = f"the entry method of {name} raised {said}" if said else f"the entry method of {name} raised"
    if event.exit_code:
        reason = f"{name} on {worker.node_id}: {said}"
    failure = _failure(tx, worker, reason, died=False)
    stopping.note_failure(
        tx, worker.job, failure, traceback=event.traceback, stderr_tail=event.stderr_tail, exit_code=event.exit_code
    )
    return failure


def _finished_while_stopping(tx: Transaction, worker: WorkerRecord, event: WorkerFinished) -> None:
    if not event.succeeded:
        _raised(tx, worker, event)


def _error_of(traceback: str) -> str:
    """What was raised, without where: the line after the last indented one."""
    lines = traceback.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line[:1].isspace()]
    after = frames[-1] + 1 if frames else 0
    return lines[after][:200] if after < len(lines) else ""


def _after_stop(tx: Transaction, worker: WorkerRecord) -> None:
    """A worker that was to stop did: its job goes on without it if it was an extra one, else it may be over."""
    if worker.extra and tx.state.jobs[worker.job].state is JOB_RUNNING:
        stopping.drop_extra(tx, worker)
        starting.announce(tx, worker.job, f"{worker.component}/{worker.rank} left")
        stopping.finish_if_all_returned(tx, worker.job)
    else:
        stopping.settle(tx, worker.job)


def _over(tx: Transaction, worker: WorkerRecord, event: WorkerStartFailed | WorkerExited) -> None:
    outcome = StopOutcome.QUARANTINED if event.quarantined else StopOutcome.ALREADY_GONE
    _gone_or_quarantined(tx, worker, event.message, outcome)


def _gone_or_quarantined(tx: Transaction, worker: WorkerRecord, reason: str, outcome: StopOutcome) -> None:
    if outcome is StopOutcome.QUARANTINED:
        tx.move_worker(worker.generation, WORKER_QUARANTINED, reason, outcome=outcome, deadline_ms=0)
    else:
        leave(tx, worker, reason, outcome)


def _ghost(tx: Transaction, event: WorkerEvent) -> None:
    """A worker nobody waits for is gone: its node may take work again."""
    node = tx.state.nodes.get(event.node_id)
    if node is None or event.generation not in node.ghosts:
        return
    if _is_proof(event):
        left = tuple(generation for generation in node.ghosts if generation != event.generation)
        tx.put(evolve(node, ghosts=left))
        tx.event(
            "node.reaped",
            f"nodes/{node.node_id}",
            node.state.value,
            f"an unwanted worker (g{event.generation}) is gone",
        )


def _is_proof(event: WorkerEvent) -> bool:
    """Whether a report says that nothing of the worker is left (I4); what could not be killed may be reported by each
    of them."""
    if isinstance(event, WorkerStopped):
        return event.outcome is not StopOutcome.QUARANTINED
    return isinstance(event, WorkerExited | WorkerStartFailed) and not event.quarantined


def _ignore(tx: Transaction, worker: WorkerRecord, event: WorkerEvent) -> None:
    """Late or repeated: the record has moved past it."""


_S = WorkerState
_STARTED = {each.name for each in fields(WorkerStarted)} - {each.name for each in fields(WorkerEvent)}
"""What a worker that was constructed says of itself, written down as it is."""

TABLE: Mapping[tuple[WorkerState, type[WorkerEvent]], Handler] = {
    **{
        (state, kind): _ignore
        for state in (_S.QUARANTINED, _S.STOPPED, _S.LOST)
        for kind in (WorkerProgressed, WorkerStarted, WorkerStartFailed, WorkerStopped, WorkerExited, WorkerFinished)
    },
    **{(state, WorkerProgressed): _ignore for state in (_S.READY, _S.STOPPING)},
    (_S.STARTING, WorkerProgressed): _progressed,
    (_S.STARTING, WorkerStarted): _started,
    (_S.READY, WorkerStarted): _ignore,
    (_S.STOPPING, WorkerStarted): _ignore,
    (_S.STARTING, WorkerStartFailed): _start_failed,
    (_S.STOPPING, WorkerStartFailed): _start_failed_while_stopping,
    (_S.STARTING, WorkerStopped): _stopped_unasked,
    (_S.READY, WorkerStopped): _stopped_unasked,
    (_S.STOPPING, WorkerStopped): _stopped,
    (_S.QUARANTINED, WorkerStopped): _gone_at_last,
    (_S.STARTING, WorkerExited): _exited,
    (_S.READY, WorkerExited): _exited,
    (_S.STOPPING, WorkerExited): _exited_while_stopping,
    (_S.QUARANTINED, WorkerExited): _gone_at_last,
    (_S.STARTING, WorkerFinished): _finished,
    (_S.READY, WorkerFinished): _finished,
    (_S.STOPPING, WorkerFinished): _finished_while_stopping,
}
