"""How many workers should an elastic component have now, and how does it get there?

A job starts with the fewest workers of every component. While it runs, extra ones are added one by one as room is
free: nobody yields to an extra worker, and each has a placement group of its own, since a group can't be resized. An
extra worker is a unit of its own: it can be preempted, drained or lost without stopping the job. When one of the
fewest is lost and an extra one runs, the extra one takes its place in the count; the missing rank is filled next.
Every change is announced with the new rank map.
"""

from __future__ import annotations

from dataclasses import replace

from callboard.model.colocation import member_names
from callboard.model.specs import ComponentSpec, JobSpec, ScalingAction
from callboard.scheduler import starting, stopping
from callboard.scheduler.asks import Ask
from callboard.scheduler.events import JobScaled
from callboard.scheduler.fitting import keeps_strategy
from callboard.scheduler.grouping import choose_groups
from callboard.scheduler.preemption import stop_timeouts
from callboard.scheduler.records import JobRecord, WorkerRecord
from callboard.scheduler.refusals import Refusal, RefusalCode
from callboard.scheduler.slots import Slot
from callboard.scheduler.states import ENDED, LIVE, JobState, StopKind, WorkerState
from callboard.scheduler.transaction import Transaction
from callboard.scheduler.view import Assumption, View


def wanted(job: JobRecord, component: ComponentSpec) -> int:
    """Workers that a component should have. One that signals make grow starts with its fewest, any other with as many
    as find room."""
    grows_by_signals = any(rule.action is ScalingAction.UP for rule in component.scaling)
    unsaid = component.min_workers if grows_by_signals else component.max_workers
    return dict(job.targets).get(component.name, unsaid)


def scale(tx: Transaction, event: JobScaled) -> str:
    """Sets how many workers an elastic component should have; the highest ranks leave first."""
    job = tx.state.jobs.get(event.uid)
    if job is None or job.state in ENDED:
        what = f"job {job.name} has ended" if job else f"there is no job {event.uid}"
        code = RefusalCode.WRONG_STATE if job else RefusalCode.NOT_FOUND
        raise Refusal(code, f"jobs/{event.uid}", what, "name")
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
    if not component.min_workers <= event.workers <= component.max_workers:
        raise Refusal(
            RefusalCode.INVALID_FIELD,
            f"jobs/{job.name}",
            f"{event.component} may have {component.min_workers} to {component.max_workers} workers, "
            f"not {event.workers}",
            "workers",
        )
    set_target(tx, job, component, event.workers, reason="request")
    return job.uid


def set_target(
    tx: Transaction, job: JobRecord, component: ComponentSpec, workers: int, *, reason: str, why: str = ""
) -> None:
    """Says how many workers a component should have, and brings it there as far as there is room."""
    before = wanted(job, component)
    targets = {**dict(job.targets), component.name: workers}
    tx.change_job(job.uid, targets=tuple(sorted(targets.items())))
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


def grow(tx: Transaction, uid: str) -> None:
    """Adds workers to a running job, as many as are wanted and find free room."""
    job = tx.state.jobs[uid]
    if job.state is not JobState.RUNNING or job.eligible_ms > tx.now_ms or job.cause_ms:
        return
    # Nothing new before running work is counted (QL-03), nor beside a copy that may live (R5).
    if tx.state.meta.reconcile_until_ms or starting.a_copy_may_live(tx, uid):
        return
    spec = tx.state.specs[uid].spec
    for component in spec.components:
        while component.elastic and len(live := live_of(tx, job, component)) < wanted(job, component):
            taken = {worker.rank for worker in live}
            rank = next(rank for rank in range(len(live) + 1) if rank not in taken)
            if _is_leaving(tx, job, component, rank) or not _add(tx, uid, spec, component, rank):
                break


def _is_leaving(tx: Transaction, job: JobRecord, component: ComponentSpec, rank: int) -> bool:
    """Whether the worker that had this rank is still on its way out: no rank is there twice (R5)."""
    return any(
        worker.state is WorkerState.STOPPING
        and (worker.component, worker.rank, worker.attempt) == (component.name, rank, job.attempt)
        for worker in tx.state.workers_of(job.uid)
    )


def lose(tx: Transaction, uid: str, gone: list[WorkerRecord], reason: str, *, counts: bool) -> None:
    """Some workers of a job are gone unasked. The job goes on if every component still has its fewest.

    Args:
        gone: the records before they were moved.
        counts: the loss counts against the restart budget, if the job must restart.
    """
    job = tx.state.jobs[uid]
    gone = [worker for worker in gone if worker.attempt == job.attempt]
    base = [worker for worker in gone if not worker.extra]
    if job.state is not JobState.RUNNING or job.cause_ms or not _promote(tx, job, base):
        stopping.recover(tx, uid, reason, counts=counts)
        return
    if job.failed:
        job = tx.change_job(uid, failed=tuple(replace(failure, survived=True) for failure in job.failed))
    for worker in gone:
        stopping.drop_extra(tx, worker)
    if counts:
        wait_ms = stopping.backoff_ms(tx.state.specs[uid].spec, len(job.failures) + 1)
        tx.change_job(uid, eligible_ms=tx.now_ms + wait_ms, failures=(*job.failures[-20:], tx.now_ms))
    starting.announce(tx, uid, reason)
    if not base and not counts:
        stopping.finish_if_all_returned(tx, uid)


def _promote(tx: Transaction, job: JobRecord, base: list[WorkerRecord]) -> bool:
    """Lets extra workers take the place of lost ones in the count, if there are enough of each component."""
    chosen: list[WorkerRecord] = []
    for component in dict.fromkeys(worker.component for worker in base):
        extras = [
            worker
            for worker in tx.state.workers_of(job.uid)
            if worker.extra and worker.component == component and worker.state is WorkerState.READY
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
    live = live_of(tx, job, component)
    extras = sorted((worker for worker in live if worker.extra), key=lambda worker: worker.rank, reverse=True)
    bounds = stop_timeouts(tx.state, spec)
    for worker in extras[: max(0, len(live) - count)]:
        stopping.shed(tx, worker, f"scaled to {count} workers", StopKind.SCALE, bounds)


def _add(tx: Transaction, uid: str, spec: JobSpec, component: ComponentSpec, rank: int) -> bool:
    ask = Ask.of(spec.pool_of(component), [Slot.of(component, rank)])
    uses = choose_groups(tx.state, View(tx.state, Assumption(subject=uid)), spec, [ask])
    if uses is None:
        return False
    placed = [(ask.slots[0], uses[0].bundles[uses[0].bundle_of[0]].node_id)]
    components = {each.name: each for each in spec.components}
    placed += [
        (Slot.of(components[worker.component], worker.rank), worker.node_id)
        for worker in tx.state.workers_of(uid)
        if worker.state in LIVE
    ]
    if not keeps_strategy(placed, spec.placement):
        return False
    starting.add_extra(tx, uid, uses[0])
    return True


def live_of(tx: Transaction, job: JobRecord, component: ComponentSpec) -> list[WorkerRecord]:
    """Workers of a component that are there and stay."""
    return [
        worker
        for worker in tx.state.workers_of(job.uid)
        if worker.component == component.name
        and worker.attempt == job.attempt
        and worker.state in LIVE
        and worker.state is not WorkerState.STOPPING
    ]
