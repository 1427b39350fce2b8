"""Propagation: options that no shorter plan can have are dropped: too slow, too wide, or too costly."""

from __future__ import annotations

from callboard.autoplace.exact.combination import Combination, Node, Times
from callboard.autoplace.instance.columns import heaviest_clique


def propagate(search: Combination, node: Node, below: int) -> tuple[Node, Times] | None:
    """The node without options that no plan shorter than ``below`` can have; None when there is no such plan."""
    low, high = list(node.low), list(node.high)
    while True:
        times = search.times(node, tuple(high))
        if times.least >= below:
            return None
        before = (tuple(low), tuple(high))
        if not (
            _drop_slow(search, low, high, times, below)
            and _drop_wide(search, node, low, high)
            and _drop_costly(search, low, high, times, below)
        ):
            return None
        if before == (tuple(low), tuple(high)):
            return Node(before[0], before[1], node.before, node.above, node.apart), times
        if before[1] == tuple(high):
            # Times depend on the fastest options only, and those stayed.
            if not _drop_wide(search, node, low, high):
                return None
            if before[1] == tuple(high):
                return Node(tuple(low), tuple(high), node.before, node.above, node.apart), times


def _drop_slow(search: Combination, low: list[int], high: list[int], times: Times, below: int) -> bool:
    for i in range(search.size):
        spans = search.chains[i].spans
        most = below - 1 - times.starts[i] - times.after[i]
        while low[i] <= high[i] and spans[low[i]] > most:
            low[i] += 1
        if low[i] > high[i]:
            return False
    return True


def _drop_wide(search: Combination, node: Node, low: list[int], high: list[int]) -> bool:
    for pool, members in enumerate(search.in_pool):
        widths, capacity = search.widths[pool], search.instance.capacity[pool]
        least = [widths[i][low[i]] for i in range(search.size)]
        inside = sum(1 << i for i in members)
        for i in members:
            beside = node.apart[i] & inside
            most = capacity - (heaviest_clique(beside, node.apart, least) if beside else 0)
            while low[i] <= high[i] and widths[i][high[i]] > most:
                high[i] -= 1
            if low[i] > high[i]:
                return False
    return True


def _drop_costly(search: Combination, low: list[int], high: list[int], times: Times, below: int) -> bool:
    """By energy: what starts after s and is followed by r has G·(T − s − r) GPU-seconds, and no more."""
    for pool, members in enumerate(search.in_pool):
        if len(members) < 2 or any(len(search.chains[i].pools) > 1 for i in members):
            continue
        capacity = search.instance.capacity[pool]
        areas = [min(search.chains[i].areas[low[i] : high[i] + 1]) for i in members]
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
                    costs = search.chains[i].areas
                    while costs[high[i]] > most:
                        high[i] -= 1
                    while costs[low[i]] > most:
                        low[i] += 1
    return True
