"""The stop of a job: it lets go of its workers, then it is stopped, recovered or queued again, and forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from callboard.model.specs import JobSpec, OnPreempt
from callboard.scheduler.handlers import groups, orders
from callboard.scheduler.handlers.starting import drop_nomination
from callboard.scheduler.plan.preemption import stop_timeouts, yield_backoff_ms
from callboard.scheduler.records.job_records import FAILURES_LIMIT, Failure, JobRecord, WorkerRecord, evolve
from callboard.scheduler.records.pool_records import PoolRecord
from callboard.scheduler.records.states import (
    ENDED,
    HOLDING,
    JOB_CANCELLED,
    JOB_FAILED,
    JOB_PENDING,
    JOB_PREEMPTING,
    JOB_RECOVERING,
    JOB_RUNNING,
    JOB_STARTING,
    JOB_STOPPING,
    JOB_SUCCEEDED,
    LIVE,
    WORKER_ASSIGNED,
    WORKER_LOST,
    WORKER_READY,
    WORKER_STARTING,
    WORKER_STOPPED,
    WORKER_STOPPING,
    GroupKind,
    JobState,
    Removal,
    StopKind,
    StopOutcome,
)
from callboard.scheduler.records.wording import join, time_left
from callboard.scheduler.state.transaction import Transaction

CAUSE_MS = 1_000
"""After an exception of a worker, for the death of a process to be reported of which it is the consequence."""

_LOST_CHARACTERS = 1_000

_BADNESS = (StopOutcome.ALREADY_GONE, StopOutcome.COOPERATIVE, StopOutcome.KILLED, StopOutcome.QUARANTINED)


def stop(
    tx: Transaction,
    uid: str,
    state: JobState,
    reason: str,
    kind: StopKind,
    *,
    target: JobState | None = None,
    checkpoint: bool = False,
    within_ms: int | None = None,
) -> None:
    """Stops every worker of a job and moves it to STOPPING, PREEMPTING or RECOVERING; it goes on when all are gone.
    What is being stopped already is only hastened. Of a command the files that it wrote are a checkpoint at any moment,
    also when it or another worker has failed; an actor that lost others is not asked."""
    job, spec = tx.state.jobs[uid], tx.state.specs[uid].spec
    commands = {component.name for component in spec.components if component.command}
    lost = "" if checkpoint else job.checkpoint_lost
    tx.move_job(uid, state, reason, deadline_ms=0, target=target, cause_ms=0, checkpoint_lost=lost)
    bounds = stop_timeouts(tx.state, spec, within_ms)
    for worker in tx.state.workers_of(uid):
        if worker.state is WORKER_ASSIGNED:
            tx.move_worker(worker.generation, WORKER_STOPPED, "never started", outcome=StopOutcome.ALREADY_GONE)
            groups.let_go(tx, worker.group_id)
        elif worker.state in (WORKER_STARTING, WORKER_READY):
            keeps = checkpoint or (state is JOB_RECOVERING and worker.component in commands)
            stop_one(tx, worker, reason, kind, bounds, checkpoint=keeps)
        elif worker.state is WORKER_STOPPING:
            hasten(tx, worker, reason, kind, bounds)
    settle(tx, uid)


def stop_one(
    tx: Transaction, worker: WorkerRecord, reason: str, kind: StopKind, bounds: tuple[int, int], *, checkpoint: bool
) -> None:
    """Asks an agent to end one worker. Without its answer the worker counts as QUARANTINED in the end (I6).

    Args:
        bounds: of the hooks and of the kill in ms; see :func:`stop_timeouts`.
    """
    cancel_ms, kill_ms = bounds
    stopping = tx.move_worker(
        worker.generation,
        WORKER_STOPPING,
        reason,
        cancel_timeout_ms=cancel_ms,
        kill_timeout_ms=kill_ms,
        checkpoint=checkpoint,
        kill_ms=tx.now_ms + cancel_ms,
        stop_kind=kind,
        deadline_ms=tx.now_ms + cancel_ms + kill_ms + groups.ANSWER_MARGIN_MS,
    )
    tx.command(orders.stop_worker(stopping, tx.now_ms))


def hasten(
    tx: Transaction, worker: WorkerRecord, reason: str, kind: StopKind, bounds: tuple[int, int], *, known: bool = False
) -> None:
    """Stops a worker a second time, while it is being stopped: the earlier end holds, and its agent is told.

    Args:
        known: its agent need not be told: it is what hastens.
    """
    cancel_ms, kill_ms = bounds
    before_ms = worker.kill_ms or worker.deadline_ms - worker.kill_timeout_ms - groups.ANSWER_MARGIN_MS
    at_ms = tx.now_ms + cancel_ms
    if at_ms >= before_ms:
        return
    left = time_left(cancel_ms)
    revision = tx.event(
        "worker.hastened",
        tx.worker_subject(worker),
        worker.state.value,
        f"{reason}; killed at the latest in {left} instead of {time_left(max(0, before_ms - tx.now_ms))}",
        {"generation": str(worker.generation), "node": worker.node_id},
    )
    kill_ms = min(kill_ms, worker.kill_timeout_ms)
    hastened = evolve(
        worker,
        reason=reason,
        cancel_timeout_ms=cancel_ms,
        kill_timeout_ms=kill_ms,
        kill_ms=at_ms,
        stop_kind=kind,
        hastened=worker.hastened + 1,
        deadline_ms=min(worker.deadline_ms, at_ms + kill_ms + groups.ANSWER_MARGIN_MS),
        revision=revision,
    )
    tx.put(hastened)
    if not known:
        tx.command(orders.stop_worker(hastened, tx.now_ms))


def hasten_job(tx: Transaction, uid: str, reason: str, kind: StopKind, within_ms: int | None = None) -> None:
    """Stops a job a second time, while it is being stopped; see :func:`hasten`."""
    bounds = stop_timeouts(tx.state, tx.state.specs[uid].spec, within_ms)
    before = len(tx.commands)
    for worker in tx.state.workers_of(uid):
        if worker.state is WORKER_STOPPING:
            hasten(tx, worker, reason, kind, bounds)
    if len(tx.commands) > before:
        tx.add_line(uid, f"{reason}; killed at the latest in {time_left(bounds[0])}")


def shed(tx: Transaction, worker: WorkerRecord, reason: str, kind: StopKind, bounds: tuple[int, int]) -> None:
    """Ends one extra worker; its job goes on."""
    if worker.state is WORKER_ASSIGNED:
        cancel_assigned(tx, worker, reason)
    elif worker.state in (WORKER_STARTING, WORKER_READY):
        stop_one(tx, worker, reason, kind, bounds, checkpoint=True)


def cancel_assigned(tx: Transaction, worker: WorkerRecord, reason: str) -> None:
    """An extra worker that was never asked of an agent will not come."""
    stopped = tx.move_worker(worker.generation, WORKER_STOPPED, reason, outcome=StopOutcome.ALREADY_GONE)
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
    if job.state is not JOB_RUNNING or not entered or job.cause_ms:
        return
    staying = (WORKER_ASSIGNED, WORKER_STARTING, WORKER_READY)
    peers = [worker for worker in tx.state.workers_of(uid) if worker.attempt == job.attempt and worker.state in staying]
    # Rank 0 of a cluster of a job's own runs the command: others only lend what they have, also one that comes late.
    led = {component.name: component.min_workers for component in spec.components if component.ray}
    base = [worker for worker in peers if not worker.extra and worker.component not in led]
    if len(base) < fewest(spec) - sum(led.values()):
        return  # one is being replaced
    runs = [
        worker for worker in peers if worker.component in entered and (worker.rank == 0 or worker.component not in led)
    ]
    if runs and all(worker.finished for worker in runs):
        reason = "every entry method returned"
        stop(tx, uid, JOB_STOPPING, reason, StopKind.COMPLETE, target=JOB_SUCCEEDED)


def note_failure(
    tx: Transaction, uid: str, failure: Failure, *, traceback: str = "", stderr_tail: str = "", exit_code: int = 0
) -> bool:
    """Writes down that a worker failed. Returns whether it is what the job fails by, as far as is known.

    It may be the cause also when the job is on its way out: what comes first is not always heard first.
    """
    job = tx.state.jobs[uid]
    failing = job.state is JOB_RECOVERING or job.target is JOB_FAILED
    if failure.attempt != job.attempt or not (failing or job.state in (JOB_STARTING, JOB_RUNNING)):
        return False
    if any(each.worker == failure.worker and each.died == failure.died for each in unsurvived(job)):
        return False
    failed = (*job.failed, failure)[-FAILURES_LIMIT:]
    fields: dict[str, Any] = {"failed": failed}
    is_cause = cause_of(unsurvived(evolve(job, failed=failed))) is failure
    if is_cause:
        fields |= {"traceback": traceback, "stderr_tail": stderr_tail, "exit_code": exit_code}
    if failing and unsurvived(job):
        fields["reason"] = failed_by(unsurvived(evolve(job, failed=failed)))
    tx.change_job(uid, **fields)
    return is_cause


def unsurvived(job: JobRecord) -> list[Failure]:
    """What the job's present attempt fails by."""
    return [failure for failure in job.failed if failure.attempt == job.attempt and not failure.survived]


