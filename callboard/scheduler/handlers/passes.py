"""The passes over what waits: reserved groups, nominated jobs, the queue.

A job that can't start doesn't block others. Most events free nothing: then only what is new is looked at. Which of the
two it is follows from the records and the event alone, and so does what is known to be blocked: a job that waits was
found blocked when something was last freed, else it would not wait.

No event looks at more than a bounded part of the queue: the next one goes on, at once, unless something was freed
meanwhile: then the first come first again. So that the last are not passed over for ever, an event may make twice as
many plans each time that happens.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from callboard.model.quantities import NOTHING, Resources, total
from callboard.model.specs import JobSpec, StopPolicy
from callboard.scheduler.handlers import elastic, groups, preempting, requests, starting
from callboard.scheduler.plan.grouping import (
    GroupUse,
    charged_beside,
    match,
    match_new,
    may_make,
    may_use,
    reserved_refund,
)
from callboard.scheduler.plan.planning import Blocked, Plan, plan, plan_patiently
from callboard.scheduler.plan.preemption import winners_over
from callboard.scheduler.plan.quota import Charged, borrows, shortages
from callboard.scheduler.plan.view import Assumption, Room, View
from callboard.scheduler.records.asks import Ask
from callboard.scheduler.records.job_records import JobRecord
from callboard.scheduler.records.states import GROUP_NOMINATED, JOB_PENDING, JOB_RUNNING, JOB_STARTING
from callboard.scheduler.state.job_index import QueueKey
from callboard.scheduler.state.shapes import Shape
from callboard.scheduler.state.transaction import Transaction

MOST_ROUNDS = 4
"""Most passes after one event. A pass that frees something (a nomination is overtaken) may help who was looked at
before. A second round finds nothing nearly always; what even the last one leaves open is for the next event."""

MOST_PLANS = 32
"""Most plans of waiting jobs in one event: about 5 ms."""

MOST_HEADS = 256
"""Most shapes that are gone through shape by shape. Where more wait, the queue is gone through job by job."""

MOST_STEPS = 4_096
"""Most jobs that one event steps over on its way through the queue, as others of their shape are blocked."""

STEPS_OF_A_SUM = 8
"""To find out whether a shape borrows takes as long as so many steps."""

FRONT = (0, -(1 << 62), 0, 0, "")
"""Before everybody in the queue."""

GROWERS = (2, *FRONT[1:])
"""Behind everybody in the queue, before all jobs that grow."""

Place = tuple[int, int, int, int, str]
"""(1 for a borrower where owners come first, 2 for a job that grows, queue key): the order of looks."""

MOST_WITNESSES = 8
"""Most waiting jobs of a shape that are asked whether it is blocked, before it is found out anew."""


@dataclass(slots=True)
class Found:
    """What one pass found out.

    Attributes:
        blocked: shapes of which a job can't start, so that no other can.
        hopeless: whether even the jobs of a shape that yielded before, to whoever it was, are blocked; if that is
            known.
        left: how many plans may still be made.
        steps: how many jobs may still be stepped over.
    """

    left: int
    steps: int
    blocked: set[Shape] = field(default_factory=set)
    hopeless: dict[Shape, bool] = field(default_factory=dict)


def run(tx: Transaction) -> None:
    """Starts or nominates whatever can be."""
    state, meta = tx.state, tx.state.meta
    retries = state.deadlines.due_of("retry", tx.now_ms)
    changed = state.room_version != tx.room_version
    due = tx.fresh or retries or changed or meta.unsettled or meta.look_on is not None or tx.growth_cut
    if not (due or state.leaving_version != tx.leaving_version):
        return
    came = dict.fromkeys(tx.fresh)
    tx.fresh.clear()
    for uid in retries:
        came[tx.change_job(str(uid), retry_ms=0).uid] = None
    if meta.reconcile_until_ms:
        if meta.look_on is not None:
            tx.count(look_on=None, look_most=0)
        return  # everything is looked at when that is over
    leaving_seen = tx.leaving_version
    # What comes now might be promised room that has begun to leave since those who wait were looked at: they are first.
    overtakes = meta.overlooked and came and len(state.queue) > len(came)
    everything = meta.unsettled or overtakes or changed
    looked_at_all = everything
    look_on = meta.look_on
    most = left = (meta.look_most or MOST_PLANS) * (2 if everything and look_on is not None else 1)
    tx.growth_left += most - MOST_PLANS
    for _ in range(MOST_ROUNDS):
        version = state.room_version
        found = Found(left, MOST_STEPS * most // MOST_PLANS)
        if everything:
            look_on = _look_at_all(tx, found)
            looked_at_all, leaving_seen = True, state.leaving_version
        else:
            _look_at_some(tx, found, came, look_on)
            look_on = look_on and _go_on(tx, found, look_on)
        left = found.left
        came.clear()
        tx.fresh.clear()
        everything = state.room_version != version
        if not everything or left <= 0:
            break
    overlooked = state.leaving_version != leaving_seen or (meta.overlooked and not looked_at_all)
    if everything and left <= 0:
        look_on = FRONT
    elif look_on is None and tx.growth_cut:
        look_on = GROWERS  # some of it was for jobs that began to run, or whose target changed
    _leave(tx, everything, overlooked, look_on, most)


def _leave(tx: Transaction, unsettled: bool, overlooked: bool, look_on: Place | None, most: int) -> None:
    """Writes down what is left for the next event."""
    look_most = 0 if look_on is None or most == MOST_PLANS else most
    meta = tx.state.meta
    if (unsettled, overlooked, look_on, look_most) != (meta.unsettled, meta.overlooked, meta.look_on, meta.look_most):
        tx.count(unsettled=unsettled, overlooked=overlooked, look_on=look_on, look_most=look_most)


def _look_at_all(tx: Transaction, found: Found) -> Place | None:
    """Looks at everything from the front on; returns where to go on, if that is left for the next event."""
    state = tx.state
    for pool in list(state.pools.values()):
        if pool.deleting:
            requests.finish_deletion(tx, pool.spec.name)
        else:
            groups.ensure_reserved(tx, pool)
    if state.nominated:
        nominees = _Nominees(tx)
        for uid in nominees.order:
            _advance_nominee(tx, uid, nominees)
    return _go_on(tx, found, FRONT)


def _go_on(tx: Transaction, found: Found, start: Place) -> Place | None:
    """Looks at what waits from a place in the queue on, and at its end at jobs that grow."""
    state = tx.state
    if start < GROWERS:
        stopped = _look_at_queue(tx, found, start)
        if stopped is not None:
            return stopped
    if not state.elastic:
        return None
    if tx.growth_cut:
        return GROWERS
    for key in sorted(state.queue_key(state.jobs[uid]) for uid in state.elastic):
        if (2, *key) >= start and elastic.grow(tx, key[-1]):
            return (2, *key)
    return None


class _Turns:
    """Where pools lend to each other, jobs within their own quota have their turn before borrowers (QL-10). All of a
    shape borrow alike, and what others were given meanwhile counts: so it is the same in one event as in many."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx
        self.lending = any(record.spec.cohort for record in tx.state.pools.values())
        self._changes = -1
        self._charged: dict[str, Resources] = {}
        self._known: dict[Shape, int] = {}
        self.sums = 0
        """How many shapes were looked at so far."""

    def of(self, shape: Shape) -> int:
        """The turn of a shape: 0, or 1 if its jobs borrow."""
        if not self.lending:
            return 0
        if self._changes != len(self._tx.changes):
            self._changes = len(self._tx.changes)
            view = View(self._tx.state, Assumption())
            self._charged = {pool: view.charged(pool) for pool in self._tx.state.pools}
            self._known.clear()
        turn = self._known.get(shape)
        if turn is None:
            self.sums += 1
            turn = self._known[shape] = int(_borrows(self._tx, shape, self._charged))
        return turn


