"""The store: the journal's SQLite file, with a log of changes, a snapshot they follow, and the newest events.

Beside them lies what was decided lately: the events that the changes are due to, and an older snapshot from which they
can be decided again (:mod:`callboard.controller.journal.replaying`). No restart needs either.

One transaction per batch, ``synchronous=FULL``: once :meth:`Store.commit` returns, the batch survives a power cut.
A batch that was cut off leaves no trace (SQLite's write-ahead log has checksums), so there is no half state.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from callboard.controller.journal.codec import (
    Decision,
    UnreadableChange,
    decode_change,
    decode_decision,
    decode_event,
    encode_change,
    encode_decision,
    encode_event,
    encode_record,
)
from callboard.controller.journal.secret_store import MissingSecrets, SecretStore, without_values
from callboard.controller.journal.state_dir import StateDir, StoreFailed, make_private_file
from callboard.scheduler import State
from callboard.scheduler.records.events import JobSubmitted
from callboard.scheduler.records.job_records import Change, Drop, EventRecord, JobRecord, Put, Record, SpecRecord
from callboard.scheduler.records.states import ENDED

FORMAT = 2
"""Version of the tables. 2: decisions, and the past from which they can be rerun; the log begins there. The records in
the tables have versions of their own (:mod:`callboard.controller.journal.codec`)."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS snapshot (position INTEGER PRIMARY KEY, line TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS log (sequence INTEGER PRIMARY KEY, line TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS mark (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS event (revision INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS past (position INTEGER PRIMARY KEY, line TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS decision (sequence INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS fruitless (number INTEGER PRIMARY KEY, sequence INTEGER NOT NULL, body TEXT NOT NULL);
"""
"""``fruitless``: decisions that changed nothing (refusals, mostly), by the change that came next. An earlier version
of format 2 has no such table, and leaves it alone."""

FRUITLESS = 1_000
"""Most decisions kept that changed nothing."""

REPLAYABLE = 10_000
"""Fewest changes that are kept with the events they are due to, once there were as many; at most there are three times
as many, and those since the snapshot."""

_BUSY_TIMEOUT_S = 5.0
"""Readers of old events never block the writer (WAL); what remains is a person with sqlite3 open."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a store holds beside the state.

    Attributes:
        changes: changes in the log since the snapshot.
        records: records in the snapshot.
    """

    changes: int
    records: int


class Store:
    """The open file. Used by one thread at a time."""

    def __init__(self, directory: StateDir, *, events_kept: int) -> None:
        """
        Args:
            directory: the locked state directory.
            events_kept: newest events to keep.

        Raises:
            StoreFailed: unreadable, read-only, or of a newer version.
        """
        self._path = directory.journal_path
        self._events_kept = events_kept
        with self._translated():
            make_private_file(self._path)
            self._database = sqlite3.connect(
                self._path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare()
                self._secrets = SecretStore(directory.secrets_path)
            except BaseException:
                self._database.close()
                raise
            (last,) = self._database.execute("SELECT coalesce(max(sequence), 0) FROM log").fetchone()
            self._sequence = max(int(last), self._mark("snapshot"))

    def _prepare(self) -> None:
        database = self._database
        (found,) = database.execute("PRAGMA user_version").fetchone()
        if found > FORMAT:
            raise newer(self._path, found)
        (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(f"malformed: {verdict}")
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        database.executescript(_SCHEMA)
        if found != FORMAT:
            database.execute("BEGIN IMMEDIATE")
            if found == 1:
                self._begin_past()
            database.execute(f"PRAGMA user_version={FORMAT}")
            database.execute("COMMIT")
        # A write that needs no change shows a read-only file now rather than at the first submit.
        database.execute("BEGIN IMMEDIATE")
        database.execute("INSERT OR REPLACE INTO mark VALUES ('opened', ?)", (self._mark("opened") + 1,))
        database.execute("COMMIT")

    def load(self) -> list[Change]:
        """The changes that make the state: the snapshot's records, then the log.

        Raises:
            StoreFailed: a line can't be read, or one is missing.
        """
        with self._translated():
            snapshot = self._database.execute("SELECT line FROM snapshot ORDER BY position")
            changes = [decode_change(line) for (line,) in snapshot]
            expected = self._mark("snapshot") + 1
            log = "SELECT sequence, line FROM log WHERE sequence >= ? ORDER BY sequence"
            for sequence, line in self._database.execute(log, (expected,)):
                if sequence != expected:
                    raise UnreadableChange(f"change {expected} is missing")
                changes.append(decode_change(line))
                expected += 1
            return self._with_secrets(changes)

    def commit(
        self, changes: Sequence[Change], events: Sequence[EventRecord], decisions: Sequence[Decision] = ()
    ) -> None:
        """Writes a batch, durably.

        Args:
            changes: what changed.
            events: entries of the event log.
            decisions: the events that were decided, in order; together they led to the changes.

        Raises:
            StoreFailed: nothing of the batch was written.
        """
        with self._translated():
            # Secrets first: a crash between the two leaves values without a job, never a job without its values.
            lines = [encode_change(self._without_secrets(change)) for change in changes]
            bodies = [(event.revision, encode_event(event)) for event in events]
            first = self._sequence + 1
            places = accumulate((decision.changes for decision in decisions), initial=first)
            placed = list(zip(places, map(_without_values, decisions)))  # noqa: B905 - one place more
            decided = [(place, encode_decision(each)) for place, each in placed if each.changes]
            fruitless = [(place, encode_decision(each)) for place, each in placed if not each.changes and each.outcome]
            with self._transaction():
                self._database.executemany("INSERT INTO log VALUES (?, ?)", enumerate(lines, first))
                self._database.executemany("INSERT INTO decision VALUES (?, ?)", decided)
                if fruitless:
                    self._database.executemany("INSERT INTO fruitless (sequence, body) VALUES (?, ?)", fruitless)
                    newest = "(SELECT max(number) FROM fruitless)"
                    self._database.execute(f"DELETE FROM fruitless WHERE number <= {newest} - ?", (FRUITLESS,))  # noqa: S608 - no input
                self._database.executemany("INSERT INTO event VALUES (?, ?)", bodies)
                if events:
                    oldest = events[-1].revision - self._events_kept
                    self._database.execute("DELETE FROM event WHERE revision <= ?", (oldest,))
            self._sequence += len(lines)

    def snapshot(self, records: Sequence[Record]) -> None:
        """Replaces the snapshot and the log by ``records``, which are the state after the last commit.

        Raises:
            StoreFailed: nothing was replaced.
        """
        with self._translated():
            with self._transaction():
                self._database.execute("DELETE FROM snapshot")
                self._database.executemany(
                    "INSERT INTO snapshot VALUES (?, ?)",
                    ((place, encode_record(_masked(record))) for place, record in enumerate(records)),
                )
                self._database.execute("INSERT OR REPLACE INTO mark VALUES ('snapshot', ?)", (self._sequence,))
                if self._sequence - self._mark("past") >= 2 * REPLAYABLE:
                    self._move_past(self._sequence - REPLAYABLE)
            self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            self._secrets.forget_all_but(
                record.uid for record in records if isinstance(record, JobRecord) and record.state not in ENDED
            )

    def _begin_past(self) -> None:
        """Lets the past begin at the present snapshot: what was before was never kept."""
        self._database.execute("INSERT INTO past SELECT position, line FROM snapshot")
        self._database.execute("INSERT OR REPLACE INTO mark VALUES ('past', ?)", (self._mark("snapshot"),))

    def _move_past(self, most: int) -> None:
        """Forgets the oldest decisions, up to the change ``most``, and moves the past to where they led."""
        first = "SELECT max(sequence) FROM decision WHERE sequence <= ?"
        (begins,) = self._database.execute(first, (most + 1,)).fetchone()
        end = most if begins is None else int(begins) - 1
        state = State()
        for (line,) in self._database.execute("SELECT line FROM past ORDER BY position"):
            state.apply(decode_change(line))
        for (line,) in self._database.execute("SELECT line FROM log WHERE sequence <= ? ORDER BY sequence", (end,)):
            state.apply(decode_change(line))
        lines = enumerate(encode_record(record) for record in state.records())
        self._database.execute("DELETE FROM past")
        self._database.executemany("INSERT INTO past VALUES (?, ?)", lines)
        self._database.execute("DELETE FROM log WHERE sequence <= ?", (end,))
        self._database.execute("DELETE FROM decision WHERE sequence <= ?", (end,))
        self._database.execute("DELETE FROM fruitless WHERE sequence <= ?", (end,))
        self._database.execute("INSERT OR REPLACE INTO mark VALUES ('past', ?)", (end,))

    def kept(self) -> Kept:
        """How much there is to load."""
        with self._translated():
            (records,) = self._database.execute("SELECT count(*) FROM snapshot").fetchone()
            return Kept(self._sequence - self._mark("snapshot"), records)

    def newest_events(self, limit: int) -> list[EventRecord]:
        """The newest events, oldest first."""
        with self._translated():
            rows = self._database.execute("SELECT body FROM event ORDER BY revision DESC LIMIT ?", (limit,)).fetchall()
            return [decode_event(body) for (body,) in reversed(rows)]

    def close(self) -> None:
        """Closes the files."""
        self._secrets.close()
        self._database.close()

    def _mark(self, name: str) -> int:
        row = self._database.execute("SELECT value FROM mark WHERE name = ?", (name,)).fetchone()
        return int(row[0]) if row else 0

    def _without_secrets(self, change: Change) -> Change:
        if isinstance(change, Put) and isinstance(change.record, SpecRecord):
            return Put(self._secrets.keep(change.record))
        return change

    def _with_secrets(self, changes: list[Change]) -> list[Change]:
        live: set[str] = set()
        for change in changes:
            if isinstance(change, Put) and isinstance(change.record, JobRecord):
                (live.discard if change.record.state in ENDED else live.add)(change.record.uid)
            elif isinstance(change, Drop) and change.kind == JobRecord.kind:
                live.discard(str(change.key))
        return [
            Put(self._secrets.restore(change.record, needed=change.record.uid in live))
            if isinstance(change, Put) and isinstance(change.record, SpecRecord)
            else change
            for change in changes
        ]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            # SQLite rolls back by itself after some errors (a full disk among them).
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, UnreadableChange, MissingSecrets) as error:
            raise failure(self._path, error) from error


def _without_values(decision: Decision) -> Decision:
    """A decision without the values of secret variables. Nothing is decided by them, but whether a request is the one
    that was made before: a submission that has some and changed nothing is not compared."""
    event = decision.event
    if not isinstance(event, JobSubmitted):
        return decision
    spec = without_values(SpecRecord(uid=event.uid, spec=event.spec)).spec
    comparable = decision.changes or spec == event.spec
    outcome = decision.outcome if comparable else None
    return replace(decision, event=replace(event, spec=spec), outcome=outcome)


def _masked(record: Record) -> Record:
    return without_values(record) if isinstance(record, SpecRecord) else record


def read_events(path: Path, first_revision: int, limit: int) -> tuple[int, list[EventRecord]]:
    """The oldest revision kept (0: none) and up to ``limit`` events from ``first_revision`` on, oldest first.

    Opens the file for itself, so that it may run in any thread beside the writer.

    Raises:
        StoreFailed: the file can't be read.
    """
    try:
        database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=_BUSY_TIMEOUT_S)
        try:
            (oldest,) = database.execute("SELECT coalesce(min(revision), 0) FROM event").fetchone()
            rows = database.execute(
                "SELECT body FROM event WHERE revision >= ? ORDER BY revision LIMIT ?", (first_revision, limit)
            ).fetchall()
        finally:
            database.close()
        return oldest, [decode_event(body) for (body,) in rows]
    except (sqlite3.Error, OSError, UnreadableChange) as error:
        raise failure(path, error) from error


@dataclass(frozen=True, slots=True)
class History:
    """What a journal tells of how its state came about.

    Attributes:
        base: what makes the state at its beginning.
        changes: every change since, by its number in the log, in order.
        decisions: the events that led to them, each by the number of its first change.
        fruitless: the events that changed nothing, by the number of the change that came next.
        events: the entries of the event log that are kept, by revision.
    """

    base: tuple[Change, ...]
    changes: Mapping[int, Change]
    decisions: Mapping[int, Decision]
    fruitless: Mapping[int, Sequence[Decision]]
    events: Mapping[int, EventRecord]


def read_history(path: Path) -> History:
    """Reads what can be rerun, beside a controller that may be running.

    Raises:
        StoreFailed: the file can't be read, or is of a newer version.
    """
    try:
        if not path.is_file():
            raise StoreFailed(path, "is not there", "Name the state directory of a controller.")
        database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=_BUSY_TIMEOUT_S)
        try:
            (found,) = database.execute("PRAGMA user_version").fetchone()
            if found > FORMAT:
                raise newer(path, found)
            database.execute("BEGIN")  # all of it as it is at one moment
            table, mark = ("snapshot", "snapshot") if found == 1 else ("past", "past")
            row = database.execute("SELECT value FROM mark WHERE name = ?", (mark,)).fetchone()
            base = [line for (line,) in database.execute(f"SELECT line FROM {table} ORDER BY position")]  # noqa: S608 - one of two words
            log = database.execute(
                "SELECT sequence, line FROM log WHERE sequence > ? ORDER BY sequence", (row[0] if row else 0,)
            ).fetchall()
            decided = [] if found == 1 else database.execute("SELECT sequence, body FROM decision").fetchall()
            fruitless: dict[int, list[Decision]] = {}
            if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'fruitless'").fetchone():
                for sequence, body in database.execute("SELECT sequence, body FROM fruitless ORDER BY number"):
                    fruitless.setdefault(sequence, []).append(decode_decision(body))
            events = [decode_event(body) for (body,) in database.execute("SELECT body FROM event")]
        finally:
            database.close()
        return History(
            tuple(map(decode_change, base)),
            {sequence: decode_change(line) for sequence, line in log},
            {sequence: decode_decision(body) for sequence, body in decided},
            fruitless,
            {event.revision: event for event in events},
        )
    except (sqlite3.Error, OSError, UnreadableChange) as error:
        raise failure(path, error) from error


def newer(path: Path, found: int) -> StoreFailed:
    """The file was written by a newer version."""
    return StoreFailed(
        path,
        f"has format {found} and this callboard reads up to {FORMAT}",
        "Start the newer callboard that wrote it.",
    )


def failure(path: Path, error: Exception) -> StoreFailed:
    """What an error of SQLite or the disk means, in words."""
    text = " ".join(str(error).split())
    known: Iterable[tuple[str, str, str]] = (
        ("full", "can't be written, the disk is full", "Free some space; the controller goes on by itself."),
        ("disk I/O", "can't be read or written, the disk reports an error", "Check the disk and the system's log."),
        ("readonly", "can't be written, it is read-only", "Make the file and its directory writable."),
        ("unable to open", "can't be opened", "Check that the directory exists and is writable."),
        ("locked", "is locked by another program", "End the program that has the file open."),
        ("malformed", "is damaged", "Restore it from a backup; nothing was changed."),
        ("not a database", "is damaged", "Restore it from a backup; nothing was changed."),
    )
    if isinstance(error, MissingSecrets):
        return StoreFailed(path, text, "Restore secrets.sqlite and secrets.key from the same backup.")
    for mark, why, remedy in known:
        if mark in text:
            return StoreFailed(path, f"{why} ({text})", remedy)
    return StoreFailed(path, f"can't be used ({text})", "Restore it from a backup, or start the version that wrote it.")
