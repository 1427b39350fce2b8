"""How does a job let go of its workers, and what becomes of it then? Stopped, recovered, queued again."""

from __future__ import annotations

from callboard.model.specs import JobSpec, OnPreempt
from callboard.scheduler import groups, orders
from callboard.scheduler.ending import end
from callboard.scheduler.evolving import evolve
from callboard.scheduler.pool_records import PoolRecord
from callboard.scheduler.preemption import stop_timeouts, yield_backoff_ms
from callboard.scheduler.records import JobRecord, WorkerRecord
from callboard.scheduler.states import HOLDING, LIVE, JobState, StopOutcome, WorkerState
from callboard.scheduler.transaction import Transaction

_BADNESS = (StopOutcome.ALREADY_GONE, StopOutcome.COOPERATIVE, StopOutcome.KILLED, StopOutcome.QUARANTINED)


def stop(
    tx: Transaction,
    uid: str,
    state: JobState,
    reason: str,
    *,
    target: JobState | None = None,
    checkpoint: bool = False,
    traceback: str = "",
    within_ms: int | None = None,
) -> None:
    """Stops every worker of a job and moves it to STOPPING, PREEMPTING or RECOVERING; it goes on when all are gone."""
    job, spec = tx.state.jobs[uid], tx.state.specs[uid].spec
    tx.move_job(uid, state, reason, target=target, traceback=traceback or job.traceback)
    cancel_ms, kill_ms = stop_timeouts(tx.state, spec, within_ms)
    for worker in tx.state.workers_of(uid):
        if worker.state is WorkerState.ASSIGNED:
            tx.move_worker(worker.generation, WorkerState.STOPPED, "never started", outcome=StopOutcome.ALREADY_GONE)
            groups.let_go(tx, worker.group_id)
        elif worker.state in (WorkerState.STARTING, WorkerState.READY):
            stop_one(tx, worker, reason, cancel_ms, kill_ms, checkpoint=checkpoint)
    settle(tx, uid)


def stop_one(
    tx: Transaction, worker: WorkerRecord, reason: str, cancel_ms: int, kill_ms: int, *, checkpoint: bool
) -> None:
    """Asks an agent to end one worker. Without its answer the worker counts as QUARANTINED in the end (I6)."""
    stopping = tx.move_worker(
        worker.generation,
        WorkerState.STOPPING,
        reason,
        cancel_timeout_ms=cancel_ms,
        kill_timeout_ms=kill_ms,
        checkpoint=checkpoint,
        deadline_ms=tx.now_ms + cancel_ms + kill_ms + groups.ANSWER_MARGIN_MS,
    )
    tx.command(orders.stop_worker(stopping))


def shed(tx: Transaction, worker: WorkerRecord, reason: str, cancel_ms: int, kill_ms: int) -> None:
    """Ends one extra worker; its job goes on."""
    if worker.state is WorkerState.ASSIGNED:
        cancel_assigned(tx, worker, reason)
    elif worker.state in (WorkerState.STARTING, WorkerState.READY):
        stop_one(tx, worker, reason, cancel_ms, kill_ms, checkpoint=True)


def cancel_assigned(tx: Transaction, worker: WorkerRecord, reason: str) -> None:
    """An extra worker that was never asked of an agent will not come."""
    stopped = tx.move_worker(worker.generation, WorkerState.STOPPED, reason, outcome=StopOutcome.ALREADY_GONE)
    groups.let_go(tx, worker.group_id)
    drop_extra(tx, stopped)


def drop_extra(tx: Transaction, worker: WorkerRecord) -> None:
    """Takes a worker that is gone out of a job that goes on without it."""
    current = tx.state.workers.get(worker.generation)
    if current is not None and current.state not in HOLDING:
        tx.drop("worker", worker.generation)
    job = tx.state.jobs[worker.job]
    _close_preemptions(tx, job, [current or worker], generation=worker.generation)
    if not any(other.group_id == worker.group_id for other in tx.state.workers_of(job.uid)):
        left = tuple(group_id for group_id in job.groups if group_id != worker.group_id)
        tx.change_job(job.uid, groups=left)


def finish_if_all_returned(tx: Transaction, uid: str) -> None:
    """A job succeeds when the entry method of every worker that has one returned; of those that stay, since an extra
    worker may have had to go."""
    job, spec = tx.state.jobs[uid], tx.state.specs[uid].spec
    entered = {component.name for component in spec.components if component.entry}
    if job.state is not JobState.RUNNING or not entered:
        return
    staying = (WorkerState.ASSIGNED, WorkerState.STARTING, WorkerState.READY)
    peers = [worker for worker in tx.state.workers_of(uid) if worker.attempt == job.attempt and worker.state in staying]
    if all(worker.finished for worker in peers if worker.component in entered):
        stop(tx, uid, JobState.STOPPING, "every entry method returned", target=JobState.SUCCEEDED)


