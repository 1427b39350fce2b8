"""Lower bounds that need no search: area, critical path, and both at once.

* *Area*: all GPU-seconds, each task in its thriftiest option, spread over all GPUs.
* *Critical path*: every task in its fastest option, GPUs without end.
* *Dual*: a plan of length T has T ≥ the length of each path and T ≥ area / G, in the *same* options. For every
  0 ≤ λ ≤ 1: T ≥ λ · path + (1 − λ) · area / G, and the least right-hand side over all options is found task by task.
* *Destructive*: the shortest length that propagation alone can't refute (Klein and Scholl, 1999). It drops
  options that no shorter plan can have: too slow, too wide, or too costly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from callboard.autoplace.exact.combination import Combination, Node, Times
from callboard.autoplace.instance.columns import heaviest_clique
from callboard.autoplace.instance.tasks import Instance
from callboard.model.frozen import dataclass

SHARES = 32
"""How finely λ is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Lower bounds in units.

    Attributes:
        area: by GPU-seconds.
        path: by the critical path.
        dual: by both.
    """

    area: int
    path: int
    dual: int

    @property
    def best(self) -> int:
        return max(self.area, self.path, self.dual)


def bounds_of(instance: Instance) -> Bounds:
    """The bounds of an instance, rounded so that they stay bounds."""
    costs = [_Costs.of((o.span, o.piece, o.gpus * o.span) for o in task.options) for task in instance.tasks]
    values = [_combined(instance, costs, share / SHARES) for share in range(SHARES + 1)]
    return Bounds(area=int(values[0] - 1e-3), path=int(values[-1] - 1e-3), dual=int(max(values) - 1e-3))


def destructive(search: Combination, least: int, most: int) -> int:
    """The shortest length in [``least``, ``most``] that propagation doesn't refute for one choice of chains."""
    root = search.root()
    if root is None:
        return most
    lengths = range(least, most)
    return least + bisect_left(lengths, True, key=lambda length: propagate(search, root, length + 1) is not None)


Corner = tuple[int, int]
"""(time, GPU-time) of an option."""


@dataclass(frozen=True, slots=True)
class _Costs:
    """What the options of a task cost, but those that no weighing of time against area would choose.

    Attributes:
        spans: by shortest span.
        pieces: by time of a piece.
        area: least GPU-time of all.
    """

    spans: Sequence[Corner]
    pieces: Sequence[Corner]
    area: int

    @classmethod
    def of(cls, options: Iterable[tuple[int, int, int]]) -> _Costs:
        """The costs of options, each as (span, piece, GPU-time)."""
        known = list(options)
        return cls(
            spans=corners((span, area) for span, _, area in known),
            pieces=corners((piece, area) for _, piece, area in known),
            area=min(area for _, _, area in known),
        )


def corners(points: Iterable[Corner]) -> list[Corner]:
    """The points that are least for some λ · time + (1 − λ) · area, 0 ≤ λ ≤ 1: the lower left of their convex hull."""
    found: list[Corner] = []
    for point in sorted(set(points)):
        if found and point[1] >= found[-1][1]:
            continue
        while len(found) > 1 and not _turns_left(found[-2], found[-1], point):
            found.pop()
        found.append(point)
    return found


def _turns_left(one: Corner, two: Corner, three: Corner) -> bool:
    return (two[0] - one[0]) * (three[1] - one[1]) > (two[1] - one[1]) * (three[0] - one[0])


def _combined(instance: Instance, costs: Sequence[_Costs], share: float) -> float:
    """λ · path + (1 − λ) · area / G at λ = ``share``, the options chosen task by task."""
    capacity = sum(instance.capacity)
    rate = (1 - share) / capacity if capacity else 0.0

    def least(options: Sequence[Corner]) -> float:
        return min(share * time + rate * area for time, area in options)

    alone = [rate * cost.area for cost in costs]
    spans = [least(cost.spans) - base for cost, base in zip(costs, alone, strict=True)]
    pieces = [least(cost.pieces) - base for cost, base in zip(costs, alone, strict=True)]
    starts = [0.0] * len(alone)
    ends = list(spans)
    for j in sorted(range(len(alone)), key=lambda j: sum(j in reach for reach in instance.reach)):
        for arc in instance.arcs:
            if arc.target == j:
                i = arc.source
                starts[j] = max(starts[j], ends[i] if arc.barrier else starts[i] + pieces[i])
                ends[j] = max(ends[j], 0.0 if arc.barrier else ends[i] + pieces[j])
        ends[j] = max(ends[j], starts[j] + spans[j])
    return max(ends) + sum(alone)


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
