"""Signals that may cut a worker's work short."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from enum import Enum, auto
from typing import Any

from callboard.agents.system.process_tree import ProcessId
from callboard.agents.system.processes import Processes


class First(Enum):
    """What came first."""

    WORK = auto()
    EXIT = auto()
    STOP = auto()
    DEADLINE = auto()


class Signals:
    """A stop that was asked for, and the end of the process; each comes once and stays."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        loop = asyncio.get_running_loop()
        self.stop_asked: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[str] = loop.create_future()
        """Set when the process ended or lost its host; the text is the reason, empty for the former."""
        self.code: int | None = None
        """Exit code of the process, negative for a signal, once it has ended and if that is known."""
        self._watchers: set[asyncio.Task[None]] = set()

    def ask_stop(self) -> None:
        """Somebody wants the worker to stop."""
        if not self.stop_asked.done():
            self.stop_asked.set_result(None)

    def end(self, reason: str) -> None:
        """The worker can't go on."""
        if not self.over.done():
            self.over.set_result(reason)

    def watch(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside the worker, until `close`."""
        task = asyncio.create_task(work)
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    def watch_process(self, process: ProcessId) -> None:
        """Notice its end."""

        async def notice() -> None:
            self.code = await self._processes.exited(process)
            self.end("")

        self.watch(notice())

    @property
    def came(self) -> First | None:
        """What cuts the work short already; None: nothing. Asked before each step that starts something: beside work
        that is done at the same moment, `first` doesn't tell of it."""
        if self.over.done():
            return First.EXIT
        return First.STOP if self.stop_asked.done() else None

    async def first(self, work: asyncio.Future[Any] | None = None, *, deadline: float | None = None) -> First:
        """What comes first: the work, the end of the process, a stop, or the deadline (loop time)."""
        signals: list[asyncio.Future[Any]] = [self.over, self.stop_asked, *([] if work is None else [work])]
        timeout = None
        if deadline is not None:
            timeout = max(0.0, deadline - asyncio.get_running_loop().time())
        await asyncio.wait(signals, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if work is not None and work.done():
            return First.WORK
        return self.came or First.DEADLINE

    def close(self) -> None:
        """Stop watching."""
        for watcher in self._watchers:
            watcher.cancel()
