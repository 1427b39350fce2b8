"""Growing pauses between tries."""

from __future__ import annotations

from collections.abc import Callable


class Backoff:
    """Pauses that double from the first to the longest."""

    def __init__(
        self, first_s: float, longest_s: float, *, uniform: Callable[[float, float], float] | None = None
    ) -> None:
        """
        Args:
            first_s: the first pause, in seconds.
            longest_s: no pause is longer, in seconds.
            uniform: shortens each pause by up to half, by chance, so that those who lost the same peer at one time
                don't come back to it as one; None: pauses are as they are.
        """
        self._first_s = first_s
        self._longest_s = longest_s
        self._uniform = uniform
        self._next_s = first_s

    def next_s(self, longest_s: float | None = None) -> float:
        """The next pause, in seconds.

        Args:
            longest_s: another bound for this pause, because of how this try failed.
        """
        pause_s = min(self._next_s, self._longest_s if longest_s is None else longest_s)
        self._next_s = pause_s * 2
        return pause_s if self._uniform is None else pause_s * self._uniform(0.5, 1.0)

    def reset(self) -> None:
        """A try succeeded: the next pause is the first again."""
        self._next_s = self._first_s
