"""Elastic components: how many workers each should have now, and how it gets there.

A job starts with the fewest workers of every component. While it runs, extra ones are added one by one as room is
free: nobody yields to an extra worker, and each has a placement group of its own, since a group can't be resized. An
extra worker is a unit of its own: it can be preempted, drained or lost without stopping the job. When one of the
fewest is lost and an extra one runs, the extra one takes its place in the count; the missing rank is filled next.
Every change is announced with the new rank map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from callboard.model.roles import member_names
from callboard.model.specs import ComponentSpec, JobSpec
from callboard.scheduler.handlers import starting, stopping
from callboard.scheduler.plan.complement import closed_to, is_leaving, live_of, missing, next_rank, wanted
from callboard.scheduler.plan.fitting import keeps_strategy
from callboard.scheduler.plan.grouping import GroupUse, choose_groups, takes
from callboard.scheduler.plan.preemption import stop_timeouts
from callboard.scheduler.plan.quota import shortages
from callboard.scheduler.plan.view import Assumption, View
from callboard.scheduler.records.asks import Ask, Slot
from callboard.scheduler.records.events import JobScaled
from callboard.scheduler.records.job_records import JobRecord, WorkerRecord, evolve
from callboard.scheduler.records.refusals import Refusal, RefusalCode
from callboard.scheduler.records.states import (
    ENDED,
    GROUP_READY,
    HOLDING,
    JOB_FAILED,
    JOB_RUNNING,
    JOB_STOPPING,
    LIVE,
    WORKER_READY,
    StopKind,
)
from callboard.scheduler.state.transaction import Transaction


def scale(tx: Transaction, event: JobScaled) -> str:
    """Sets how many workers an elastic component should have; the highest ranks leave first."""
    job = living(tx, event.uid)
    components = {
        name: component
        for component in tx.state.specs[job.uid].spec.components
        for name in (*member_names(component), component.name)
    }
    component = components.get(event.component)
    if component is None:
        known = ", ".join(components)
        message = f"job {job.name} has no component {event.component}; it has {known}"
        raise Refusal(RefusalCode.NOT_FOUND, f"jobs/{job.name}", message, "component")
    least, most = component.min_workers, component.max_workers
    if not least <= event.workers <= most:
        message = (
            f"{event.component} may have {least} to {most} workers, not {event.workers}"
            if least < most
            else f"{event.component} always has {most} workers; a job makes it elastic by min_workers and max_workers"
        )
        raise Refusal(RefusalCode.INVALID_FIELD, f"jobs/{job.name}", message, "workers")
    set_target(tx, job, component, event.workers, reason="request")
    return job.uid


def living(tx: Transaction, uid: str) -> JobRecord:
    """The job that somebody names, if it has not ended."""
    job = tx.state.jobs.get(uid)
    if job is None or job.state in ENDED:
        what = f"job {job.name} has ended" if job else f"there is no job {uid}"
        code = RefusalCode.WRONG_STATE if job else RefusalCode.NOT_FOUND
        raise Refusal(code, f"jobs/{uid}", what, "name")
    return job


def set_target(
    tx: Transaction, job: JobRecord, component: ComponentSpec, workers: int, *, reason: str, why: str = ""
) -> None:
    """Says how many workers a component should have, and brings it there as far as there is room."""
    before = wanted(job, component)
    targets = {**dict(job.targets), component.name: workers}
    tx.change_job(job.uid, targets=tuple(sorted(targets.items())))
    if workers != before:  # said twice, it is one change
        tx.event(
            "job.scaled",
            f"jobs/{job.name}",
            job.state.value,
            f"{component.name} should have {workers} workers{f': {why}' if why else ''}",
            {"direction": "up" if workers > before else "down", "reason": reason},
        )
    _shrink(tx, job.uid, component, workers)
    stopping.finish_if_all_returned(tx, job.uid)
    grow(tx, job.uid)


def grow(tx: Transaction, uid: str) -> bool:
    """Adds workers to a running job, as many as are wanted, find free room, and one event may look for;
    returns whether there are more than that."""
    job = tx.state.jobs[uid]
    if job.state is not JOB_RUNNING or job.eligible_ms > tx.now_ms or job.cause_ms:
        return False
    # Nothing new before running work is counted (QL-03), nor beside a copy that may live (R5).
    if tx.state.meta.reconcile_until_ms or starting.a_copy_may_live(tx, uid):
        return False
    spec = tx.state.specs[uid].spec
    # The first job that an event looks for is gone through until something is added: else the next event, which begins
    # with it again, would find what this one found, and so would all after it.
    must_go_on = not tx.growth_looked
    for component in spec.components:
        while (component.elastic or spec.replaces) and len(live := live_of(tx.state, job, component)) < wanted(
            job, component
        ):
            rank = next_rank(live)
            if is_leaving(tx.state, job, component, rank):
                break
            if tx.growth_left <= 0 and not must_go_on:
                tx.growth_cut = True
                return True
            if not _add(tx, uid, spec, component, rank):
                break
            must_go_on = False
    return False


def lose(tx: Transaction, uid: str, gone: list[WorkerRecord], reason: str, *, counts: bool) -> None:
    """Some workers of a job are gone unasked. The job goes on if every component still has its fewest.

    Args:
        gone: the records before they were moved.
        counts: the loss counts against the restart budget, if the job must restart.
    """
    job = tx.state.jobs[uid]
    gone = [worker for worker in gone if worker.attempt == job.attempt]
    base = [worker for worker in gone if not worker.extra]
    spec = tx.state.specs[uid].spec
    goes_on = job.state is JOB_RUNNING and not job.cause_ms and not any(_leads(tx, worker) for worker in gone)
    if not goes_on or not (_promote(tx, job, base) or _replaces(tx, job, base)):
        stopping.recover(tx, uid, reason, counts=counts)
        return
    if counts and spec.replaces and not stopping.may_restart(tx, uid):
        stopping.stop(tx, uid, JOB_STOPPING, reason, StopKind.FAILURE, target=JOB_FAILED)
        return
    _survive(tx, uid)
    for worker in gone:
        _let_go(tx, worker)
    if counts:
        failures = tx.state.jobs[uid].failures if spec.replaces else (*job.failures[-20:], tx.now_ms)
        wait_ms = stopping.backoff_ms(spec, len(failures))
        tx.change_job(uid, eligible_ms=tx.now_ms + wait_ms, failures=failures)
    if missing(tx.state, uid):
        await_replacement(tx, uid, reason)
    starting.announce(tx, uid, reason)
    if not base and not counts:
        stopping.finish_if_all_returned(tx, uid)
    if spec.replaces:
        grow(tx, uid)


def _named(absent: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{component}/{rank}" for component, ranks in absent.items() for rank in ranks)


def await_replacement(tx: Transaction, uid: str, reason: str) -> None:
    """A job runs on without some worker. If that is not replaced within the time of a start, all of it starts again."""
    job, spec = tx.state.jobs[uid], tx.state.specs[uid].spec
    until_ms = max(tx.now_ms, job.eligible_ms) + spec.longest_start_ms
    tx.move_job(uid, JOB_RUNNING, f"{_named(missing(tx.state, uid))} is being replaced: {reason}", deadline_ms=until_ms)


def replaced(tx: Transaction, worker: WorkerRecord) -> None:
    """A replacement is ready: it counts as the one it replaces."""
    job, spec = tx.state.jobs[worker.job], tx.state.specs[worker.job].spec
    component = next(each for each in spec.components if each.name == worker.component)
    if sum(1 for other in live_of(tx.state, job, component) if not other.extra) >= component.min_workers:
        return
    starting.promote(tx, worker)
    if job.deadline_ms and not missing(tx.state, worker.job):
        reason = f"{worker.component}/{worker.rank} was replaced"
        tx.move_job(worker.job, JOB_RUNNING, reason, deadline_ms=0, restarts=job.restarts + 1)


def not_replaced(tx: Transaction, uid: str, why: str) -> None:
    """A replacement did not come in time: the job waits for room as a whole."""
    absent = _named(missing(tx.state, uid))
    tx.change_job(uid, deadline_ms=0)
    stopping.recover(tx, uid, f"{absent} could not be replaced in time: {why}", counts=False)


def replace_living(
    tx: Transaction, worker: WorkerRecord, reason: str, kind: StopKind, *, within_ms: int | None = None
) -> bool:
    """Ends one worker of a running job and replaces it, if its job is such that the others keep running meanwhile."""
    job, spec = tx.state.jobs[worker.job], tx.state.specs[worker.job].spec
    counts = kind is StopKind.FAILURE
    if job.state is not JOB_RUNNING or job.cause_ms or _leads(tx, worker) or not _replaces(tx, job, [worker]):
        return False
    if counts and not stopping.may_restart(tx, job.uid):
        return False
    if counts:
        wait_ms = stopping.backoff_ms(spec, len(tx.state.jobs[job.uid].failures))
        tx.change_job(job.uid, eligible_ms=tx.now_ms + wait_ms)
    _survive(tx, job.uid)
    tx.put(evolve(tx.state.workers[worker.generation], extra=True))  # a unit of its own, which may go
    bounds = stop_timeouts(tx.state, spec, within_ms)
    stopping.shed(tx, tx.state.workers[worker.generation], reason, kind, bounds)
    await_replacement(tx, job.uid, reason)
    starting.announce(tx, job.uid, reason)
    return True


def _leads(tx: Transaction, worker: WorkerRecord) -> bool:
    """Whether the others of a component can't go on without this one: it runs their command, and the head of their
    Ray cluster."""
    components = tx.state.specs[worker.job].spec.components
    return worker.rank == 0 and any(each.ray for each in components if each.name == worker.component)


def _survive(tx: Transaction, uid: str) -> None:
    """Whatever failed, the job goes on."""
    failed = tx.state.jobs[uid].failed
    if failed:
        tx.change_job(uid, failed=tuple(replace(failure, survived=True) for failure in failed))


def _replaces(tx: Transaction, job: JobRecord, lost: list[WorkerRecord]) -> bool:
    """Whether a job runs on without these workers until they are replaced: some worker has to be left to run on."""
    gone = {worker.generation for worker in lost}
    left = [w for w in tx.state.workers_of(job.uid) if w.state is WORKER_READY and w.generation not in gone]
    return tx.state.specs[job.uid].spec.replaces and bool(left)


def _let_go(tx: Transaction, worker: WorkerRecord) -> None:
    """A worker that is gone is none of the fewest any more; one that can't be proved gone keeps its room."""
    current = tx.state.workers.get(worker.generation)
    if current is not None and current.state in HOLDING and not current.extra:
        tx.put(evolve(current, extra=True))
    stopping.drop_extra(tx, worker)


