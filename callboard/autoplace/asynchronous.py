"""Which split into groups has the shortest period, with every batch in time? The asynchronous search.

The least load over all splits (:mod:`callboard.autoplace.groups`) bounds the period from below. Splits are then tried
in the order of their own bounds, and for each the order of turns in its groups, until no open bound is below the best
period that was found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

from callboard.autoplace.building import HYBRID, seconds_of, spans_of
from callboard.autoplace.cyclic import Rule, Steady, least_period
from callboard.autoplace.exact import Budget, Found, Stopped
from callboard.autoplace.groups import Group, Groups, least_load
from callboard.autoplace.plan import Plan, Span, Spans, Status
from callboard.autoplace.problem import Async, Layout, NoPlan, Problem, Unplaceable
from callboard.autoplace.stopping import Stop
from callboard.autoplace.tasks import Instance

MOST_TASKS = 10
"""With more tasks there are too many subsets; they are refused by name."""

NODES_OF_PURE = 2_000
"""Splits and turns tried for the best layout of each pure kind."""

NODES_OF_FIRST = 500
"""The same when the time is over before there is a plan; far less than a second."""

Split = tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A split with its steady state."""

    split: Split
    steady: Steady

    @property
    def layout(self) -> str:
        """``collocated``, ``disaggregated`` or ``hybrid``."""
        on_gpus = [group for group in self.split if group.widths]
        if len(on_gpus) <= 1:
            return Layout.COLLOCATED.value
        shared = any(len(group.members) > 1 for group in on_gpus)
        return HYBRID if shared else Layout.DISAGGREGATED.value


class _Search:
    """Looks for the shortest period of one kind of layout."""

    def __init__(self, problem: Problem, instance: Instance, groups: Groups, budget: Budget) -> None:
        assert isinstance(problem.objective, Async)
        self.instance = instance
        self.groups = groups
        self.budget = budget
        self.staleness = problem.objective.staleness
        self.best: Candidate | None = None
        self.below = math.inf
        self.on_found: Callable[[Candidate], None] = lambda found: None  # noqa: ARG005

    def run(self, partitions: Iterator[tuple[tuple[int, ...], ...]], least: float) -> None:
        """Tries every split of these partitions; ends early at the period ``least``, which none can beat.

        Raises:
            Stopped: the budget is spent.
        """
        for partition in partitions:
            for split in self._splits(partition, ()):
                self.try_split(split)
                if self.below <= least + 1:
                    return

    def _splits(self, partition: tuple[tuple[int, ...], ...], chosen: Split) -> Iterator[Split]:
        """The groups of a partition that fit together and whose loads are below the best period."""
        self.budget.spend()
        if len(chosen) == len(partition):
            yield chosen
            return
        free = list(self.instance.capacity)
        for group in chosen:
            for pool, width in group.widths:
                free[pool] -= width
        fitting = [
            group
            for group in self.groups.of(partition[len(chosen)])
            if all(width <= free[pool] for pool, width in group.widths)
        ]
        last = len(chosen) + 1 == len(partition)
        for group in sorted(fitting, key=lambda g: (g.load, g.gpus)):
            if group.load >= self.below:
                break
            yield from self._splits(partition, (*chosen, group))
            if last and len(self.instance.capacity) == 1 and not any(group.tails):
                break  # The fastest that fits is the best for the last of them.

    def try_split(self, split: Split) -> None:
        """Tries every order of turns of one split.

        Raises:
            Stopped: the budget is spent.
        """
        least = max(group.load for group in split)
        sync = 0 if self.groups.syncs_inside(split) else self.groups.sync
        rules = batch_rules(self.instance, split, sync, self.staleness)
        pairs = [(i, j) for group in split for a, i in enumerate(group.members) for j in group.members[:a]]
        self._turns(split, rules, sorted(pairs), least)

    def _turns(self, split: Split, rules: list[Rule], pairs: list[tuple[int, int]], least: float) -> None:
        """Chooses, pair by pair, how many periods apart two members of a group take their turns."""
        self.budget.spend()
        size = 2 * len(self.instance.tasks) + 1
        steady = least_period(size, rules, least, self.below)
        if steady is None:
            return
        if not pairs:
            self.best = Candidate(split, steady)
            self.below = steady.period
            self.on_found(self.best)
            return
        (i, j), rest = pairs[0], pairs[1:]
        reach = min(math.ceil(self.staleness) + 1, 2 * len(self.instance.tasks))
        for shift in sorted(range(-reach, reach + 2), key=lambda shift: (abs(shift - 0.5), shift)):
            # i ends before the turn of j, `shift` periods on; j before that of i, 1 − `shift` periods on.
            apart = [
                Rule(_end(i), _start(j), 0.0, float(shift)),
                Rule(_end(j), _start(i), 0.0, float(1 - shift)),
            ]
            self._turns(split, rules + apart, rest, steady.period)