def cause_of(failed: Sequence[Failure]) -> Failure:
    """The first death, which exceptions of others follow from; without one the first exception. What dies long after
    the first failure is no cause of it."""
    first_ms = min(failure.at_ms for failure in failed)
    died = [failure for failure in failed if failure.died and failure.at_ms <= first_ms + CAUSE_MS]
    return min(died or failed, key=lambda failure: failure.at_ms)


def failed_by(failed: Sequence[Failure]) -> str:
    """The reason of a job that fails: its cause, and who failed beside."""
    cause = cause_of(failed)
    others = list(dict.fromkeys(failure.worker for failure in failed if failure.worker != cause.worker))
    if not others:
        return cause.reason
    more = f" and {len(others) - 5} more" if len(others) > 5 else ""
    return f"{cause.reason}; {', '.join(others[:5])}{more} failed after it"


def await_cause(tx: Transaction, uid: str) -> bool:
    """Whether a job that just failed by an exception goes on for a moment, since a process of it may have died before
    and be reported after."""
    job = tx.state.jobs[uid]
    busy = (WORKER_STARTING, WORKER_READY)
    failed = unsurvived(job)
    if any(failure.died for failure in failed):
        return False
    known = {failure.worker for failure in failed}
    if not any(
        worker.state in busy and worker.attempt == job.attempt and f"{worker.component}/{worker.rank}" not in known
        for worker in tx.state.workers_of(uid)
    ):
        return False
    if not job.cause_ms:
        tx.change_job(uid, cause_ms=tx.now_ms + CAUSE_MS)
    return True


