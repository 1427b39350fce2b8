"""The journal off the event loop: one writer thread in front of the :mod:`~callboard.controller.journal.store`. Where
others share it: what a standby is told of the leader."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from callboard.controller.journal.codec import Decision
from callboard.controller.journal.database import Where
from callboard.controller.journal.state_dir import StateDir
from callboard.controller.journal.store import Store, read_events
from callboard.model.frozen import dataclass
from callboard.scheduler import State
from callboard.scheduler.records.job_records import Change, EventRecord, Record
from callboard.wire.refusals import NotLeader

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Member:
    """A controller of the cluster.

    Attributes:
        address: where its clients and agents connect.
        tokens_at: where those without a certificate do, if not there.
    """

    address: str
    tokens_at: str = ""
    leads: bool = False


@dataclass(frozen=True, slots=True)
class Followed:
    """What a standby saw in one look.

    Attributes:
        leader: who leads, as far as is known.
        changes: what changed since the last look, or all that makes the state.
        events: what was added to the event log, or the newest.
        anew: whether they are all there is, and not what was added.
        trouble: why nothing could be seen; empty: it could.
    """

    leader: Member
    changes: Sequence[Change] = ()
    events: Sequence[EventRecord] = ()
    anew: bool = False
    trouble: str = ""


class Follower(Protocol):
    """Who is told what a leader writes, until this process leads itself."""

    def followed(self, seen: Followed) -> None:
        """Something was seen, or nothing new."""

    @property
    def wants_to_lead(self) -> bool:
        """Whether to go on."""

    def woken(self) -> None:
        """The leadership is lost."""


@dataclass(frozen=True, slots=True)
class Following:
    """What a standby knows of the leader.

    Attributes:
        heard_s: when the journal was last read, by the loop's clock.
        trouble: why it can't be read now; empty: it can.
    """

    leader: Member
    heard_s: float
    trouble: str = ""


def not_leader(leader: Member) -> NotLeader:
    """What callers are told who want something decided."""
    where = f"; {leader.address} does" if leader.address else ", and nobody does yet"
    return NotLeader(
        f"this controller is a standby and decides nothing{where}. Give clients and agents the addresses of all "
        "controllers, and they find the one that leads",
        metadata={"leader": leader.address, "leader_tokens_at": leader.tokens_at},
    )


class Journal(Protocol):
    """What the driver asks of a journal. Every method raises ``StoreFailed`` when it can't."""

    async def lead(self, follower: Follower) -> bool:
        """Returns True once this process may write: at once, unless others share the journal. False: it is not wanted
        any more. Meanwhile ``follower`` is told what the leader writes."""

    def check(self) -> None:
        """Raises ``StoreFailed`` if this process may not write any more."""

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


class StoreJournal(ABC):
    """A journal whose store is used by a thread of its own."""

    def __init__(self, *, events_kept: int, changes_per_snapshot: int) -> None:
        self._events_kept = events_kept
        self._changes_per_snapshot = changes_per_snapshot
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="callboard-journal")
        self._store: Store | None = None
        self._changes = 0
        self._lines = 0

    @property
    @abstractmethod
    def where(self) -> Where:
        """The database."""

    @abstractmethod
    def _make_store(self) -> Store:
        """Opens it, in the thread."""

    async def lead(self, follower: Follower) -> bool:  # noqa: ARG002 - nobody else is there to be followed
        """Nobody shares it."""
        return True

    def check(self) -> None:  # noqa: B027 - what holds unless others share it
        """Nobody can take it away."""

    @property
    def wants_snapshot(self) -> bool:
        """A snapshot costs as much as it has lines: after as many changes it is cheap per change, and a restart reads
        at most twice as many."""
        return self._changes >= max(self._changes_per_snapshot, self._lines)

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
        self._lines = await self._run(lambda: self._opened.snapshot(records))
        self._changes = 0

    async def newest_events(self, limit: int) -> list[EventRecord]:
        """The newest events, oldest first."""
        return await self._run(lambda: self._opened.newest_events(limit))

    async def read_events(self, first_revision: int, limit: int) -> tuple[int, list[EventRecord]]:
        """Old events; read beside the writer, so that a slow reader of history delays no commit."""
        return await asyncio.to_thread(read_events, self.where, first_revision, limit)

    async def close(self) -> None:
        await self._run(self._close)
        self._thread.shutdown()

    @property
    def _opened(self) -> Store:
        assert self._store is not None
        return self._store

    def _open(self) -> State:
        self._close()
        self._store = self._make_store()
        state = self._store.load()
        kept = self._store.kept()
        self._changes, self._lines = kept.changes, kept.lines
        return state

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class SqliteJournal(StoreJournal):
    """The journal in a state directory that this process has locked."""

    def __init__(self, directory: StateDir, *, events_kept: int, changes_per_snapshot: int) -> None:
        super().__init__(events_kept=events_kept, changes_per_snapshot=changes_per_snapshot)
        self._directory = directory

    @property
    def where(self) -> Path:
        """The database."""
        return self._directory.journal_path

    def _make_store(self) -> Store:
        return Store.of(self._directory, events_kept=self._events_kept)