def _look_at_queue(tx: Transaction, found: Found, start: Place) -> Place | None:
    """Goes through the queue from a place on; returns where to go on, if that is left for the next event."""
    if not tx.state.waiting:
        return None
    look = _look_at_heads if len(tx.state.waiting) <= MOST_HEADS else _look_one_by_one
    return look(tx, found, start, _Turns(tx))


def _look_at_heads(tx: Transaction, found: Found, start: Place, turns: _Turns) -> Place | None:
    """Shape by shape at once: as soon as one job of a shape is blocked, so are the others."""
    waiting = tx.state.waiting
    heads = []
    for number, (shape, alike) in enumerate(waiting.items()):
        turn = turns.of(shape)
        if (turn, *alike[-1]) < start:
            continue  # all of them were looked at, so whether the shape is blocked matters no more
        first = _first_from(start, turn, alike)
        if first and _witness(tx, alike[: min(first, MOST_WITNESSES)]):
            found.blocked.add(shape)
        else:
            heads.append((turn, alike[first], number, shape, first))
    heapq.heapify(heads)
    while heads:
        if found.left <= 0:
            return (heads[0][0], *heads[0][1])
        turn, key, number, shape, index = heapq.heappop(heads)
        if turn < turns.of(shape):
            heapq.heappush(heads, (1, key, number, shape, index))
            continue
        _look_at(tx, found, key[-1])
        if shape in found.blocked:
            continue
        alike = waiting.get(shape, [])
        # A job that started has left the list; one that is held or backs off stays and is stepped over.
        if index < len(alike) and alike[index] == key:
            index += 1
        if index < len(alike):
            heapq.heappush(heads, (turn, alike[index], number, shape, index))
    return None


