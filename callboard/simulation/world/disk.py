"""The controller's disk: lines of the real codec, written with delays, now and then full, and kept through crashes."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from callboard.controller.journal.codec import (
    Decision,
    decode_change,
    decode_event,
    encode_change,
    encode_event,
    encode_record,
)
from callboard.controller.journal.state_dir import StoreFailed
from callboard.scheduler import State
from callboard.scheduler.records.job_records import Change, EventRecord, Record
from callboard.simulation.options import Fault
from callboard.simulation.world.site import Site

SNAPSHOT_AFTER = 4_000
"""Changes in the log until a snapshot pays."""

SLOW_MS = (200, 2_500)
"""For a batch while the disk is slow: long enough for silence to be noticed while a join is being written."""

EVENTS_KEPT = 2_000

Batch = tuple[Sequence[Change], Sequence[EventRecord]]


class Disk:
    """What survives."""

    def __init__(self) -> None:
        self._snapshot: list[str] = []
        self._log: list[str] = []
        self._events: deque[str] = deque(maxlen=EVENTS_KEPT)
        self._digest = hashlib.sha256()
        self.changes = 0
        self.full_until_ms = 0
        """Nothing can be written before."""
        self.slow_until_ms = 0
        """Everything takes long before."""

    @property
    def digest(self) -> str:
        """SHA-256 of everything ever committed, in hex."""
        return self._digest.hexdigest()

    @property
    def wants_snapshot(self) -> bool:
        """Whether one pays."""
        return len(self._log) > SNAPSHOT_AFTER + len(self._snapshot)

    def commit(self, changes: Sequence[Change], events: Sequence[EventRecord]) -> None:
        """Writes a batch."""
        lines = [encode_change(change) for change in changes]
        said = [encode_event(event) for event in events]
        self._log.extend(lines)
        self._events.extend(said)
        self.changes += len(lines)
        for text in (*lines, *said):
            self._digest.update(text.encode())
            self._digest.update(b"\n")

    def snapshot(self, records: Sequence[Record]) -> None:
        """Replaces snapshot and log."""
        self._snapshot = [encode_record(record) for record in records]
        self._log.clear()

    def replay(self) -> State:
        """The state that is written."""
        state = State()
        for line in (*self._snapshot, *self._log):
            state.apply(decode_change(line))
        return state

    def newest_events(self, limit: int) -> list[EventRecord]:
        """The newest events, oldest first."""
        return [decode_event(text) for text in list(self._events)[-limit:]]


class SimulatedJournal:
    """The journal of one life of the controller: production's protocol over the disk, with the disk's delays."""

    def __init__(self, site: Site, disk: Disk, committed: Callable[[Sequence[Change]], None]) -> None:
        """
        Args:
            committed: is told what is on disk, before anybody else can know.
        """
        self._site = site
        self._disk = disk
        self._committed = committed
        self._on_its_way: Batch | None = None

    @property
    def wants_snapshot(self) -> bool:
        """Whether one pays."""
        return self._disk.wants_snapshot

    async def open(self) -> State:
        """Replays what is written."""
        await self._moment()
        return self._disk.replay()

    async def commit(
        self,
        changes: Sequence[Change],
        events: Sequence[EventRecord],
        decisions: Sequence[Decision],  # noqa: ARG002 - no restart needs them
    ) -> None:
        """Writes a batch."""
        self._on_its_way = (changes, events)
        await self._moment()
        self._on_its_way = None
        self._write(changes, events)

    async def snapshot(self, records: Sequence[Record]) -> None:
        """Replaces snapshot and log."""
        await self._moment()
        self._disk.snapshot(records)

    async def newest_events(self, limit: int) -> list[EventRecord]:
        """The newest events, oldest first."""
        return self._disk.newest_events(limit)

    async def read_events(self, first_revision: int, limit: int) -> tuple[int, list[EventRecord]]:
        """Old events."""
        events = self._disk.newest_events(EVENTS_KEPT)
        found = [event for event in events if event.revision >= first_revision]
        return (events[0].revision if events else 0), found[:limit]

    async def close(self) -> None:
        """Lets go of it."""

    def crash(self) -> None:
        """The program died: what it was writing is lost, or as often on disk without anybody having been told."""
        if self._on_its_way is not None and self._site.chance.controller.random() < 0.5:
            self._site.count("crash after commit, before anybody was told")
            self._write(*self._on_its_way)
        self._on_its_way = None

    async def _moment(self) -> None:
        """What the disk takes.

        Raises:
            StoreFailed: it is full.
        """
        chance = self._site.chance.controller
        wait_ms = chance.randint(1, 6)
        if chance.random() < 0.01 and Fault.DELAY in self._site.faults and self._site.happens("slow disk"):
            self._site.count("slow disk")
            wait_ms = chance.randint(100, 3_000)
        if self._site.timeline.now_ms < self._disk.slow_until_ms:
            wait_ms = max(wait_ms, chance.randint(*SLOW_MS))
        await asyncio.sleep(wait_ms / 1000)
        if self._site.timeline.now_ms < self._disk.full_until_ms:
            self._site.count("written to a full disk")
            raise StoreFailed(Path("simulated"), "the disk is full", "Wait.")

    def _write(self, changes: Sequence[Change], events: Sequence[EventRecord]) -> None:
        self._disk.commit(changes, events)
        self._committed(changes)
