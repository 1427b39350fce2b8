"""The controller's disk: files in memory on which SQLite and the store that ships work, and what a disk does to them.

It is slow, full, or reports an error. When its program is killed, what was written stays as it is. When the machine
loses its power, what was not synced is lost or torn: of the write under way any sectors are there, or of all since the
last one that SQLite synced. The next life opens what is left of the files, as a store does after a crash.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from typing import TypeVar

from callboard.controller.journal.codec import Decision, decode_change
from callboard.controller.journal.database import SqliteDatabase
from callboard.controller.journal.journal import SqliteJournal
from callboard.controller.journal.secret_store import SecretStore
from callboard.controller.journal.state_dir import JOURNAL_NAME, KEY_NAME, SECRETS_NAME, StateDir
from callboard.controller.journal.store import Store, sqlite_journal, translated
from callboard.scheduler.records.job_records import Change, EventRecord
from callboard.simulation.options import Fault
from callboard.simulation.world.site import Site

SNAPSHOT_AFTER = 4_000
"""Changes in the log until a snapshot pays."""

EVENTS_KEPT = 2_000

MOST_DECODED = 4 * SNAPSHOT_AFTER

SLOW_MS = (200, 2_500)
"""For a batch while the disk is slow: long enough for silence to be noticed while a join is being written."""

FULL, BROKEN = "database or disk is full", "disk I/O error"
"""How SQLite says it."""

WHOLE = 0.3
"""Share of the writes during which the power fails that are there all the same."""

_SECTOR = 512
_LOG = JOURNAL_NAME + "-wal"
_FILES = (JOURNAL_NAME, _LOG, SECRETS_NAME, SECRETS_NAME + "-journal", KEY_NAME)

_SYNCS_COMMITS = 2
"""From this ``PRAGMA synchronous`` on SQLite syncs its log with every commit."""

_T = TypeVar("_T")
_Files = dict[str, bytes]


class Disk:
    """What survives."""

    def __init__(self) -> None:
        memory = Path("/dev/shm")  # noqa: S108 - a directory of our own in it
        self._home = tempfile.TemporaryDirectory(prefix="callboard-", dir=memory if memory.is_dir() else None)
        self._lives = itertools.count(1)
        self._digest = hashlib.sha256()
        self.changes = 0
        self.full_until_ms = 0
        """Nothing can be written before."""
        self.error = FULL
        """What the disk says until then."""
        self.slow_until_ms = 0
        """Everything takes long before."""
        self.directory = self._new_directory({})
        self._left: _Files | None = None
        """What the next life will find, once the power is lost."""
        self._synced: _Files = {}
        """What would be there of a store that syncs nothing."""
        self.store: Store | None = None
        """Of the life that works on it."""
        self.decode = lru_cache(MOST_DECODED)(decode_change)
        """Each life reads nearly the same texts; what a text means doesn't change, and a change is never changed."""
        self._power_until_ms = 0
        self._on_power_loss: Callable[[], object] | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of everything ever committed, in hex."""
        return self._digest.hexdigest()

    def committed(self, texts: Sequence[str], changes: int) -> None:
        self.changes += changes
        for text in texts:
            self._digest.update(text.encode())
            self._digest.update(b"\n")

    def lose_power(self, from_ms: int, tell: Callable[[], object]) -> None:
        """Lets the power fail during the first write from then on."""
        self._synced, self._power_until_ms, self._on_power_loss = self._files(), from_ms, tell

    def write(self, work: Callable[[], None], syncs: Callable[[], bool], now_ms: int, chance: Random) -> bool:
        """Writes a batch; whether it is there for good.

        Args:
            syncs: whether what is written is synced before the work is done.
        """
        if self._on_power_loss is None or now_ms < self._power_until_ms:
            work()
            return True
        before = self._files()
        work()
        after, base = self._files(), before if syncs() else self._synced
        torn = {**after, _LOG: _torn(base.get(_LOG, b""), after.get(_LOG, b""), chance)}
        # A checkpoint syncs the log before it touches the tables: then all of it is there.
        survives = chance.random() < WHOLE or base[JOURNAL_NAME] != after[JOURNAL_NAME]
        self._left = after if survives else torn
        tell, self._on_power_loss = self._on_power_loss, None
        tell()
        return survives

    def crashed(self) -> None:
        """The program died, or its machine: the next one finds what is left."""
        left = self._files() if self._left is None else self._left
        self._left = self._on_power_loss = None
        self._let_go()
        earlier, self.directory = self.directory, self._new_directory(left)
        shutil.rmtree(earlier.path)

    def heal(self) -> None:
        """Nothing ails it any more."""
        self.full_until_ms = self.slow_until_ms = 0
        self._on_power_loss = None

    def close(self) -> None:
        self._let_go()
        self._home.cleanup()

    def _let_go(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None

    def _new_directory(self, files: _Files) -> StateDir:
        directory = StateDir(Path(self._home.name) / str(next(self._lives)))
        directory.path.mkdir(mode=0o700)
        for name, content in files.items():
            (directory.path / name).write_bytes(content)
        return directory

    def _files(self) -> _Files:
        paths = [self.directory.path / name for name in _FILES]
        return {path.name: path.read_bytes() for path in paths if path.is_file()}


def _torn(before: bytes, after: bytes, chance: Random) -> bytes:
    """A file of which some of the sectors that were written last are not there: what was written before the first of
    them is."""
    size = max(len(before), len(after))
    old, new = before.ljust(size, b"\0"), after.ljust(size, b"\0")
    written = [at for at in range(0, size, _SECTOR) if old[at : at + _SECTOR] != new[at : at + _SECTOR]]
    mixed = bytearray(new)
    first = chance.randrange(len(written)) if written else 0
    for place, at in enumerate(written[first:]):
        if not place or chance.random() < 0.5:  # a disk keeps no order
            mixed[at : at + _SECTOR] = old[at : at + _SECTOR]
    return bytes(mixed)


class _File(SqliteDatabase):
    """The database that ships, on a disk that has no room or reports an error now and then."""

    def __init__(self, journal: SimulatedJournal, path: Path) -> None:
        self._journal = journal
        journal.check_disk()
        super().__init__(path)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Fails at its end as the disk does."""
        with super().transaction():
            yield
            self._journal.check_disk()

    exclusively = transaction


