"""The asynchronous search: the split into groups with the shortest period that has every batch in time.

The least load over all splits (:mod:`callboard.autoplace.solve.groups`) bounds the period from below. Splits are then
tried in the order of their own bounds, and for each the order of turns in its groups, until no open bound is below the
best period that was found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType

from callboard.autoplace.instance.stopping import Budget, Stop, Stopped
from callboard.autoplace.instance.tasks import Found, Instance
from callboard.autoplace.problem.plan import Plan, Span, Spans, Status
from callboard.autoplace.problem.problem import Layout, Problem, no_plan
from callboard.autoplace.solve.batches import end_of, start_of
from callboard.autoplace.solve.building import HYBRID, seconds_of, spans_of
from callboard.autoplace.solve.groups import Groups, Split, least_load
from callboard.autoplace.solve.splits import Candidate, SplitSearch, partitions_of

MOST_TASKS = 10
"""With more tasks there are too many subsets; they are refused by name."""

NODES_OF_PURE = 2_000
"""Splits and turns tried for the best layout of each pure kind."""

NODES_OF_FIRST = 500
"""The same when the time is over before there is a plan; far less than a second."""


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
            raise no_plan(problem.components, "no split into groups fits the GPUs and the memory")
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

    def _first(self, partition: list[tuple[tuple[int, ...], ...]]) -> SplitSearch:
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

    def _search(self, budget: Budget) -> SplitSearch:
        return SplitSearch(self.problem, self.instance, self.groups, budget)

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
        told: the period and its bound, in units, as they improve.
        gap: relative gap that is good enough.

    Raises:
        NoPlan: no split fits, or there are too many components for this objective.
    """
    size = len(instance.tasks)
    if size > MOST_TASKS:
        raise no_plan(problem.components, f"{size} components; asynchronous plans are searched for up to {MOST_TASKS}")
    hunt = _Hunt(problem, instance, halt=halt, told=told, gap=gap)
    try:
        done = hunt.run()
    except KeyboardInterrupt:
        halt.interrupted = True
        done = False
    if hunt.best is None:
        raise no_plan(
            problem.components, "no split holds the staleness in this layout" if done else "no plan was found in time"
        )
    return _plan(hunt, _leaner(problem, instance, hunt.groups, hunt.best), done=done)


def _leaner(problem: Problem, instance: Instance, groups: Groups, best: Candidate) -> Candidate:
    """Fewer GPUs for the same period, group by group."""
    for place in range(len(best.split)):
        for group in sorted(groups.of(best.split[place].members), key=lambda g: g.gpus):
            if group.gpus >= best.split[place].gpus:
                break
            search = SplitSearch(problem, instance, groups, Budget(NODES_OF_PURE))
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
        starts=tuple(round(times[start_of(task)]) for task in range(size)),
        ends=tuple(round(times[end_of(task)]) for task in range(size)),
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
    status = Status.OPTIMAL if done else Status.TIME_LIMIT if hunt.halt.late else Status.FEASIBLE
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
