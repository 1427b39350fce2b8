"""The deadlines: when what is due, each a time that a record states or that follows from records."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from callboard.scheduler.records.job_records import Key

Deadline = tuple[int, str, Key]
"""(time in ms, what is due, key of the record)."""


class Deadlines:
    """Every time that stands, the earliest first.

    A deadline stays until its record moves on, however often it is asked for: what is due and can't be handled is not
    lost (I6).
    """

    def __init__(self) -> None:
        self._times: dict[tuple[str, Key], int] = {}
        self._in_order: list[Deadline] = []
        self._paused: dict[Deadline, int] = {}
        """Deadlines whose handling raised, which is a defect, and when each is tried again. Nothing else is kept beside
        the records, and nothing is decided by it but when the defect shows again."""

    def set(self, kind: str, key: Key, at_ms: int) -> None:
        """The record of ``key`` states this time; 0: none."""
        old = self._times.get((kind, key), 0)
        if old == at_ms:
            return
        if old:
            gone = (old, kind, key)
            del self._in_order[bisect_left(self._in_order, gone)]
            self._paused.pop(gone, None)
        if at_ms:
            self._times[kind, key] = at_ms
            insort(self._in_order, (at_ms, kind, key))
        else:
            del self._times[kind, key]

    def next_ms(self) -> int | None:
        """The earliest time something is due, or None."""
        if not self._paused:
            return self._in_order[0][0] if self._in_order else None
        first = next((at_ms for at_ms, kind, key in self._in_order if (at_ms, kind, key) not in self._paused), None)
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
        if not self._in_order or self._in_order[0][0] > now_ms:
            return []  # the rule, and asked after every event
        return [key for _, each, key in self._until(now_ms) if each == kind]

    def pause(self, deadlines: Iterable[Deadline], again_ms: int) -> None:
        """These could not be handled: each is due again at ``again_ms``, alone."""
        self._paused.update((deadline, again_ms) for deadline in deadlines if self.stands(deadline))

    def all(self) -> list[Deadline]:
        """Every deadline, for the check of the invariants."""
        return list(self._in_order)

    def _until(self, now_ms: int) -> Iterator[Deadline]:
        for deadline in self._in_order:
            if deadline[0] > now_ms:
                return
            yield deadline
