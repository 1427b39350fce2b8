"""Branch and bound: the shortest plan, searched over who shares GPUs with whom in which order, then over GPU counts.

Each pair of tasks that could meet on a GPU is either *ordered* (one ends before the other starts; they may share) or
*apart* (no common GPU; they may overlap in time). Given all pairs, the earliest schedule is the best one, and given
the counts too it is one pass over the graph. The search only splits what conflicts:

1. A node knows some pairs and, per task, a range of a chain of options.
2. Propagation finds the earliest starts and the least time to the end, drops options that are too slow for the
   incumbent, too wide beside those that must lie apart, or too costly in GPU-seconds for the time that is left.
3. The widest options are tried: if what overlaps in their earliest schedule can lie side by side, that is the best of
   the node. Otherwise a pair that overlaps is split three ways, or a range of options in two.

Ties go to fewer GPUs in total, then fewer for earlier components: a second run looks for the least of those among the
plans that are as fast. Nothing here depends on a clock or on hashing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from callboard.autoplace.exact.bounds import propagate
from callboard.autoplace.exact.branching import around, halves, in_order, split
from callboard.autoplace.exact.combination import Combination, Node, Times
from callboard.autoplace.instance.chains import Chain, combinations_of
from callboard.autoplace.instance.stopping import Budget, Stopped
from callboard.autoplace.instance.tasks import Found, Instance, Option
from callboard.autoplace.problem.problem import Layout


@dataclass(slots=True)
class Shortest:
    """Looks for the shortest plan.

    Attributes:
        below: only shorter plans are of interest; falls with each one found.
        on_found: told of each.
        open: once stopped: the least time of what was not looked into, in the combination that was searched.
    """

    below: int
    budget: Budget
    best: Found | None = None
    open: int = 1 << 62
    on_found: Callable[[Found], None] = lambda found: None  # noqa: ARG005

    def run(self, search: Combination, start: Node | None = None) -> None:
        """Searches one combination of chains.

        Args:
            start: only below this node of it; None: all of it.

        Raises:
            Stopped: the budget is spent.
        """
        start = start or search.root()
        root = None if start is None else propagate(search, start, self.below)
        if root is not None:
            self._visit(search, *root)

    def _visit(self, search: Combination, node: Node, times: Times) -> None:
        try:
            self.budget.spend()
        except Stopped:
            self.open = min(self.open, times.least)
            raise
        masks = search.overlaps(node, times)
        columns = search.columns(node.high, masks)
        if columns is not None:
            self.best = search.found(node.high, times, columns)
            self.below = self.best.length
            self.on_found(self.best)
            return
        below = self.below
        parts = [propagate(search, part, below) for part in split(search, node, masks, times, node.high)]
        ordered = sorted((part for part in parts if part is not None), key=lambda part: part[1].least)
        for place, part in enumerate(ordered):
            again = part if self.below == below else propagate(search, part[0], self.below)
            if again is None:
                continue
            try:
                self._visit(search, *again)
            except Stopped:
                self.open = min([self.open, *(rest[1].least for rest in ordered[place + 1 :])])
                raise


@dataclass(slots=True)
class Leanest:
    """Looks for the fewest GPUs among plans no longer than a given one.

    Attributes:
        length: longest plan of interest.
    """

    length: int
    budget: Budget
    best: Found | None = None

    def run(self, search: Combination) -> None:
        """Searches one combination of chains.

        Raises:
            Stopped: the budget is spent.
        """
        start = search.root()
        root = None if start is None else self._narrowed(search, start)
        if root is not None:
            self._visit(search, root)

    def _visit(self, search: Combination, node: Node) -> None:
        self.budget.spend()
        each = tuple(chain.gpus[low] for chain, low in zip(search.chains, node.low, strict=True))
        if self.best is not None and sum(each) >= self.best.gpus[0]:
            return
        times = search.times(node, node.low)
        masks = search.overlaps(node, times)
        if times.least <= self.length:
            columns = search.columns(node.low, masks)
            if columns is not None:
                self.best = search.found(node.low, times, columns)
                return
            parts = split(search, node, masks, times, node.low)
        else:
            parts = halves(node)[::-1] or split(search, node, masks, times, node.low)
        for part in parts:
            narrowed = self._narrowed(search, part)
            if narrowed is not None:
                self._visit(search, narrowed)

    def _narrowed(self, search: Combination, node: Node) -> Node | None:
        """The node without options that would need more GPUs in total than the leanest plan so far."""
        while True:
            narrowed = propagate(search, node, self.length + 1)
            if narrowed is None or self.best is None:
                return narrowed and narrowed[0]
            node = narrowed[0]
            gpus = [chain.gpus for chain in search.chains]
            spare = self.best.gpus[0] - 1 - sum(each[low] for each, low in zip(gpus, node.low, strict=True))
            if spare < 0:
                return None
            high = list(node.high)
            for i in range(search.size):
                while gpus[i][high[i]] - gpus[i][node.low[i]] > spare:
                    high[i] -= 1
            if tuple(high) == node.high:
                return node
            node = Node(node.low, tuple(high), node.before, node.above, node.apart)


def combinations_in_order(instance: Instance, layout: Layout = Layout.ANY) -> list[tuple[int, Combination]]:
    """(lower bound, search) of every choice of chains that allows ``layout``, those with the smallest bound first."""
    found: list[tuple[int, int, Combination]] = []
    for place, chains in enumerate(combinations_of(instance)):
        search = Combination(instance, chains, layout)
        root = search.root()
        if root is not None:
            found.append((search.times(root, root.high).least, place, search))
    return [(bound, search) for bound, _, search in sorted(found, key=lambda one: one[:2])]


def tidied(
    instance: Instance,
    options: tuple[Option, ...],
    starts: Sequence[int],
    ends: Sequence[int],
    columns: tuple[dict[int, int], ...],
) -> Found:
    """A plan with its tasks at the earliest times that its order on shared GPUs allows."""
    search = Combination(instance, tuple(Chain.of((option,)) for option in options))
    node = search.root()
    assert node is not None
    for i, j in sorted(search.pairs(), key=lambda pair: min(starts[pair[0]], starts[pair[1]])):
        if meet(options, columns, i, j):
            first, then = (i, j) if ends[i] <= starts[j] else (j, i)
            if not node.before[then] >> first & 1:
                node = in_order(node, first, then)
                assert node is not None
    times = search.times(node, node.low)
    return search.found(node.low, times, columns)


def meet(options: Sequence[Option], columns: Sequence[dict[int, int]], i: int, j: int) -> bool:
    """Whether two tasks share a GPU."""
    widths = dict(options[i].widths), dict(options[j].widths)
    return any(
        columns[i][pool] < columns[j][pool] + widths[1][pool] and columns[j][pool] < columns[i][pool] + widths[0][pool]
        for pool in columns[i]
        if pool in columns[j]
    )


SIZES = (4, 5, 6)
"""Tasks freed at a time."""

NODES = 150
"""Nodes for one neighbourhood."""


def improved(search: Combination, found: Found, budget: Budget) -> Found:
    """A plan that no neighbourhood makes shorter, or the best when the budget was spent.

    Args:
        search: the choice of chains that ``found`` is of.
        found: where to start.
        budget: asked whether to stop; its nodes are not spent.
    """
    for size in SIZES:
        again = size < search.size
        while again and not budget.stopped():
            again = False
            for free in _windows(found, size):
                start = around(search, found, free)
                if start is None:
                    continue
                shortest = Shortest(found.length, Budget(NODES, budget.stopped))
                try:
                    shortest.run(search, start)
                except Stopped:
                    if budget.stopped():
                        return shortest.best or found
                if shortest.best is not None:
                    found = shortest.best
                    again = True
    return found


def _windows(found: Found, size: int) -> list[frozenset[int]]:
    """Tasks next to each other by start, and by end."""
    tasks = range(len(found.starts))
    orders = (sorted(tasks, key=lambda i: (found.starts[i], i)), sorted(tasks, key=lambda i: (found.ends[i], i)))
    windows = [frozenset(order[at : at + size]) for order in orders for at in range(len(order) - size + 1)]
    return list(dict.fromkeys(windows))
