"""Ctrl-C and SIGTERM in a program that has children: the first ends it in order, the second hurries."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import typer

from callboard.cli.show.exits import INTERRUPTED
from callboard.cli.show.verb_guard import failing_in_words

Result = TypeVar("Result")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """The signals that arrived.

    Attributes:
        hurry: set by a signal that asks to stop waiting for anybody.
        received: the first signal; None: none yet.
    """

    def __init__(self) -> None:
        self.hurry = asyncio.Event()
        self.received: signal.Signals | None = None
        self._task: asyncio.Task[Any] | None = None
        self._hurry_at_once = False

    def watch(self, task: asyncio.Task[Any]) -> None:
        """The first signal cancels ``task``, unless it is in a :meth:`cleaning` block."""
        self._task = task

    @contextmanager
    def cleaning(self, *, hurry_at_once: bool = False) -> Iterator[None]:
        """While the block runs no signal cancels it: whoever cleans up has to come to the end.

        Args:
            hurry_at_once: already the first signal hurries.
        """
        task, self._task = self._task, None
        self._hurry_at_once = hurry_at_once
        try:
            yield
        finally:
            self._task, self._hurry_at_once = task, False

    def take(self, number: signal.Signals) -> None:
        if self.received is not None or self._hurry_at_once:
            self.hurry.set()
        if self.received is None:
            self.received = number
            if self._task is not None:
                self._task.cancel()


def run_interruptible(main: Callable[[Interrupts], Coroutine[Any, Any, Result]]) -> Result:
    """Runs ``main``; the first signal cancels it, the second sets ``hurry``.

    Raises:
        KeyboardInterrupt: a signal ended it.
    """

    async def outer() -> Result:
        interrupts = Interrupts()
        task = asyncio.ensure_future(main(interrupts))
        interrupts.watch(task)
        try:
            with taking(_SIGNALS, interrupts.take):
                return await task
        except asyncio.CancelledError:
            if interrupts.received is None:
                raise
            raise KeyboardInterrupt from None

    return asyncio.run(outer())


@contextmanager
def taking(numbers: Sequence[signal.Signals], take: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Gives signals to ``take`` as long as the block runs."""
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, take, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def run_locally(
    main: Callable[[Interrupts], Coroutine[Any, Any, Result]], interrupted: Callable[[], int] = lambda: INTERRUPTED
) -> Result:
    """Runs what works on a cluster of this machine, and tells in words what fails.

    Args:
        interrupted: called when a signal ended it; returns the exit code.
    """
    with failing_in_words():
        try:
            return run_interruptible(main)
        except KeyboardInterrupt:
            raise typer.Exit(interrupted()) from None
