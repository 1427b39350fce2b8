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

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from callboard.autoplace.chains import Chain, Link, combinations_of, links_of
from callboard.autoplace.columns import fit, heaviest_clique
from callboard.autoplace.tasks import Instance, Option


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


Accepts = Callable[[tuple[Option, ...], tuple[dict[int, int], ...]], bool]
"""Whether a plan's layout may be proposed."""


@dataclass(frozen=True, slots=True)
class _Node:
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

    def __init__(self, instance: Instance, chains: tuple[Chain, ...]) -> None:
        self.instance = instance
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

    def root(self) -> _Node:
        """Everything open but what the graph and the memory decide."""
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
            for j in _bits(self.meets[i]):
                if self._never_share(i, j):
                    apart[i] |= 1 << j
        high = tuple(len(chain.options) - 1 for chain in self.chains)
        return _Node((0,) * size, high, tuple(before), tuple(above), tuple(apart))

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

    def times(self, node: _Node, choice: tuple[int, ...]) -> _Times:
        """The earliest schedule with these options, and the least time after each end."""
        size, chains = self.size, self.chains
        spans = [chains[i].spans[choice[i]] for i in range(size)]
        pieces = [chains[i].pieces[choice[i]] for i in range(size)]
        order = sorted(range(size), key=lambda i: node.above[i].bit_count())
        starts = [0] * size
        ends = [0] * size
        for j in order:
            start = end = 0
            for i in _bits(node.before[j]):
                start = max(start, ends[i])
            for link in self.into[j]:
                i = link.other
                if link.barrier:
                    start = max(start, ends[i] + link.whole)
                else:
                    start = max(start, starts[i] + pieces[i] + link.piece)
                    end = max(end, ends[i] + link.piece + pieces[j])
                    if link.whole:
                        end = max(end, starts[i] + pieces[i] + link.whole + pieces[j])
            starts[j] = start
            ends[j] = max(end, start + spans[j])
        after = [0] * size
        from_start = [0] * size
        below: list[list[int]] = [[] for _ in range(size)]
        for j in range(size):
            for i in _bits(node.before[j]):
                below[i].append(j)
        for i in reversed(order):
            rest = max((from_start[j] for j in below[i]), default=0)
            whole = 0
            for link in self.out[i]:
                j = link.other
                if link.barrier:
                    rest = max(rest, link.whole + from_start[j])
                else:
                    rest = max(rest, link.piece + pieces[j] + after[j])
                    whole = max(whole, pieces[i] + link.piece + from_start[j])
                    if link.whole:
                        whole = max(whole, pieces[i] + link.whole + pieces[j] + after[j])
            after[i] = rest
            from_start[i] = max(whole, spans[i] + rest)
        least = max((starts[i] + from_start[i] for i in range(size)), default=0)
        return _Times(starts, ends, after, max(least, max(ends, default=0)))

    def propagate(self, node: _Node, below: int) -> tuple[_Node, _Times] | None:
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
                return _Node(before[0], before[1], node.before, node.above, node.apart), times
            if before[1] == tuple(high):
                # Times depend on the fastest options only, and those stayed.
                if not self._drop_wide(node, low, high):
                    return None
                if before[1] == tuple(high):
                    return _Node(tuple(low), tuple(high), node.before, node.above, node.apart), times

    def _drop_slow(self, low: list[int], high: list[int], times: _Times, below: int) -> bool:
        for i in range(self.size):
            spans = self.chains[i].spans
            most = below - 1 - times.starts[i] - times.after[i]
            while low[i] <= high[i] and spans[low[i]] > most:
                low[i] += 1
            if low[i] > high[i]:
                return False
        return True

    def _drop_wide(self, node: _Node, low: list[int], high: list[int]) -> bool:
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
            areas = {i: min(self.chains[i].areas[low[i] : high[i] + 1]) for i in members}
            heads = sorted({times.starts[i] for i in members})
            tails = sorted({times.after[i] for i in members})
            for head in heads:
                for tail in tails:
                    inside = [i for i in members if times.starts[i] >= head and times.after[i] >= tail]
                    if len(inside) < 2:
                        break
                    slack = capacity * (below - 1 - head - tail) - sum(areas[i] for i in inside)
                    if slack < 0:
                        return False
                    for i in inside:
                        most = slack + areas[i]
                        costs = self.chains[i].areas
                        while costs[high[i]] > most:
                            high[i] -= 1
                        while costs[low[i]] > most:
                            low[i] += 1
        return True

    # ---- solutions ----

    def overlaps(self, node: _Node, times: _Times) -> tuple[int, ...]:
        """Pairs that must not share a GPU in this schedule: those apart, and those that overlap in time."""
        masks = list(node.apart)
        for i in range(self.size):
            for j in _bits(self.meets[i] & ~masks[i]):
                if times.starts[i] < times.ends[j] and times.starts[j] < times.ends[i]:
                    masks[i] |= 1 << j
                    masks[j] |= 1 << i
        return tuple(masks)

    def columns(self, choice: tuple[int, ...], masks: tuple[int, ...]) -> tuple[dict[int, int], ...] | None:
        """First GPUs by task and pool; None when the tasks don't fit."""
        found: list[dict[int, int]] = [{} for _ in range(self.size)]
        for pool, members in enumerate(self.in_pool):
            widths = [self.widths[pool][i][choice[i]] for i in range(self.size)]
            capacity = self.instance.capacity[pool]
            if heaviest_clique(sum(1 << i for i in members), masks, widths) > capacity:
                return None
            limit = self.instance.memory[pool]
            holds = None if limit is None else self._memory_rule(limit)
            placed = fit(members, masks, widths, capacity, holds)
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

    def split(self, node: _Node, masks: tuple[int, ...], times: _Times, choice: tuple[int, ...]) -> list[_Node]:
        """The node in parts: by a pair that overlaps, or by a range of options."""
        pair = self._worst_pair(node, masks, times, choice)
        if pair is not None:
            i, j = pair
            return [
                part for part in (self._apart(node, i, j), self._ordered(node, i, j), self._ordered(node, j, i)) if part
            ]
        return self._halves(node)

    def _worst_pair(
        self, node: _Node, masks: tuple[int, ...], times: _Times, choice: tuple[int, ...]
    ) -> tuple[int, int] | None:
        worst: tuple[int, int] | None = None
        most = -1
        for i in range(self.size):
            for j in _bits(masks[i] & ~node.apart[i]):
                if j < i:
                    continue
                both = min(times.ends[i], times.ends[j]) - max(times.starts[i], times.starts[j])
                weight = both * (self.chains[i].gpus[choice[i]] + self.chains[j].gpus[choice[j]])
                if weight > most:
                    worst, most = (i, j), weight
        return worst

    def _apart(self, node: _Node, i: int, j: int) -> _Node:
        apart = list(node.apart)
        apart[i] |= 1 << j
        apart[j] |= 1 << i
        return _Node(node.low, node.high, node.before, node.above, tuple(apart))

    def _ordered(self, node: _Node, i: int, j: int) -> _Node | None:
        """i ends before j starts; so does all that ends no later than i, before all that starts no sooner than j."""
        if node.above[i] >> j & 1:
            return None
        sooner = node.above[i] | 1 << i
        before, above = list(node.before), list(node.above)
        for later in range(self.size):
            if later == j or node.above[later] >> j & 1:
                before[later] |= sooner
                above[later] |= sooner
        return _Node(node.low, node.high, tuple(before), tuple(above), node.apart)

    def _halves(self, node: _Node) -> list[_Node]:
        widest = max(range(self.size), key=lambda i: node.high[i] - node.low[i])
        low, high = node.low[widest], node.high[widest]
        if low == high:
            return []
        middle = (low + high) // 2
        upper = (*node.low[:widest], middle + 1, *node.low[widest + 1 :])
        lower = (*node.high[:widest], middle, *node.high[widest + 1 :])
        return [
            _Node(upper, node.high, node.before, node.above, node.apart),
            _Node(node.low, lower, node.before, node.above, node.apart),
        ]


