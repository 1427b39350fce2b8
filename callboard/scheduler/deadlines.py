"""What is due, and when? Times by which something must happen, each a promise of one record."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from callboard.scheduler.records import Key

Deadline = tuple[int, str, Key]
"""(time in ms, what is due, key of the record)."""


class Deadlines:
    """Every time that a record states, the earliest first.

    Records move on without telling: an entry counts only as long as its record still says so.
    """

    def __init__(self, stands: Callable[[int, str, Key], bool]) -> None:
        """
        Args:
            stands: whether the record of an entry still states that time.
        """
        self._stands = stands
        self._heap: list[Deadline] = []
        self._retries: dict[Deadline, int] = {}
        """Deadlines whose handling failed, and when each is tried again; the heap's entries of them don't count."""

    def add(self, at_ms: int, kind: str, key: Key) -> None:
        """A record states a time."""
        heapq.heappush(self._heap, (at_ms, kind, key))

    def next_ms(self) -> int | None:
        """The earliest time something is due, or None."""
        retries = [at_ms for deadline, at_ms in self._retries.items() if self._stands(*deadline)]
        while self._heap:
            deadline = self._heap[0]
            if deadline not in self._retries and self._stands(*deadline):
                return min(deadline[0], *retries) if retries else deadline[0]
            heapq.heappop(self._heap)
        return min(retries, default=None)

    def take(self, now_ms: int) -> list[Deadline]:
        """Takes out what is due at ``now_ms``, earliest first. Entries whose record moved on are left out.

        What was put back comes alone, so that it fails nothing but itself should it fail again; the rest is due still.
        """
        for deadline in sorted(self._retries, key=lambda each: (self._retries[each], each[1], str(each[2]))):
            if self._retries[deadline] > now_ms:
                break
            del self._retries[deadline]
            if self._stands(*deadline):
                return [deadline]
        found: dict[Deadline, None] = {}
        while self._heap and self._heap[0][0] <= now_ms:
            entry = heapq.heappop(self._heap)
            if entry not in self._retries and self._stands(*entry):
                found[entry] = None
        return list(found)

    def put_back(self, deadlines: Iterable[Deadline], again_ms: int) -> None:
        """What :meth:`take` took out could not be handled: it is due again at ``again_ms``, each alone."""
        self._retries.update((deadline, again_ms) for deadline in deadlines if self._stands(*deadline))
