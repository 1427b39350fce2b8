"""Directories of code that jobs bring along: files named by the hash of what is in them (docs/programs.md).

A package comes and goes in pieces, so that no message is large, an upload that broke off goes on where it was, and what
is there already is not sent again. When room is wanted, what no living job needs goes first, the longest unused first.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs.scalars import PACKAGE
from callboard.wire.refusals import InvalidRequest, LimitReached, NotFound

MAX_PACKAGE_BYTES = 256 << 20
TOTAL_BYTES = 4 << 30
POOL_BYTES = 2 << 30
"""Of the packages that the living jobs of one pool need."""

PIECE_BYTES = 2 << 20
"""Most of a package in one message."""


class Packages:
    """The packages of one controller."""

    def __init__(
        self,
        folder: Path,
        needed: Callable[[], Mapping[str, Collection[str]]],
        total_bytes: int = TOTAL_BYTES,
        pool_bytes: int = POOL_BYTES,
    ) -> None:
        """
        Args:
            folder: where they are kept.
            needed: packages of the jobs that live, by pool.
            total_bytes: what is kept of all of them.
            pool_bytes: what the jobs of one pool may need.
        """
        self._folder = folder
        self._needed = needed
        self._total_bytes = total_bytes
        self._pool_bytes = pool_bytes
        self._one_at_a_time = asyncio.Lock()

    def has(self, package: str) -> bool:
        """Whether it is there, whole."""
        path = self._path(package)
        if path.is_file():
            os.utime(path)  # used now
            return True
        return False

    def check_room(self, pool: str, packages: Collection[str]) -> None:
        """Whether a pool may have a job with these packages, besides those that it has.

        Raises:
            LimitReached: its jobs need too much already.
        """
        before = self._needed().get(pool, ())
        if set(packages) <= set(before):
            return
        held = sum(self._size_of(each) for each in {*before, *packages})
        if held > self._pool_bytes:
            raise LimitReached(
                f"with this job the packages of pool {pool}'s living jobs would be {held >> 20} MiB; "
                f"{self._pool_bytes >> 20} MiB are allowed. Wait for jobs to end, or name data in .callboardignore"
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
        """
        path = self._path(package)
        if not 0 < size <= MAX_PACKAGE_BYTES or len(data) > PIECE_BYTES:
            message = f"{size} bytes in pieces of {len(data)}; at most {MAX_PACKAGE_BYTES} in pieces of {PIECE_BYTES}"
            raise InvalidRequest.of(InvalidInput([Fault("size_bytes", message)]))
        async with self._one_at_a_time:
            if await self._is_sound(package):
                return size
            self._folder.mkdir(mode=0o700, exist_ok=True)
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
                raise InvalidRequest.of(InvalidInput([Fault("package", message)]))
            part.replace(path)
            return size

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
        """
        if offset < 0 or not (self.has(package) if offset else await self._is_sound(package)):
            raise NotFound(f"{package} is not kept here; submit the job again, and it is sent again")
        with self._path(package).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return size, os.pread(file.fileno(), PIECE_BYTES, offset)

    def _path(self, package: str) -> Path:
        match = PACKAGE.fullmatch(package)
        if match is None:
            raise InvalidRequest.of(InvalidInput([Fault("package", f"{package[:100]!r} is not a package")]))
        return self._folder / match[1]

    def _make_room(self, size: int) -> None:
        files = sorted((path for path in self._folder.iterdir()), key=lambda path: path.stat().st_mtime)
        held = sum(path.stat().st_size for path in files)
        needed = {package.partition(":")[2] for some in self._needed().values() for package in some}
        for path in files:
            if held + size <= self._total_bytes:
                return
            if path.stem not in needed:
                held -= path.stat().st_size
                path.unlink()
        if held + size > self._total_bytes:
            raise LimitReached(
                f"the packages of living jobs are {held} of {self._total_bytes} bytes; there is no room for {size} "
                "more. Wait for jobs to end, or leave out large files with .callboardignore"
            )


def _settled(path: Path) -> str:
    """The name of what was sent, once it is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return digest_of(path)


def digest_of(path: Path) -> str:
    """The name of the package that a file is."""
    with path.open("rb") as file:
        return f"package:{hashlib.file_digest(file, 'sha256').hexdigest()}"
