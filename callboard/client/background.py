"""A background loop for programs without an event loop: one loop in one thread of the process.

One for all, because gRPC's asyncio has a single completion queue per process: several loops that share it wake each
other for nothing and stall (GC-07).
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, TypeVar

Result = TypeVar("Result")

_STOP_S = 2.0
"""For calls in flight to be cancelled when the process ends."""

_starting = threading.Lock()


def in_a_loop() -> bool:
    """Whether the caller runs on an event loop, which must not be held up."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class BackgroundLoop:
    """An event loop in a daemon thread. Every method may be called from any thread but its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="callboard client", daemon=True)
        self._stopped = False
        self._thread.start()
        atexit.register(self._stop)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of ``work``; whatever interrupts the wait, such as Ctrl-C, cancels it.

        Raises:
            RuntimeError: called from the loop itself, which would wait for itself for ever; or the process ends.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a SyncClient can't be used inside its own event loop; use Client there")
        running = self.begin(work)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    def begin(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Starts ``work``; its result comes in the future, which a caller's own event loop may wait for.

        Raises:
            RuntimeError: the process ends.
        """
        if self._stopped:
            work.close()
            raise RuntimeError("the process is ending; its clients take no more calls")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def iterate(self, items: AsyncIterator[Result]) -> Iterator[Result]:
        """The items, each asked for when it is wanted."""
        try:
            while True:
                try:
                    item = self.run(_next(items))
                except _End:
                    return
                yield item
        finally:
            if not self._stopped:
                self.run(_close(items))

    def _stop(self) -> None:
        self._stopped = True
        if self._thread.is_alive():
            stopping = asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)
            stopping.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
            self._thread.join(_STOP_S)


def background_loop() -> BackgroundLoop:
    """The loop of this process, made when it is first asked for; a forked child gets one of its own."""
    with _starting:
        return _loop_of(os.getpid())


@lru_cache(maxsize=1)
def _loop_of(pid: int) -> BackgroundLoop:  # noqa: ARG001 - the key: threads don't survive a fork.
    return BackgroundLoop()


class _End(Exception):
    """No more items. StopAsyncIteration can't pass through a future."""


async def _next(items: AsyncIterator[Result]) -> Result:
    try:
        return await anext(items)
    except StopAsyncIteration:
        raise _End from None


async def _close(items: AsyncIterator[Any]) -> None:
    close = getattr(items, "aclose", None)
    if close is not None:
        await close()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=_STOP_S / 2)