def fewest(spec: JobSpec) -> int:
    """Workers without which a job is not whole."""
    return sum(component.min_workers for component in spec.components)


def recover(tx: Transaction, uid: str, reason: str, *, counts: bool) -> None:
    """A job lost a worker: the rest is stopped, then it starts again if its restart budget allows.

    Args:
        counts: the loss counts against the budget; losing a node does not.
    """
    job = tx.state.jobs[uid]
    if job.state not in (JOB_STARTING, JOB_RUNNING):
        settle(tx, uid)
        return
    if failed := unsurvived(job):
        cause = cause_of(failed)
        reason, counts = failed_by(failed), cause.counts
    if counts and not may_restart(tx, uid):
        stop(tx, uid, JOB_STOPPING, reason, StopKind.FAILURE, target=JOB_FAILED)
        return
    stop(tx, uid, JOB_RECOVERING, reason, StopKind.FAILURE)


def may_restart(tx: Transaction, uid: str) -> bool:
    """Counts a failure against the restart budget of a job; False: it has none left."""
    job, restart = tx.state.jobs[uid], tx.state.specs[uid].spec.restart
    recent = tuple(at for at in job.failures if not restart.window_ms or at > tx.now_ms - restart.window_ms)
    if len(recent) >= restart.max_restarts:
        return False
    tx.change_job(uid, failures=(*recent, tx.now_ms))
    return True


