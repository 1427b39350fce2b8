"""The store: the tables of a journal, with a log of changes, a snapshot they follow, and the newest events.

Beside them lies what was decided lately: the events that the changes are due to, and an older snapshot from which they
can be decided again (:mod:`callboard.controller.journal.rerun`). No restart needs either.

The tables lie in SQLite or in PostgreSQL (`journal/database.py`). One transaction per batch,
written through to disk: once :meth:`Store.commit` returns, the batch survives a power cut. A batch that was cut off
leaves no trace, so there is no half state.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import accumulate, chain
from pathlib import Path

from callboard.controller.journal.codec import (
    DAMAGED,
    Decision,
    UnreadableChange,
    decode_change,
    decode_decision,
    decode_event,
    encode_change,
    encode_decision,
    encode_event,
    sealed,
    unsealed,
)
from callboard.controller.journal.database import Database, SqliteDatabase, Where, failure
from callboard.controller.journal.packs import Pack, changes_of, line_of, packed
from callboard.controller.journal.secret_store import MissingSecrets, SecretStore, without_values
from callboard.controller.journal.state_dir import StateDir, StoreFailed
from callboard.model.frozen import dataclass
from callboard.scheduler import State
from callboard.scheduler.records.events import JobSubmitted
from callboard.scheduler.records.job_records import Change, Drop, EventRecord, JobRecord, Put, Record, SpecRecord
from callboard.scheduler.records.states import ENDED

FORMAT = 4
"""Version of the tables. 2: decisions, and the past from which they can be rerun; the log begins there. 3: checksums of
what is written from now on. 4: packs of jobs that have ended. The records in the tables have versions of their own
(:mod:`callboard.controller.journal.codec`)."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS snapshot (position {key}, line TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS log (sequence {key}, line TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS mark (name TEXT PRIMARY KEY, value {number} NOT NULL);
CREATE TABLE IF NOT EXISTS event (revision {key}, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS past (position {key}, line TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS decision (sequence {key}, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS fruitless (number {counted_key}, sequence {number} NOT NULL, body TEXT NOT NULL);
"""
"""``fruitless``: decisions that changed nothing (refusals, mostly), by the change that came next. An earlier version
of format 2 has no such table, and leaves it alone."""

FRUITLESS = 1_000
"""Most decisions kept that changed nothing."""

REPLAYABLE = 10_000
"""Fewest changes that are kept with the events they are due to, once there were as many; at most there are three times
as many, and those since the snapshot."""

_TROUBLE = (UnreadableChange, UnicodeDecodeError)
"""What content that can't be used raises; the second: SQLite quotes damaged text in its errors."""

TABLES = ("snapshot", "log", "mark", "event", "past", "decision", "fruitless")
"""All of a journal but its secrets."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a store holds beside the state.

    Attributes:
        changes: changes in the log since the snapshot.
    """

    changes: int
    lines: int


class Store:
    """The open journal. Used by one thread at a time."""

    def __init__(self, database: Database, secrets: SecretStore, *, events_kept: int) -> None:
        """
        Args:
            database: an open one, which the store closes.
            secrets: the values of secret variables; closed with it.

        Raises:
            StoreFailed: unreadable, read-only, or of a newer version.
        """
        self.decode: Callable[[str], Change] = decode_change
        """Makes a change of its text."""
        self._database = database
        self._secrets = secrets
        self._events_kept = events_kept
        self._packs: list[Pack] = []
        with self._translated():
            try:
                prepare(database)
                # A write that needs no change shows a read-only file now rather than at the first submit.
                with database.exclusively():
                    self._set_mark("opened", self._mark("opened") + 1)
            except BaseException:
                self.close()
                raise
            (last,) = database.execute("SELECT coalesce(max(sequence), 0) FROM log").fetchone()
            self._sequence = max(int(last), self._mark("snapshot"))

    @classmethod
    def of(cls, directory: StateDir, *, events_kept: int) -> Store:
        """The store in a locked state directory.

        Raises:
            StoreFailed: as above.
        """
        with translated(directory.journal_path):
            database = sqlite_journal(directory)
            try:
                secrets = SecretStore.of(directory.secrets_path)
            except BaseException:
                database.close()
                raise
        return cls(database, secrets, events_kept=events_kept)

    def load(self) -> State:
        """The state: the snapshot's records, then the log.

        Raises:
            StoreFailed: a line can't be read, or one is missing.
        """
        with self._translated():
            self._packs.clear()
            changes, _ = read_state(self._database, self._packs, self.decode)
            return _state_of(self._packs, with_secrets(changes, self._secrets))

    def commit(
        self, changes: Sequence[Change], events: Sequence[EventRecord], decisions: Sequence[Decision] = ()
    ) -> None:
        """Writes a batch, durably.

        Args:
            decisions: the events that were decided, in order; together they led to the changes.

        Raises:
            StoreFailed: nothing of the batch was written.
        """
        with self._translated():
            # Secrets first: a crash between the two leaves values without a job, never a job without its values.
            first = self._sequence + 1
            plain = (encode_change(self._without_secrets(change)) for change in changes)
            lines = [(place, sealed(place, line)) for place, line in enumerate(plain, first)]
            bodies = [(event.revision, sealed(event.revision, encode_event(event))) for event in events]
            places = accumulate((decision.changes for decision in decisions), initial=first)
            placed = list(zip(places, map(_without_values, decisions)))  # noqa: B905 - one place more
            decided = [(place, sealed(place, encode_decision(each))) for place, each in placed if each.changes]
            fruitless = [
                (place, sealed(place, encode_decision(each)))
                for place, each in placed
                if not each.changes and each.outcome
            ]
            with self._database.transaction():
                self._database.insert("log", lines)
                self._database.insert("decision", decided)
                if fruitless:
                    self._database.insert("fruitless (sequence, body)", fruitless)
                    newest = "(SELECT max(number) FROM fruitless)"
                    self._database.execute(f"DELETE FROM fruitless WHERE number <= {newest} - ?", (FRUITLESS,))  # noqa: S608 - no input
                self._database.insert("event", bodies)
                if events:
                    oldest = events[-1].revision - self._events_kept
                    self._database.execute("DELETE FROM event WHERE revision <= ?", (oldest,))
            self._sequence += len(lines)

    def snapshot(self, records: Sequence[Record]) -> int:
        """Replaces the snapshot and the log by ``records``, which are the state after the last commit.

        Returns:
            How many lines the snapshot has.

        Raises:
            StoreFailed: nothing was replaced.
        """
        with self._translated():
            with self._database.exclusively():
                count, self._packs = write_state(self._database, "snapshot", records, self._packs)
                self._set_mark("snapshot", self._sequence)
                if self._sequence - self._mark("past") >= 2 * REPLAYABLE:
                    self._move_past(self._sequence - REPLAYABLE)
            self._database.compact()
            self._secrets.forget_all_but(
                record.uid for record in records if isinstance(record, JobRecord) and record.state not in ENDED
            )
        return count

    def _move_past(self, most: int) -> None:
        """Forgets the oldest decisions, up to the change ``most``, and moves the past to where they led."""
        first = "SELECT max(sequence) FROM decision WHERE sequence <= ?"
        (begins,) = self._database.execute(first, (most + 1,)).fetchone()
        end = most if begins is None else int(begins) - 1
        packs = list[Pack]()
        changes = _read_table(self._database, "past", packs)
        state = _state_of(packs, changes)
        log = "SELECT sequence, line FROM log WHERE sequence <= ? ORDER BY sequence"
        for row in self._database.execute(log, (end,)):
            state.apply(decode_change(unsealed(*row)))
        write_state(self._database, "past", state.records(), packs)
        self._database.execute("DELETE FROM log WHERE sequence <= ?", (end,))
        self._database.execute("DELETE FROM decision WHERE sequence <= ?", (end,))
        self._database.execute("DELETE FROM fruitless WHERE sequence <= ?", (end,))
        self._set_mark("past", end)

    def kept(self) -> Kept:
        """How much there is to load."""
        with self._translated():
            (lines,) = self._database.execute("SELECT count(*) FROM snapshot").fetchone()
            return Kept(self._sequence - self._mark("snapshot"), lines)

    def newest_events(self, limit: int) -> list[EventRecord]:
        """The newest events, oldest first."""
        with self._translated():
            newest = "SELECT revision, body FROM event ORDER BY revision DESC LIMIT ?"
            rows = self._database.execute(newest, (limit,)).fetchall()
            return [decode_event(unsealed(*row)) for row in reversed(rows)]

    def close(self) -> None:
        self._secrets.close()
        self._database.close()

    def _mark(self, name: str) -> int:
        return mark(self._database, name)

    def _set_mark(self, name: str, value: int) -> None:
        set_mark(self._database, name, value)

    def _without_secrets(self, change: Change) -> Change:
        if isinstance(change, Put) and isinstance(change.record, SpecRecord):
            return Put(self._secrets.keep(change.record))
        return change

    @contextmanager
    def _translated(self) -> Iterator[None]:
        expected: tuple[type[Exception], ...] = (*self._database.errors, *_TROUBLE, MissingSecrets)
        try:
            yield
        except expected as error:
            raise _failure(self._database, error) from error


def sqlite_journal(directory: StateDir, opened: Callable[[Path], SqliteDatabase] = SqliteDatabase) -> SqliteDatabase:
    """The database in a locked state directory, ready to be written.

    Raises:
        sqlite3.Error, OSError: it can't be used.
        StoreFailed: it is of a newer version.
    """
    database = opened(directory.journal_path)
    try:
        # Before anything is written to it.
        check_format(database)
        for pragma in ("quick_check(1)", "journal_mode=WAL", "synchronous=FULL"):
            database.pragma(pragma)
    except BaseException:
        database.close()
        raise
    return database


def prepare(database: Database) -> None:
    """Makes the tables, or brings those of an earlier version up to date.

    Raises:
        StoreFailed: they are of a newer version.
    """
    found = check_format(database)
    if found == FORMAT and database.has_table("fruitless"):
        return
    database.script(_SCHEMA.format(**asdict(database.words)))
    if found != FORMAT:
        with database.exclusively():
            if found == 1:
                # The past begins at the present snapshot: what was before was never kept.
                database.execute("INSERT INTO past SELECT position, line FROM snapshot")
                set_mark(database, "past", mark(database, "snapshot"))
            database.set_format(FORMAT)


def check_format(database: Database) -> int:
    """Version of the tables; 0: there are none.

    Raises:
        StoreFailed: they are of a newer version.
    """
    found = database.format()
    if found > FORMAT:
        raise StoreFailed(
            database.name,
            f"has format {found} and this callboard reads up to {FORMAT}",
            "Start the newer callboard that wrote it.",
        )
    return found


def mark(database: Database, name: str) -> int:
    """A number that is written down under a name; 0: none is.

    Raises:
        UnreadableChange: it is another one than was written.
    """
    found = dict(database.execute("SELECT name, value FROM mark WHERE name IN (?, ?)", (name, f"{name}~")).fetchall())
    value = found.get(name, 0)
    if f"{name}~" in found and found[f"{name}~"] != ~value:
        raise UnreadableChange(f"{DAMAGED}: the mark {name!r} is another one: {value}")
    return int(value)


def set_mark(database: Database, name: str, value: int) -> None:
    """Writes a number down under a name, and beside it what shows whether it is another one now."""
    replacing = "ON CONFLICT (name) DO UPDATE SET value = excluded.value"
    for each in ((name, value), (f"{name}~", ~value)):
        database.execute(f"INSERT INTO mark VALUES (?, ?) {replacing}", each)  # noqa: S608 - no input


def write_state(
    database: Database, table: str, records: Iterable[Record], known: Iterable[Pack] = ()
) -> tuple[int, list[Pack]]:
    """Replaces what a table holds of a state.

    Args:
        table: "snapshot" or "past".
        records: all of the state; secret values are left out.
        known: packs of its jobs that were made or read before.

    Returns:
        How many lines it has now, and its packs.
    """
    packs, rest = packed(records, known)
    # Most jobs that have ended are older than those that have not: tables are in order without being sorted.
    lines = chain((pack.line for pack in packs), map(line_of, rest))
    database.execute(f"DELETE FROM {table}")  # noqa: S608 - one of two words
    database.insert(table, ((place, sealed(place, line)) for place, line in enumerate(lines)))
    return len(rest) + len(packs), packs


def _state_of(packs: Iterable[Pack], changes: Iterable[Change]) -> State:
    state = State()
    for pack in packs:
        state.put_ended(pack.specs, pack.jobs)
    for change in changes:
        state.apply(change)
    return state


def _read_table(database: Database, table: str, packs: list[Pack] | None = None) -> list[Change]:
    """What :func:`write_state` wrote.

    Args:
        packs: gets the packs, whose jobs are not among the changes then: all of these come after them.

    Raises:
        UnreadableChange: a line can't be read.
    """
    rows = database.execute(f"SELECT position, line FROM {table} ORDER BY position")  # noqa: S608 - one of two words
    return [change for row in rows for change in changes_of(unsealed(*row), packs)]


def read_state(
    database: Database, packs: list[Pack] | None = None, decode: Callable[[str], Change] = decode_change
) -> tuple[list[Change], int]:
    """The changes that make the state, without secret values, and the number of the last one.

    Args:
        packs: gets those of the snapshot, whose jobs are not among the changes then: all of these come after them.
        decode: makes a change of its text in the log.

    Raises:
        UnreadableChange: a line can't be read, or one is missing.
    """
    changes = _read_table(database, "snapshot", packs)
    last = mark(database, "snapshot")
    log = "SELECT sequence, line FROM log WHERE sequence > ? ORDER BY sequence"
    for sequence, line in database.execute(log, (last,)):
        if sequence != last + 1:
            raise UnreadableChange(f"change {last + 1} is missing")
        changes.append(decode(unsealed(sequence, line)))
        last = sequence
    return changes, last


def with_secrets(changes: Sequence[Change], secrets: SecretStore) -> list[Change]:
    """The changes, with the values of secret variables.

    Raises:
        MissingSecrets: those of a job that has not ended are gone.
    """
    # By their exact types: a record that sleeps has ended, and lies before all that is told of its job later.
    live: set[str] = set()
    specs: list[tuple[int, SpecRecord]] = []
    for place, change in enumerate(changes):
        if isinstance(change, Drop):
            if change.kind == JobRecord.kind:
                live.discard(str(change.key))
            continue
        record = change.record
        if type(record) is SpecRecord:
            specs.append((place, record))
        elif type(record) is JobRecord:
            (live.discard if record.state in ENDED else live.add)(record.uid)
    whole = list(changes)
    for place, spec in specs:
        whole[place] = Put(secrets.restore(spec, needed=spec.uid in live))
    return whole


@contextmanager
def translated(where: Where) -> Iterator[None]:
    """Turns what goes wrong while a journal is opened into words."""
    try:
        yield
    except StoreFailed:
        raise
    except (sqlite3.Error, OSError, *_TROUBLE, MissingSecrets) as error:
        raise _failure(where, error) from error


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


@contextmanager
def reading(where: Where) -> Iterator[Database]:
    """A journal, open for itself beside its writer, as it is at one moment; may be used in any thread.

    Raises:
        StoreFailed: it can't be read, or is of a newer version.
    """
    database = open_to_read(where)
    expected: tuple[type[Exception], ...] = (*database.errors, *_TROUBLE)
    try:
        check_format(database)
        with database.as_of_now():
            yield database
    except expected as error:
        raise _failure(database, error) from error
    finally:
        database.close()


def open_to_read(where: Where) -> Database:
    """A connection that only reads.

    Raises:
        StoreFailed: there is none.
    """
    if isinstance(where, str):
        from callboard.controller.journal.postgres import PostgresDatabase  # noqa: PLC0415 - an extra

        return PostgresDatabase(where, "reads")
    try:
        return SqliteDatabase(where, reads_only=True)
    except SqliteDatabase.errors as error:
        raise failure(where, error) from error


def read_events(where: Where, first_revision: int, limit: int) -> tuple[int, list[EventRecord]]:
    """The oldest revision kept (0: none) and up to ``limit`` events from ``first_revision`` on, oldest first.

    Raises:
        StoreFailed: the journal can't be read.
    """
    with reading(where) as database:
        (oldest,) = database.execute("SELECT coalesce(min(revision), 0) FROM event").fetchone()
        rows = database.execute(
            "SELECT revision, body FROM event WHERE revision >= ? ORDER BY revision LIMIT ?", (first_revision, limit)
        ).fetchall()
        return oldest, [decode_event(unsealed(*row)) for row in rows]


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


def read_history(where: Where) -> History:
    """Reads what can be rerun, beside a controller that may be running.

    Raises:
        StoreFailed: the journal can't be read, or is of a newer version.
    """
    if isinstance(where, Path) and not where.is_file():
        raise StoreFailed(where, "is not there", "Name the state directory of a controller.")
    with reading(where) as database:
        return history_of(database)


def history_of(database: Database) -> History:
    """All that can be rerun, of a journal that is open."""
    found = database.format()
    table = "snapshot" if found == 1 else "past"
    log = database.execute(
        "SELECT sequence, line FROM log WHERE sequence > ? ORDER BY sequence", (mark(database, table),)
    ).fetchall()
    decided = [] if found == 1 else database.execute("SELECT sequence, body FROM decision").fetchall()
    fruitless: dict[int, list[Decision]] = {}
    if database.has_table("fruitless"):
        for row in database.execute("SELECT sequence, body FROM fruitless ORDER BY number"):
            fruitless.setdefault(row[0], []).append(decode_decision(unsealed(*row)))
    events = [decode_event(unsealed(*row)) for row in database.execute("SELECT revision, body FROM event")]
    return History(
        tuple(_read_table(database, table)),
        {row[0]: decode_change(unsealed(*row)) for row in log},
        {row[0]: decode_decision(unsealed(*row)) for row in decided},
        fruitless,
        {event.revision: event for event in events},
    )


def _failure(of: Database | Where, error: Exception) -> StoreFailed:
    if isinstance(error, MissingSecrets):
        name = of if isinstance(of, (str, Path)) else of.name
        return StoreFailed(name, str(error), "Restore secrets.sqlite and secrets.key from the same backup.")
    if isinstance(of, str):
        return StoreFailed(of, str(error), "Check the database.")
    return failure(of, error) if isinstance(of, Path) else of.failure(error)
