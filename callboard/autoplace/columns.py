"""Do rectangles fit side by side? Contiguous GPU ranges for tasks of which some must not overlap.

Ranges can always be pushed to the left until each starts at GPU 0 or at the end of another (normal patterns, Herz
1972), so trying those positions in ascending order is exhaustive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

MOST_STEPS = 20_000
"""Positions tried before giving up; what fits is mostly found in a few dozen."""

Masks = Sequence[int]
"""Bit j of entry i: tasks i and j must not overlap."""


def heaviest_clique(members: int, apart: Masks, weights: Sequence[int]) -> int:
    """Largest total weight of tasks out of the bit set ``members`` that are pairwise apart."""
    if not members & (members - 1):
        return weights[members.bit_length() - 1] if members else 0
    best = 0

    def grow(candidates: int, weight: int) -> None:
        nonlocal best
        best = max(best, weight)
        while candidates and weight + _weight(candidates, weights) > best:
            low = candidates & -candidates
            i = low.bit_length() - 1
            candidates ^= low
            grow(candidates & apart[i], weight + weights[i])

    grow(members, 0)
    return best


class TooMany(Exception):
    """Too many positions were tried for an answer: neither a fit nor its impossibility is known."""


def fit(
    members: Sequence[int],
    apart: Masks,
    widths: Sequence[int],
    capacity: int,
    holds: Callable[[Sequence[int]], bool] | None = None,
) -> dict[int, int] | None:
    """A first GPU for each task, the leftmost in the order of the tasks; None when they don't fit.

    Args:
        members: indices of the tasks to place, in the order that breaks ties.
        apart: which must not overlap.
        widths: GPUs by task.
        capacity: GPUs of the pool.
        holds: whether the tasks that cover one GPU together fit its memory; None: always.

    Raises:
        TooMany: after :data:`MOST_STEPS` positions.
    """
    placed: dict[int, int] = {}
    # Tasks that nothing keeps apart don't see each other: each knot of them is placed for itself.
    knots = [tuple(members)] if holds is not None else _knots(members, apart)
    for knot in knots:
        found = _Fitting(apart, widths, capacity, holds).place(knot)
        if found is None:
            return None
        placed |= found
    return placed


class _Fitting:
    """Tries the normal patterns of some tasks, leftmost first."""

    def __init__(
        self, apart: Masks, widths: Sequence[int], capacity: int, holds: Callable[[Sequence[int]], bool] | None
    ) -> None:
        self.apart = apart
        self.widths = widths
        self.capacity = capacity
        self.holds = holds
        self.placed: dict[int, int] = {}
        self.steps = 0

    def place(self, rest: tuple[int, ...], last: int = 0) -> dict[int, int] | None:
        """The placed tasks with ``rest`` beside them, none of these left of ``last``."""
        if not rest:
            return self.placed
        starts = sorted({0} | {at + self.widths[other] for other, at in self.placed.items()})
        for start in starts:
            for task in rest if start >= last else ():
                self.steps += 1
                if self.steps > MOST_STEPS:
                    raise TooMany
                if not self._fits(task, start):
                    continue
                self.placed[task] = start
                if self.place(tuple(other for other in rest if other != task), start) is not None:
                    return self.placed
                del self.placed[task]
        return None

    def _fits(self, task: int, start: int) -> bool:
        end = start + self.widths[task]
        if end > self.capacity or not _free(task, start, self.placed, self.apart, self.widths):
            return False
        if self.holds is None:
            return True
        # What covers a GPU changes only where a range starts: those inside the new range, and its own first GPU.
        points = {start} | {at for at in self.placed.values() if start <= at < end}
        return all(
            self.holds([task, *(o for o, at in self.placed.items() if at <= point < at + self.widths[o])])
            for point in points
        )


def _knots(members: Sequence[int], apart: Masks) -> list[tuple[int, ...]]:
    """Members in groups that are connected by being apart."""
    inside = sum(1 << task for task in members)
    left = list(members)
    knots = []
    while left:
        reached, edge = 0, 1 << left[0]
        while edge:
            reached |= edge
            wider = 0
            for task in left:
                if edge >> task & 1:
                    wider |= apart[task] & inside
            edge = wider & ~reached
        knots.append(tuple(task for task in left if reached >> task & 1))
        left = [task for task in left if not reached >> task & 1]
    return knots


def _free(task: int, start: int, placed: dict[int, int], apart: Masks, widths: Sequence[int]) -> bool:
    return not any(
        apart[task] >> other & 1 and start < at + widths[other] and at < start + widths[task]
        for other, at in placed.items()
    )


def _weight(members: int, weights: Sequence[int]) -> int:
    total = 0
    while members:
        low = members & -members
        total += weights[low.bit_length() - 1]
        members ^= low
    return total
