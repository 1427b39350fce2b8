"""The times of tasks: their earliest starts and ends, and how much must follow, by one pass each way.

The innermost loops of the search: comparisons, since a call of ``max`` costs more than what it compares.
"""
# ruff: noqa: PLR1730, FURB136 - see above.

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from callboard.autoplace.instance.chains import Link

Links = Sequence[Sequence[Link]]


@lru_cache(maxsize=1 << 16)
def bits_of(mask: int) -> tuple[int, ...]:
    """The set bits, ascending."""
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)


def earliest(
    order: Sequence[int], spans: Sequence[int], pieces: Sequence[int], into: Links, before: Sequence[int]
) -> tuple[list[int], list[int]]:
    """(starts, ends) of every task at the earliest.

    A stream i → j: start_j ≥ start_i + p_i and end_j ≥ end_i + p_j. A barrier: start_j ≥ end_i. A transfer is a stage
    of its own between the two, with its own time for a piece and for the batch.

    Args:
        order: tasks, each after all it waits for.
        spans: shortest span of each.
        pieces: time of a piece of each.
        into: arcs into each.
        before: bit i of entry j: i ends before j starts.
    """
    starts = [0] * len(spans)
    ends = [0] * len(spans)
    for j in order:
        start = end = 0
        for i in bits_of(before[j]):
            if ends[i] > start:
                start = ends[i]
        for link in into[j]:
            i = link.other
            if link.barrier:
                if ends[i] + link.whole > start:
                    start = ends[i] + link.whole
                continue
            passed = starts[i] + pieces[i]
            if passed + link.piece > start:
                start = passed + link.piece
            last = max(ends[i] + link.piece, passed + link.whole) if link.whole else ends[i]
            if last + pieces[j] > end:
                end = last + pieces[j]
        starts[j] = start
        ends[j] = end if end > start + spans[j] else start + spans[j]
    return starts, ends


def remaining(
    order: Sequence[int], spans: Sequence[int], pieces: Sequence[int], out: Links, before: Sequence[int]
) -> tuple[list[int], list[int]]:
    """(from the end, from the start) of every task: the least time until all have ended. Arguments as above."""
    after = [0] * len(spans)
    from_start = [0] * len(spans)
    for i in reversed(order):
        # Whatever comes later in the order has written what it asks of those before it.
        rest, whole = after[i], 0
        for link in out[i]:
            j = link.other
            if link.barrier:
                if link.whole + from_start[j] > rest:
                    rest = link.whole + from_start[j]
                continue
            if link.piece + pieces[j] + after[j] > rest:
                rest = link.piece + pieces[j] + after[j]
            passing = pieces[i] + link.piece + from_start[j]
            if link.whole:
                passing = max(passing, pieces[i] + link.whole + pieces[j] + after[j])
            if passing > whole:
                whole = passing
        after[i] = rest
        from_start[i] = whole if whole > spans[i] + rest else spans[i] + rest
        for earlier in bits_of(before[i]):
            if from_start[i] > after[earlier]:
                after[earlier] = from_start[i]
    return after, from_start
