"""The database under a store: what a store asks of it, and SQLite's answer. PostgreSQL's is in
`journal/postgres.py`.

Both speak the same SQL, with ``?`` for values; what differs is named in :data:`Words`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from callboard.controller.journal.state_dir import StoreFailed, make_private_file
from callboard.model.faults import Fault, InvalidInput
from callboard.model.frozen import dataclass

BUSY_TIMEOUT_S = 5.0
"""Readers of old events never block the writer (WAL); what remains is a person with sqlite3 open."""

_FREE_SPACE = "Free some space; a controller that runs goes on by itself."

Where = Path | str
"""A journal: the file of SQLite, or the URL of a PostgreSQL."""


STORE_VARIABLE = "CALLBOARD_STORE"
"""Names the database where no option does; unlike a command line, others can't read it."""


@dataclass(frozen=True, slots=True)
class Words:
    """What the two call otherwise."""

    key: str
    counted_key: str
    number: str
    data: str


class Rows(Protocol):
    """What a statement found."""

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Database(Protocol):
    """One open connection. Used by one thread at a time."""

    words: Words
    name: str
    """For people."""
    errors: tuple[type[Exception], ...]
    """What its statements raise."""

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> Rows:
        """Runs a statement."""

    def script(self, sql: str) -> None:
        """Runs statements without values."""

    def insert(self, table: str, rows: Iterable[Sequence[Any]]) -> None:
        """Adds rows to a table."""

    def transaction(self) -> AbstractContextManager[None]:
        """All of a block or nothing, durably. Nothing is read in it that it wrote: it may be sent in one go."""

    def exclusively(self) -> AbstractContextManager[None]:
        """A transaction that may read what it wrote."""

    def as_of_now(self) -> AbstractContextManager[None]:
        """Reads in the block see everything as it is at one moment."""

    def format(self) -> int:
        """Version of the tables; 0: there are none."""

    def set_format(self, number: int) -> None:
        """Writes it down."""

    def has_table(self, name: str) -> bool:
        """Whether a table is there."""

    def compact(self) -> None:
        """Gives back room, after a snapshot."""

    def failure(self, error: Exception) -> StoreFailed:
        """What an error means, in words."""

    def close(self) -> None:
        """Closes it."""


class SqliteDatabase:
    """A file of SQLite."""

    words = Words(key="INTEGER PRIMARY KEY", counted_key="INTEGER PRIMARY KEY", number="INTEGER", data="BLOB")
    errors: tuple[type[Exception], ...] = (sqlite3.Error, OSError)

    def __init__(self, path: Path, *, reads_only: bool = False) -> None:
        """
        Args:
            path: the file; made, private, where there is none.
            reads_only: nothing is written, and no file is made.

        Raises:
            sqlite3.Error, OSError: it can't be used.
        """
        self.path = path
        self.name = str(path)
        if not reads_only:
            make_private_file(path)
        mode = "ro" if reads_only else "rw"
        self._connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}",
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )
        self.execute: Callable[..., sqlite3.Cursor] = self._connection.execute

    def pragma(self, words: str) -> None:
        """Sets or checks something of SQLite's own.

        Raises:
            sqlite3.DatabaseError: the file is damaged.
        """
        found = self.execute(f"PRAGMA {words}").fetchone()
        if words.startswith("quick_check") and found[0] != "ok":
            raise sqlite3.DatabaseError(f"malformed: {found[0]}")

    def script(self, sql: str) -> None:
        self._connection.executescript(sql)

    def insert(self, table: str, rows: Iterable[Sequence[Any]]) -> None:
        found = list(rows)
        if found:
            marks = ", ".join("?" * len(found[0]))
            self._connection.executemany(f"INSERT INTO {table} VALUES ({marks})", found)  # noqa: S608 - our own names

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of a block or nothing, durably."""
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.execute("COMMIT")
        except BaseException:
            # SQLite rolls back by itself after some errors (a full disk among them).
            if self._connection.in_transaction:
                self.execute("ROLLBACK")
            raise

    exclusively = transaction

    @contextmanager
    def as_of_now(self) -> Iterator[None]:
        """Reads in the block see everything as it is at one moment."""
        self.execute("BEGIN")
        try:
            yield
        finally:
            if self._connection.in_transaction:
                self.execute("ROLLBACK")

    def format(self) -> int:
        return int(self.execute("PRAGMA user_version").fetchone()[0])

    def set_format(self, number: int) -> None:
        self.execute(f"PRAGMA user_version={number}")

    def has_table(self, name: str) -> bool:
        return self.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)).fetchone() is not None

    def compact(self) -> None:
        """Writes everything from the write-ahead log into the file."""
        self.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def failure(self, error: Exception) -> StoreFailed:
        """What an error of SQLite or the disk means, in words."""
        return failure(self.path, error)

    def close(self) -> None:
        self._connection.close()


def failure(path: Path, error: Exception) -> StoreFailed:
    """What an error of SQLite or the disk means, in words."""
    text = " ".join(str(error).split())
    known: Iterable[tuple[str, str, str]] = (
        ("full", "can't be written, the disk is full", _FREE_SPACE),
        ("No space left", "can't be written, the disk is full", _FREE_SPACE),
        ("disk I/O", "can't be read or written, the disk reports an error", "Check the disk and the system's log."),
        ("readonly", "can't be written, it is read-only", "Make the file and its directory writable."),
        ("Read-only file system", "can't be written, it is read-only", "Make the file and its directory writable."),
        ("No such file or directory", "can't be made", "Make its directory first, or name another."),
        ("Permission denied", "can't be used by this account", "Let it read and write there, or name another place."),
        ("unable to open", "can't be opened", "Check that the directory exists and is writable."),
        ("locked", "is locked by another program", "End the program that has the file open."),
        ("malformed", "is damaged", "Restore it from a backup; nothing was changed."),
        ("not a database", "is damaged", "Restore it from a backup; nothing was changed."),
        ("decode", "is damaged", "Restore it from a backup; nothing was changed."),
    )
    for mark, why, remedy in known:
        if mark in text:
            return StoreFailed(path, f"{why} ({text})", remedy)
    return StoreFailed(path, f"can't be used ({text})", "Restore it from a backup, or start the version that wrote it.")


def check_url(url: str, *, from_command_line: bool) -> str:
    """The URL of a database, checked.

    Raises:
        InvalidInput: it is none, or others could read its password.
    """
    if not is_url(url):
        raise InvalidInput([Fault("store", f"{without_password(url)!r} is not a URL like postgresql://host/database")])
    parts = urlsplit(url)
    if from_command_line and (parts.password or "password=" in parts.query):
        why = "every account of this machine can read a password on a command line; keep it in ~/.pgpass or PGPASSWORD"
        raise InvalidInput([Fault("store", why)])
    return url


def is_url(where: Where) -> bool:
    """Whether a journal is a database of PostgreSQL."""
    return str(where).startswith(("postgresql://", "postgres://"))


def without_password(url: str) -> str:
    """A URL as it may be shown."""
    head, at, tail = url.partition("?")[0].rpartition("@")
    scheme, _, account = head.partition("://")
    return f"{scheme}://{account.partition(':')[0]}@{tail}" if at else tail
