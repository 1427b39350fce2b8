"""Departure: why and when an agent leaves.

By a signal, by the controller's wish, or because the program that started it is gone. A second signal hurries.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import structlog

from callboard.agents.system.pid_watch import exited
from callboard.agents.system.process_tree import ProcessId, identify

_log = structlog.get_logger(__name__)


class Departure:
    """Waits for a reason to leave."""

    def __init__(self) -> None:
        self.reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.on_hurry: Callable[[], None] = lambda: None
        """Called for every further signal."""

    def ask(self, reason: str) -> None:
        """Leave; asked again, hurry."""
        if self.reason.done():
            _log.warning("hurrying", why=reason)
            self.on_hurry()
        else:
            self.reason.set_result(reason)

    def listen(self) -> None:
        """Take SIGTERM and SIGINT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask, number.name)

    def ignore(self) -> None:
        """Give the signals back."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    async def follow_parent(self, pid: int) -> None:
        """Leave when our parent is gone: whoever ran us for a demo or `up` must not leave us behind."""
        parent = identify(pid)
        # Only a parent's pid is surely still its own while we can see that it is our parent.
        if parent is not None and os.getppid() == pid:
            await exited(parent)
        self.ask(f"the parent process {pid} is gone")

    async def follow(self, process: ProcessId) -> None:
        """Leave when a process is gone that watches over us without being our parent."""
        await exited(process)
        self.ask(f"the process {process.pid} is gone")