def _promote(tx: Transaction, job: JobRecord, base: list[WorkerRecord]) -> bool:
    """Lets extra workers take the place of lost ones in the count, if there are enough of each component."""
    chosen: list[WorkerRecord] = []
    for component in dict.fromkeys(worker.component for worker in base):
        extras = [
            worker
            for worker in tx.state.workers_of(job.uid)
            if worker.extra and worker.component == component and worker.state is WORKER_READY
        ]
        missing = sum(1 for worker in base if worker.component == component)
        if len(extras) < missing:
            return False
        chosen += sorted(extras, key=lambda worker: worker.rank)[:missing]
    for worker in chosen:
        starting.promote(tx, worker)
    return True


def _shrink(tx: Transaction, uid: str, component: ComponentSpec, count: int) -> None:
    job, spec = tx.state.jobs[uid], tx.state.specs[uid].spec
    live = live_of(tx.state, job, component)
    extras = sorted((worker for worker in live if worker.extra), key=lambda worker: worker.rank, reverse=True)
    bounds = stop_timeouts(tx.state, spec)
    for worker in extras[: max(0, len(live) - count)]:
        stopping.shed(tx, worker, f"scaled to {count} workers", StopKind.SCALE, bounds)


def _add(tx: Transaction, uid: str, spec: JobSpec, component: ComponentSpec, rank: int) -> bool:
    tx.growth_left -= 1
    tx.growth_looked = True
    ask = Ask(spec.pool_of(component), [(component, range(rank, rank + 1))])
    if spec.replaces and _add_in_place(tx, uid, spec, ask):
        return True
    view = View(tx.state, Assumption(subject=uid, closed=closed_to(tx.state, tx.state.jobs[uid], spec, component)))
    uses = choose_groups(tx.state, view, spec, [ask])
    if uses is None:
        return False
    starting.add_extra(tx, uid, uses[0])
    return True


