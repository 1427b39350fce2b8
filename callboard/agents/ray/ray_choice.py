"""What Ray will choose: which devices it will give a bundle, and how to have it give certain ones.

Ray takes no wish for a device: for whole GPUs it takes the lowest ones of which nobody has a part, for a part the
fullest one that still has it, the lowest of those; bundles of one node get theirs in their order (m). So what Ray will
choose is known where it is known what is free. Other devices come about by *fillers*: bookings that take away what Ray
would choose instead, made before the group and given back after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from callboard.model.quantities import MILLI

Share = tuple[int, int]
"""(index of a device among its node's, thousandths of it)."""

Shares = tuple[Share, ...]
"""What one bundle holds: whole devices, or a part of one."""


@dataclass(frozen=True)
class Filler:
    """A booking that keeps Ray from choosing a device.

    Attributes:
        passing: given back before the group is made: it only led the filler behind it past a device of the group's.
    """

    index: int
    milli: int
    passing: bool


class DeviceTaken(Exception):
    """A device that a group must have isn't free in Ray."""

    def __init__(self, index: int) -> None:
        super().__init__(f"GPU {index} is not free")
        self.index = index


class NoOrder(Exception):
    """No order of the bundles gives each its devices."""


def amount(shares: Shares) -> int:
    """What a bundle books, in thousandths of a GPU."""
    return sum(milli for _, milli in shares)


def chosen(free: Sequence[int], milli: int) -> tuple[int, ...]:
    """The devices from which Ray takes an amount; none when it doesn't find it.

    Args:
        free: thousandths of each device that nobody has.
        milli: a part of one device, or a multiple of whole ones.
    """
    if milli >= MILLI:
        whole = [index for index, left in enumerate(free) if left >= MILLI]
        return tuple(whole[: milli // MILLI]) if len(whole) * MILLI >= milli else ()
    fitting = [(left, index) for index, left in enumerate(free) if left >= milli]
    return (min(fitting)[1],) if fitting else ()


def in_order(bundles: Sequence[Shares]) -> bool:
    """Whether Ray could give the bundles of one node their whole devices in this order."""
    indexes = [index for shares in bundles for index, milli in shares if milli >= MILLI]
    return indexes == sorted(indexes)


def _other(free: Sequence[int], bundles: Sequence[Shares]) -> int | None:
    """A device that Ray would choose instead of one that a bundle must have."""
    left = list(free)
    for shares in bundles:
        indexes = sorted(index for index, _ in shares)
        choice = chosen(left, amount(shares))
        if list(choice) != indexes:
            return min(set(choice) - set(indexes))
        for index, milli in shares:
            left[index] -= milli
    return None


def fillers(free: Sequence[int], bundles: Sequence[Shares]) -> list[Filler]:
    """What to book, in this order, so that the bundles of one node get their devices.

    Args:
        free: thousandths of each device of the node that are free in Ray.
        bundles: of the group on this node, in Ray's order.

    Raises:
        DeviceTaken: a device of theirs isn't free.
        NoOrder: whatever else is booked, Ray would give them other devices.
    """
    kept = [0] * len(free)
    for shares in bundles:
        for index, milli in shares:
            if index >= len(kept):
                raise DeviceTaken(index)
            kept[index] += milli
    for index, milli in enumerate(kept):
        if milli > free[index]:
            raise DeviceTaken(index)
    left = list(free)
    while (other := _other(left, bundles)) is not None:
        # Of what Ray would choose from, only what the group is to have of it is left; or, where that is so already, of
        # the devices it is to choose.
        fills = [other, *[index for shares in bundles for index, _ in shares]]
        loose = [index for index in fills if left[index] > kept[index]]
        if not loose:
            raise NoOrder
        left[loose[0]] = kept[loose[0]]
    return _steps(list(free), [before - after for before, after in zip(free, left, strict=True)])


def _steps(free: list[int], fills: list[int]) -> list[Filler]:
    """Bookings that take so much of each device, each led past those before which Ray would choose it."""
    steps: list[Filler] = []
    # In the order in which Ray chooses, so that what stands in the way of one is never to be filled later.
    for index in sorted((index for index, milli in enumerate(fills) if milli), key=lambda index: (free[index], index)):
        while (choice := chosen(free, fills[index])) != (index,):
            (other,) = choice
            steps.append(Filler(other, free[other], passing=True))
            free[other] = 0
        steps.append(Filler(index, fills[index], passing=False))
        free[index] -= fills[index]
    return steps
