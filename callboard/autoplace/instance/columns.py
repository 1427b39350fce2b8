"""Rectangles side by side: contiguous GPU ranges for tasks of which some must not overlap.

Ranges can always be pushed to the left until each starts at GPU 0 or at the end of another (normal patterns, Herz
1972), so trying those positions in ascending order is exhaustive. What isn't found soon that way is decided over who
lies left of whom: a choice for each pair apart fits if no chain of neighbours is wider than the pool (an acyclic
orientation whose longest path is short enough; Gallai, Hasse, Roy and Vitaver for widths).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

FEW_STEPS = 500
"""Positions tried before pairs are decided instead; what fits is mostly found in a few dozen."""

MOST_STEPS = 20_000
"""Choices for pairs before giving up."""

MOST_STEPS_WITH_MEMORY = 5_000
"""Positions tried where memory counts before giving up."""

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
        TooMany: after :data:`MOST_STEPS` choices, or :data:`MOST_STEPS_WITH_MEMORY` positions.
    """
    if holds is not None:
        if fit(members, apart, widths, capacity) is None:
            return None
        return _Fitting(apart, widths, capacity, holds, MOST_STEPS_WITH_MEMORY).place(tuple(members))
    placed: dict[int, int] = {}
    # Tasks that nothing keeps apart don't see each other: each knot of them is placed for itself.
    for knot in _knots(members, apart):
        try:
            found = _Fitting(apart, widths, capacity, None, FEW_STEPS).place(knot)
        except TooMany:
            found = _Sides(knot, apart, widths, capacity).place()
        if found is None:
            return None
        placed |= found
    return placed


class _Fitting:
    """Tries the normal patterns of some tasks, leftmost first."""

    def __init__(
        self,
        apart: Masks,
        widths: Sequence[int],
        capacity: int,
        holds: Callable[[Sequence[int]], bool] | None,
        most_steps: int,
    ) -> None:
        self.apart = apart
        self.widths = widths
        self.capacity = capacity
        self.holds = holds
        self.most_steps = most_steps
        self.placed: dict[int, int] = {}
        self.steps = 0

    def place(self, rest: tuple[int, ...], last: int = 0, after: int = 0) -> dict[int, int] | None:
        """The placed tasks with ``rest`` beside them, none of these left of ``last``.

        Those that start at ``last`` itself come from place ``after`` of ``rest`` on: in another order they would be
        the same ranges again.
        """
        if not rest:
            return self.placed
        starts = sorted({0} | {at + self.widths[other] for other, at in self.placed.items()})
        for start in starts:
            for place, task in enumerate(rest) if start >= last else ():
                if start == last and place < after:
                    continue
                self.steps += 1
                if self.steps > self.most_steps:
                    raise TooMany
                if not self._fits(task, start):
                    continue
                self.placed[task] = start
                if self.place((*rest[:place], *rest[place + 1 :]), start, place) is not None:
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


class _Sides:
    """Decides for each pair apart who lies left of whom; ranges then start where the widest chain left of them ends."""

    def __init__(self, members: Sequence[int], apart: Masks, widths: Sequence[int], capacity: int) -> None:
        self.members = members
        self.widths = widths
        self.capacity = capacity
        self.pairs = [(i, j) for i in members for j in members if i < j and apart[i] >> j & 1]
        self.steps = 0

    def place(self) -> dict[int, int] | None:
        """First GPUs; None when no choice fits."""
        return self._decide(dict.fromkeys(self.members, 0), self.pairs)

    def _decide(self, left: dict[int, int], undecided: Sequence[tuple[int, int]]) -> dict[int, int] | None:
        """The ranges when bit i of ``left[j]`` says that i lies left of j, and the other pairs are open."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise TooMany
        while True:
            before, behind = self._chains(left)
            if any(before[i] + self.widths[i] + behind[i] > self.capacity for i in self.members):
                return None
            undecided = [(i, j) for i, j in undecided if not (left[i] >> j & 1 or left[j] >> i & 1)]
            room = {
                (i, j): self.capacity - before[i] - self.widths[i] - self.widths[j] - behind[j]
                for pair in undecided
                for i, j in (pair, pair[::-1])
            }
            forced = next(((i, j) for (i, j), most in room.items() if room[j, i] < 0 <= most), None)
            if forced is None:
                break
            left = self._with(left, *forced)
        if not undecided:
            return before
        i, j = min(undecided, key=lambda pair: (room[pair] + room[pair[::-1]], pair))
        if room[i, j] < 0:
            return None
        # A plan and its mirror image are the same to everybody, so the first pair is decided once for all.
        sides = [(i, j)] if not any(left.values()) else [(i, j), (j, i)]
        for one, other in sides:
            found = self._decide(self._with(left, one, other), undecided)
            if found is not None:
                return found
        return None

    def _with(self, left: dict[int, int], i: int, j: int) -> dict[int, int]:
        """``left`` with i, and all left of it, left of j and of all that j is left of."""
        sooner = left[i] | 1 << i
        return {k: mask | sooner if k == j or mask >> j & 1 else mask for k, mask in left.items()}

    def _chains(self, left: dict[int, int]) -> tuple[dict[int, int], dict[int, int]]:
        """(GPUs before, GPUs behind) each range that the widest chain of others takes."""
        order = sorted(self.members, key=lambda i: left[i].bit_count())
        before: dict[int, int] = {}
        behind = dict.fromkeys(self.members, 0)
        for j in order:
            before[j] = max([before[i] + self.widths[i] for i in self.members if left[j] >> i & 1], default=0)
        for j in reversed(order):
            for i in self.members:
                if left[j] >> i & 1:
                    behind[i] = max(behind[i], behind[j] + self.widths[j])
        return before, behind


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
