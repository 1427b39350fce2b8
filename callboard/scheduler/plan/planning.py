"""The plan of a job's start, from the least to the most that others must give up.

The stages, each a superset of the one before: room that is free; idle dynamic groups trimmed; what is on its way out
awaited; nominations overtaken; victims. A plan is complete and verified before anything is done about it, so nobody is
evicted for a job that still could not start (PC-02, PC-04), and the sets it names are irreducible.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from callboard.model.frozen import dataclass, quick
from callboard.model.specs import JobSpec
from callboard.scheduler.plan.candidates import (
    Candidate,
    Helps,
    candidates,
    lowest_level,
    overtakable,
    takes_only_what_is_owed,
    without,
)
from callboard.scheduler.plan.grouping import (
    GroupUse,
    charged_beside,
    choose_groups,
    ever_fits,
    may_make,
    new_kind,
    together,
)
from callboard.scheduler.plan.pinned import pin
from callboard.scheduler.plan.preemption import Claims, claims_of, left_ms
from callboard.scheduler.plan.quota import shortages
from callboard.scheduler.plan.rooms import NodeFilter, Rooms
from callboard.scheduler.plan.victims import Choice, worker_by_worker
from callboard.scheduler.plan.view import Assumption, View, assuming
from callboard.scheduler.records.asks import Ask
from callboard.scheduler.records.job_records import JobRecord
from callboard.scheduler.records.states import JOB_RUNNING, JOB_STARTING, LIVE, Rule
from callboard.scheduler.state.shapes import MAX_SHAPES
from callboard.scheduler.state.state import State


@dataclass(frozen=True, slots=True)
class Victim:
    """Who must yield, by which rule and why: a whole job, or one extra worker of it (``generation`` not 0)."""

    uid: str
    rule: Rule
    reason: str
    generation: int = 0


@quick
@dataclass(frozen=True, slots=True)
class Plan:
    """How a job starts.

    Attributes:
        trims: ids of idle groups to remove first.
        overtakes: uids of jobs whose nomination is dropped.
        victims: jobs that must yield first.
        waits: something has to end before it can start.
    """

    uses: tuple[GroupUse, ...]
    trims: tuple[str, ...] = ()
    overtakes: tuple[str, ...] = ()
    victims: tuple[Victim, ...] = ()
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Blocked:
    """A job can't start, whoever would yield to it.

    Attributes:
        retry_ms: when that may change by time alone; 0: never.
        limited: it could, but for how many may yield to it at once, or how much its pool is owed. One that fewer must
            yield to may be luckier.
    """

    retry_ms: int = 0
    limited: bool = False
    too_many: int = 0
    """Victims it would take, where that is more than may yield at once; 0: that is not what stops it."""

    @property
    def hopeless(self) -> bool:
        """Whether a job that may take the place of fewer others is blocked for sure, too."""
        return not self.retry_ms and not self.limited


def plan(state: State, uid: str, spec: JobSpec, waiting_since_ms: int, now_ms: int) -> Plan | Blocked:
    """The cheapest way for a job to start.

    Args:
        uid: the job's uid; empty for one that was not submitted.
        waiting_since_ms: since when it waits, for the policy's preemption delay.
    """
    search = _Search(state, uid, spec)
    found = search.without_victims(now_ms)
    if found is not None:
        return found
    policy = state.policy_for(spec.pool)
    if spec.never_preempts:
        return Blocked()
    if now_ms < waiting_since_ms + policy.preemption_delay_ms:
        return Blocked(waiting_since_ms + policy.preemption_delay_ms)
    return search.with_victims(policy.max_victims_per_round, now_ms)


def best_case(state: State, uid: str, spec: JobSpec, now_ms: int) -> Assumption:
    """What a job that is blocked may hope for: all that others must give up, given up."""
    return _Search(state, uid, spec).best_case(now_ms)


def plan_patiently(state: State, uid: str, spec: JobSpec) -> Plan | None:
    """Where a job starts once enough of what runs has ended by itself; nobody is asked to yield."""
    return _Search(state, uid, spec).patiently()


def could_ever_fit(state: State, spec: JobSpec) -> bool:
    """Whether the nodes and quotas there are could hold the job if nothing else was there."""
    shape = state.shapes.of(spec)
    known = state.fits_ever.get(shape)
    if known is None:
        view = View(state, Assumption(empty=True))
        known = ever_fits(state, view, spec, shape.asks)
        if len(state.fits_ever) >= MAX_SHAPES:
            state.fits_ever.clear()
        state.fits_ever[shape] = known
    return known


class _Search:
    """One search: the job, and what is tried for it."""

    def __init__(self, state: State, uid: str, spec: JobSpec) -> None:
        self._state = state
        self._uid = uid
        self._spec = spec
        self._asks: Sequence[Ask] = state.shapes.of(spec).asks
        self._no_room: bool | None = None
        self._overtakes: frozenset[str] | None = None

    @cached_property
    def _claims(self) -> Claims:
        """What quota gives the job."""
        return claims_of(self._state, self._spec, self._uid)

    def _overtakable(self, now_ms: int) -> frozenset[str]:
        """Whose nomination the job may take; one search asks as of one time."""
        if self._overtakes is None:
            nominated = self._state.nominated
            found = overtakable(self._state, self._spec, self._uid, now_ms, self._claims) if nominated else ()
            self._overtakes = frozenset(found)
        return self._overtakes

    def _view(self, assumption: Assumption) -> View:
        """The state under an assumption. All that look ahead share what they find on its way out."""
        if not assumption.future:
            return View(self._state, assumption)
        return self._ahead if assumption is self._ahead.assumption else View(self._state, assumption, self._ahead)

    @cached_property
    def _ahead(self) -> View:
        return View(self._state, Assumption(subject=self._uid, future=True))

    def without_victims(self, now_ms: int) -> Plan | None:
        """A plan that evicts nobody."""
        for assumption in self._from_now_on(now_ms):
            found = self._try(assumption)
            if found is not None:
                return self._slim(*found)
        return None

    def _from_now_on(self, now_ms: int) -> Iterator[Assumption]:
        """What may be taken for granted if nobody is evicted, least first."""
        now = Assumption(subject=self._uid, passed=self._passable(now_ms))
        yield now
        if self._state.leaving or now.passed:
            yield self._ahead.assumption
        overtakes = self._overtakable(now_ms)
        if overtakes:
            yield replace(now, overtaken=overtakes)
            yield replace(self._ahead.assumption, overtaken=overtakes)

    def patiently(self) -> Plan | None:
        """A plan on the room of everything that runs."""
        found = self._try_exactly(self._all_ended())
        return None if found is None else Plan(found[1], waits=True)

    def _all_ended(self) -> Assumption:
        running = (*self._state.jobs_by_state[JOB_RUNNING], *self._state.jobs_by_state[JOB_STARTING])
        return Assumption(subject=self._uid, future=True, released=frozenset(running))

    def _passable(self, now_ms: int) -> frozenset[str]:
        """Patient nominees that this job may pass: it is thought to end before they can start."""
        if not self._spec.estimated_duration_ms:
            return frozenset()
        return frozenset(
            uid
            for uid in self._state.nominated
            if self._state.jobs[uid].patient
            and uid != self._uid
            and self._spec.estimated_duration_ms <= _starts_in_ms(self._state, uid, now_ms)
        )

    def with_victims(self, max_victims: int, now_ms: int) -> Plan | Blocked:
        """A plan with the lowest possible maximum priority of victims, and of those the cheapest irreducible set."""
        state = self._state
        usable = len(state.free)
        if not usable:
            return Blocked()  # No node takes work, whoever yields: in an outage all jobs that run would be looked at.
        base = Assumption(subject=self._uid, future=True, overtaken=self._overtakable(now_ms))
        helps = self._helps(base, usable)
        level = lowest_level(state, self._spec, self._uid, now_ms, self._claims, helps=helps)
        if level.complete and not level.few:
            return Blocked()
        # One victim of the lowest level at which anybody must yield, if no two could be cheaper. The first does mostly.
        for number, unit in enumerate(filter(level.is_least, level.few)):
            alone = self._evicting(base, [unit]) if not number or self._could_help(base, unit) else None
            if alone is not None:
                return alone
        found, retry_ms = candidates(state, self._spec, self._uid, now_ms, self._claims, helps=helps)
        if not found:
            return Blocked(retry_ms)
        chosen = self._choose(base, found, max_victims)
        if chosen is None:
            return Blocked(retry_ms)
        if isinstance(chosen, int):
            return Blocked(retry_ms, limited=True, too_many=chosen)
        plan_found = self._evicting(base, sorted(chosen, key=lambda unit: (unit.priority_milli, unit.cost)))
        return Blocked(retry_ms, limited=True) if plan_found is None else plan_found

    def _choose(self, base: Assumption, found: list[Candidate], max_victims: int) -> list[Candidate] | int | None:
        """The victims of the lowest possible level from whom least is taken away; None: all together are too few. A
        number: only so many together would be enough, and fewer may yield at once; 0: not more than is owed may."""
        state = self._state

        def enough(units: Sequence[Candidate]) -> bool:
            return self._try(without(base, units)) is not None

        fewest = 0

        def allowed(units: Sequence[Candidate]) -> bool:
            nonlocal fewest
            if not takes_only_what_is_owed(state, self._uid, units):
                return False
            if not max_victims or len(units) <= max_victims:
                return True
            fewest = min(fewest or len(units), len(units))
            return False

        level = self._lowest_level(found, enough)
        if level is None:
            return None
        top = level[-1].priority_milli
        level.sort(key=lambda unit: unit.cost)
        choice = Choice(state.cluster_use.capacity, enough, allowed)
        for unit in level:
            # A set whose maximum is lower than the lowest level cannot be enough, so one victim must be of that level.
            if unit.priority_milli == top and self._could_help(base, unit) and enough([unit]):
                choice.offer([unit])
                break
        wanted, slots = together(state, self._spec, self._asks)
        guessed = worker_by_worker(state, base, wanted, slots, level)
        first = {unit.key for unit in guessed}
        guessed += [unit for unit in level if unit.key not in first]
        for order in (level, guessed, level[::-1]):
            choice.offer_shortest_run(order)
        choice.improve(guessed)
        return fewest if choice.best is None else choice.best

    def _evicting(self, base: Assumption, units: Sequence[Candidate]) -> Plan | None:
        """A plan in which exactly these yield; None if it isn't enough or takes back more quota than was lent."""
        assumption = without(base, units)
        final = self._try(assumption)
        if final is None or not takes_only_what_is_owed(self._state, self._uid, units):
            return None
        return replace(self._slim(*final), victims=tuple(_victim(unit) for unit in units), waits=True)

    def best_case(self, now_ms: int) -> Assumption:
        """Everything that may be taken for granted: whoever must yield did, what is on its way out or idle is gone."""
        spec = self._spec
        units: list[Candidate] = []
        if not spec.never_preempts:
            units, _ = candidates(self._state, spec, self._uid, now_ms, self._claims)
        base = Assumption(subject=self._uid, future=True, overtaken=self._overtakable(now_ms))
        assumption = without(base, units)
        return self._trimming(assumption)

    def with_one(self, victim: Victim) -> Plan | None:
        """A plan in which exactly this job yields."""
        assumption = Assumption(subject=self._uid, future=True, released=frozenset({victim.uid}))
        found = self._try(assumption)
        if found is None:
            return None
        return replace(self._slim(*found), victims=(victim,), waits=True)

    def _lowest_level(
        self, found: list[Candidate], feasible: Callable[[Sequence[Candidate]], bool]
    ) -> list[Candidate] | None:
        """Candidates up to the lowest priority at which evicting all of them would help, by bisection: evicting more
        never makes a plan impossible."""
        priorities = sorted({unit.priority_milli for unit in found})

        def up_to(priority_milli: int) -> list[Candidate]:
            return [unit for unit in found if unit.priority_milli <= priority_milli]

        if not feasible(up_to(priorities[-1])):
            return None
        is_enough = lambda priority_milli: feasible(up_to(priority_milli))  # noqa: E731
        return up_to(priorities[bisect_left(priorities[:-1], True, key=is_enough)])

    def _helps(self, base: Assumption, usable: int) -> Helps | None:
        """Who could be of use: most of those that run on nodes which fell silent are as cheap as others, and would be
        tried one after another. None: anybody."""
        state, wanted = self._state, together(self._state, self._spec, self._asks)[0]
        if usable == len(state.nodes) and not wanted.required:
            return None
        only_room: list[bool] = []

        def helps(job: JobRecord) -> bool:
            groups = dict.fromkeys(worker.group_id for worker in state.workers_of(job.uid) if worker.state in LIVE)
            nodes = (state.nodes[bundle.node_id] for group_id in groups for bundle in state.groups[group_id].bundles)
            if any(node.usable and wanted.admits(node) for node in nodes):
                return True
            if not only_room:
                only_room.append(self._lacks_only_room(base))
            return not only_room[0]

        return helps

    def _lacks_only_room(self, base: Assumption) -> bool:
        """Whether neither quota nor the number of groups keeps the job from its start: then whoever leaves no room
        where the job may go is of no use to it."""
        view = self._view(base)
        for ask in self._asks:
            pool = self._state.pools[ask.pool].spec
            kind = new_kind(pool.pg_pool)
            charged = charged_beside(view.charged, self._asks, ask)
            if shortages(self._state.pools, charged, pool, ask.resources):
                return False
            if kind is not None and not may_make(view, pool, kind):
                return False
        return True

    def _could_help(self, base: Assumption, unit: Candidate) -> bool:
        """Whether evicting one unit alone could make room: a quick look that only rules out the hopeless."""
        if not self._lacks_room(base):
            return True
        state = self._state
        nodes = dict.fromkeys(
            worker.node_id
            for worker in state.workers_of(unit.job.uid)
            if not unit.generation or worker.generation == unit.generation
        )
        if self._spec.placed:
            return any(
                slot.place is not None and slot.place.node_id in nodes for ask in self._asks for slot in ask.slots
            )
        ask = self._asks[0].slots[0].resources
        view = self._view(self._trimming(without(base, [unit])))
        return any(view.room_alone(state.nodes[node_id]).fits(ask) for node_id in nodes)

    def _trimming(self, assumption: Assumption) -> Assumption:
        """The same with every idle dynamic group out of the way: what a victim leaves may be one."""
        return assuming(assumption, {"trimmed": frozenset(self._view(assumption).trimmable())})

    def _lacks_room(self, base: Assumption) -> bool:
        """Whether a job of one worker, or one whose places are given, finds no room: then only evicting on its
        nodes-to-be can help."""
        if self._no_room is None:
            rooms = Rooms(self._state, self._view(self._trimming(base)), NodeFilter())
            if self._spec.placed:
                self._no_room = pin(rooms, [slot for ask in self._asks for slot in ask.slots]) is None
                return self._no_room
            alone = len(self._asks) == 1 and len(self._asks[0].slots) == 1
            ask = self._asks[0].slots[0].resources
            self._no_room = alone and not any(room.fits(ask) for room in rooms.fullest_first(ask))
        return self._no_room

    def _try(self, assumption: Assumption) -> tuple[Assumption, tuple[GroupUse, ...]] | None:
        """Groups under an assumption; if there are none, with every idle dynamic group out of the way."""
        view = self._view(assumption)
        uses = choose_groups(self._state, view, self._spec, self._asks)
        if uses is not None:
            return assumption, uses
        idle = view.trimmable()
        return self._try_exactly(assuming(assumption, {"trimmed": frozenset(idle)})) if idle else None

    def _try_exactly(self, assumption: Assumption) -> tuple[Assumption, tuple[GroupUse, ...]] | None:
        uses = choose_groups(self._state, self._view(assumption), self._spec, self._asks)
        return None if uses is None else (assumption, uses)

    def _slim(self, assumption: Assumption, uses: tuple[GroupUse, ...]) -> Plan:
        """The plan without trims and overtakings that turn out unnecessary; the oldest idle groups go first."""
        if not assumption.trimmed and not assumption.overtaken:
            return Plan(uses, waits=assumption.patient)
        order = self._view(replace(assumption, trimmed=frozenset())).trimmable()
        newest_first = [group_id for group_id in reversed(order) if group_id in assumption.trimmed]
        assumption, uses = self._without(newest_first, "trimmed", assumption, uses)
        by_turn = sorted(assumption.overtaken, key=lambda uid: self._state.queue_key(self._state.jobs[uid]))
        assumption, uses = self._without(by_turn, "overtaken", assumption, uses)
        trims = tuple(group_id for group_id in order if group_id in assumption.trimmed)
        overtakes = tuple(uid for uid in self._state.nominated if uid in assumption.overtaken)
        return Plan(uses, trims, overtakes, waits=assumption.patient)

    def _without(
        self, names: Sequence[str], field: str, assumption: Assumption, uses: tuple[GroupUse, ...]
    ) -> tuple[Assumption, tuple[GroupUse, ...]]:
        """The same with those names left out that the plan does without, the first first. Most are: so it tries one,
        two, four together, and halves where that is too many."""
        first = 0
        while first < len(names):
            fine, too_many, step = first, len(names) + 1, 1
            found = assumption, uses
            while fine + 1 < too_many:
                end = (fine + too_many) // 2 if too_many <= len(names) else min(fine + step, len(names))
                left = getattr(assumption, field) - set(names[first:end])
                fewer = self._try_exactly(replace(assumption, **{field: left}))
                if fewer is None:
                    too_many = end
                else:
                    fine, found, step = end, fewer, 2 * step
            assumption, uses = found
            first = fine + 1
        return assumption, uses


def _starts_in_ms(state: State, uid: str, now_ms: int) -> int:
    """How long a patient nominee waits at least: as long as the longest known job in its room is thought to go on."""
    left = [0]
    for group_id in state.jobs[uid].groups:
        group = state.groups.get(group_id)
        for bundle in group.bundles if group is not None else ():
            holders = dict.fromkeys(worker.job for worker in state.workers_on(bundle.node_id))
            left += [
                left_ms(state.jobs[other], state.specs[other].spec, now_ms) for other in holders if other in state.jobs
            ]
    return max(left)


def _victim(unit: Candidate) -> Victim:
    assert unit.verdict.rule is not None, "a victim must yield by some rule"
    return Victim(unit.job.uid, unit.verdict.rule, unit.verdict.reason, unit.generation)


def plan_with(state: State, uid: str, spec: JobSpec, victim: Victim) -> Plan | None:
    """A plan for a job under the assumption that one named victim yields, by hand and not by the rules."""
    return _Search(state, uid, spec).with_one(victim)
