"""The steps of a synchronous search: each may better the plan, raise the bound, or prove the plan the fastest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import prod

from callboard.autoplace.exact.bounds import bounds_of, destructive
from callboard.autoplace.exact.branch_and_bound import Leanest, Shortest, combinations_in_order, improved
from callboard.autoplace.exact.combination import Combination
from callboard.autoplace.exact.variants import Variants
from callboard.autoplace.instance.chains import chains_of
from callboard.autoplace.instance.options import for_layout
from callboard.autoplace.instance.stopping import Budget, Stop, Stopped
from callboard.autoplace.instance.tasks import Found, Instance
from callboard.autoplace.problem.problem import Layout
from callboard.autoplace.solve.building import HYBRID, layout_of

SMALL = 8
"""With more tasks a good plan is looked for before the proof."""

NODES_OF_PURE = 1_500
"""Nodes spent on the best all-disjoint split and the best collocated order."""

NODES_OF_FIRST = 200
"""Nodes for a plan when the time is over before there is one; far less than a second."""

NODES_OF_TIES = 1_500
"""Nodes spent on finding fewer GPUs for the same time; a fixed number, so that the same input gives the same bytes."""

MOST_COMBINATIONS = 4_096
"""More of them than this aren't enumerated for a pure layout."""


class Run:
    """One search: the incumbent, the bound, and who is told of them.

    Args:
        told: the incumbent and the bound, in units, as they improve.
        gap: relative gap that is good enough.
        solver: whether to ask CP-SAT for what branch and bound doesn't prove.

    Attributes:
        hybrid: the shortest that is neither collocated nor disaggregated.
        bound: no plan is shorter, in units.
        notes: what was lost.
        by: which part of the search found or proved the best.
    """

    def __init__(
        self, instance: Instance, halt: Stop, told: Callable[[int, int], None], gap: float, solver: bool
    ) -> None:
        self.instance = instance
        self.halt = halt
        self.told = told
        self.gap = gap
        self.solver = solver
        self.bound = min(bounds_of(instance).best, instance.horizon)
        self.best: Found | None = None
        self.hybrid: Found | None = None
        self.notes: list[str] = []
        self.by = "exact"

    def incumbent(self, found: Found) -> None:
        """A plan, better than the last or not."""
        if layout_of(found.options, found.columns) == HYBRID and (
            self.hybrid is None or found.length < self.hybrid.length
        ):
            self.hybrid = found
        if self.best is None or found.length < self.best.length:
            self.best = found
            self.told(found.length, min(self.bound, found.length))

    def raised(self, bound: int) -> None:
        """A better lower bound."""
        if bound > self.bound:
            self.bound = bound
            if self.best is not None:
                self.told(self.best.length, min(bound, self.best.length))

    def good_enough(self) -> bool:
        """Whether to stop: somebody said so, or the gap is reached."""
        if self.halt():
            return True
        return self.gap > 0 and self.best is not None and self.best.length - self.bound <= self.gap * self.best.length

    def pure(self, layout: Layout, nodes: int | None = NODES_OF_PURE) -> tuple[Found | None, bool]:
        """(the best plan of a pure layout, whether that is proved)."""
        instance = for_layout(self.instance, layout)
        whole = prod(len(chains_of(task.options)) for task in instance.tasks) <= MOST_COMBINATIONS
        if not whole:
            instance = _one_chain_each(instance)
        searches = combinations_in_order(instance, layout)
        shortest = Shortest(self.instance.horizon + 1, Budget(nodes, self.halt))
        try:
            for bound, search in searches:
                if bound < shortest.below:
                    shortest.run(search)
        except Stopped:
            if shortest.best is None and self.halt():
                # However little time there was, some plan: a few nodes that nobody stops.
                shortest = Shortest(self.instance.horizon + 1, Budget(NODES_OF_FIRST))
                with suppress(Stopped):
                    for _, search in searches:
                        if shortest.best is None:
                            shortest.run(search)
            return shortest.best, False
        return shortest.best, whole

    def branch(self, searches: list[tuple[int, Combination]], nodes: int | None) -> bool:
        """Branch and bound; whether it is done."""
        below = self.instance.horizon + 1 if self.best is None else self.best.length
        shortest = Shortest(below, Budget(nodes, self.good_enough), on_found=self.incumbent)
        for place, (bound, search) in enumerate(searches):
            if bound >= shortest.below:
                break
            if search.size > SMALL and self.best is not None and search.has(self.best.options):
                self.incumbent(improved(search, self.best, Budget(None, self.good_enough)))
                shortest.below = min(shortest.below, self.best.length)
            try:
                shortest.run(search)
            except Stopped:
                rest = [bound for bound, _ in searches[place + 1 :]]
                self.raised(min([shortest.open, shortest.below, *rest]))
                return False
            if search.unsure:
                self.notes.append("some layouts were too many to try, so the proof is missing")
                return False
        return True

    def variants(self, nodes: int | None) -> bool:
        """Branch and bound that decides late who offloads and who shares; whether it is done."""
        below = self.instance.horizon + 1 if self.best is None else self.best.length
        search = Variants(self.instance, Budget(nodes, self.good_enough), self.incumbent)
        done = search.run(below)
        if not done:
            self.raised(min(search.open, below))
            return False
        if self.best is not None:
            self._leaner_than(self.best)
            self.bound = self.best.length
        return True

    def _leaner_than(self, best: Found) -> None:
        """Fewer GPUs for the same time, everything but GPU counts and their order as in ``best``."""
        chains = [
            next((chain for chain in chains_of(task.options) if option in chain.options), None)
            for task, option in zip(self.instance.tasks, best.options, strict=True)
        ]
        if any(chain is None for chain in chains):
            # It is the best disjoint split, whose options were thinned for that layout.
            self.leanest(Layout.DISAGGREGATED)
            return
        lean = Leanest(best.length, Budget(NODES_OF_TIES), best)
        with suppress(Stopped):  # The fixed number of nodes is the rule for ties, not a failure.
            lean.run(Combination(self.instance, tuple(chain for chain in chains if chain is not None)))
        self.best = lean.best

    def refute(self, searches: list[tuple[int, Combination]]) -> None:
        """Raises the bound by propagation alone."""
        most = self.instance.horizon if self.best is None else self.best.length
        least = most
        for bound, search in searches:
            if bound >= least or self.halt():
                break
            least = min(least, destructive(search, max(bound, self.bound), least))
        if not self.halt():
            self.raised(least)

    def leanest(self, layout: Layout = Layout.ANY) -> None:
        """Fewer GPUs for the same time."""
        assert self.best is not None
        instance = for_layout(self.instance, layout)
        searches = [one for one in combinations_in_order(instance, layout) if one[0] <= self.best.length]
        lean = Leanest(self.best.length, Budget(NODES_OF_TIES), self.best)
        with suppress(Stopped):  # The fixed number of nodes is the rule for ties, not a failure.
            for _, search in searches:
                lean.run(search)
        self.best = lean.best


def _one_chain_each(instance: Instance) -> Instance:
    """The instance with the options of each task that leave most memory: what fits at all fits with them."""
    tasks = []
    for task in instance.tasks:
        chain = min(chains_of(task.options), key=lambda chain: (chain.resident, chain.peak, chain.spans[-1]))
        tasks.append(replace(task, options=chain.options))
    return replace(instance, tasks=tuple(tasks))
