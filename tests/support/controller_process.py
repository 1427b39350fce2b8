"""A controller as a program of its own, to be killed and started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from tests.support.ports import steady_port


class ControllerProcess:
    """One controller; its state outlives it.

    Attributes:
        address: where it listens; the same after a restart.
        lines: what it logged so far.
    """

    def __init__(
        self,
        state_dir: Path,
        *options: str,
        listen: str = "",
        within: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
        program: Sequence[str] = ("callboard.controller",),
    ) -> None:
        """
        Args:
            state_dir: of the controller.
            options: more of its options.
            listen: where it listens at first; empty: at a port that it can come back to.
            within: command that becomes the controller: what it runs in.
            environment: variables of its own.
            program: the module that is run, with what comes before the options.
        """
        self.state_dir = state_dir
        self._within = within
        self._environment = environment
        self._program = program
        self.address = listen or f"127.0.0.1:{steady_port()}"
        self.lines: list[dict[str, Any]] = []
        self.other: list[str] = []
        self._options = options
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()

    async def start(self) -> None:
        """Starts it and waits until it listens.

        Raises:
            AssertionError: it ended before.
        """
        await self.spawn()
        listening = await self.said("listening")
        self.address = listening["address"]

    async def spawn(self) -> None:
        """Starts it."""
        self.lines.clear()
        self.other.clear()
        self._process = await asyncio.create_subprocess_exec(
            *(
                *self._within,
                sys.executable,
                "-m",
                *self._program,
                "--listen",
                self.address,
                "--log-format",
                "json",
            ),
            *("--state-dir", str(self.state_dir), "--log-level", "debug", *self._options),
            stderr=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONUNBUFFERED": "1", **self._environment},
        )
        self._reader = asyncio.create_task(self._read())

    async def said(self, event: str) -> dict[str, Any]:
        """Waits until it logged ``event`` and returns the line."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            found[:] = [line for line in self.lines if line["event"] == event]
            return bool(found) or self._reader is None or self._reader.done()

        async with self._changed:
            await self._changed.wait_for(look)
        assert found, f"it ended without {event!r}: {self.lines} {self.other}"
        return found[0]

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Waits for its end and returns its exit code."""
        assert self._process is not None
        assert self._reader is not None
        code = await self._process.wait()
        await asyncio.wait({self._reader})
        return code

    async def kill(self) -> None:
        """Kills it, as a crash would."""
        self.signal(signal.SIGKILL)
        await self.ended()

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it runs."""
        return None if self._process is None else self._process.returncode

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.returncode is None:
            await self.kill()

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        async for raw in self._process.stderr:
            text = raw.decode()
            try:
                self.lines.append(json.loads(text))
            except ValueError:
                self.other.append(text)
            async with self._changed:
                self._changed.notify_all()
        async with self._changed:
            self._changed.notify_all()
