"""The splits into groups, and the order in which the members of each best take turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from callboard.autoplace.instance.stopping import Budget
from callboard.autoplace.instance.tasks import Instance
from callboard.autoplace.problem.problem import Async, Layout, Problem
from callboard.autoplace.solve.batches import Rule, Steady, batch_rules, least_period, turn_rules
from callboard.autoplace.solve.building import HYBRID
from callboard.autoplace.solve.groups import Groups, Split
from callboard.model.frozen import dataclass


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


class SplitSearch:
    """Looks for the shortest period of one kind of layout.

    Args:
        problem: with an asynchronous objective.
        groups: the groups that its tasks can be in.

    Attributes:
        best: the split with the shortest period so far.
        below: only shorter periods are of interest, in units; falls with each one found.
        on_found: told of each.
    """

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
            self._turns(split, rules + turn_rules(i, j, shift), rest, steady.period)


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