def _look_one_by_one(tx: Transaction, found: Found, start: Place, turns: _Turns) -> Place | None:
    """Job by job, as many as one event may step over: the same order, without a look at every shape there is."""
    state = tx.state
    met: set[Shape] = set()
    for turn in (0, 1) if turns.lending else (0,):
        index = _first_from(start, turn, state.queue)
        while index < len(state.queue):
            key = state.queue[index]
            if found.left <= 0 or found.steps <= STEPS_OF_A_SUM * turns.sums:
                found.steps = 0
                return (turn, *key)
            found.steps -= 1
            index += 1
            shape = state.shapes[key[-1]]
            if turns.of(shape) != turn:
                continue
            if shape not in met:
                met.add(shape)
                alike = state.waiting[shape]
                first = _first_from(start, turn, alike)
                if first and _witness(tx, alike[: min(first, MOST_WITNESSES)]):
                    found.blocked.add(shape)
            if shape not in found.blocked:
                _look_at(tx, found, key[-1])
                index = bisect_right(state.queue, key)
    return None


def _first_from(start: Place, turn: int, keys: Sequence[QueueKey]) -> int:
    """The first of sorted keys that is not before a place, in the turn of owners or in that of borrowers."""
    if turn != start[0]:
        return 0 if turn > start[0] else len(keys)
    return bisect_left(keys, start[1:])


def _borrows(tx: Transaction, shape: Shape, charged: Mapping[str, Resources]) -> bool:
    """Whether a job of a shape takes one of its pools beyond its own quota.

    Args:
        charged: what counts against the quota of each pool beside the job.
    """
    pools = tx.state.pools
    return any(
        ask.pool in pools and borrows(charged.__getitem__, pools[ask.pool].spec, ask.resources) for ask in shape.asks
    )


def _look_at_some(tx: Transaction, found: Found, came: Collection[str], look_on: Place | None) -> None:
    """Nothing changed that could help what is blocked: only new jobs, and those whose time has come. Where the queue is
    still gone through, those that stand behind have their turn then."""
    state = tx.state
    uids = [uid for uid in came if uid in state.jobs]
    if look_on is not None:
        uids = [uid for uid in uids if _place(tx, uid) < look_on]
    if len(uids) > 1:
        uids.sort(key=lambda uid: state.queue_key(state.jobs[uid]))
    for uid in uids:
        if state.jobs[uid].nominated:
            _advance_nominee(tx, uid, _Nominees(tx))
        shape = state.shapes[uid]
        alike = state.waiting.get(shape, ())
        # While the queue is gone through, nobody knows who was looked at.
        if look_on is None and shape not in found.blocked and len(alike) > 1 and _witness(tx, alike, came):
            found.blocked.add(shape)
        _look_at(tx, found, uid)
        if uid in state.elastic and (look_on is None or (2, *state.queue_key(state.jobs[uid])) < look_on):
            elastic.grow(tx, uid)