@dataclass(slots=True)
class Shortest:
    """Looks for the shortest plan.

    Attributes:
        below: only shorter plans are of interest; falls with each one found.
        budget: nodes and interruption.
        best: the shortest so far.
        on_found: told of each.
    """

    below: int
    budget: Budget
    best: Found | None = None
    on_found: Callable[[Found], None] = lambda found: None  # noqa: ARG005

    def run(self, search: Combination) -> None:
        """Searches one combination of chains.

        Raises:
            Stopped: the budget is spent.
        """
        root = search.propagate(search.root(), self.below)
        if root is not None:
            self._visit(search, *root)

    def _visit(self, search: Combination, node: _Node, times: _Times) -> None:
        self.budget.spend()
        masks = search.overlaps(node, times)
        columns = search.columns(node.high, masks)
        if columns is not None:
            self.best = search.found(node.high, times, columns)
            self.below = self.best.length
            self.on_found(self.best)
            return
        parts = [search.propagate(part, self.below) for part in search.split(node, masks, times, node.high)]
        for part in sorted((part for part in parts if part is not None), key=lambda part: part[1].least):
            if part[1].least < self.below:
                again = search.propagate(part[0], self.below)
                if again is not None:
                    self._visit(search, *again)


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
        root = self._narrowed(search, search.root())
        if root is not None:
            self._visit(search, root)

    def _visit(self, search: Combination, node: _Node) -> None:
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
            parts = search._halves(node)[::-1] or search.split(node, masks, times, node.low)
        for part in parts:
            narrowed = self._narrowed(search, part)
            if narrowed is not None:
                self._visit(search, narrowed)

    def _narrowed(self, search: Combination, node: _Node) -> _Node | None:
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
            node = _Node(node.low, tuple(high), node.before, node.above, node.apart)


def combinations_in_order(instance: Instance) -> list[Combination]:
    """Every choice of chains, those with the smallest bound first."""
    searches = [Combination(instance, chains) for chains in combinations_of(instance)]
    bounds = []
    for place, search in enumerate(searches):
        root = search.root()
        bounds.append((search.times(root, root.high).least, place))
    return [searches[place] for _, place in sorted(bounds)]


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def links(search: Combination) -> tuple[list[list[Link]], list[list[Link]]]:
    """(into, out of) each task."""
    return search.into, search.out
