"""A node of the search: who shares with whom in which order, a range of options, and the times that follow.

A choice of one chain per task fixes the pools, the memory and who shares at all; a node of its search knows some pairs
of tasks and, per task, a range of its chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import add

from callboard.autoplace.instance.chains import Chain, links_of
from callboard.autoplace.instance.columns import TooMany, fit, heaviest_clique
from callboard.autoplace.instance.tasks import Found, Instance, Option
from callboard.autoplace.instance.timing import bits_of, earliest, remaining
from callboard.autoplace.problem.problem import Layout
from callboard.model.frozen import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """What is known: option ranges, and pairs as bit sets (``before[j]`` has i when i ends before j starts)."""

    low: tuple[int, ...]
    high: tuple[int, ...]
    before: tuple[int, ...]
    above: tuple[int, ...]  # above[j] has i when i starts, and ends, before j does
    apart: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Times:
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

    def pairs(self) -> list[tuple[int, int]]:
        """Pairs that could meet on a GPU."""
        return [(i, j) for i in range(self.size) for j in bits_of(self.meets[i]) if i < j]

    def has(self, options: tuple[Option, ...]) -> bool:
        """Whether these options are of its chains."""
        return all(option in chain.options for option, chain in zip(options, self.chains, strict=True))

    def times(self, node: Node, choice: tuple[int, ...]) -> Times:
        """The earliest schedule with these options, and the least time after each end."""
        size, chains = self.size, self.chains
        spans = [chain.spans[c] for chain, c in zip(chains, choice, strict=True)]
        pieces = [chain.pieces[c] for chain, c in zip(chains, choice, strict=True)]
        order = sorted(range(size), key=[above.bit_count() for above in node.above].__getitem__)
        starts, ends = earliest(order, spans, pieces, self.into, node.before)
        after, from_start = remaining(order, spans, pieces, self.out, node.before)
        least = max(map(add, starts, from_start))
        return Times(starts, ends, after, max(least, *ends))

    def overlaps(self, node: Node, times: Times) -> tuple[int, ...]:
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

    def found(self, choice: tuple[int, ...], times: Times, columns: tuple[dict[int, int], ...]) -> Found:
        """The plan of these options at their earliest times."""
        return Found(
            length=max(times.ends),
            options=tuple(chain.options[c] for chain, c in zip(self.chains, choice, strict=True)),
            starts=tuple(times.starts),
            ends=tuple(times.ends),
            columns=columns,
        )
