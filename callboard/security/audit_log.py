"""The audit log: who changed what, when, from where, and with which result.

One line of JSON for each call that changed something or was meant to, in the state directory (``audit.jsonl``, mode
0600). When the file is full it becomes ``audit.jsonl.1`` in place of the one before, so that the log is bounded. A line
is with the operating system before the call is answered, and on disk within a second (:meth:`AuditLog.sync`): a crash
of the controller loses none, a power failure at most the lines of the last second. The changes themselves are in the
journal, which is on disk before a call is answered.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import fields
from operator import attrgetter
from pathlib import Path

from callboard.model.frozen import dataclass
from callboard.model.log import structlog

_log = structlog.get_logger(__name__)

AUDIT_NAME = "audit.jsonl"

MAX_FILE_BYTES = 8 << 20
"""Of each of the two files: tens of thousands of lines."""

IN_MEMORY = 10_000
"""Newest entries that can be asked for; older ones are in the files."""

MAX_TEXT = 300
"""Longest text of an entry: a caller chooses the names it asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One call.

    Attributes:
        at_ms: when it was answered, in milliseconds since 1970.
        role: its role; empty: everything is allowed.
        code: gRPC status.
        why: why it was refused; empty: it was not.
    """

    number: int
    at_ms: int
    who: str
    role: str
    method: str
    subject: str
    peer: str
    code: str
    why: str = ""


_FIELDS = tuple(field.name for field in fields(Entry))
_values = attrgetter(*_FIELDS)


class AuditLog:
    """The log of one controller; :meth:`open` before anything is added, and :meth:`close` at the end."""

    def __init__(self, path: Path, *, most_bytes: int = MAX_FILE_BYTES) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._descriptor = -1
        self._bytes = 0
        self._entries: deque[Entry] = deque(maxlen=IN_MEMORY)
        self._number = 0
        self._unsynced = False
        self.trouble = ""
        """Why the newest entry is not on disk; empty: it is."""

    def open(self) -> None:
        """Reads the newest entries and goes on after them.

        Raises:
            OSError: it can't be read or written.
        """
        for path in (self._older, self._path):
            self._entries.extend(_read(path))
        self._number = self._entries[-1].number if self._entries else 0
        self._open_file()
        if self._bytes and os.pread(self._descriptor, 1, self._bytes - 1) != b"\n":
            self._write(b"\n")  # torn by a crash: the line is lost, and the next one is not

    def close(self) -> None:
        """Lets go of the file, once it is on disk."""
        if self._descriptor >= 0:
            self.sync()
            os.close(self._descriptor)
            self._descriptor = -1

    def sync(self) -> None:
        """Brings what was added to disk. May take a while, and may be called by another thread than :meth:`add`."""
        if not self._unsynced:
            return
        self._unsynced = False
        try:
            # A descriptor of its own: the log may go on in another file meanwhile.
            descriptor = os.dup(self._descriptor)
            try:
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._unsynced = True
            _log.error("audit_log_not_on_disk", why=str(error))

    def add(
        self, *, at_ms: int, who: str, role: str, method: str, subject: str, peer: str, code: str, why: str
    ) -> None:
        """Adds an entry. A disk that takes nothing is told in :attr:`trouble`; the call it is about has happened."""
        self._number += 1
        entry = Entry(
            number=self._number,
            at_ms=at_ms,
            who=who,
            role=role,
            method=method,
            subject=subject[:MAX_TEXT],
            peer=peer[:MAX_TEXT],
            code=code,
            why=why[:MAX_TEXT],
        )
        self._entries.append(entry)
        line = json.dumps(dict(zip(_FIELDS, _values(entry), strict=True)), separators=(",", ":")).encode() + b"\n"
        try:
            if self._bytes + len(line) > self._most_bytes:
                self.close()
                self._path.replace(self._older)
            if self._descriptor < 0:
                self._open_file()
            self._write(line)
            trouble = ""
        except OSError as error:
            trouble = f"{self._path}: {error.strerror}"
        if trouble and not self.trouble:
            _log.error("audit_log_not_written", why=trouble, kept_in_memory=IN_MEMORY)
        elif self.trouble and not trouble:
            _log.info("audit_log_written_again", path=str(self._path))
        self.trouble = trouble

    def newest(self, most: int, *, before: int = 0, who: str = "") -> list[Entry]:
        """The newest entries, newest first.

        Args:
            before: only those with a smaller number; 0: all.
            who: only those of this client; empty: of all.
        """
        found = (
            entry
            for entry in reversed(self._entries)
            if (not before or entry.number < before) and (not who or entry.who == who)
        )
        return [entry for entry, _ in zip(found, range(most), strict=False)]

    @property
    def _older(self) -> Path:
        return self._path.with_name(f"{self._path.name}.1")

    def _open_file(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o600)
        self._bytes = os.fstat(self._descriptor).st_size

    def _write(self, line: bytes) -> None:
        while line:  # A disk that is nearly full takes a part.
            written = os.write(self._descriptor, line)
            self._bytes += written
            self._unsynced = True
            line = line[written:]


def _read(path: Path) -> Iterator[Entry]:
    """Entries of a file. A line that is torn or is none of ours is left out."""
    try:
        lines: Iterable[bytes] = path.read_bytes().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            yield Entry(**json.loads(line))
        except (ValueError, TypeError):
            continue
