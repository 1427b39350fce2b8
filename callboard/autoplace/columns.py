"""Do rectangles fit side by side? Contiguous GPU ranges for tasks of which some must not overlap.

Ranges can always be pushed to the left until each starts at GPU 0 or at the end of another (normal patterns, Herz
1972), so trying those positions in ascending order is exhaustive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Masks = Sequence[int]
"""Bit j of entry i: tasks i and j must not overlap."""


def heaviest_clique(members: int, apart: Masks, weights: Sequence[int]) -> int:
    """Largest total weight of tasks out of the bit set ``members`` that are pairwise apart."""
    best = 0

    def grow(candidates: int, weight: int, rest: int) -> None:
        nonlocal best
        best = max(best, weight)
        while candidates and weight + rest > best:
            low = candidates & -candidates
            i = low.bit_length() - 1
            candidates ^= low
            rest -= weights[i]
            inner = candidates & apart[i]
            grow(inner, weight + weights[i], _weight(inner, weights))

    grow(members, 0, _weight(members, weights))
    return best


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
    """
    placed: dict[int, int] = {}

    def covers_well(task: int, start: int) -> bool:
        if holds is None:
            return True
        # What covers a GPU changes only where a range starts: those inside the new range, and its own first GPU.
        points = {start} | {at for at in placed.values() if start <= at < start + widths[task]}
        return all(
            holds([task, *(other for other, at in placed.items() if at <= point < at + widths[other])])
            for point in points
        )

    def place(rest: tuple[int, ...], last: int) -> bool:
        if not rest:
            return True
        starts = sorted({0} | {at + widths[other] for other, at in placed.items()})
        for start in starts:
            if start < last:
                continue
            for task in rest:
                if start + widths[task] > capacity or not _free(task, start, placed, apart, widths):
                    continue
                if not covers_well(task, start):
                    continue
                placed[task] = start
                if place(tuple(other for other in rest if other != task), start):
                    return True
                del placed[task]
        return False

    return placed if place(tuple(members), 0) else None


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