def _place(tx: Transaction, uid: str) -> Place:
    """Where a job stands in the order of looks."""
    # A nomination of its own doesn't count for a job.
    view, shape = View(tx.state, Assumption(subject=uid)), tx.state.shapes[uid]
    charged = {ask.pool: view.charged(ask.pool) for ask in shape.asks}
    turn = _Turns(tx).lending and _borrows(tx, shape, charged)
    return (int(turn), *tx.state.queue_key(tx.state.jobs[uid]))


def _witness(tx: Transaction, alike: Sequence[QueueKey], came: Collection[str] = ()) -> bool:
    """Whether among jobs of a shape one waits that was looked at when something was last freed, and so shows that the
    shape is blocked."""
    uids = (key[-1] for key in islice(alike, MOST_WITNESSES))
    return any(uid not in came and _shows_that_its_shape_is_blocked(tx, uid) for uid in uids)


def _shows_that_its_shape_is_blocked(tx: Transaction, uid: str) -> bool:
    """Whether a job that was looked at and still waits does so because there is no way for it."""
    job = tx.state.jobs[uid]
    apart = job.nominated or job.eligible_ms or job.yielded_to
    return not (apart or starting.a_copy_may_live(tx, uid))


def _look_at(tx: Transaction, found: Found, uid: str) -> None:
    job = tx.state.jobs[uid]
    if job.state is not JOB_PENDING or job.nominated:
        return
    spec = tx.state.specs[uid].spec
    if job.eligible_ms > tx.now_ms:
        _keep_place(tx, job, spec)
        return
    if starting.a_copy_may_live(tx, uid):
        return
    shape = tx.state.shapes[uid]
    starving = 0 < job.starving_ms <= tx.now_ms
    if not starving and (found.hopeless.get(shape) if job.yielded_to else shape in found.blocked):
        return
    found.left -= 1
    way = plan(tx.state, uid, spec, job.submit_ms, tx.now_ms)
    if isinstance(way, Blocked):
        if starving and _hold_room(tx, job, spec):
            return
        if not job.yielded_to:
            found.blocked.add(shape)
            found.hopeless[shape] = way.hopeless
        elif way.hopeless and shape not in found.hopeless:
            found.hopeless[shape] = _is_hopeless(tx, job, spec)
        if way.retry_ms != job.retry_ms:
            tx.change_job(uid, retry_ms=way.retry_ms)
        return
    _carry_out(tx, job, way)


def _is_hopeless(tx: Transaction, job: JobRecord, spec: JobSpec) -> bool:
    """Whether even a job of this shape that never yielded to anybody would be blocked. One look spares one at each of
    the many that a wave of preemptions leaves waiting."""
    found = plan(tx.state, "", spec, job.submit_ms, tx.now_ms)
    return isinstance(found, Blocked) and found.hopeless


def _hold_room(tx: Transaction, job: JobRecord, spec: JobSpec) -> bool:
    """A job that was blocked for too long holds the room it needs as it becomes free, one job at a time: the queue is
    gone through from its front, so it is the best-ranked one."""
    if any(tx.state.jobs[uid].patient for uid in tx.state.nominated):
        return False
    found = plan_patiently(tx.state, job.uid, spec)
    if found is None:
        return False
    starting.nominate(tx, job.uid, found, patient=True)
    return True


def _keep_place(tx: Transaction, job: JobRecord, spec: JobSpec) -> None:
    """A job that restarts after a failure keeps its room while it backs off, if nobody must give up anything for it:
    else its ranks would come back to a pool that others have filled (QL-02)."""
    if not job.restarts:
        return
    # Nor does it pass anybody by ending early: it does not start now.
    asked = replace(spec, never_preempts=True, estimated_duration_ms=0)
    found = plan(tx.state, job.uid, asked, job.submit_ms, tx.now_ms)
    if isinstance(found, Plan) and not found.overtakes and not found.trims:
        starting.nominate(tx, job.uid, found)