def _add_in_place(tx: Transaction, uid: str, spec: JobSpec, ask: Ask) -> bool:
    """Adds a worker in a bundle that its job still has from the one it replaces, if there is one."""
    state, slot = tx.state, ask.slots[0]
    pool = state.pools.get(ask.pool)
    view = View(state, Assumption(subject=uid))
    if pool is None or shortages(state.pools, view.charged, pool.spec, ask.resources):
        return False
    for group_id in state.jobs[uid].groups:
        group = state.groups.get(group_id)  # gone with its Ray session, perhaps, or when its last worker left it
        if group is None or group.state is not GROUP_READY or group.pool != ask.pool or group.destroy:
            continue
        held = {worker.bundle_index for worker in state.workers_in(group_id)}
        for index, bundle in enumerate(group.bundles):
            if (
                index in held
                or not state.nodes[bundle.node_id].takes(bundle.devices)
                or not takes(state, group, index, slot)
            ):
                continue
            placed = [(slot, bundle.node_id), *_placed(tx, uid, spec)]
            if keeps_strategy(placed, spec.placement):
                starting.add_extra(tx, uid, GroupUse(ask, group_id, group.group_kind, group.bundles, (index,)))
                return True
    return False


def _placed(tx: Transaction, uid: str, spec: JobSpec) -> list[tuple[Slot, str]]:
    """The workers of a job, each with its node."""
    components = {each.name: each for each in spec.components}
    return [
        (Slot.of(components[worker.component], worker.rank), worker.node_id)
        for worker in tx.state.workers_of(uid)
        if worker.state in LIVE
    ]
