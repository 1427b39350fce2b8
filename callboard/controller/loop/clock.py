"""The controller's wall clock in milliseconds, which never goes back and never jumps."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Wall time at the start, carried on by the monotonic clock.

    A wall clock that is set back or forward while the controller runs would end leases and timeouts too late or all
    at once; durations are what the scheduler's deadlines are about. A restart takes the wall clock's time again, but
    never one before ``not_before_ms``.
    """

    def __init__(
        self,
        not_before_ms: int = 0,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """
        Args:
            not_before_ms: last time that an earlier controller journaled, in milliseconds since 1970.
            wall_ns: wall clock in nanoseconds since 1970.
            monotonic_ns: monotonic clock in nanoseconds.
        """
        self._monotonic_ns = monotonic_ns
        self._start_ns = monotonic_ns()
        self.started_ms = max(wall_ns() // 1_000_000, not_before_ms)

    def now_ms(self) -> int:
        """Milliseconds since 1970."""
        return self.started_ms + (self._monotonic_ns() - self._start_ns) // 1_000_000
