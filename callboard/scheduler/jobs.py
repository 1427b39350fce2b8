"""What becomes of a job once it was submitted? Started, stopped, recovered, ended."""

from __future__ import annotations

from callboard.model.specs import ComponentSpec, Fencing, JobSpec, OnPreempt
from callboard.scheduler import groups, orders
from callboard.scheduler.evolving import evolve
from callboard.scheduler.grouping import GroupUse
from callboard.scheduler.planning import Plan, Victim
from callboard.scheduler.preemption import lost_work_ms, stop_timeouts, yield_backoff_ms
from callboard.scheduler.records import (
    ENDED,
    HOLDING,
    LIVE,
    BundleRecord,
    DeviceShare,
    GroupKind,
    GroupState,
    JobRecord,
    JobState,
    PoolRecord,
    PreemptionRecord,
    Removal,
    Rule,
    StopOutcome,
    WorkerRecord,
    WorkerState,
)
from callboard.scheduler.transaction import Transaction

KEPT_PREEMPTIONS = 1_000
"""Most preemption records kept; the totals go on counting."""

_BADNESS = (StopOutcome.ALREADY_GONE, StopOutcome.COOPERATIVE, StopOutcome.KILLED, StopOutcome.QUARANTINED)


# ---- start ----


def admit(tx: Transaction, uid: str, uses: tuple[GroupUse, ...], reason: str) -> None:
    """Gives a job its groups and workers and asks for what has to be made. All or nothing (I3)."""
    state = tx.state
    job = state.jobs[uid]
    for old in state.workers_of(uid):
        if old.state in (WorkerState.STOPPED, WorkerState.LOST):
            tx.drop("worker", old.generation)
    group_ids = [_take_group(tx, uid, use) for use in uses]
    count = sum(len(use.ask.slots) for use in uses)
    generation = tx.count(next_generation=state.meta.next_generation + count).next_generation
    tx.move_job(
        uid,
        JobState.STARTING,
        reason,
        attempt=job.attempt + 1,
        groups=tuple(group_ids),
        nominated=False,
        patient=False,
        waits_for=(),
        target=None,
        eligible_ms=0,
        deadline_ms=0,
        running_ms=0,
    )
    for use, group_id in zip(uses, group_ids, strict=True):
        generation = _assign(tx, uid, use, group_id, generation, extra=False)
    if job.attempt:
        announce(tx, uid, f"attempt {job.attempt + 1}")
    for group_id in group_ids:
        if state.groups[group_id].state is GroupState.READY:
            start_assigned(tx, group_id)


def _assign(tx: Transaction, uid: str, use: GroupUse, group_id: str, generation: int, *, extra: bool) -> int:
    """Adds the workers that go into one group; returns the next free generation."""
    components = {component.name: component for component in tx.state.specs[uid].spec.components}
    for slot, index in zip(use.ask.slots, use.bundle_of, strict=True):
        component = components[slot.component]
        tx.put(
            WorkerRecord(
                generation=generation,
                job=uid,
                component=slot.component,
                rank=slot.rank,
                attempt=tx.state.jobs[uid].attempt,
                state=WorkerState.ASSIGNED,
                node_id=use.bundles[index].node_id,
                group_id=group_id,
                bundle_index=index,
                pool=use.ask.pool,
                resources=component.resources,
                devices=devices_in(use.bundles[index], component),
                extra=extra,
                reason="waits for its placement group",
            )
        )
        generation += 1
    return generation


