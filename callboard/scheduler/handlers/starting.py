"""The start of a job: admitted whole, or nominated for room that is still to come."""

from __future__ import annotations

from callboard.model.specs import Fencing
from callboard.scheduler.handlers import groups, orders
from callboard.scheduler.plan.grouping import GroupUse, suiting
from callboard.scheduler.plan.planning import Plan
from callboard.scheduler.records.asks import Slot
from callboard.scheduler.records.events import PortReserved
from callboard.scheduler.records.job_records import RAN_LIMIT, JobRecord, RanOn, WorkerRecord, evolve
from callboard.scheduler.records.node_record import DeviceShare, NodeRecord
from callboard.scheduler.records.pool_records import BundleRecord
from callboard.scheduler.records.states import (
    GROUP_NOMINATED,
    GROUP_READY,
    JOB_PREEMPTING,
    JOB_STARTING,
    JOB_STOPPING,
    LIVE,
    WORKER_ASSIGNED,
    WORKER_LOST,
    WORKER_QUARANTINED,
    WORKER_STARTING,
    WORKER_STOPPED,
    Removal,
)
from callboard.scheduler.state.transaction import Transaction

_STRICT = Fencing.STRICT


def admit(tx: Transaction, uid: str, uses: tuple[GroupUse, ...], reason: str) -> None:
    """Gives a job its groups and workers and asks for what has to be made. All or nothing (I3)."""
    state = tx.state
    job = state.jobs[uid]
    for old in state.workers_of(uid):
        if old.state in (WORKER_STOPPED, WORKER_LOST):
            tx.drop("worker", old.generation)
    group_ids = [_take_group(tx, uid, use) for use in uses]
    generation = tx.draw("next_generation", sum(use.ask.count for use in uses))
    tx.move_job(
        uid,
        JOB_STARTING,
        reason,
        attempt=job.attempt + 1,
        groups=tuple(group_ids),
        nominated=False,
        patient=False,
        waits_for=(),
        target=None,
        eligible_ms=0,
        retry_ms=0,
        deadline_ms=0,
        running_ms=0,
        ran=_ran(job, job.attempt + 1, uses),
    )
    for use, group_id in zip(uses, group_ids, strict=True):
        generation = _assign(tx, uid, use, group_id, generation, extra=False)
    if job.attempt:
        announce(tx, uid, f"attempt {job.attempt + 1}")
    for group_id in group_ids:
        if state.groups[group_id].state is GROUP_READY:
            start_assigned(tx, group_id)


