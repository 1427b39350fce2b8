"""Parts of a cluster in a test's hand: an agent that is killed and started again, and a TCP proxy before the controller
that cuts connections, holds back what they carry, and doubles them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from callboard.agents.supplies.worker_env import AGENT_MARKER
from callboard.security.processes import marked, process_table

UP, DOWN = "up", "down"
"""Towards the server, and back."""


SETTLE_S = 120.0
"""For a cluster without faults to come to rest on a busy machine."""


class Violation(Exception):
    """Something that was promised did not hold."""


class Proxy:
    """Listens on a port of loopback and forwards to another.

    Attributes:
        port: where it listens.
        target: host and port it forwards to.
        doubled: whether the server gets every connection that begins from now on twice, with the same content.
    """

    def __init__(self, host: str, port: int) -> None:
        self.port = 0
        self.doubled = False
        self.target = (host, port)
        self._open = {UP: asyncio.Event(), DOWN: asyncio.Event()}
        self.heal()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """Where it listens, "host:port"."""
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.heal()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Ends every connection with a reset, on both sides."""
        for writer in self._writers:
            writer.transport.abort()

    def hold(self, *directions: str) -> None:
        """Forwards nothing in these directions; connections stay, and new ones are taken."""
        for direction in directions:
            self._open[direction].clear()

    def heal(self) -> None:
        """Forwards everything again, what was held back first."""
        for gate in self._open.values():
            gate.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        mine, pumps = {writer}, []
        self._writers.add(writer)
        try:
            servers: list[asyncio.StreamWriter] = []
            for _ in range(2 if self.doubled else 1):
                answers, server = await asyncio.open_connection(*self.target)
                mine.add(server)
                self._writers.add(server)
                # What the second answers is for nobody.
                pumps.append(asyncio.create_task(self._pump(answers, [] if servers else [writer], DOWN)))
                servers.append(server)
            pumps.append(asyncio.create_task(self._pump(reader, servers, UP)))
            # One side is gone: so is the other.
            await asyncio.wait(pumps, return_when=asyncio.FIRST_EXCEPTION)
        except OSError:
            pass
        finally:
            self._writers -= mine
            for each in mine:
                each.transport.abort()
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, source: asyncio.StreamReader, targets: list[asyncio.StreamWriter], direction: str) -> None:
        while data := await source.read(1 << 16):
            await self._open[direction].wait()
            for place, target in enumerate(targets):
                target.write(data)
                try:
                    await target.drain()
                except OSError:
                    # That the second one's server hung up is its own affair.
                    if not place:
                        raise
        if targets:
            raise ConnectionResetError


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of its own for a signal."""
    with suppress(OSError):
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
    return False


class Agent:
    """The agent of one node, started again whenever it has ended."""

    def __init__(
        self,
        folder: Path,
        node: str,
        token: Path | None,
        controller: str,
        more: Mapping[str, Any],
        *,
        within: Sequence[str] = (),
    ) -> None:
        self.node = node
        self.run_dir = folder / node
        self._within = within
        self.wanted = False
        self.process: asyncio.subprocess.Process | None = None
        self.killed = False
        self._starting = asyncio.Lock()
        self.log = folder / f"{node}.log"
        self._file = folder / f"{node}.json"
        settings = {
            "node_id": node,
            "controller": controller,
            "token_file": str(token or ""),
            "cluster": f"chaos-{os.getpid()}",
            "runtime": "process",
            "simulate_gpus": 2,
            "cpu_milli": 8000,
            "memory_bytes": 8 << 30,
            "run_dir": str(self.run_dir),
            "successor_s": 60,
            "leave_hooks_s": 0.3,
            "log_format": "json",
            **more,
        }
        self._file.write_text(json.dumps(settings))

    @property
    def up(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.returncode is None

    async def ensure(self) -> None:
        """Starts it if it is wanted and doesn't run.

        Raises:
            Violation: it had ended by itself.
        """
        async with self._starting:
            if self.process is not None and self.process.returncode is not None and self.wanted and not self.killed:
                code = self.process.returncode
                raise Violation(f"the agent of {self.node} ended by itself with {code}; see {self.log}")
            if self.wanted and not self.up:
                self.killed = False
                with self.log.open("ab") as log:
                    self.process = await asyncio.create_subprocess_exec(
                        *(*self._within, sys.executable, "-m", "callboard.agents", str(self._file)), stderr=log
                    )

    async def kill(self) -> None:
        """Kills it, as a crash would."""
        if self.up:
            assert self.process is not None
            self.killed = True
            self.process.kill()
            await self.process.wait()

    async def leave(self) -> None:
        """Ends it politely.

        Raises:
            Violation: it did not end well.
        """
        self.wanted = False
        if self.up:
            assert self.process is not None
            async with asyncio.timeout(SETTLE_S):
                # A signal that comes before the agent listens ends it as it ends every program: what the agent before
                # it left would stay.
                while self.process.returncode is None and not _catches(self.process.pid, signal.SIGTERM):  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.01)
                with suppress(ProcessLookupError):
                    self.process.terminate()
                code = await self.process.wait()
            if code and not self.killed:
                raise Violation(f"the agent of {self.node} left with {code}; see {self.log}")
        self.process = None

    def recorded(self, role: str) -> list[int]:
        """Pids of processes of a role that it wrote down."""
        with suppress(OSError, ValueError):
            return [
                each["pid"]
                for each in json.loads((self.run_dir / "processes.json").read_text())
                if each["role"] == role and each["pid"]
            ]
        return []

    def processes(self) -> set[int]:
        """All living processes of its node but the agent itself."""
        table = process_table()
        found = marked(f"{AGENT_MARKER}={self.run_dir}", table)
        return {each.pid for each in found if not table[each.pid].gone}
