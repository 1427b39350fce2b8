"""The journal off the event loop: one writer thread in front of the :mod:`~callboard.controller.journal.store`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from callboard.controller.journal.codec import Decision
from callboard.controller.journal.state_dir import StateDir
from callboard.controller.journal.store import Store, read_events
from callboard.scheduler import State
from callboard.scheduler.records.job_records import Change, EventRecord, Record

_T = TypeVar("_T")


class Journal(Protocol):
    """What the driver asks of a journal. Every method raises ``StoreFailed`` when it can't."""

    async def open(self) -> State:
        """Opens it, again if it was open, and returns the last good state."""

    async def commit(
        self, changes: Sequence[Change], events: Sequence[EventRecord], decisions: Sequence[Decision]
    ) -> None:
        """Writes a batch, with the events that led to it; once this returns, it survives."""

    async def snapshot(self, records: Sequence[Record]) -> None:
        """Replaces the log by the state after the last commit."""

    async def newest_events(self, limit: int) -> list[EventRecord]:
        """The newest events, oldest first."""

    async def read_events(self, first_revision: int, limit: int) -> tuple[int, list[EventRecord]]:
        """The oldest revision kept and events from a revision on, oldest first."""

    async def close(self) -> None:
        """Closes it."""

    @property
    def wants_snapshot(self) -> bool:
        """Whether the log has grown enough for a snapshot to pay."""


class SqliteJournal:
    """The journal in a state directory that this process has locked."""

    def __init__(self, directory: StateDir, *, events_kept: int, changes_per_snapshot: int) -> None:
        self._directory = directory
        self._events_kept = events_kept
        self._changes_per_snapshot = changes_per_snapshot
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="callboard-journal")
        self._store: Store | None = None
        self._changes = 0
        self._records = 0

    @property
    def path(self) -> Path:
        """The database."""
        return self._directory.journal_path

    @property
    def wants_snapshot(self) -> bool:
        """A snapshot costs as much as there are records: after twice as many changes it is cheap per change."""
        return self._changes >= max(self._changes_per_snapshot, 2 * self._records)

    async def open(self) -> State:
        """Opens the files and replays them."""
        return await self._run(self._open)

    async def commit(
        self, changes: Sequence[Change], events: Sequence[EventRecord], decisions: Sequence[Decision]
    ) -> None:
        """Writes a batch, durably."""
        await self._run(lambda: self._opened.commit(changes, events, decisions))
        self._changes += len(changes)

    async def snapshot(self, records: Sequence[Record]) -> None:
        """Replaces snapshot and log."""
        await self._run(lambda: self._opened.snapshot(records))
        self._changes, self._records = 0, len(records)

    async def newest_events(self, limit: int) -> list[EventRecord]:
        """The newest events, oldest first."""
        return await self._run(lambda: self._opened.newest_events(limit))

    async def read_events(self, first_revision: int, limit: int) -> tuple[int, list[EventRecord]]:
        """Old events; read beside the writer, so that a slow reader of history delays no commit."""
        return await asyncio.to_thread(read_events, self.path, first_revision, limit)

    async def close(self) -> None:
        """Closes the files and ends the thread."""
        await self._run(self._close)
        self._thread.shutdown()

    @property
    def _opened(self) -> Store:
        assert self._store is not None
        return self._store

    def _open(self) -> State:
        self._close()
        self._store = Store(self._directory, events_kept=self._events_kept)
        state = State()
        for change in self._store.load():
            state.apply(change)
        kept = self._store.kept()
        self._changes, self._records = kept.changes, kept.records
        return state

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
