"""What time is it? Virtual milliseconds; whatever is due next happens at once."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

EPOCH_MS = 1_800_000_000_000
"""Wall time at the beginning, in milliseconds since 1970."""


class Timer:
    """Something that will be done, unless it is cancelled."""

    __slots__ = ("do",)

    def __init__(self, do: Callable[[], None]) -> None:
        self.do: Callable[[], None] | None = do

    def cancel(self) -> None:
        """Don't do it."""
        self.do = None


class Timeline:
    """A queue of what will happen. Things due at the same time happen in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.wall_offset_ms = 0
        """How far the wall clock was set forward or back."""
        self._heap: list[tuple[int, int, Timer]] = []
        self._numbers = itertools.count()

    @property
    def wall_ms(self) -> int:
        """What the wall clock shows."""
        return EPOCH_MS + self.now_ms + self.wall_offset_ms

    def after(self, wait_ms: float, do: Callable[[], None]) -> Timer:
        """Does something in ``wait_ms``."""
        timer = Timer(do)
        heapq.heappush(self._heap, (self.now_ms + max(0, int(wait_ms)), next(self._numbers), timer))
        return timer

    def step(self, until_ms: int | None = None) -> bool:
        """Does what is due next; False when nothing is, or nothing before ``until_ms``."""
        while self._heap:
            at_ms, _, timer = self._heap[0]
            if timer.do is None:
                heapq.heappop(self._heap)
                continue
            if until_ms is not None and at_ms > until_ms:
                self.now_ms = max(self.now_ms, until_ms)
                return False
            heapq.heappop(self._heap)
            self.now_ms = max(self.now_ms, at_ms)
            do, timer.do = timer.do, None
            do()
            return True
        if until_ms is not None:
            self.now_ms = max(self.now_ms, until_ms)
        return False