class _Store(Store):
    """The store that ships, which says what it wrote."""

    def __init__(self, directory: StateDir, journal: SimulatedJournal) -> None:
        self._journal = journal
        with translated(directory.journal_path):
            database = sqlite_journal(directory, partial(_File, journal))
            secrets = SecretStore.of(directory.secrets_path)
        super().__init__(database, secrets, events_kept=EVENTS_KEPT)
        self.decode = journal.decode

    def commit(
        self, changes: Sequence[Change], events: Sequence[EventRecord], decisions: Sequence[Decision] = ()
    ) -> None:
        """Writes a batch, and lets it be looked at."""
        first = self._sequence + 1
        if self._journal.write(lambda: super(_Store, self).commit(changes, events, decisions), self._syncs):
            lines = self._database.execute("SELECT line FROM log WHERE sequence >= ? ORDER BY sequence", (first,))
            texts = [line for (line,) in lines]
            if events:
                told = "SELECT body FROM event WHERE revision >= ? ORDER BY revision"
                texts += [body for (body,) in self._database.execute(told, (events[0].revision,))]
            self._journal.written(changes, texts)

    def _syncs(self) -> bool:
        (level,) = self._database.execute("PRAGMA synchronous").fetchone()
        return bool(level >= _SYNCS_COMMITS)


class SimulatedJournal(SqliteJournal):
    """The journal of one life of the controller: the one that ships over the disk, with the disk's delays."""

    def __init__(self, site: Site, disk: Disk, committed: Callable[[Sequence[Change]], None]) -> None:
        """
        Args:
            committed: is told what is on disk, before anybody else can know.
        """
        super().__init__(disk.directory, events_kept=EVENTS_KEPT, changes_per_snapshot=SNAPSHOT_AFTER)
        self._site = site
        self._disk = disk
        self._committed = committed
        self.decode = disk.decode

    def write(self, work: Callable[[], None], syncs: Callable[[], bool]) -> bool:
        """Writes a batch; whether it is there for good."""
        return self._disk.write(work, syncs, self._site.timeline.now_ms, self._site.chance.disk)

    def written(self, changes: Sequence[Change], texts: Sequence[str]) -> None:
        self._disk.committed(texts, len(changes))
        self._committed(changes)

    def check_disk(self) -> None:
        """Looks whether anything can be written.

        Raises:
            sqlite3.Error: it can't.
        """
        if self._site.timeline.now_ms < self._disk.full_until_ms:
            self._site.count(f"SQLite: {self._disk.error}")
            raise sqlite3.OperationalError(self._disk.error)

    def _make_store(self) -> Store:
        self._disk.store = _Store(self._directory, self)
        return self._disk.store

    async def _run(self, work: Callable[[], _T]) -> _T:
        """What the disk does takes its time; a crash comes before the work, or after it and before anybody is told."""
        chance = self._site.chance.controller
        wait_ms = chance.randint(2, 6)
        if chance.random() < 0.01 and Fault.DELAY in self._site.faults and self._site.happens("slow disk"):
            self._site.count("slow disk")
            wait_ms = chance.randint(100, 3_000)
        if self._site.timeline.now_ms < self._disk.slow_until_ms:
            wait_ms = max(wait_ms, chance.randint(*SLOW_MS))
        before_s = chance.randrange(wait_ms) / 1000
        await asyncio.sleep(before_s)
        done = work()
        await asyncio.sleep(wait_ms / 1000 - before_s)
        return done
