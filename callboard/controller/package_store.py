"""The store of packages, which are code that jobs bring along: files named by the hash of what is in them.

A package comes and goes in pieces, so that no message is large, an upload that broke off goes on where it was, and what
is there already is not sent again. When room is wanted, what no living job needs goes first, the longest unused first.

Controllers that share a database keep packages there, too: whoever takes over has the code of the jobs that it gets.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from callboard.controller.journal.commits import store_failed
from callboard.controller.journal.state_dir import StoreFailed
from callboard.model.inputs.scalars import PACKAGE
from callboard.wire.refusals import LimitReached, NotFound, invalid

if TYPE_CHECKING:
    from callboard.controller.journal.postgres import PostgresDatabase

MAX_PACKAGE_BYTES = 256 << 20
TOTAL_BYTES = 4 << 30
POOL_BYTES = 2 << 30
"""Of the packages that the living jobs of one pool need."""

PIECE_BYTES = 2 << 20
"""Most of a package in one message."""

Needed = Callable[[], Mapping[str, Collection[str]]]


@dataclass(eq=False)
class Packages:
    """The packages of one controller.

    Attributes:
        needed: packages of the jobs that live, by pool.
        total_bytes: what is kept of all of them.
        pool_bytes: what the jobs of one pool may need.
        shared: those that other controllers have, too.
    """

    folder: Path
    needed: Needed
    total_bytes: int = TOTAL_BYTES
    pool_bytes: int = POOL_BYTES
    shared: SharedPackages | None = None
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    def has(self, package: str) -> bool:
        """Whether it is there, whole."""
        path = self._path(package)
        if path.is_file():
            os.utime(path)  # used now
            return True
        return False

    async def obtain(self, package: str) -> bool:
        """Whether it is there, whole, by now: one that another controller took is fetched.

        Raises:
            Unavailable: the database that controllers share can't be asked.
        """
        if self.has(package):
            return True
        async with self._one_at_a_time:
            return self.has(package) or await self._fetched(package)

    async def check_room(self, pool: str, packages: Collection[str]) -> None:
        """Whether a pool may have a job with these packages, besides those that it has.

        Raises:
            LimitReached: its jobs need too much already.
            Unavailable: the database that controllers share can't be asked.
        """
        before = self.needed().get(pool, ())
        if set(packages) <= set(before):
            return
        needed, shared = {*before, *packages}, dict[str, int]()
        if self.shared is not None and not all(self.has(each) for each in needed):
            with _translated():
                shared = await asyncio.to_thread(self.shared.sizes)
        held = sum(shared.get(_digest(each)) or self._size_of(each) for each in needed)
        if held > self.pool_bytes:
            raise LimitReached(
                f"with this job the packages of pool {pool}'s living jobs would be {held >> 20} MiB; "
                f"{self.pool_bytes >> 20} MiB are allowed. Wait for jobs to end, or name data in .callboardignore"
            )

    def _size_of(self, package: str) -> int:
        try:
            return self._path(package).stat().st_size
        except FileNotFoundError:
            return 0  # of a job that was submitted by an earlier version

    async def put(self, package: str, size: int, offset: int, data: bytes) -> int:
        """Take a piece; returns how many bytes are there. One that was taken before changes nothing.

        Raises:
            InvalidRequest: it is too large, or not what its name says.
            LimitReached: the packages of living jobs leave no room.
            Unavailable: the database that controllers share can't be written.
        """
        path = self._path(package)
        if not 0 < size <= MAX_PACKAGE_BYTES or len(data) > PIECE_BYTES:
            message = f"{size} bytes in pieces of {len(data)}; at most {MAX_PACKAGE_BYTES} in pieces of {PIECE_BYTES}"
            raise invalid("size_bytes", message)
        async with self._one_at_a_time:
            if await self._is_sound(package):
                await self._share(package)
                return size
            if await self._fetched(package):
                return size
            self.folder.mkdir(mode=0o700, exist_ok=True)
            part = path.with_suffix(".part")
            there = part.stat().st_size if part.exists() else 0
            if not data or offset != there or there + len(data) > size:
                return min(there, size)
            if not there:
                self._make_room(size)
            with part.open("ab") as file:
                file.write(data)
            if there + len(data) < size:
                return there + len(data)
            digest = await asyncio.to_thread(_settled, part)
            if digest != package:
                part.unlink()
                message = f"what was sent is {digest}; send it again"
                raise invalid("package", message)
            part.replace(path)
            await self._share(package)
            return size

    async def _share(self, package: str) -> None:
        """Before its sender hears that it is kept: the job that needs it may be another controller's soon."""
        if self.shared is not None:
            path, needed = self._path(package), self._all_needed()
            with _translated():
                await asyncio.to_thread(self.shared.keep, package, path, needed, self.total_bytes)

    async def _fetched(self, package: str) -> bool:
        """Whether another controller had taken it: then it is here now."""
        if self.shared is None:
            return False
        path = self._path(package)
        with _translated():
            size = await asyncio.to_thread(self.shared.size_of, package)
            if not size:
                return False
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self._make_room(size)
            part = path.with_suffix(".part")
            await asyncio.to_thread(self.shared.fetch, package, part)
        if await asyncio.to_thread(_settled, part) != package:
            part.unlink()
            return False
        part.replace(path)
        return True

    async def _is_sound(self, package: str) -> bool:
        """Whether it is there, and still what its name says: a disk may have changed it."""
        if not self.has(package):
            return False
        path = self._path(package)
        if await asyncio.to_thread(digest_of, path) == package:
            return True
        path.unlink(missing_ok=True)
        return False

    async def read(self, package: str, offset: int) -> tuple[int, bytes]:
        """Its size, and the piece at a place.

        Raises:
            NotFound: it is not there.
            Unavailable: the database that controllers share can't be asked.
        """
        sound = offset >= 0 and (self.has(package) if offset else await self._is_sound(package))
        if not sound and (offset < 0 or not await self.obtain(package)):
            raise NotFound(f"{package} is not kept here; submit the job again, and it is sent again")
        with self._path(package).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return size, os.pread(file.fileno(), PIECE_BYTES, offset)

    def _path(self, package: str) -> Path:
        match = PACKAGE.fullmatch(package)
        if match is None:
            raise invalid("package", f"{package[:100]!r} is not a package")
        return self.folder / match[1]

    def _all_needed(self) -> set[str]:
        return {package for some in self.needed().values() for package in some}

    def _make_room(self, size: int) -> None:
        files = sorted(self.folder.iterdir(), key=lambda path: path.stat().st_mtime)
        held = [(path.name, path.stat().st_size) for path in files]
        for name in _given_up(held, self._all_needed(), size, self.total_bytes):
            (self.folder / name).unlink()


