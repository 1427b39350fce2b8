"""Who may start now? One pass over what waits: reserved groups, nominated jobs, the queue.

A job that can't start doesn't block others. What was found blocked is not looked at again until something changed
that could help it: the memory of that is no part of the state, and losing it only costs time.
"""

from __future__ import annotations

import heapq

from callboard.model.specs import JobSpec
from callboard.scheduler import groups, jobs, requests
from callboard.scheduler.grouping import GroupUse, asks_of, match, quota_shortage
from callboard.scheduler.planning import Blocked, Plan, plan
from callboard.scheduler.preemption import lost_work_ms
from callboard.scheduler.records import GroupState, JobRecord, JobState
from callboard.scheduler.transaction import Transaction
from callboard.scheduler.view import Assumption, View

Shape = tuple[object, ...]


class Memory:
    """What is known to be blocked, valid for one version of the room."""

    def __init__(self) -> None:
        self.version = -1
        self.blocked: set[Shape] = set()
        self.retries: list[tuple[int, str]] = []

    def forget(self) -> None:
        """Looks at everything again next time."""
        self.version = -1

    def next_retry_ms(self) -> int | None:
        """When a blocked job may become possible by time alone."""
        return self.retries[0][0] if self.retries else None


def run(tx: Transaction, memory: Memory) -> None:
    """Starts or nominates whatever can be."""
    state = tx.state
    if state.meta.reconcile_until_ms:
        return
    version = state.room_version
    if version == memory.version:
        _look_at_some(tx, memory)
    else:
        memory.blocked.clear()
        memory.retries.clear()
        for pool in list(state.pools.values()):
            if pool.deleting:
                requests.finish_deletion(tx, pool.spec.name)
            else:
                groups.ensure_reserved(tx, pool)
        for uid in sorted(state.nominated, key=lambda uid: state.queue_key(state.jobs[uid])):
            _advance_nominee(tx, uid)
        for key in list(state.queue):
            _look_at(tx, memory, key[-1])
    tx.fresh.clear()
    memory.version = state.room_version if state.room_version == version else -1


def shape_of(spec: JobSpec) -> Shape:
    """Jobs of one shape are blocked for the same reasons."""
    return (
        spec.pool,
        spec.priority_milli,
        spec.labels,
        spec.placement,
        spec.node_selector,
        spec.node_selector_soft,
        spec.never_preempts,
        tuple((c.name, c.pool, c.resources, c.min_workers) for c in spec.components),
    )


def _look_at_some(tx: Transaction, memory: Memory) -> None:
    """Nothing changed that could help what is blocked: only new jobs, and those whose time has come."""
    uids = dict.fromkeys(tx.fresh)
    while memory.retries and memory.retries[0][0] <= tx.now_ms:
        _, uid = heapq.heappop(memory.retries)
        job = tx.state.jobs.get(uid)
        if job is not None and job.state is JobState.PENDING:
            memory.blocked.discard(shape_of(tx.state.specs[uid].spec))
            uids[uid] = None
    for uid in sorted(uids, key=lambda uid: tx.state.queue_key(tx.state.jobs[uid])):
        _look_at(tx, memory, uid)


def _look_at(tx: Transaction, memory: Memory, uid: str) -> None:
    job = tx.state.jobs[uid]
    if job.state is not JobState.PENDING or job.nominated or job.eligible_ms > tx.now_ms:
        return
    spec = tx.state.specs[uid].spec
    shape = shape_of(spec)
    if shape in memory.blocked:
        return
    found = plan(tx.state, uid, spec, job.submit_ms, tx.now_ms)
    if isinstance(found, Blocked):
        memory.blocked.add(shape)
        if found.retry_ms:
            heapq.heappush(memory.retries, (found.retry_ms, uid))
        return
    _carry_out(tx, job, found)


