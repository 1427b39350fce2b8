"""The keeper of the fence: the agent's side of `fence`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from typing import TypeAlias

import structlog

from callboard.agents.pid_watch import exited
from callboard.agents.process_tree import ProcessId, identify, send_signal
from callboard.agents.run_dir import RunDir, Started
from callboard.model.backoff import Backoff

_log = structlog.get_logger(__name__)

_RETRY_FIRST_S, _RETRY_MAX_S = 0.1, 5.0
"""Between attempts at another fence."""

_Program: TypeAlias = asyncio.subprocess.Process


class FenceKeeper:
    """Keeps one fence alive from the first strict worker on."""

    def __init__(self, run_dir: RunDir, environment: Mapping[str, str]) -> None:
        """
        Args:
            run_dir: of the node; what the fence reads.
            environment: of the fence; carries the node's marker, so that the next agent finds it.
        """
        self._run_dir = run_dir
        self._environment = environment
        self._watching = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self.process: ProcessId | None = None

    async def watching(self) -> None:
        """Return once a fence watches. From the first call on there always is one, but for its restarts."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())
        await self._watching.wait()

    async def close(self) -> None:
        """End it: no strict worker is left."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
            self._keeper = None

    async def _keep(self) -> None:
        backoff = Backoff(_RETRY_FIRST_S, _RETRY_MAX_S)
        while True:
            pause_s = backoff.next_s()
            try:
                code = await self._one_life()
            except OSError as error:
                # No memory or no processes left: starts of strict workers wait, up to their deadline.
                _log.error("fence_not_started", why=str(error), again_s=pause_s)
            else:
                _log.warning("fence_ended", code=code, again_s=pause_s)
            await asyncio.sleep(pause_s)

    async def _one_life(self) -> int | None:
        """One fence from its start to its end; returns its exit code."""
        program = await self._start()
        try:
            assert program.stdout is not None
            if await program.stdout.readline():
                self._watching.set()
                await program.wait()
        finally:
            self._watching.clear()
            await self._end(program)
        return program.returncode

    async def _start(self) -> _Program:
        arguments = ("-P", "-m", "callboard.agents.fence", str(self._run_dir.path), str(os.getpid()))
        with (self._run_dir.logs / "fence.log").open("ab") as errors:
            program = await asyncio.create_subprocess_exec(
                sys.executable,
                *arguments,
                env=dict(self._environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self.process = identify(program.pid)
        if self.process is not None:
            self._run_dir.put(Started("fence", self.process))
        return program

    async def _end(self, program: _Program) -> None:
        process, self.process = self.process, None
        if program.returncode is None and process is not None:
            send_signal(process, signal.SIGKILL)
            await exited(process)
        await program.wait()
        self._run_dir.drop("fence")
