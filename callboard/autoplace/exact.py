"""Which plan is best? Branch and bound over who shares with whom in which order, then over GPU counts.

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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import add

from callboard.autoplace.chains import Chain, combinations_of, links_of
from callboard.autoplace.columns import TooMany, fit, heaviest_clique
from callboard.autoplace.problem import Layout
from callboard.autoplace.tasks import Instance, Option
from callboard.autoplace.timing import bits_of, earliest, remaining


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan for an instance.

    Attributes:
        length: end of its last task, in units.
        options: one per task.
        starts: earliest starts.
        ends: ends.
        columns: first GPU by task and pool index.
    """

    length: int
    options: tuple[Option, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    columns: tuple[dict[int, int], ...]

    @property
    def gpus(self) -> tuple[int, ...]:
        """The tie breaker: GPUs in total, then by task."""
        each = tuple(option.gpus for option in self.options)
        return (sum(each), *each)


class Stopped(Exception):
    """The search was stopped before it was done: by its caller or by its number of nodes."""


@dataclass(slots=True)
class Budget:
    """How much may be spent.

    Attributes:
        nodes: nodes left; None: any number.
        stopped: asked at every node.
    """

    nodes: int | None = None
    stopped: Callable[[], bool] = lambda: False

    def spend(self) -> None:
        """One node.

        Raises:
            Stopped: nothing is left.
        """
        if self.nodes is not None:
            if self.nodes <= 0:
                raise Stopped
            self.nodes -= 1
        if self.stopped():
            raise Stopped


@dataclass(frozen=True, slots=True)
class Node:
    """What is known: option ranges, and pairs as bit sets (``before[j]`` has i when i ends before j starts)."""

    low: tuple[int, ...]
    high: tuple[int, ...]
    before: tuple[int, ...]
    above: tuple[int, ...]  # above[j] has i when i starts, and ends, before j does
    apart: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Times:
    """Bounds with the fastest options of a node."""

    starts: list[int]
    ends: list[int]
    after: list[int]  # least time from the end of a task to the end of all
    least: int


class Combination:
    """The search over one choice of chains."""

    def __init__(self, instance: Instance, chains: tuple[Chain, ...], layout: Layout = Layout.ANY) -> None:
        self.instance = instance
        self.layout = layout
        self.unsure = False  # a layout was given up that might have been one: nothing is proved any more
        self.chains = chains
        self.size = len(chains)
        first = tuple(chain.options[0] for chain in chains)
        self.into, self.out = links_of(instance.arcs, first)
        self.in_pool = [
            [i for i in range(self.size) if pool in chains[i].pools] for pool in range(len(instance.capacity))
        ]
        self.widths = [
            [tuple(dict(option.widths).get(pool, 0) for option in chain.options) for chain in chains]
            for pool in range(len(instance.capacity))
        ]
        self.meets = [
            sum(1 << j for j in range(self.size) if j != i and set(chains[i].pools) & set(chains[j].pools))
            for i in range(self.size)
        ]

    def root(self) -> Node | None:
        """Everything open but what the graph, the memory and the layout decide; None when that is impossible."""
        if self.layout is Layout.COLLOCATED and not self._may_collocate():
            return None
        size = self.size
        above = [0] * size
        before = [0] * size
        for i in range(size):
            for j in self.instance.reach[i]:
                above[j] |= 1 << i
            for j in self.instance.ends_before[i]:
                before[j] |= 1 << i
        apart = [0] * size
        for i in range(size):
            for j in bits_of(self.meets[i]):
                if self.layout is Layout.DISAGGREGATED or self._never_share(i, j):
                    apart[i] |= 1 << j
        high = tuple(len(chain.options) - 1 for chain in self.chains)
        return Node((0,) * size, high, tuple(before), tuple(above), tuple(apart))

    def _may_collocate(self) -> bool:
        """Whether the tasks with GPUs can all cover GPU 0 of one pool."""
        members = [i for i in range(self.size) if self.chains[i].pools]
        if len({self.chains[i].pools for i in members}) > 1 or any(len(self.chains[i].pools) > 1 for i in members):
            return False
        if len(members) > 1 and any(self.chains[i].alone for i in members):
            return False
        limit = self.instance.memory[self.chains[members[0]].pools[0]] if members else None
        return limit is None or self._memory_rule(limit)(members)

    def _never_share(self, i: int, j: int) -> bool:
        one, other = self.chains[i], self.chains[j]
        if one.alone or other.alone:
            return True
        common = set(one.pools) & set(other.pools)
        return any(
            limit is not None and max(one.peak + other.resident, other.peak + one.resident) > limit
            for limit in (self.instance.memory[pool] for pool in common)
        )

    # ---- bounds ----

    def times(self, node: Node, choice: tuple[int, ...]) -> _Times:
        """The earliest schedule with these options, and the least time after each end."""
        size, chains = self.size, self.chains
        spans = [chain.spans[c] for chain, c in zip(chains, choice, strict=True)]
        pieces = [chain.pieces[c] for chain, c in zip(chains, choice, strict=True)]
        order = sorted(range(size), key=[above.bit_count() for above in node.above].__getitem__)
        starts, ends = earliest(order, spans, pieces, self.into, node.before)
        after, from_start = remaining(order, spans, pieces, self.out, node.before)
        least = max(map(add, starts, from_start))
        return _Times(starts, ends, after, max(least, *ends))

    def propagate(self, node: Node, below: int) -> tuple[Node, _Times] | None:
        """The node without options that no plan shorter than ``below`` can have; None when there is no such plan."""
        low, high = list(node.low), list(node.high)
        while True:
            times = self.times(node, tuple(high))
            if times.least >= below:
                return None
            before = (tuple(low), tuple(high))
            if not (
                self._drop_slow(low, high, times, below)
                and self._drop_wide(node, low, high)
                and self._drop_costly(low, high, times, below)
            ):
                return None
            if before == (tuple(low), tuple(high)):
                return Node(before[0], before[1], node.before, node.above, node.apart), times
            if before[1] == tuple(high):
                # Times depend on the fastest options only, and those stayed.
                if not self._drop_wide(node, low, high):
                    return None
                if before[1] == tuple(high):
                    return Node(tuple(low), tuple(high), node.before, node.above, node.apart), times

    def _drop_slow(self, low: list[int], high: list[int], times: _Times, below: int) -> bool:
        for i in range(self.size):
            spans = self.chains[i].spans
            most = below - 1 - times.starts[i] - times.after[i]
            while low[i] <= high[i] and spans[low[i]] > most:
                low[i] += 1
            if low[i] > high[i]:
                return False
        return True

    def _drop_wide(self, node: Node, low: list[int], high: list[int]) -> bool:
        for pool, members in enumerate(self.in_pool):
            widths, capacity = self.widths[pool], self.instance.capacity[pool]
            least = [widths[i][low[i]] for i in range(self.size)]
            inside = sum(1 << i for i in members)
            for i in members:
                beside = node.apart[i] & inside
                most = capacity - (heaviest_clique(beside, node.apart, least) if beside else 0)
                while low[i] <= high[i] and widths[i][high[i]] > most:
                    high[i] -= 1
                if low[i] > high[i]:
                    return False
        return True

    def _drop_costly(self, low: list[int], high: list[int], times: _Times, below: int) -> bool:
        """By energy: what starts after s and is followed by r has G·(T − s − r) GPU-seconds, and no more."""
        for pool, members in enumerate(self.in_pool):
            if len(members) < 2 or any(len(self.chains[i].pools) > 1 for i in members):
                continue
            capacity = self.instance.capacity[pool]
            areas = [min(self.chains[i].areas[low[i] : high[i] + 1]) for i in members]
            starts = [times.starts[i] for i in members]
            after = [times.after[i] for i in members]
            for head in sorted(set(starts)):
                late = [k for k, start in enumerate(starts) if start >= head]
                for tail in sorted({after[k] for k in late}):
                    inside = [k for k in late if after[k] >= tail]
                    if len(inside) < 2:
                        break
                    slack = capacity * (below - 1 - head - tail) - sum([areas[k] for k in inside])
                    if slack < 0:
                        return False
                    for k in inside:
                        i, most = members[k], slack + areas[k]
                        costs = self.chains[i].areas
                        while costs[high[i]] > most:
                            high[i] -= 1
                        while costs[low[i]] > most:
                            low[i] += 1
        return True

    # ---- solutions ----

    def overlaps(self, node: Node, times: _Times) -> tuple[int, ...]:
        """Pairs that must not share a GPU in this schedule: those apart, and those that overlap in time."""
        masks = list(node.apart)
        for i in range(self.size):
            for j in bits_of(self.meets[i] & ~masks[i]):
                if times.starts[i] < times.ends[j] and times.starts[j] < times.ends[i]:
                    masks[i] |= 1 << j
                    masks[j] |= 1 << i
        return tuple(masks)

    def columns(self, choice: tuple[int, ...], masks: tuple[int, ...]) -> tuple[dict[int, int], ...] | None:
        """First GPUs by task and pool; None when the tasks don't fit."""
        if self.layout is Layout.COLLOCATED and any(masks):
            return None
        found: list[dict[int, int]] = [{} for _ in range(self.size)]
        for pool, members in enumerate(self.in_pool):
            widths = [self.widths[pool][i][choice[i]] for i in range(self.size)]
            capacity = self.instance.capacity[pool]
            if heaviest_clique(sum(1 << i for i in members), masks, widths) > capacity:
                return None
            limit = self.instance.memory[pool]
            holds = None if limit is None else self._memory_rule(limit)
            try:
                placed = fit(members, masks, widths, capacity, holds)
            except TooMany:
                self.unsure = True
                return None
            if placed is None:
                return None
            for i, column in placed.items():
                found[i][pool] = column
        return tuple(found)

    def _memory_rule(self, limit: int) -> Callable[[Iterable[int]], bool]:
        def holds(tasks: Iterable[int]) -> bool:
            together = list(tasks)
            resident = sum(self.chains[i].resident for i in together)
            return all(self.chains[i].peak + resident - self.chains[i].resident <= limit for i in together)

        return holds

    def found(self, choice: tuple[int, ...], times: _Times, columns: tuple[dict[int, int], ...]) -> Found:
        """The plan of these options at their earliest times."""
        return Found(
            length=max(times.ends),
            options=tuple(chain.options[c] for chain, c in zip(self.chains, choice, strict=True)),
            starts=tuple(times.starts),
            ends=tuple(times.ends),
            columns=columns,
        )

    # ---- branching ----

    def pairs(self) -> list[tuple[int, int]]:
        """Pairs that could meet on a GPU."""
        return [(i, j) for i in range(self.size) for j in bits_of(self.meets[i]) if i < j]

    def forced(self, apart: tuple[int, int], ordered: tuple[int, int]) -> Node | None:
        """The root with one pair apart and another in this order; None when that is impossible."""
        root = self.root()
        if root is None or root.apart[ordered[0]] >> ordered[1] & 1:
            return None
        return self.ordered(self._apart(root, *apart), *ordered)

    def around(self, found: Found, free: frozenset[int]) -> Node | None:
        """The root with every pair as in ``found``, but those inside ``free``; counts are open for all."""
        node = self.root()
        for i, j in self.pairs():
            if node is None or {i, j} <= free:
                continue
            if found.ends[i] <= found.starts[j]:
                node = node if node.before[j] >> i & 1 else self.ordered(node, i, j)
            elif found.ends[j] <= found.starts[i]:
                node = node if node.before[i] >> j & 1 else self.ordered(node, j, i)
            else:
                node = self._apart(node, i, j)
        return node

    def has(self, options: tuple[Option, ...]) -> bool:
        """Whether these options are of its chains."""
        return all(option in chain.options for option, chain in zip(options, self.chains, strict=True))

    def split(self, node: Node, masks: tuple[int, ...], times: _Times, choice: tuple[int, ...]) -> list[Node]:
        """The node in parts: by a pair that overlaps, or by a range of options."""
        pair = self._worst_pair(node, masks, times, choice)
        if pair is not None:
            i, j = pair
            orders = (self.ordered(node, i, j), self.ordered(node, j, i))
            parts = orders if self.layout is Layout.COLLOCATED else (self._apart(node, i, j), *orders)
            return [part for part in parts if part]
        return self.halves(node)

    def _worst_pair(
        self, node: Node, masks: tuple[int, ...], times: _Times, choice: tuple[int, ...]
    ) -> tuple[int, int] | None:
        worst: tuple[int, int] | None = None
        most = -1
        for i in range(self.size):
            for j in bits_of(masks[i] & ~node.apart[i]):
                if j < i:
                    continue
                both = min(times.ends[i], times.ends[j]) - max(times.starts[i], times.starts[j])
                weight = both * (self.chains[i].gpus[choice[i]] + self.chains[j].gpus[choice[j]])
                if weight > most:
                    worst, most = (i, j), weight
        return worst

    def _apart(self, node: Node, i: int, j: int) -> Node:
        apart = list(node.apart)
        apart[i] |= 1 << j
        apart[j] |= 1 << i
        return Node(node.low, node.high, node.before, node.above, tuple(apart))

    def ordered(self, node: Node, i: int, j: int) -> Node | None:
        """i ends before j starts; so does all that ends no later than i, before all that starts no sooner than j."""
        if node.above[i] >> j & 1:
            return None
        sooner = node.above[i] | 1 << i
        before, above = list(node.before), list(node.above)
        for later in range(self.size):
            if later == j or node.above[later] >> j & 1:
                before[later] |= sooner
                above[later] |= sooner
        return Node(node.low, node.high, tuple(before), tuple(above), node.apart)

    def halves(self, node: Node) -> list[Node]:
        """The node with the widest range of options in two, the wider options first; nothing if all are chosen."""
        widest = max(range(self.size), key=lambda i: node.high[i] - node.low[i])
        low, high = node.low[widest], node.high[widest]
        if low == high:
            return []
        middle = (low + high) // 2
        upper = (*node.low[:widest], middle + 1, *node.low[widest + 1 :])
        lower = (*node.high[:widest], middle, *node.high[widest + 1 :])
        return [
            Node(upper, node.high, node.before, node.above, node.apart),
            Node(node.low, lower, node.before, node.above, node.apart),
        ]


@dataclass(slots=True)
class Shortest:
    """Looks for the shortest plan.

    Attributes:
        below: only shorter plans are of interest; falls with each one found.
        budget: nodes and interruption.
        best: the shortest so far.
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
            search: the combination.
            start: only below this node of it; None: all of it.

        Raises:
            Stopped: the budget is spent.
        """
        start = start or search.root()
        root = None if start is None else search.propagate(start, self.below)
        if root is not None:
            self._visit(search, *root)

    def _visit(self, search: Combination, node: Node, times: _Times) -> None:
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
        parts = [search.propagate(part, below) for part in search.split(node, masks, times, node.high)]
        ordered = sorted((part for part in parts if part is not None), key=lambda part: part[1].least)
        for place, part in enumerate(ordered):
            again = part if self.below == below else search.propagate(part[0], self.below)
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
        budget: nodes and interruption.
        best: the leanest so far.
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
            parts = search.split(node, masks, times, node.low)
        else:
            parts = search.halves(node)[::-1] or search.split(node, masks, times, node.low)
        for part in parts:
            narrowed = self._narrowed(search, part)
            if narrowed is not None:
                self._visit(search, narrowed)

    def _narrowed(self, search: Combination, node: Node) -> Node | None:
        """The node without options that would need more GPUs in total than the leanest plan so far."""
        while True:
            narrowed = search.propagate(node, self.length + 1)
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
        common = [pool for pool in columns[i] if pool in columns[j]]
        widths = [dict(options[k].widths) for k in (i, j)]
        meet = any(
            columns[i][pool] < columns[j][pool] + widths[1][pool]
            and columns[j][pool] < columns[i][pool] + widths[0][pool]
            for pool in common
        )
        if meet:
            first, then = (i, j) if ends[i] <= starts[j] else (j, i)
            if not node.before[then] >> first & 1:
                node = search.ordered(node, first, then)
                assert node is not None
    times = search.times(node, node.low)
    return search.found(node.low, times, columns)