def batch_rules(instance: Instance, split: Split, sync: int, staleness: float) -> list[Rule]:
    """What is asked of one batch, of two batches of one task, and of the latency."""
    rules: list[Rule] = []
    options = {task: option for group in split for task, option in zip(group.members, group.options, strict=True)}
    tails = {task: tail for group in split for task, tail in zip(group.members, group.tails, strict=True)}
    for group in split:
        for task, span in zip(group.members, group.spans, strict=True):
            rules += [
                Rule(0, _start(task), 0.0, 0.0),
                Rule(_start(task), _end(task), float(span), 0.0),
                Rule(_end(task), _start(task), 0.0, 1.0),  # done before its next batch
                # The whole batch, its weight sync included, within (η + 1) periods of variable 0.
                Rule(_end(task), 0, float(tails[task] + sync), staleness + 1.0),
            ]
    for arc in instance.arcs:
        i, j = arc.source, arc.target
        whole, piece = arc.delay(options[i], options[j])
        if arc.barrier:
            rules.append(Rule(_end(i), _start(j), float(tails[i] + whole), 0.0))
            continue
        # What hides under the next batch still has to arrive: the end of j's span plus its own tail.
        rules += [
            Rule(_start(i), _start(j), float(options[i].piece + piece), 0.0),
            Rule(_end(i), _end(j), float(tails[i] + piece + options[j].piece - tails[j]), 0.0),
        ]
        if whole:
            rules.append(Rule(_start(i), _end(j), float(options[i].piece + whole + options[j].piece), 0.0))
    return rules


