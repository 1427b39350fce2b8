"""The nearness of devices: which of a node's free ones are connected best.

A greedy choice from every device as the first: grown by whichever is nearest to those chosen, of those the one that is
nearest to all. With the few devices that a node has it finds the best set in all but odd machines, and costs n² · count
steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from callboard.scheduler.records.node_record import DeviceInfo

_UNKNOWN = 8
"""A distance that nobody told counts as farther than any that is."""


def nearest(devices: Sequence[DeviceInfo], free: Sequence[int], count: int) -> Sequence[int]:
    """The first ``count`` of the answer are as near to each other as can be, each to those before it, and of sets that
    are equally near the one that leaves the others nearest to each other; then the lowest. The others follow.

    Args:
        devices: of a node.
        free: indexes of those that can be taken, in order.
        count: how many are taken.
    """
    if not 0 < count < len(free) or not devices[free[0]].distances:
        return free
    far = {i: {j: _distance(devices, i, j) for j in free if j != i} for i in free}
    if len({distance for others in far.values() for distance in others.values()}) == 1:
        return free  # all are equally far from each other
    lonely = {i: sum(others.values()) for i, others in far.items()}
    best: tuple[tuple[int, int, list[int]], list[int]] | None = None
    for first in free:
        chosen, within = [first], 0
        left = dict(far[first])
        while len(chosen) < count:
            near = min(left, key=lambda index: (left[index], lonely[index], index))
            within += left.pop(near)
            chosen.append(near)
            for index in left:
                left[index] += far[near][index]
        # What is far from the chosen is near to itself: a set that is a part of its own leaves no part torn.
        rank = (within, -sum(left.values()), sorted(chosen))
        if best is None or rank < best[0]:
            best = (rank, chosen)
    assert best is not None
    return [*best[1], *(index for index in free if index not in best[1])]


def _distance(devices: Sequence[DeviceInfo], one: int, other: int) -> int:
    known = devices[one].distances
    return (known[other] if other < len(known) else 0) or _UNKNOWN
