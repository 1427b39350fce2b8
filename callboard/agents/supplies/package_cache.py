"""The cache of packages on this node: code that jobs bring along, fetched, verified, and unpacked for each worker.

The file in the cache is verified whenever it is used, and fetched again when it isn't what its name says. Each worker
has a tree of its own: what one writes there no other sees, and it goes with the worker.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
import shutil
import tarfile
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import grpc

from callboard.agents.runtime import HostError
from callboard.model.durations import Backoff
from callboard.model.log import structlog
from callboard.security.dialing import Channel
from callboard.security.tokens import BadToken
from callboard.v1 import agent_pb2, agent_pb2_grpc

_log = structlog.get_logger(__name__)

MAX_UNPACKED_BYTES = 1 << 30
MAX_MEMBERS = 60_000
KEPT_BYTES = 2 << 30
"""Of packages in the cache; the longest unused goes first, and none that is used right now."""

_MAX_HEADER_BYTES = 1 << 20
"""Of names and the like of one member, which are read into memory as a whole."""

_MAX_FETCHED_BYTES = 256 << 20
_PIECE_S = 30.0

_PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_TRIES, _RETRY_FIRST_S, _RETRY_MAX_S = 20, 0.1, 10.0
"""For one piece; the worker's own start deadline is above."""


class Packages:
    """The packages of one node."""

    def __init__(self, folder: Path, dial: Callable[[], Channel]) -> None:
        self._folder = folder
        self._dial = dial
        self._used: Counter[str] = Counter()
        self._fetching: dict[str, asyncio.Lock] = {}

    async def unpack(self, package: str, target: Path) -> None:
        """Put the files of a package into a new folder.

        Raises:
            HostError: it can't be had, or holds what no package may hold.
        """
        file = self._folder / package.partition(":")[2]
        self._used[file.name] += 1
        given_up = threading.Event()
        try:
            async with self._fetching.setdefault(package, asyncio.Lock()):
                if not file.exists() or await asyncio.to_thread(_name_of, file) != package:
                    await self._fetch(package, file)
            os.utime(file)
            await asyncio.to_thread(_extract, file, target, given_up)
        except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
            raise HostError(f"the code of the job can't be unpacked on this node: {error}") from error
        finally:
            given_up.set()
            self._used[file.name] -= 1
            if not self._used[file.name]:
                del self._used[file.name]
                self._fetching.pop(package, None)

    async def _fetch(self, package: str, file: Path) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        part = file.with_suffix(".part")
        try:
            async with self._dial() as channel:
                stub = agent_pb2_grpc.AgentServiceStub(channel)
                with part.open("wb") as output:
                    size = 1
                    while output.tell() < size:
                        request = agent_pb2.GetPackageRequest(package=package, offset=output.tell())
                        piece = await _piece(stub, request)
                        size = piece.size_bytes
                        if (not piece.data and output.tell() < size) or size > _MAX_FETCHED_BYTES:
                            raise HostError(f"the controller sent {len(piece.data)} of {size} bytes of the job's code")
                        output.write(piece.data)
        except (grpc.aio.AioRpcError, BadToken) as error:
            why = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
            raise HostError(f"the code of the job can't be fetched: {why}") from error
        if (found := await asyncio.to_thread(_name_of, part)) != package:
            raise HostError(
                f"the code of the job arrived as {found}, not as {package}; the network or a disk changes data"
            )
        await asyncio.to_thread(self._keep, part, file)
        _log.info("package_fetched", package=package, bytes=size)

    def _keep(self, part: Path, file: Path) -> None:
        part.replace(file)
        aged = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in self._folder.iterdir())
        held = sum(size for _, size, _ in aged)
        for _, size, old in aged:
            if held > KEPT_BYTES and old.stem not in self._used:
                old.unlink()
                held -= size


async def _piece(stub: Any, request: agent_pb2.GetPackageRequest) -> Any:
    """A piece of a package. A controller that is away, as it is while another takes over, is waited for."""
    backoff = Backoff(_RETRY_FIRST_S, _RETRY_MAX_S)
    for tries_left in reversed(range(_TRIES)):
        try:
            return await stub.GetPackage(request, timeout=_PIECE_S)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _PASSING or not tries_left:
                raise
            _log.info("package_piece_asked_again", package=request.package, why=error.details())
        await asyncio.sleep(backoff.next_s())
    raise AssertionError("the last try returns or raises")


def _name_of(file: Path) -> str:
    with file.open("rb") as content:
        return f"package:{hashlib.file_digest(content, 'sha256').hexdigest()}"


class _Bounded:
    """The stream inside a package, which says more than it may only once: a small file can unpack to any size, also to
    one endless name."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file = file
        self.tell = file.tell

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MAX_HEADER_BYTES:
            raise tarfile.TarError(f"the name of a file has {size} bytes")
        return self._file.read(size)

    def seek(self, place: int) -> None:
        if not self._file.tell() <= place <= MAX_UNPACKED_BYTES + 1024 * MAX_MEMBERS:
            raise tarfile.TarError("its files lie across each other, or are more than is allowed")
        self._file.seek(place)


def _extract(file: Path, target: Path, given_up: threading.Event) -> None:
    shutil.rmtree(target, ignore_errors=True)  # of an agent that ended meanwhile
    target.mkdir(parents=True)
    try:
        with gzip.open(file) as unzipped:
            stream: Any = _Bounded(unzipped)
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                _place(archive, target, given_up)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def _place(archive: tarfile.TarFile, target: Path, given_up: threading.Event) -> None:
    """Plain files and links inside the folder, as `client.packing` writes them, and nothing else: no devices, no hard
    links, no name twice. Links come last, so that nothing is ever written through one."""
    links: dict[Path, str] = {}
    size = 0
    for count, member in enumerate(archive, 1):
        size += member.size
        if size > MAX_UNPACKED_BYTES or count > MAX_MEMBERS:
            raise tarfile.TarError(f"more than {MAX_MEMBERS} files or {MAX_UNPACKED_BYTES >> 20} MiB")
        if given_up.is_set():
            raise tarfile.TarError("nobody waits for it any more")
        place = _inside(target, member.name)
        if member.isdir():
            place.mkdir(parents=True, exist_ok=True)
        elif member.issym():
            _inside(target, os.path.join(os.path.dirname(member.name), member.linkname))  # noqa: PTH118, PTH120
            links[place] = member.linkname
        elif member.isreg() and not member.issparse():
            place.parent.mkdir(parents=True, exist_ok=True)
            _write(place, archive.extractfile(member), 0o755 if member.mode & 0o100 else 0o644)
        else:
            raise tarfile.TarError(f"{member.name!r} is a special file: neither a plain file nor a link")
    for place, points_to in links.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(points_to)
    for place in links:
        if not Path(os.path.realpath(place)).is_relative_to(os.path.realpath(target)):
            raise tarfile.TarError(f"the link {place.name!r} leads outside of its folder")


def _inside(target: Path, name: str) -> Path:
    """Where a name lies in the folder."""
    if name.startswith("/") or "\0" in name:
        raise tarfile.TarError(f"{name!r} is an absolute path")
    parts = os.path.normpath(name).split("/")
    if parts[0] == "..":
        raise tarfile.TarError(f"{name!r} leads outside of its folder")
    return target.joinpath(*parts)


def _write(place: Path, content: IO[bytes] | None, mode: int) -> None:
    assert content is not None, "a plain file has content"
    with os.fdopen(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as output:
        shutil.copyfileobj(content, output, 1 << 16)
