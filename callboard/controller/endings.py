"""The end of a controller: a signal, a second one that hurries, or the death of its parent."""

from __future__ import annotations

import asyncio
import os
import signal

from callboard.model.log import structlog

log = structlog.get_logger(__name__)


class Endings:
    """What asks the program to end, while it runs.

    Attributes:
        asked: set by the first SIGTERM or SIGINT, or when the parent is gone.
        hurried: set by the second.
    """

    def __init__(self, *, exit_with_parent: bool) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        self._exit_with_parent = exit_with_parent
        self._parent_fd = -1

    def watch(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)
        if self._exit_with_parent:
            self._watch_parent()

    def unwatch(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        if self._parent_fd >= 0:
            loop.remove_reader(self._parent_fd)
            os.close(self._parent_fd)
            self._parent_fd = -1

    def _watch_parent(self) -> None:
        # A pidfd rather than PR_SET_PDEATHSIG, which fires when the *thread* that started us ends.
        parent = os.getppid()
        try:
            self._parent_fd = os.pidfd_open(parent)
        except ProcessLookupError:
            self._parent_gone()
            return
        if os.getppid() != parent:
            self._parent_gone()
            return
        asyncio.get_running_loop().add_reader(self._parent_fd, self._parent_gone)

    def _parent_gone(self) -> None:
        if self._parent_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._parent_fd)
        self.asked.set()
        log.warning("the program that started the controller is gone; it stops too")

    def _on_signal(self, name: str) -> None:
        if self.asked.is_set():
            log.warning("hurrying", signal=name)
            self.hurried.set()
        else:
            log.info("stopping", signal=name)
            self.asked.set()