def _carry_out(tx: Transaction, job: JobRecord, found: Plan) -> None:
    for other in found.overtakes:
        starting.drop_nomination(tx, other, f"overtaken by {job.name}")
        preempting.note_yield(tx, other, job.uid)
    if not found.waits:
        starting.admit(tx, job.uid, found.uses, "has its room")
        return
    starting.nominate(tx, job.uid, found)
    for group_id in found.trims:
        groups.trim(tx, group_id, f"makes room for {job.name}")
    nominee = tx.state.jobs[job.uid]
    for victim in found.victims:
        preempting.preempt(tx, victim, nominee)
    if not found.victims:
        # What was in the way may have been of those who stand behind it.
        _advance_nominee(tx, job.uid, _Nominees(tx))


class _Nominees:
    """Jobs that hold room that is still to come, in their order. Each is looked at after everything that is freed, so
    what one look asks about all of them is found out once."""

    def __init__(self, tx: Transaction) -> None:
        self._tx, self._state = tx, tx.state
        state = tx.state
        keys = sorted((state.queue_key(state.jobs[uid]), uid) for uid in state.nominated)
        self.order = [uid for _, uid in keys]
        self._place = {uid: place for place, uid in enumerate(self.order)}
        self._changes = -1
        self._sums: dict[tuple[str, bool], list[Resources]] = {}
        # Few yielded to anybody, and while nominees are looked at nobody yields.
        self._winners = {uid: winners_over(state, uid) for uid in self.order if state.jobs[uid].yielded_to}

    def behind(self, uid: str) -> frozenset[str]:
        """Those that get what they were promised after a job: they yielded to it, or stand behind it in the queue. Of
        two nominated jobs one at most waits for the other."""
        place = self._place[uid]
        found = frozenset(self.order[place + 1 :])
        if self._winners:
            found -= self._winners.get(uid, frozenset())
            found |= {other for other, winners in self._winners.items() if uid in winners}
        return found

    def charged(self, view: View, uid: str) -> Charged:
        """What counts against pools beside a nominee: ``view.charged`` of a view that overtakes those behind it. While
        none yielded to anybody, they are those before it, whose sum grows from one to the next."""
        if self._winners or view.assumption.released:
            return view.charged
        future, place = view.assumption.future, self._place[uid]

        def of(pool: str) -> Resources:
            if self._changes != len(self._tx.changes):
                self._changes = len(self._tx.changes)
                self._sums.clear()
            sums = self._sums.get((pool, future))
            if sums is None:
                sums = self._sums[pool, future] = self._sums_of(pool, future=future)
            return sums[place]

        return of

    def _sums_of(self, pool: str, *, future: bool) -> list[Resources]:
        """What counts against a pool beside each nominee in turn."""
        view = View(self._state, Assumption(future=future, overtaken=frozenset(self._state.nominated)))
        sums = [view.charged(pool)]
        for uid in self.order:
            asked = NOTHING
            if uid in self._state.nominated:
                asked = total(ask.resources for ask in self._state.shapes[uid].asks if ask.pool == pool)
            sums.append(sums[-1] + asked)
        return sums