def recover(tx: Transaction, uid: str, reason: str, *, counts: bool) -> None:
    """A job lost a worker: the rest is stopped, then it starts again if its restart budget allows.

    Args:
        counts: the loss counts against the budget; losing a node does not.
    """
    job, spec = tx.state.jobs[uid], tx.state.specs[uid].spec
    if job.state not in (JobState.STARTING, JobState.RUNNING):
        settle(tx, uid)
        return
    if counts:
        window_ms = spec.restart.window_ms
        recent = tuple(at for at in job.failures if not window_ms or at > tx.now_ms - window_ms)
        if len(recent) >= spec.restart.max_restarts:
            stop(tx, uid, JobState.STOPPING, reason, target=JobState.FAILED)
            return
        tx.change_job(uid, failures=(*recent, tx.now_ms))
    stop(tx, uid, JobState.RECOVERING, reason)


def settle(tx: Transaction, uid: str) -> None:
    """Moves a job on once none of its workers may have a process any more."""
    job = tx.state.jobs.get(uid)
    if job is None or job.state not in (JobState.STOPPING, JobState.PREEMPTING, JobState.RECOVERING):
        return
    workers = tx.state.workers_of(uid)
    if any(worker.state in LIVE for worker in workers):
        return
    _close_preemptions(tx, job, [worker for worker in workers if worker.attempt == job.attempt])
    spec = tx.state.specs[uid].spec
    if job.state is JobState.STOPPING:
        assert job.target is not None, "a stopping job knows how it ends"
        end(tx, uid, job.target, job.reason)
    elif job.state is JobState.PREEMPTING and spec.on_preempt is OnPreempt.CANCEL:
        end(tx, uid, JobState.CANCELLED, job.reason)
    else:
        if job.state is JobState.PREEMPTING:
            wait_ms = yield_backoff_ms(tx.state, spec, job.preemptions)
        else:
            failed = job.failures and job.failures[-1] == _last_failure(job)
            wait_ms = backoff_ms(spec, len(job.failures)) if failed else 0
        restarts = job.restarts + (job.state is JobState.RECOVERING)
        tx.move_job(
            uid,
            JobState.PENDING,
            job.reason,
            groups=(),
            running_ms=0,
            restarts=restarts,
            eligible_ms=tx.now_ms + wait_ms if wait_ms else 0,
        )
        tx.fresh.append(uid)


def requeue(tx: Transaction, uid: str, reason: str, *, pool: PoolRecord | None = None, failed_group: str = "") -> None:
    """A starting job one of whose groups can't be had waits again (STARTING → PENDING).

    Args:
        pool: whose backoff applies before the next try; None: at once.
        failed_group: the group that its caller takes care of.
    """
    job = tx.state.jobs[uid]
    if any(worker.state in (WorkerState.STARTING, WorkerState.READY) for worker in tx.state.workers_of(uid)):
        recover(tx, uid, reason, counts=False)
        return
    wait_ms = min(60_000, pool.spec.pg_pool.retry_base_ms << min(job.attempt - 1, 16)) if pool else 0
    for worker in tx.state.workers_of(uid):
        if worker.state is WorkerState.ASSIGNED:
            tx.move_worker(worker.generation, WorkerState.STOPPED, "never started", outcome=StopOutcome.ALREADY_GONE)
    tx.move_job(uid, JobState.PENDING, reason, groups=(), eligible_ms=tx.now_ms + wait_ms if wait_ms else 0)
    tx.fresh.append(uid)
    for group_id in job.groups:
        if group_id != failed_group:
            groups.let_go(tx, group_id)


def backoff_ms(spec: JobSpec, failures: int) -> int:
    """``base · 2ⁿ``, at most the longest."""
    return min(spec.restart.backoff_max_ms, spec.restart.backoff_base_ms << min(failures - 1, 30))


def _last_failure(job: JobRecord) -> int:
    entered = [line.at_ms for line in job.story if line.state == JobState.RECOVERING.value]
    return entered[-1] if entered else -1


def _close_preemptions(tx: Transaction, job: JobRecord, workers: list[WorkerRecord], generation: int = 0) -> None:
    """Notes how a preemption ended: of the whole job, and of whatever extra workers it had, or of one extra worker."""
    outcomes = [worker.outcome for worker in workers if worker.outcome is not None]
    worst = max(outcomes, key=_BADNESS.index, default=StopOutcome.ALREADY_GONE)
    for record in tx.state.open_preemptions(job.uid):
        if generation and record.generation != generation:
            continue
        tx.put(evolve(record, yield_ms=tx.now_ms - record.decided_ms, outcome=worst))
        counts = dict(tx.state.meta.preemption_outcomes)
        counts[worst.value] = counts.get(worst.value, 0) + 1
        tx.count(preemption_outcomes=tuple(sorted(counts.items())))
        tx.event(
            "preemption.done",
            f"jobs/{job.name}",
            job.state.value,
            f"{job.name} yielded ({worst.value.lower()}) after {tx.now_ms - record.decided_ms} ms",
            {"victim": job.name, "preemptor": record.preemptor_name, "outcome": worst.value},
        )
