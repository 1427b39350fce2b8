"""The event log: the newest events in memory, older ones from the journal, and who waits for more.

A watcher is only a position in the log: it costs no buffer, delays nobody, and one that stops reading is dropped when
what it has not read is no longer kept.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from itertools import islice
from operator import attrgetter

from callboard.model.frozen import dataclass
from callboard.scheduler.records.job_records import EventRecord
from callboard.wire.refusals import LimitReached, RevisionCompacted, Unavailable, invalid

CHUNK = 64
"""Most events in one message of a watch, and most that are looked at before others get their turn."""

TURN_S = 0.01
"""Time between two chunks for watches that catch up, all of them together: a chunk costs the loop two milliseconds, and
what it does for others must not wait for a crowd of them."""

ReadOld = Callable[[int, int], Awaitable[tuple[int, list[EventRecord]]]]
"""(first revision, limit) → the oldest revision kept on disk (0: none) and events from there on."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects events. Empty fields select everything.

    Attributes:
        types: types, or their first part with a dot (``job.``).
        may_see: which subjects the reader may see at all; None: every one.
    """

    types: tuple[str, ...] = ()
    subject: str = ""
    may_see: Callable[[str], bool] | None = None

    def selects(self, event: EventRecord) -> bool:
        """Whether ``event`` is wanted."""
        if self.subject and event.subject != self.subject and not event.subject.startswith(self.subject + "/"):
            return False
        if self.types and not any(
            event.type.startswith(wanted) if wanted.endswith(".") else event.type == wanted for wanted in self.types
        ):
            return False
        return self.may_see is None or self.may_see(event.subject)


@dataclass(frozen=True, slots=True)
class Progress:
    """One message of a watch: every selected event up to ``revision`` has been given."""

    revision: int
    events: tuple[EventRecord, ...]


class EventLog:
    """The log as readers see it: only what is journaled."""

    def __init__(self, read_old: ReadOld, *, in_memory: int, watchers: int) -> None:
        """
        Args:
            in_memory: newest events kept in memory.
            watchers: most watches at one time.
        """
        self._read_old = read_old
        self._newest: list[EventRecord] = []
        self._in_memory = in_memory
        self._most_watchers = watchers
        self._watchers = 0
        self._closed: Unavailable | None = None
        self._more = asyncio.Event()
        self._turn = asyncio.Lock()
        self.revision = 0
        """Revision of the newest event."""

    def load(self, events: Sequence[EventRecord]) -> None:
        """Starts, or goes on after :meth:`close`, from the newest events in the journal, oldest first."""
        self._newest = list(events)
        self.revision = events[-1].revision if events else 0
        self._closed = None

    def publish(self, events: Iterable[EventRecord]) -> None:
        """Adds events, in order, and wakes who waits."""
        self._newest.extend(events)
        if len(self._newest) > 2 * self._in_memory:
            del self._newest[: -self._in_memory]  # seldom, so that each event is moved once at most
        if self._newest:
            self.revision = max(self.revision, self._newest[-1].revision)
        self._wake()

    def close(self, why: Unavailable) -> None:
        """Ends every watch with ``why``."""
        self._closed = why
        self._wake()

    async def watch(self, start: int, wanted: Filter, *, progress_s: float) -> AsyncIterator[Progress]:
        """Every selected event from revision ``start`` on (0: from now), with marks of progress in between.

        Args:
            start: first revision.
            progress_s: longest silence in seconds; a mark without events says that the watch is alive. The first
                message comes at once.

        Raises:
            RevisionCompacted: ``start``, or what a slow reader has not read yet, is no longer kept.
            InvalidRequest: ``start`` lies in the future.
            LimitReached: too many watches.
            Unavailable: the log was closed.
        """
        if start > self.revision + 1 or start < 0:
            # It can't be waited for: the client saw another log (another cluster, or a restored backup).
            raise invalid("start_revision", f"{start} lies beyond the log, which ends at {self.revision}")
        if self._watchers >= self._most_watchers:
            raise LimitReached(f"{self._most_watchers} watches are open already; close one")
        self._watchers += 1
        try:
            position = start or self.revision + 1
            first = True
            while True:
                if self._closed is not None:
                    raise Unavailable(self._closed.error.message, reason=self._closed.error.reason)
                more = self._more
                events = await self.read(position, CHUNK) if position <= self.revision else []
                if events:
                    position = events[-1].revision + 1
                elif position <= self.revision:
                    position = self.revision + 1  # revisions without an event
                if len(events) == CHUNK:  # it catches up
                    async with self._turn:
                        await asyncio.sleep(TURN_S)
                selected = tuple(event for event in events if wanted.selects(event))
                if selected or first:
                    first = False
                    yield Progress(position - 1, selected)
                elif not events and not await happens(more, progress_s):
                    yield Progress(position - 1, ())
        finally:
            self._watchers -= 1

    async def read(self, first: int, limit: int) -> list[EventRecord]:
        """Up to ``limit`` events from revision ``first`` on, oldest first.

        Raises:
            RevisionCompacted: ``first`` is no longer kept.
        """
        if self._newest and first >= self._newest[0].revision:
            return self._from_memory(first, limit)
        oldest, events = await self._read_old(first, limit)
        if events and oldest > first and oldest > 1:
            raise RevisionCompacted(
                f"revision {first} is no longer kept, the oldest is {oldest}; list what there is, then watch from now",
                metadata={"oldest_revision": str(oldest)},
            )
        # What is on disk may not have been published yet.
        return [event for event in events if event.revision <= self.revision]

    async def oldest(self) -> int:
        """The oldest revision kept; 0 when there is no event."""
        oldest, _ = await self._read_old(0, 0)
        return oldest

    def newest(self, limit: int, wanted: Filter) -> list[EventRecord]:
        """The newest selected events, oldest first; looks at what is in memory only."""
        found = list(islice((event for event in reversed(self._newest) if wanted.selects(event)), limit))
        found.reverse()
        return found

    def _from_memory(self, first: int, limit: int) -> list[EventRecord]:
        start = bisect_left(self._newest, first, key=attrgetter("revision"))
        return self._newest[start : start + limit]

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()


async def happens(event: asyncio.Event, within_s: float) -> bool:
    """Whether something happens within so many seconds."""
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