def _ran(job: JobRecord, attempt: int, uses: tuple[GroupUse, ...]) -> tuple[RanOn, ...]:
    """Where the job's workers ran, with those that go into these groups."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for use in uses:
        for slot, index in zip(use.ask.slots, use.bundle_of, strict=True):
            ranks.setdefault((use.bundles[index].node_id, slot.component), []).append(slot.rank)
    before = []
    for each in job.ran:
        key = (each.node_id, each.component)
        if each.attempt == attempt and key in ranks:
            ranks[key] = sorted({*each.ranks, *ranks[key]})
        else:
            before.append(each)
    before += [RanOn(attempt, node_id, component, tuple(found)) for (node_id, component), found in ranks.items()]
    return tuple(before[-RAN_LIMIT:])


def _assign(tx: Transaction, uid: str, use: GroupUse, group_id: str, generation: int, *, extra: bool) -> int:
    """Adds the workers that go into one group; returns the next free generation."""
    for slot, index in zip(use.ask.slots, use.bundle_of, strict=True):
        tx.put(
            WorkerRecord(
                generation=generation,
                job=uid,
                component=slot.component,
                rank=slot.rank,
                attempt=tx.state.jobs[uid].attempt,
                state=WORKER_ASSIGNED,
                node_id=use.bundles[index].node_id,
                group_id=group_id,
                bundle_index=index,
                pool=use.ask.pool,
                resources=slot.resources,
                devices=devices_in(tx.state.nodes[use.bundles[index].node_id], use.bundles[index], slot),
                extra=extra,
                reason="waits for its placement group",
            )
        )
        generation += 1
    return generation


def devices_in(node: NodeRecord, bundle: BundleRecord, slot: Slot) -> tuple[DeviceShare, ...]:
    """The devices of a bundle that one worker gets: those of its place, or whole ones in order, or its share of the
    first that has it."""
    if slot.place is not None:
        return bundle.devices
    ask = slot.resources
    ask_milli = ask.gpu_milli
    if ask_milli == 0:
        return ()
    picks = ask.gpu_model or ask.gpu_memory_min_bytes
    devices = suiting(node, bundle.devices, ask) if picks else bundle.devices
    if ask_milli < 1000:
        share = next(share for share in devices if share.milli >= ask_milli)
        return (DeviceShare(share.index, share.id, ask_milli),)
    whole = [share for share in devices if share.milli == 1000]
    return tuple(whole[: ask_milli // 1000])


def start_assigned(tx: Transaction, group_id: str, first: int = 0) -> None:
    """Asks agents to start the workers that waited for a group, as many as this event still may. Those that meet at a
    port wait until it is reserved.

    Args:
        first: lowest generation that is looked at.
    """
    workers = tx.state.workers
    peers: dict[tuple[str, str], orders.Peers] = {}
    awaited: set[tuple[str, str]] = set()
    for generation in tx.state.generations_in(group_id, first):
        worker = workers[generation]
        key = (worker.job, worker.component)
        if worker.state is not WORKER_ASSIGNED or key in awaited:
            continue
        if tx.starts_left <= 0:
            tx.count(starting=(*tx.state.meta.starting, (group_id, generation)))
            return
        if key not in peers:
            peers[key] = orders.peers_of(tx.state, worker)
            reservation = orders.awaited_port(peers[key])
            if reservation is not None:
                if tx.state.groups[reservation.worker.group_id].state is GROUP_READY:
                    tx.command(reservation)
                awaited.add(key)
                continue
        tx.starts_left -= 1
        timeout_ms = tx.state.specs[worker.job].spec.longest_start_ms
        # The agent bounds the start and cleans up for at most a kill timeout; only then is its silence a fault.
        deadline_ms = tx.now_ms + timeout_ms + groups.ANSWER_MARGIN_MS + 10_000
        started = tx.move_worker(generation, WORKER_STARTING, f"asked of {worker.node_id}", deadline_ms=deadline_ms)
        tx.command(orders.start_worker(tx.state, started, peers[key]))


def go_on(tx: Transaction) -> None:
    """Asks for workers that earlier events left to this one."""
    left = tx.state.meta.starting
    if tx.starts_left <= 0:
        return
    tx.count(starting=())
    for group_id, generation in left:
        group = tx.state.groups.get(group_id)
        if group is not None and group.state is GROUP_READY:
            start_assigned(tx, group_id, generation)


def port_reserved(tx: Transaction, event: PortReserved) -> None:
    """The first worker of a component has a port where the others find it: all of them may start."""
    first = tx.state.workers.get(event.generation)
    if first is None or first.node_id != event.node_id or first.state is not WORKER_ASSIGNED or first.master_port:
        return
    tx.put(evolve(first, master_port=event.port or -1))
    waiting = [
        other
        for other in tx.state.workers_of(first.job)
        if other.component == first.component and other.state is WORKER_ASSIGNED  # the groups of others may be gone
    ]
    for group_id in dict.fromkeys(other.group_id for other in waiting):
        if tx.state.groups[group_id].state is GROUP_READY:
            start_assigned(tx, group_id)


def add_extra(tx: Transaction, uid: str, use: GroupUse) -> None:
    """Adds one worker to a running job, in a group of its own."""
    group_id = _take_group(tx, uid, use)
    job = tx.state.jobs[uid]
    tx.change_job(
        uid,
        groups=(*[other for other in job.groups if other != group_id], group_id),
        ran=_ran(job, job.attempt, (use,)),
    )
    generation = tx.draw("next_generation")
    _assign(tx, uid, use, group_id, generation, extra=True)
    if tx.state.groups[group_id].state is GROUP_READY:
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
                tx, use.ask.pool, use.kind, GROUP_NOMINATED, use.bundles, reason="waits for room", nominee=uid
            )
            group_ids.append(group.group_id)
    if plan.waits and not waits_for and not patient:
        leaving = (JOB_STOPPING, JOB_PREEMPTING)
        waits_for = [other for job_state in leaving for other in tx.state.jobs_by_state[job_state]]
        waits_for += tx.state.group_index.returning
    job = tx.change_job(
        uid, nominated=True, patient=patient, groups=tuple(group_ids), waits_for=tuple(waits_for), retry_ms=0
    )
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
        if group.state is GROUP_NOMINATED:
            groups.remove(tx, group_id, Removal.JOB_ENDED, reason)
        else:
            idle = group.state is GROUP_READY and not tx.state.workers_in(group_id)
            tx.change_group(group_id, nominee="", idle_since_ms=tx.now_ms if idle else 0)
    tx.event("job.nomination_dropped", f"jobs/{job.name}", job.state.value, reason)


def _take_group(tx: Transaction, uid: str, use: GroupUse) -> str:
    reason = f"for {tx.state.jobs[uid].name}"
    if not use.group_id:
        group = groups.create(tx, use.ask.pool, use.kind, use.bundles, reason, job=uid, users=1)
        groups.count_use(tx, group, fresh=True, reused=False)
        return group.group_id
    group = tx.state.groups[use.group_id]
    groups.count_use(tx, group, fresh=group.state is GROUP_NOMINATED, reused=group.users > 0)
    tx.change_group(group.group_id, job=uid, nominee="", idle_since_ms=0, users=group.users + 1)
    if group.state is GROUP_NOMINATED:
        groups.begin_creation(tx, group.group_id, reason)
    return group.group_id


def a_copy_may_live(tx: Transaction, uid: str) -> bool:
    """Whether a strict job has a worker that nobody proved gone: it starts nothing until that is proved or its node is
    given up (R5)."""
    return tx.state.specs[uid].spec.fencing is _STRICT and any(
        worker.state is WORKER_QUARANTINED for worker in tx.state.workers_of(uid)
    )