def partitions_of(tasks: tuple[int, ...], alone: frozenset[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to split tasks into groups, few members per group first; those ``alone`` share with nobody."""

    def grow(rest: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
        if not rest:
            yield ()
            return
        first, others = rest[0], rest[1:]
        for mask in range(1 << len(others)):
            members = (first, *(task for k, task in enumerate(others) if mask >> k & 1))
            if len(members) > 1 and alone & set(members):
                continue
            left = tuple(task for k, task in enumerate(others) if not mask >> k & 1)
            for tail in grow(left):
                yield (members, *tail)

    yield from grow(tasks)


class _Hunt:
    """One asynchronous search: pure layouts first, then every split."""

    def __init__(
        self, problem: Problem, instance: Instance, *, halt: Stop, told: Callable[[int, int], None], gap: float
    ) -> None:
        self.problem = problem
        self.instance = instance
        self.halt = halt
        self.told = told
        self.gap = gap
        self.groups = Groups(instance, round(problem.weight_sync_seconds / instance.unit_seconds))
        bound = least_load(self.groups, 2 * instance.horizon + self.groups.sync)
        if bound is None:
            raise _no_plan(problem, "no split into groups fits the GPUs and the memory")
        self.bound = bound
        self.best: Candidate | None = None
        self.hybrid: float | None = None
        self.pure: dict[str, Candidate | None] = {}

    def run(self) -> bool:
        """Searches; whether the best is proved."""
        layout = self.problem.layout
        sure = True
        for kind, partition in self._pure_partitions().items():
            wanted = layout in (Layout.UNIFORM, kind)
            search = self._search(Budget(None if wanted else NODES_OF_PURE, self.halt))
            try:
                search.run(iter(partition), self.bound)
            except Stopped:
                sure = sure and not wanted
                if search.best is None and self.halt():
                    search = self._first(partition)
            self.pure[kind.value] = search.best
            if search.best is not None and (wanted or layout is Layout.ANY):
                self._found(search.best)
        return self._any() if layout is Layout.ANY else sure

    def _first(self, partition: list[tuple[tuple[int, ...], ...]]) -> _Search:
        """However little time there was, some plan: a few nodes that nobody stops."""
        search = self._search(Budget(NODES_OF_FIRST))
        with suppress(Stopped):  # The number of nodes is the rule here, not a failure.
            search.run(iter(partition), self.bound)
        return search

    def _any(self) -> bool:
        search = self._search(Budget(None, self._enough))
        search.on_found = self._found
        search.below = math.inf if self.best is None else self.best.steady.period
        if search.below <= self.bound + 1:
            return True
        size = len(self.instance.tasks)
        try:
            search.run(partitions_of(tuple(range(size)), self._cpu_only()), self.bound)
        except Stopped:
            return False
        return True

    def _pure_partitions(self) -> dict[Layout, list[tuple[tuple[int, ...], ...]]]:
        apart = tuple((task,) for task in range(len(self.instance.tasks)))
        together = (*((task,) for task in sorted(self._cpu_only())), tuple(sorted(self.groups.on_gpus)))
        return {Layout.COLLOCATED: [together] if self.groups.on_gpus else [], Layout.DISAGGREGATED: [apart]}

    def _cpu_only(self) -> frozenset[int]:
        return frozenset(range(len(self.instance.tasks))) - self.groups.on_gpus

    def _search(self, budget: Budget) -> _Search:
        return _Search(self.problem, self.instance, self.groups, budget)

    def _found(self, candidate: Candidate) -> None:
        period = candidate.steady.period
        if candidate.layout == HYBRID:
            self.hybrid = period if self.hybrid is None else min(self.hybrid, period)
        if self.best is None or period < self.best.steady.period:
            self.best = candidate
            self.told(math.ceil(period), self.bound)

    def _enough(self) -> bool:
        if self.halt():
            return True
        if self.gap <= 0 or self.best is None:
            return False
        return self.best.steady.period - self.bound <= self.gap * self.best.steady.period


def search_async(
    problem: Problem, instance: Instance, *, halt: Stop, told: Callable[[int, int], None], gap: float
) -> Plan:
    """The shortest period of a problem.

    Args:
        problem: with an asynchronous objective.
        instance: its tasks.
        halt: when to end.
        told: the period and its bound, in units, as they improve.
        gap: relative gap that is good enough.

    Raises:
        NoPlan: no split fits, or there are too many components for this objective.
    """
    size = len(instance.tasks)
    if size > MOST_TASKS:
        raise _no_plan(problem, f"{size} components; asynchronous plans are searched for up to {MOST_TASKS}")
    hunt = _Hunt(problem, instance, halt=halt, told=told, gap=gap)
    try:
        done = hunt.run()
    except KeyboardInterrupt:
        halt.interrupted = True
        done = False
    if hunt.best is None:
        raise _no_plan(problem, "no split holds the staleness in this layout" if done else "no plan was found in time")
    return _plan(hunt, _leaner(problem, instance, hunt.groups, hunt.best), done=done)


def _leaner(problem: Problem, instance: Instance, groups: Groups, best: Candidate) -> Candidate:
    """Fewer GPUs for the same period, group by group."""
    for place in range(len(best.split)):
        for group in sorted(groups.of(best.split[place].members), key=lambda g: g.gpus):
            if group.gpus >= best.split[place].gpus:
                break
            search = _Search(problem, instance, groups, Budget(NODES_OF_PURE))
            search.below = best.steady.period + 1
            split = (*best.split[:place], group, *best.split[place + 1 :])
            if group.load > best.steady.period or not _room(instance, split):
                continue
            try:
                search.try_split(split)
            except Stopped:
                continue
            if search.best is not None:
                best = Candidate(
                    split, replace(search.best.steady, period=max(search.best.steady.period, best.steady.period))
                )
                break
    return best


def _room(instance: Instance, split: Split) -> bool:
    used = [0] * len(instance.capacity)
    for group in split:
        for pool, width in group.widths:
            used[pool] += width
    return all(a <= b for a, b in zip(used, instance.capacity, strict=True))


def _plan(hunt: _Hunt, best: Candidate, *, done: bool) -> Plan:
    problem, instance = hunt.problem, hunt.instance
    period = seconds_of(math.ceil(best.steady.period - 0.01), instance)
    times = best.steady.times
    size = len(instance.tasks)
    columns: list[dict[int, int]] = [{} for _ in range(size)]
    free = [0] * len(instance.capacity)
    for group in sorted(best.split, key=lambda group: group.members):
        for task, option in zip(group.members, group.options, strict=True):
            columns[task] = {pool: free[pool] for pool, _ in option.widths}
        for pool, width in group.widths:
            free[pool] += width
    where = {task: (group, k) for group in best.split for k, task in enumerate(group.members)}
    found = Found(
        length=math.ceil(best.steady.period),
        options=tuple(where[task][0].options[where[task][1]] for task in range(size)),
        starts=tuple(round(times[_start(task)]) for task in range(size)),
        ends=tuple(round(times[_end(task)]) for task in range(size)),
        columns=tuple(columns),
    )
    tails = {task: where[task][0].tails[where[task][1]] for task in range(size)}
    sync = 0 if hunt.groups.syncs_inside(best.split) else hunt.groups.sync
    latency = max(found.ends[task] + tails[task] for task in range(size)) + sync
    ways: dict[str, float | None] = {
        kind: None if one is None else seconds_of(math.ceil(one.steady.period - 0.01), instance)
        for kind, one in hunt.pure.items()
    }
    ways[HYBRID] = None if hunt.hybrid is None else seconds_of(math.ceil(hunt.hybrid - 0.01), instance)
    status = (
        Status.OPTIMAL
        if done
        else Status.TIME_LIMIT
        if hunt.halt.late and not hunt.halt.interrupted
        else Status.FEASIBLE
    )
    return Plan(
        problem=problem,
        iteration_seconds=period,
        lower_bound_seconds=period if done else min(period, seconds_of(hunt.bound, instance)),
        status=status,
        spans=Spans(_with_tails(problem, instance, found, tails)),
        layout=best.layout,
        alternatives=MappingProxyType(ways),
        latency_seconds=seconds_of(latency, instance),
        checked_seconds=period,
        solver="async",
        notes=problem.notes,
    )


def _with_tails(problem: Problem, instance: Instance, found: Found, tails: dict[int, int]) -> tuple[Span, ...]:
    tail_of = {
        problem.components[member].name: seconds_of(tails[i], instance)
        for i, task in enumerate(instance.tasks)
        for member in task.members
    }
    return tuple(replace(span, tail_seconds=tail_of[span.component]) for span in spans_of(problem, instance, found))


def _no_plan(problem: Problem, reason: str) -> NoPlan:
    return NoPlan(
        tuple(
            Unplaceable(component=c.name, gpus=tuple(sorted({mode.gpus for mode in c.modes})), reason=reason)
            for c in problem.components
        )
    )


def _start(task: int) -> int:
    return 2 * task + 1


def _end(task: int) -> int:
    return 2 * task + 2