def settle(tx: Transaction, uid: str) -> None:
    """Moves a job on once none of its workers may have a process any more."""
    job = tx.state.jobs.get(uid)
    if job is None or job.state not in (JOB_STOPPING, JOB_PREEMPTING, JOB_RECOVERING):
        return
    workers = tx.state.workers_of(uid)
    if any(worker.state in LIVE for worker in workers):
        return
    _close_preemptions(tx, job, [worker for worker in workers if worker.attempt == job.attempt])
    spec = tx.state.specs[uid].spec
    reason = job.reason
    if job.checkpoint_lost and job.state is not JOB_RECOVERING:
        reason = f"{reason}; checkpoint lost: {job.checkpoint_lost}"
    if job.state is JOB_STOPPING:
        assert job.target is not None, "a stopping job knows how it ends"
        end(tx, uid, job.target, job.reason if job.target is JOB_FAILED else reason)
    elif job.state is JOB_PREEMPTING and spec.on_preempt is OnPreempt.CANCEL:
        end(tx, uid, JOB_CANCELLED, reason)
    else:
        if job.state is JOB_PREEMPTING:
            wait_ms = yield_backoff_ms(tx.state, spec, job.preemptions)
        else:
            failed = job.failures and job.failures[-1] == _last_failure(job)
            wait_ms = backoff_ms(spec, len(job.failures)) if failed else 0
        restarts = job.restarts + (job.state is JOB_RECOVERING)
        tx.move_job(
            uid,
            JOB_PENDING,
            reason,
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
    if any(worker.state in (WORKER_STARTING, WORKER_READY) for worker in tx.state.workers_of(uid)):
        recover(tx, uid, reason, counts=False)
        return
    wait_ms = min(60_000, pool.spec.pg_pool.retry_base_ms << min(job.attempt - 1, 16)) if pool else 0
    for worker in tx.state.workers_of(uid):
        if worker.state is WORKER_ASSIGNED:
            tx.move_worker(worker.generation, WORKER_STOPPED, "never started", outcome=StopOutcome.ALREADY_GONE)
    eligible_ms = tx.now_ms + wait_ms if wait_ms else 0
    tx.move_job(uid, JOB_PENDING, reason, groups=(), eligible_ms=eligible_ms, cause_ms=0)
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
    lost = lost_by(workers)
    for record in tx.state.open_preemptions(job.uid):
        if generation and record.generation != generation:
            continue
        tx.put(evolve(record, yield_ms=tx.now_ms - record.decided_ms, outcome=worst, checkpoint_lost=lost))
        counts = dict(tx.state.meta.preemption_outcomes)
        counts[worst.value] = counts.get(worst.value, 0) + 1
        tx.count(preemption_outcomes=tuple(sorted(counts.items())))
        tx.event(
            "preemption.done",
            f"jobs/{job.name}",
            job.state.value,
            f"{job.name} yielded ({worst.value.lower()}) after {tx.now_ms - record.decided_ms} ms"
            + (f"; checkpoint lost: {lost}" if lost else ""),
            {"victim": job.name, "preemptor": record.preemptor_name, "outcome": worst.value},
        )


def lose_checkpoint(tx: Transaction, worker: WorkerRecord, why: str) -> None:
    """Notes that a worker which was asked for a checkpoint left none; what says so first holds."""
    current = tx.state.workers[worker.generation]
    if current.checkpoint_lost:
        return
    why = why[:_LOST_CHARACTERS]
    tx.put(evolve(current, checkpoint_lost=why))
    job = tx.state.jobs[worker.job]
    # A job that runs on loses extra workers one by one; of the others all are stopped at once.
    whose = [current] if job.state is JOB_RUNNING else tx.state.workers_of(job.uid)
    lost = lost_by([tx.state.workers[each.generation] for each in whose if each.attempt == job.attempt])
    tx.change_job(job.uid, checkpoint_lost=lost)
    tx.event("worker.checkpoint_lost", tx.worker_subject(worker), worker.state.value, f"checkpoint lost: {why}")


def lost_by(workers: Sequence[WorkerRecord]) -> str:
    """Why checkpoints of these workers were lost, worker by worker; empty: none was."""
    lost = [
        f"{worker.component}/{worker.rank}: {worker.checkpoint_lost}" for worker in workers if worker.checkpoint_lost
    ]
    return join(lost)[: 2 * _LOST_CHARACTERS]


def end(tx: Transaction, uid: str, state: JobState, reason: str) -> None:
    """Ends a job that holds nothing. Quarantined workers stay on record until they are proved gone."""
    job = tx.state.jobs[uid]
    drop_nomination(tx, uid, reason)
    ttl_ms = tx.state.specs[uid].spec.ttl_after_finished_ms
    tx.move_job(
        uid,
        state,
        reason,
        end_ms=tx.now_ms,
        groups=(),
        eligible_ms=0,
        session_ms=0,
        deadline_ms=tx.now_ms + ttl_ms if ttl_ms is not None else 0,
    )
    for worker in tx.state.workers_of(uid):
        if worker.state in (WORKER_STOPPED, WORKER_LOST):
            tx.drop("worker", worker.generation)
    for checkpoint in tx.state.checkpoints_of(job.uid):
        tx.drop("checkpoint", checkpoint.key)


def forget(tx: Transaction, uid: str) -> None:
    """Takes an ended job off the list."""
    assert tx.state.jobs[uid].state in ENDED
    assert uid not in tx.state.jobs_holding, "the story of a worker that nobody proved gone is still needed"
    job = tx.state.jobs[uid]
    tx.event("job.forgotten", f"jobs/{job.name}", job.state.value, "it ended long enough ago", {"uid": uid})
    tx.drop("job", uid)
    tx.drop("spec", uid)


def destroy_groups_of(tx: Transaction, job: JobRecord) -> None:
    """Marks every group of a job for removal, reserved ones too: they stay away until their pool is updated."""
    for group_id in job.groups:
        group = tx.state.groups.get(group_id)
        if group is not None and group.job == job.uid:
            groups.doom(tx, group_id, Removal.REQUESTED, f"removed with {job.name}, as asked")
            if group.group_kind is GroupKind.RESERVED:
                keep_away(tx, group.pool, group.reserved_index)


def keep_away(tx: Transaction, pool_name: str, index: int) -> None:
    """Notes that a reserved group was removed on purpose."""
    pool = tx.state.pools.get(pool_name)
    if pool is not None and index not in pool.destroyed_reserved:
        tx.put(evolve(pool, destroyed_reserved=tuple(sorted({*pool.destroyed_reserved, index}))))
