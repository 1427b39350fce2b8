"""Code that jobs bring along, on this node: fetched from the controller, verified, unpacked for each worker.

The file in the cache is verified whenever it is used, and fetched again when it isn't what its name says. Each worker
has a tree of its own: what one writes there no other sees, and it goes with the worker.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import tarfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import grpc
import structlog

from callboard.agents.runtime import HostError
from callboard.security.dialing import Channel
from callboard.security.tokens import BadToken
from callboard.v1 import agent_pb2, agent_pb2_grpc

_log = structlog.get_logger(__name__)

MAX_UNPACKED_BYTES = 1 << 30
MAX_MEMBERS = 60_000
KEPT = 8
"""Packages in the cache; the longest unused goes first."""

_PIECE_S = 30.0


class Packages:
    """The packages of one node."""

    def __init__(self, folder: Path, dial: Callable[[], Channel]) -> None:
        """
        Args:
            folder: its cache.
            dial: a channel to the controller.
        """
        self._folder = folder
        self._dial = dial
        self._fetching: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def unpack(self, package: str, target: Path) -> None:
        """Put the files of a package into a new folder.

        Raises:
            HostError: it can't be had, or holds what no package may hold.
        """
        file = self._folder / package.partition(":")[2]
        try:
            async with self._fetching[package]:
                if not file.exists() or await asyncio.to_thread(_name_of, file) != package:
                    await self._fetch(package, file)
            os.utime(file)
            await asyncio.to_thread(_extract, file, target)
        except (OSError, tarfile.TarError) as error:
            raise HostError(f"the code of the job can't be unpacked on this node: {error}") from error

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
                        piece = await stub.GetPackage(request, timeout=_PIECE_S)
                        size = piece.size_bytes
                        if not piece.data and output.tell() < size:
                            raise HostError("the controller sent nothing of the code of the job")
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
        whole = [path for path in self._folder.iterdir() if not path.suffix]
        for old in sorted(whole, key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink()


def _name_of(file: Path) -> str:
    with file.open("rb") as content:
        return f"package:{hashlib.file_digest(content, 'sha256').hexdigest()}"


def _extract(file: Path, target: Path) -> None:
    """What leads out of the folder, devices and the like are refused by the filter."""
    shutil.rmtree(target, ignore_errors=True)  # of an agent that ended meanwhile
    target.mkdir(parents=True)
    size = 0
    with tarfile.open(file, mode="r:gz") as archive:
        for count, member in enumerate(archive, 1):
            size += member.size
            if size > MAX_UNPACKED_BYTES or count > MAX_MEMBERS:
                raise tarfile.TarError(f"more than {MAX_MEMBERS} files or {MAX_UNPACKED_BYTES >> 20} MiB")
            archive.extract(member, target, filter="data")
