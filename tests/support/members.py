"""Several controllers on one PostgreSQL, as programs of their own, and what can go wrong between them."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from callboard.client.client import Client
from callboard.security.places import CERTS_NAME
from callboard.v1.scheduler_pb2 import Stats
from tests.support.controller_process import ControllerProcess

LEASE_MS = 2_000
"""A short one: a test waits for its end."""


class Members:
    """Controllers of one cluster, in one process group each.

    Attributes:
        all: in the order in which they were started.
    """

    def __init__(self, folder: Path, urls: list[str], *options: str, lease_ms: int = LEASE_MS) -> None:
        """
        Args:
            folder: for their state directories.
            urls: the database, as each of them reaches it.
            options: more for each.
            lease_ms: of the leader.
        """
        self.all = [
            ControllerProcess(folder / f"member-{place}", "--store", url, "--store-lease-ms", str(lease_ms), *options)
            for place, url in enumerate(urls)
        ]

    @property
    def addresses(self) -> str:
        """As clients and agents are told."""
        return ",".join(each.address for each in self.all)

    @property
    def leader(self) -> ControllerProcess:
        """The first, which leads until something happens to it."""
        return self.all[0]

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def _start(self) -> None:
        first, *others = self.all
        await first.start()
        await first.said("term begins")
        for each in others:
            each.state_dir.mkdir(mode=0o700, parents=True)
            shutil.copy(first.state_dir / "secrets.key", each.state_dir)
            if (first.state_dir / CERTS_NAME).exists():
                shutil.copytree(first.state_dir / CERTS_NAME, each.state_dir / CERTS_NAME)
            await each.start()
            await each.said("follows")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self.all:
            await each.__aexit__(kind, error, trace)

    async def next_leader(self) -> ControllerProcess:
        """The one of the others that takes over."""
        waiting = [asyncio.create_task(each.said("term begins")) for each in self.all[1:]]
        done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        return self.all[1 + waiting.index(done.pop())]

    @staticmethod
    async def stats_of(member: ControllerProcess) -> Stats:
        """What one of them says itself."""
        async with Client(member.address) as client:
            return await client.stats()


class Wire:
    """A way to the database that can be cut: nothing passes, and nobody is told."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: asyncio.Server | None = None
        self.there = asyncio.Event()
        self.back = asyncio.Event()
        self.there.set()
        self.back.set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """Where it begins."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        far_writer: asyncio.StreamWriter | None = None
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
            passing = {
                asyncio.create_task(self._pass(reader, far_writer, self.there)),
                asyncio.create_task(self._pass(far_reader, writer, self.back)),
            }
            try:
                await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in passing:
                    each.cancel()
                await asyncio.gather(*passing, return_exceptions=True)
        finally:
            for end in (writer, far_writer):
                if end is not None:
                    end.close()

    @staticmethod
    async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, whole: asyncio.Event) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await whole.wait()
                writer.write(data)
                await writer.drain()
            await whole.wait()  # the end of a connection is not seen either


@contextlib.asynccontextmanager
async def writers(addresses: str, count: int) -> AsyncIterator[list[str]]:
    """Clients that make pools, one after another; yields the names of those that were acknowledged so far."""
    acknowledged: list[str] = []

    async def write(writer: int) -> None:
        async with Client(addresses, timeout=60) as client:
            number = 0
            while True:
                name = f"w{writer}-{number}"
                await client.ensure_pool(name)
                acknowledged.append(name)
                number += 1

    async with asyncio.TaskGroup() as group:  # one that fails fails the test at once
        tasks = [group.create_task(write(writer)) for writer in range(count)]
        try:
            yield acknowledged
        finally:
            for task in tasks:
                task.cancel()


async def more_than(acknowledged: list[str], count: int) -> None:
    """Waits for so many more acknowledgements."""
    wanted = len(acknowledged) + count

    async def is_there() -> bool:
        return len(acknowledged) >= wanted

    await until(is_there)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Looks again and again."""
    while not await holds():  # noqa: ASYNC110 - it is another program that changes
        await asyncio.sleep(0.02)