def devices_in(bundle: BundleRecord, component: ComponentSpec) -> tuple[DeviceShare, ...]:
    """The devices of a bundle that one worker gets: whole ones in order, or its share of the first that has it."""
    ask_milli = component.resources.gpu_milli
    if ask_milli == 0:
        return ()
    if ask_milli < 1000:
        share = next(share for share in bundle.devices if share.milli >= ask_milli)
        return (DeviceShare(share.index, share.id, ask_milli),)
    whole = [share for share in bundle.devices if share.milli == 1000]
    return tuple(whole[: ask_milli // 1000])


def start_assigned(tx: Transaction, group_id: str) -> None:
    """Asks agents to start the workers that waited for a group."""
    for worker in tx.state.workers_in(group_id):
        if worker.state is not WorkerState.ASSIGNED:
            continue
        timeout_ms = tx.state.specs[worker.job].spec.start_timeout_ms
        # The agent bounds the start and cleans up for at most a kill timeout; only then is its silence a fault.
        deadline_ms = tx.now_ms + timeout_ms + groups.ANSWER_MARGIN_MS + 10_000
        started = tx.move_worker(
            worker.generation, WorkerState.STARTING, f"asked of {worker.node_id}", deadline_ms=deadline_ms
        )
        tx.command(orders.start_worker(tx.state, started))


def nominate(tx: Transaction, uid: str, plan: Plan, *, patient: bool = False) -> None:
    """Holds what a plan needs for a job until what is in the way has ended (I7).

    Args:
        patient: nothing is asked to end; the room is held as running jobs end by themselves.
    """
    group_ids = []
    waits_for = [victim.uid for victim in plan.victims] + list(plan.trims)
    for use in plan.uses:
        if use.group_id:
            tx.change_group(use.group_id, nominee=uid, idle_since_ms=0)
            group_ids.append(use.group_id)
        else:
            group = groups.new_group(
                tx, use.ask.pool, use.kind, GroupState.NOMINATED, use.bundles, nominee=uid, reason="waits for room"
            )
            group_ids.append(group.group_id)
    if plan.waits and not waits_for and not patient:
        leaving = (JobState.STOPPING, JobState.PREEMPTING)
        waits_for = [other for job_state in leaving for other in tx.state.jobs_by_state[job_state]]
        waits_for += list(tx.state.groups_by_state[GroupState.REMOVING])
    job = tx.change_job(uid, nominated=True, patient=patient, groups=tuple(group_ids), waits_for=tuple(waits_for))
    victims = ", ".join(tx.state.jobs[victim.uid].name for victim in plan.victims)
    tx.event(
        "job.nominated",
        f"jobs/{job.name}",
        job.state.value,
        f"room is held for it; it waits for {victims}" if victims else "room is held for it until it is free",
        {"groups": ",".join(group_ids), "victims": victims, "trims": ",".join(plan.trims)},
    )


def drop_nomination(tx: Transaction, uid: str, reason: str) -> None:
    """Gives back what was held for a job that has not started."""
    job = tx.state.jobs[uid]
    if not job.nominated:
        return
    tx.change_job(uid, nominated=False, patient=False, groups=(), waits_for=())
    for group_id in job.groups:
        group = tx.state.groups.get(group_id)
        if group is None or group.nominee != uid:
            continue
        if group.state is GroupState.NOMINATED:
            groups.remove(tx, group_id, Removal.JOB_ENDED, reason)
        else:
            idle = group.state is GroupState.READY and not tx.state.workers_in(group_id)
            tx.change_group(group_id, nominee="", idle_since_ms=tx.now_ms if idle else 0)
    tx.event("job.nomination_dropped", f"jobs/{job.name}", job.state.value, reason)


def _take_group(tx: Transaction, uid: str, use: GroupUse) -> str:
    if not use.group_id:
        group = groups.new_group(
            tx, use.ask.pool, use.kind, GroupState.CREATING, use.bundles, job=uid, users=0, reason="asked for by a job"
        )
        groups.begin_creation(tx, group.group_id, f"for {tx.state.jobs[uid].name}")
        groups.count_use(tx, group, fresh=True)
    else:
        group = tx.state.groups[use.group_id]
        groups.count_use(tx, group, fresh=group.state is GroupState.NOMINATED)
        tx.change_group(group.group_id, job=uid, nominee="", idle_since_ms=0)
        if group.state is GroupState.NOMINATED:
            groups.begin_creation(tx, group.group_id, f"for {tx.state.jobs[uid].name}")
    tx.change_group(group.group_id, users=tx.state.groups[group.group_id].users + 1)
    return group.group_id


# ---- stop ----


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


def add_extra(tx: Transaction, uid: str, use: GroupUse) -> None:
    """Adds one worker to a running job, in a group of its own."""
    group_id = _take_group(tx, uid, use)
    job = tx.state.jobs[uid]
    tx.change_job(uid, groups=(*[other for other in job.groups if other != group_id], group_id))
    generation = tx.count(next_generation=tx.state.meta.next_generation + 1).next_generation
    _assign(tx, uid, use, group_id, generation, extra=True)
    if tx.state.groups[group_id].state is GroupState.READY:
        start_assigned(tx, group_id)


def promote(tx: Transaction, worker: WorkerRecord) -> None:
    """An extra worker takes the place of a lost one in the count of the fewest."""
    tx.put(evolve(tx.state.workers[worker.generation], extra=False))


def announce(tx: Transaction, uid: str, why: str) -> None:
    """Tells watchers which rank is where, by generation."""
    job = tx.state.jobs[uid]
    ranks = {
        f"{worker.component}/{worker.rank}": f"{worker.node_id} g{worker.generation}"
        for worker in tx.state.workers_of(uid)
        if worker.attempt == job.attempt and worker.state in LIVE
    }
    tx.event("job.rank_map", f"jobs/{job.name}", job.state.value, why, ranks)


def preempt(tx: Transaction, victim: Victim, preemptor: JobRecord | None, *, within_ms: int | None = None) -> None:
    """Makes a job, or one extra worker of it, yield.

    Args:
        within_ms: shortens the time of its hooks (a drain's deadline).
    """
    uid, rule, reason = victim.uid, victim.rule, victim.reason
    job = tx.state.jobs[uid]
    meta = tx.count(
        next_preemption=tx.state.meta.next_preemption + 1, total_preemptions=tx.state.meta.total_preemptions + 1
    )
    record = PreemptionRecord(
        number=meta.next_preemption,
        victim=uid,
        victim_name=job.name,
        preemptor=preemptor.uid if preemptor else "",
        preemptor_name=preemptor.name if preemptor else "",
        pool=tx.state.specs[uid].spec.pool,
        rule=rule,
        reason=reason,
        decided_ms=tx.now_ms,
        generation=victim.generation,
        lost_work_ms=lost_work_ms(job, tx.now_ms),
    )
    tx.put(record)
    tx.drop("preemption", meta.next_preemption - KEPT_PREEMPTIONS)
    by = f"by {preemptor.name}" if preemptor else "by hand" if rule is Rule.MANUAL else "to drain"
    tx.event(
        "preemption.decided",
        f"jobs/{job.name}",
        job.state.value,
        f"preempted {by}: {reason}",
        {"victim": job.name, "preemptor": record.preemptor_name, "rule": rule.value},
    )
    tx.change_job(uid, preemptions=job.preemptions + 1)
    if preemptor is not None:
        note_yield(tx, uid, preemptor.uid)
    if victim.generation:
        cancel_ms, kill_ms = stop_timeouts(tx.state, tx.state.specs[uid].spec, within_ms)
        shed(tx, tx.state.workers[victim.generation], f"preempted {by}", cancel_ms, kill_ms)
        return
    stop(tx, uid, JobState.PREEMPTING, f"preempted {by}", checkpoint=True, within_ms=within_ms)


def note_yield(tx: Transaction, uid: str, winner: str) -> None:
    """Remembers that a job yielded to another, as long as that one has not ended."""
    known = tx.state.jobs[uid].yielded_to
    live = [other for other in known if other in tx.state.jobs and tx.state.jobs[other].state not in ENDED]
    tx.change_job(uid, yielded_to=(*[other for other in live if other != winner], winner))


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


# ---- the end ----


def a_copy_may_live(tx: Transaction, uid: str) -> bool:
    """Whether a strict job has a worker that nobody proved gone: it starts nothing until that is proved or its node is
    given up (R5)."""
    return tx.state.specs[uid].spec.fencing is Fencing.STRICT and any(
        worker.state is WorkerState.QUARANTINED for worker in tx.state.workers_of(uid)
    )


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
        if worker.state in (WorkerState.STOPPED, WorkerState.LOST):
            tx.drop("worker", worker.generation)
    for checkpoint in tx.state.checkpoints_of(job.uid):
        tx.drop("checkpoint", checkpoint.key)


def forget(tx: Transaction, uid: str) -> None:
    """Takes an ended job off the list."""
    assert tx.state.jobs[uid].state in ENDED
    for worker in tx.state.workers_of(uid):
        if worker.state is WorkerState.QUARANTINED:
            return  # its story is still needed
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


def _last_failure(job: JobRecord) -> int:
    entered = [line.at_ms for line in job.story if line.state == JobState.RECOVERING.value]
    return entered[-1] if entered else -1


def backoff_ms(spec: JobSpec, failures: int) -> int:
    """``base · 2ⁿ``, at most the longest."""
    return min(spec.restart.backoff_max_ms, spec.restart.backoff_base_ms << min(failures - 1, 30))


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
