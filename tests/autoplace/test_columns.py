"""Do ranges lie side by side whenever they can, and is that decided quickly where most positions are useless?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callboard.autoplace.instance import columns
from callboard.autoplace.instance.columns import TooMany, fit

Side = tuple[int, list[int], list[int]]


@st.composite
def sides(draw: st.DrawFn) -> Side:
    """(capacity, widths, masks) of a few ranges."""
    capacity = draw(st.integers(2, 12))
    size = draw(st.integers(1, 6))
    widths = [draw(st.integers(1, capacity)) for _ in range(size)]
    masks = [0] * size
    for j in range(size):
        for i in range(j):
            if draw(st.integers(0, 2)):
                masks[i] |= 1 << j
                masks[j] |= 1 << i
    return capacity, widths, masks


def fits(capacity: int, widths: Sequence[int], masks: Sequence[int]) -> bool:
    """Whether some order from left to right fits, each range directly behind what it must not overlap."""
    for order in permutations(range(len(widths))):
        ends: dict[int, int] = {}
        for i in order:
            ends[i] = widths[i] + max([end for other, end in ends.items() if masks[i] >> other & 1], default=0)
        if max(ends.values()) <= capacity:
            return True
    return False


def holds(placed: dict[int, int], capacity: int, widths: Sequence[int], masks: Sequence[int]) -> bool:
    """Whether these ranges are inside the pool and keep apart."""
    inside = all(0 <= at <= capacity - widths[i] for i, at in placed.items())
    return inside and all(
        placed[i] + widths[i] <= placed[j] or placed[j] + widths[j] <= placed[i]
        for i in placed
        for j in placed
        if i < j and masks[i] >> j & 1
    )


@pytest.mark.parametrize("positions", [0, 10, 500])
def test_a_fit_is_found_exactly_when_there_is_one(monkeypatch: pytest.MonkeyPatch, positions: int) -> None:
    monkeypatch.setattr(columns, "FEW_STEPS", positions)

    @given(sides())
    @settings(max_examples=200, deadline=None, database=None)
    def agree(side: Side) -> None:
        capacity, widths, masks = side
        placed = fit(range(len(widths)), masks, widths, capacity)
        assert (placed is not None) == fits(capacity, widths, masks)
        if placed is not None:
            assert sorted(placed) == list(range(len(widths)))
            assert holds(placed, capacity, widths, masks)

    agree()


def test_positions_alone_give_up_where_pairs_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    # A cycle of seven neighbours: no two neighbours are wider than the pool, and yet the odd one has no side left.
    widths, capacity = [4, 4, 4, 4, 4, 4, 4], 11
    masks = [1 << (i + 1) % 7 | 1 << (i - 1) % 7 for i in range(7)]
    assert fit(range(7), masks, widths, 12) is not None
    assert fit(range(7), masks, widths, capacity) is None
    assert fit(range(7), masks, widths, capacity, holds=lambda tasks: True) is None
    monkeypatch.setattr(columns, "MOST_STEPS_WITH_MEMORY", 100)
    with pytest.raises(TooMany):
        fit(range(7), masks, widths, 12, holds=lambda tasks: len(list(tasks)) < 3)