class SharedPackages:
    """Packages in the PostgreSQL that controllers share. What is named by what is in it needs no fence: nobody has
    something else to write there. Each method has a session of its own, and may run in any thread."""

    def __init__(self, url: str) -> None:
        self._url = url

    def sizes(self) -> dict[str, int]:
        """Bytes of each by its digest, the longest unused first.

        Raises:
            StoreFailed: the database can't be asked.
        """
        with self._session() as database:
            return _sizes(database)

    def size_of(self, package: str) -> int:
        """Bytes of one; 0: it is not there.

        Raises:
            StoreFailed: the database can't be asked.
        """
        asked = "SELECT coalesce(sum(length(data)), 0) FROM package WHERE name = ?"
        with self._session() as database:
            return int(database.execute(asked, (_digest(package),)).fetchone()[0])

    def keep(self, package: str, path: Path, needed: Collection[str], total_bytes: int) -> None:
        """Takes one, whole and durably. One that is there is used now.

        Args:
            needed: those that living jobs need, which are not given up for it.

        Raises:
            StoreFailed: the database can't be written.
            LimitReached: those that are needed leave no room.
        """
        name = _digest(package)
        with self._session() as database, database.exclusively():
            used = "UPDATE package SET used_at = now() WHERE name = ? AND place = 0 RETURNING place"
            if database.execute(used, (name,)).fetchone() is not None:
                return
            for old in _given_up(list(_sizes(database).items()), needed, path.stat().st_size, total_bytes):
                database.execute("DELETE FROM package WHERE name = ?", (old,))
            with path.open("rb") as file:
                for place, data in enumerate(iter(lambda: file.read(PIECE_BYTES), b"")):
                    added = "INSERT INTO package VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
                    database.execute(added, (name, place, data))

    def fetch(self, package: str, path: Path) -> None:
        """Writes what is in one to a file.

        Raises:
            StoreFailed: the database can't be asked, or the file not be written.
        """
        asked = "SELECT data FROM package WHERE name = ? AND place = ?"
        with self._session() as database, path.open("wb") as file:
            place = 0
            while (row := database.execute(asked, (_digest(package), place)).fetchone()) is not None:
                file.write(row[0])
                place += 1

    @contextmanager
    def _session(self) -> Iterator[PostgresDatabase]:
        from callboard.controller.journal.postgres import PostgresDatabase  # noqa: PLC0415 - an extra

        database = PostgresDatabase(self._url, "packages")
        try:
            with database.translated():
                yield database
        finally:
            database.close()


def _sizes(database: PostgresDatabase) -> dict[str, int]:
    asked = "SELECT name, sum(length(data)) FROM package GROUP BY name ORDER BY max(used_at)"
    return {name: int(size) for name, size in database.execute(asked)}


def _given_up(held: Sequence[tuple[str, int]], needed: Collection[str], size: int, total_bytes: int) -> list[str]:
    """What goes to make room for one more: nothing that is needed, and the longest unused first.

    Args:
        held: digest, or name of a file that begins with it, and bytes of each; the longest unused first.
        needed: packages of living jobs.
        size: bytes of the new one.

    Raises:
        LimitReached: those that are needed leave no room.
    """
    kept, digests = sum(each for _, each in held), {_digest(package) for package in needed}
    gone = []
    for name, each in held:
        if kept + size <= total_bytes:
            break
        if name.partition(".")[0] not in digests:
            gone.append(name)
            kept -= each
    if kept + size > total_bytes:
        raise LimitReached(
            f"the packages of living jobs are {kept} of {total_bytes} bytes; there is no room for {size} "
            "more. Wait for jobs to end, or leave out large files with .callboardignore"
        )
    return gone


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except StoreFailed as failure:
        raise store_failed(failure) from failure


def _digest(package: str) -> str:
    return package.partition(":")[2]


def _settled(path: Path) -> str:
    """The name of what was sent, once it is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return digest_of(path)


def digest_of(path: Path) -> str:
    """The name of the package that a file is."""
    with path.open("rb") as file:
        return f"package:{hashlib.file_digest(file, 'sha256').hexdigest()}"