def _advance_nominee(tx: Transaction, uid: str, nominees: _Nominees) -> None:
    """Starts a nominated job when its room is free; when there is nothing left to wait for, it is planned again."""
    state = tx.state
    job, spec = state.jobs[uid], state.specs[uid].spec
    asks = state.shapes[uid].asks
    uses: list[GroupUse] = []
    broken = ""
    free = True
    view = View(state, Assumption(subject=uid, overtaken=nominees.behind(uid)))
    rooms: dict[str, Room] = {}
    for ask, group_id in zip(asks, job.groups, strict=True):
        group = state.groups.get(group_id)
        if group is None or group.nominee != uid:
            broken = f"placement group {group_id} is gone"
            break
        if not all(state.nodes[bundle.node_id].takes(bundle.devices) for bundle in group.bundles) or group.destroy:
            broken = f"placement group {group_id} can't be used any more"
            break
        pool = state.pools.get(ask.pool)
        if pool is None or pool.deleting:
            broken = f"pool {ask.pool} is gone"
            break
        if group.state is GROUP_NOMINATED:
            bundle_of = match_new(state, group, spec, pool.spec, ask)
            free = free and _room_is_free(tx, group_id, rooms) and may_make(view, pool.spec, group.group_kind)
        else:
            bundle_of = match(state, group, spec, pool.spec, ask) if may_use(pool.spec.pg_pool, spec, group) else None
            free = free and not state.workers_in(group_id)
        if bundle_of is None or pool.spec.stop_policy is not StopPolicy.NONE:
            broken = f"placement group {group_id} fits no longer" if bundle_of is None else f"pool {ask.pool} holds"
            break
        use = GroupUse(ask, group_id, group.group_kind, group.bundles, bundle_of)
        free = free and not _charged_too_much(tx, nominees.charged(view, uid), asks, use)
        uses.append(use)
    if broken:
        starting.drop_nomination(tx, uid, broken)
    elif free and job.eligible_ms <= tx.now_ms and not starting.a_copy_may_live(tx, uid):
        starting.admit(tx, uid, tuple(uses), "its room is free")
    elif not free and not _will_be_free(tx, uid, uses, nominees):
        starting.drop_nomination(tx, uid, "what is on its way out does not free its room any more")


def _charged_too_much(tx: Transaction, charged: Charged, asks: tuple[Ask, ...], use: GroupUse) -> bool:
    """Whether the quota doesn't hold the ask yet."""
    pool = tx.state.pools[use.ask.pool].spec
    refund = reserved_refund(tx.state, pool, use)
    return bool(shortages(tx.state.pools, charged_beside(charged, asks, use.ask), pool, use.ask.resources, refund))


def _room_is_free(tx: Transaction, group_id: str, rooms: dict[str, Room]) -> bool:
    """Whether nobody holds the room a planned group claims. Other claims don't count: they were planned beside it.

    Args:
        rooms: what is free by node, less what the nominee's groups before this one take.
    """
    state = tx.state
    for bundle in state.groups[group_id].bundles:
        book = state.ledger.nodes[bundle.node_id]
        room = rooms.get(bundle.node_id)
        if room is None:
            room = rooms[bundle.node_id] = Room(book.node, book.booked)
        if not room.holds(bundle):
            return False
        room.use(bundle)
    return True


def _will_be_free(tx: Transaction, uid: str, uses: list[GroupUse], nominees: _Nominees) -> bool:
    """Whether a nominated job can start once everything that is on its way out is gone; for one that waits for running
    jobs to end, once they have."""
    state = tx.state
    released: frozenset[str] = frozenset()
    if state.jobs[uid].patient:
        released = frozenset((*state.jobs_by_state[JOB_RUNNING], *state.jobs_by_state[JOB_STARTING]))
    overtaken = nominees.behind(uid)
    view = View(state, Assumption(subject=uid, future=True, released=released, overtaken=overtaken))
    beside = nominees.charged(view, uid)
    rooms: dict[str, Room] = {}
    for use in uses:
        group = state.groups[use.group_id]
        pool = state.pools[use.ask.pool].spec
        charged = charged_beside(beside, [other.ask for other in uses], use.ask)
        if shortages(state.pools, charged, pool, use.ask.resources, reserved_refund(state, pool, use)):
            return False
        if group.state is not GROUP_NOMINATED:
            if not view.open_to_subject(group):
                return False
            continue
        if not may_make(view, pool, group.group_kind):
            return False
        for bundle in group.bundles:
            room = rooms.get(bundle.node_id)
            if room is None:
                room = rooms[bundle.node_id] = view.room_alone(state.nodes[bundle.node_id])
            if not room.holds(bundle):
                return False
            room.use(bundle)
    return True