def _carry_out(tx: Transaction, job: JobRecord, found: Plan) -> None:
    for other in found.overtakes:
        jobs.drop_nomination(tx, other, f"overtaken by {job.name}")
    if not found.waits:
        jobs.admit(tx, job.uid, found.uses, "has its room")
        return
    jobs.nominate(tx, job.uid, found)
    for group_id in found.trims:
        groups.trim(tx, group_id, f"makes room for {job.name}")
    nominee = tx.state.jobs[job.uid]
    for victim in found.victims:
        lost_ms = lost_work_ms(tx.state.jobs[victim.uid], tx.now_ms)
        jobs.preempt(tx, victim.uid, nominee, victim.rule, victim.reason, lost_ms)


def _advance_nominee(tx: Transaction, uid: str) -> None:
    """Starts a nominated job when its room is free; when there is nothing left to wait for, it is planned again."""
    state = tx.state
    job, spec = state.jobs[uid], state.specs[uid].spec
    asks = asks_of(spec)
    uses: list[GroupUse] = []
    broken = ""
    free = True
    view = View(state, Assumption(subject=uid))
    for ask, group_id in zip(asks, job.groups, strict=True):
        group = state.groups.get(group_id)
        if group is None or group.nominee != uid:
            broken = f"placement group {group_id} is gone"
            break
        if not all(state.nodes[bundle.node_id].usable for bundle in group.bundles) or group.destroy:
            broken = f"placement group {group_id} can't be used any more"
            break
        pool = state.pools.get(ask.pool)
        if pool is None or pool.deleting:
            broken = f"pool {ask.pool} is gone"
            break
        if group.state is GroupState.NOMINATED:
            bundle_of: tuple[int, ...] | None = tuple(range(len(group.bundles)))
            free = free and _room_is_free(tx, group_id)
        else:
            bundle_of = match(state, group, spec, pool.spec, ask)
            free = free and not state.workers_in(group_id)
        if bundle_of is None:
            broken = f"placement group {group_id} fits no longer"
            break
        free = free and not _charged_too_much(tx, view, ask.pool, uid)
        uses.append(GroupUse(ask, group_id, group.group_kind, group.bundles, bundle_of))
    if broken:
        jobs.drop_nomination(tx, uid, broken)
    elif free:
        jobs.admit(tx, uid, tuple(uses), "its room is free")
    elif not any(_still_leaving(tx, awaited) for awaited in job.waits_for):
        jobs.drop_nomination(tx, uid, "what it waited for is over and its room is not free")


def _charged_too_much(tx: Transaction, view: View, pool: str, uid: str) -> bool:
    """Whether the quota doesn't hold the ask yet; other nominations don't count here, they were planned around."""
    spec = tx.state.specs[uid].spec
    record = tx.state.pools[pool]
    ask = next(ask for ask in asks_of(spec) if ask.pool == pool)
    others = tx.state.nominated_ask(pool, but=uid)
    return bool(quota_shortage(view, record.spec, ask.resources, refund=others))


def _room_is_free(tx: Transaction, group_id: str) -> bool:
    """Whether nobody holds the room a planned group claims: it would fit beside what is booked."""
    state = tx.state
    by_node: dict[str, list[tuple[int, int]]] = {}
    for bundle in state.groups[group_id].bundles:
        book = state.ledger.nodes[bundle.node_id]
        capacity = book.node.capacity
        shares = by_node.setdefault(bundle.node_id, [])
        shares.extend((share.index, share.milli) for share in bundle.devices)
        total = [b.resources for b in state.groups[group_id].bundles if b.node_id == bundle.node_id]
        need = sum(total[1:], start=total[0])
        if not (capacity - book.booked.resources()).covers(need):
            return False
        if any(book.booked.device_milli[index] + milli > 1000 for index, milli in shares):
            return False
    return True


def _still_leaving(tx: Transaction, awaited: str) -> bool:
    job = tx.state.jobs.get(awaited)
    if job is not None:
        return job.state in (JobState.PREEMPTING, JobState.STOPPING)
    return awaited in tx.state.groups
