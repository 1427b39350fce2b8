"""The keeper of the fence: the agent's side of `fence`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeAlias

from callboard.agents.files.run_dir import RunDir, Started
from callboard.agents.system.processes import Processes
from callboard.agents.system.tasks import cancelled
from callboard.model.durations import Backoff
from callboard.model.log import structlog
from callboard.security.processes import ProcessId, identify

_log = structlog.get_logger(__name__)

_RETRY_FIRST_S, _RETRY_MAX_S = 0.1, 5.0
"""Between attempts at another fence."""


class FenceProgram(Protocol):
    """A fence that was started."""

    process: ProcessId | None
    """None: it ended at once."""

    async def watches(self) -> bool:
        """Return once it watches; False when it ended before."""

    async def wait(self) -> int:
        """Its exit code, once it has ended."""


StartFence: TypeAlias = Callable[[Mapping[str, str]], Awaitable[FenceProgram]]
"""Starts a fence with an environment."""


class FenceKeeper:
    """Keeps one fence alive from the first strict worker on."""

    def __init__(
        self, run_dir: RunDir, processes: Processes, start: StartFence, environment: Mapping[str, str]
    ) -> None:
        """
        Args:
            run_dir: of the node; what the fence reads.
            environment: of the fence; carries the node's marker, so that the next agent finds it.
        """
        self._run_dir = run_dir
        self._processes = processes
        self._begin = start
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
            await cancelled([self._keeper])
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

    async def _one_life(self) -> int:
        """One fence from its start to its end; returns its exit code."""
        fence = await self._begin(self._environment)
        self.process = fence.process
        if fence.process is not None:
            self._run_dir.put(Started("fence", fence.process))
        try:
            if await fence.watches():
                self._watching.set()
                await fence.wait()
        finally:
            self._watching.clear()
            process, self.process = self.process, None
            if process is not None:
                self._processes.send_signal(process, signal.SIGKILL)
                await self._processes.exited(process)
            code = await fence.wait()
            self._run_dir.drop("fence")
        return code


class _Child:
    """A fence in a child process."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.process = identify(child.pid)
        self.wait = child.wait
        self._child = child

    async def watches(self) -> bool:
        assert self._child.stdout is not None
        return bool(await self._child.stdout.readline())


async def start_fence(run_dir: RunDir, environment: Mapping[str, str]) -> FenceProgram:
    """Start the fence of this machine."""
    with (run_dir.logs / "fence.log").open("ab") as errors:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", "callboard.agents.link.fence", str(run_dir.path), str(os.getpid())),
            env=dict(environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    return _Child(child)
