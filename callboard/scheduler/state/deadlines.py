"""The deadlines: when what is due, each a time that a record states or that follows from records."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from callboard.scheduler.records.job_records import Key

Deadline = tuple[int, str, Key]
"""(time in ms, what is due, key of the record)."""

FEW = 64
"""So many entries of the heap that no longer stand are no matter."""


class Deadlines:
    """Every time that stands, the earliest first.

    A deadline stays until its record moves on, however often it is asked for: what is due and can't be handled is not
    lost (I6).
    """

    def __init__(self) -> None:
        self._times: dict[tuple[str, Key], int] = {}
        self._heap: list[Deadline] = []
        """Every time that stands, and some that no longer do; never at the top, and never more than those that do."""
        self._paused: dict[Deadline, int] = {}
        """Deadlines whose handling raised, which is a defect, and when each is tried again. Nothing else is kept beside
        the records, and nothing is decided by it but when the defect shows again."""

    def set(self, kind: str, key: Key, at_ms: int) -> None:
        """The record of ``key`` states this time; 0: none."""
        times, heap, what = self._times, self._heap, (kind, key)
        old = times.get(what, 0)
        if old == at_ms:
            return
        if at_ms:
            times[what] = at_ms
            heappush(heap, (at_ms, kind, key))
        else:
            del times[what]
        if old:
            if self._paused:
                self._paused.pop((old, kind, key), None)
            while heap and times.get((heap[0][1], heap[0][2])) != heap[0][0]:
                heappop(heap)
            if len(heap) > 2 * len(times) + FEW:
                self._heap = [(each_ms, *each) for each, each_ms in times.items()]
                heapify(self._heap)

    def next_ms(self) -> int | None:
        """The earliest time something is due, or None."""
        if not self._paused:
            return self._heap[0][0] if self._heap else None
        first = min((deadline[0] for deadline in self.all() if deadline not in self._paused), default=None)
        again_ms = min(self._paused.values())
        return again_ms if first is None else min(first, again_ms)

    def stands(self, deadline: Deadline) -> bool:
        """Whether the record still states this time."""
        at_ms, kind, key = deadline
        return self._times.get((kind, key)) == at_ms

    def due(self, now_ms: int) -> list[Deadline]:
        """What is due at ``now_ms``, earliest first.

        What was paused comes alone, so that it fails nothing but itself should it fail again; the rest is due still.
        """
        for deadline in sorted(self._paused, key=lambda each: (self._paused[each], each[1], str(each[2]))):
            if self._paused[deadline] > now_ms:
                break
            return [deadline]
        return [deadline for deadline in self._until(now_ms) if deadline not in self._paused]

    def due_of(self, kind: str, now_ms: int) -> list[Key]:
        """Keys of what is due of one kind, earliest first."""
        if not self._heap or self._heap[0][0] > now_ms:
            return []  # the rule, and asked after every event
        return [key for _, each, key in self._until(now_ms) if each == kind]

    def pause(self, deadlines: Iterable[Deadline], again_ms: int) -> None:
        """These could not be handled: each is due again at ``again_ms``, alone."""
        self._paused.update((deadline, again_ms) for deadline in deadlines if self.stands(deadline))

    def all(self) -> list[Deadline]:
        """Every deadline, the earliest first."""
        return sorted((at_ms, kind, key) for (kind, key), at_ms in self._times.items())

    def _until(self, now_ms: int) -> list[Deadline]:
        """What is due, the earliest first: below an entry of the heap that isn't due, none is."""
        found: set[Deadline] = set()
        places = [0]
        while places:
            place = places.pop()
            if place < len(self._heap) and self._heap[place][0] <= now_ms:
                places += (2 * place + 1, 2 * place + 2)
                if self.stands(self._heap[place]):
                    found.add(self._heap[place])
        return sorted(found)
