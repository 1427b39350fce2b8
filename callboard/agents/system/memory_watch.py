"""The memory watch: which worker of the node holds the most. The one that is ended need not be the one that took it.

Ray's memory monitor ends several workers at once, small ones too; the kernel may end a small one beside a large one.
So an end for lack of memory also names who held most at that time, by what was last seen of each.
"""

from __future__ import annotations

from dataclasses import dataclass

RECENT_S = 10.0
"""What was seen longer ago is of a worker that is gone: the others are looked at twice a second. Long enough for
workers that were ended together to name each other, whichever's end is told first."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a worker was last seen to hold.

    Attributes:
        name: "job/component/rank".
        held_bytes: resident memory of its process tree.
        asked_bytes: memory that it asked for; 0: none.
        at_s: when, in seconds of the loop's clock.
    """

    name: str
    held_bytes: int
    asked_bytes: int
    at_s: float


class MemoryWatch:
    """What each worker of the node was last seen to hold."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}

    def see(self, held: Held) -> None:
        """Remember it, and forget what is no more."""
        self._held[held.name] = held
        for name in [name for name, each in self._held.items() if held.at_s - each.at_s > RECENT_S]:
            del self._held[name]

    def larger_than(self, name: str, now_s: float) -> Held | None:
        """The worker that held most, unless it is the one called ``name``."""
        recent = [held for held in self._held.values() if now_s - held.at_s <= RECENT_S]
        most = max(recent, key=lambda held: held.held_bytes, default=None)
        return None if most is None or most.name == name else most
