"""Lanes: the thread on which each method of the user runs.

Sync classes run on threads. With a `limit` of 1 one thread builds the object and makes every call, strictly one at a
time, so thread-local CUDA and torch state is kept; that is the main thread of the process where the host can give it
away (`worker_main`, `worker_actor`), because signal handlers can be set nowhere else. With more the main thread builds
the object and runs its entry method, and a pool serves the calls. Async classes live on an event loop of their own.
Hooks run beside either, because they must work while `run()` is busy.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn, Protocol

_STREAM_AHEAD = 8
"""Items a stream may be ahead of its reader."""


class Lane(Protocol):
    """Where the methods of one object run."""

    def build(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Run what makes the object ready."""

    def enter(self, function: Callable[..., Any], /) -> Future[Any]:
        """Run the entry method; counts as one call."""

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a method; at most `limit` at once."""

    def stream(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Run a method that yields; counts as one call until its end."""

    def hook(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Run a hook at once, whatever else is busy."""


class InFlight:
    """Counts calls, and waits for none."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self.count += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self.count -= 1
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no call is in flight; False if `timeout_s` seconds were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: self.count == 0, timeout_s)


def lane_for(
    target: type, *, hooks: tuple[str, ...], limit: int, enters: bool = False, main: MainThread | None = None
) -> Lane:
    """The lane for objects of this class: a loop if any public method but a hook is async.

    Args:
        enters: it has an entry method.
        main: the main thread, where the lane may have it.
    """
    is_async = any(
        inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)
        for name, member in inspect.getmembers(target, callable)
        if not name.startswith("_") and name not in hooks
    )
    if is_async:
        return LoopLane(limit)
    taken = main if main is not None and (enters or limit == 1) and main.take() else None
    if limit == 1:
        return ThreadLane(taken or _pool(1))
    return ThreadLane(_pool(limit - bool(taken)), build=main, enter=taken)


def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="callboard-run")


def in_thread(function: Callable[..., Any], /, *args: Any) -> Future[Any]:
    """Run on a thread made for it. A daemon: one that hangs must not keep the process."""
    future: Future[Any] = Future()
    # Whoever waits may be cut off; the function runs to its end all the same.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(_called(function, *args))
        except BaseException as error:  # noqa: BLE001 - it goes to whoever waits for the future
            future.set_exception(error)

    threading.Thread(target=run, name="callboard-hook", daemon=True).start()
    return future


def _called(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What a function returns. A `next()` that ran out raises what no future of asyncio takes: whoever awaits it would
    wait for ever."""
    try:
        return _finish(function(*args, **kwargs))
    except StopIteration as error:
        raise RuntimeError(f"a next() in it had nothing left ({error!r})") from error


def _finish(result: Any) -> Any:
    """An async hook of a sync class gets a loop for its one run."""
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


class MainThread:
    """The main thread of the process: for what builds objects, then for the first object that keeps it busy; `serve`
    gives it away."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()

    def take(self) -> bool:
        """Whether it is free, and the asker's from now on."""
        free, self._taken = not self._taken, True
        return free

    def submit(self, function: Callable[[], Any], /) -> Future[Any]:
        """Run on the main thread, after what was submitted before."""
        future: Future[Any] = Future()
        self._waiting.put((function, future))
        return future

    def serve(self) -> NoReturn:
        """Run what is submitted, for as long as the process lives."""
        while True:
            function, future = self._waiting.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - it goes to whoever waits for the future
                future.set_exception(error)


class ThreadLane:
    """The lane of sync classes."""

    def __init__(
        self,
        pool: MainThread | ThreadPoolExecutor,
        *,
        build: MainThread | None = None,
        enter: MainThread | None = None,
    ) -> None:
        """
        Args:
            build: for what makes the object ready; None: as the calls.
            enter: for the entry method; None: as the calls.
        """
        self._pool, self._build, self._enter = pool, build or pool, enter or pool

    def build(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        return self._build.submit(lambda: _called(function, *args))

    def enter(self, function: Callable[..., Any], /) -> Future[Any]:
        return self._enter.submit(lambda: _called(function))

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._pool.submit(lambda: _called(function, *args, **kwargs))

    async def stream(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Iterate on the pool, one thread for the whole stream."""
        mailbox = _Mailbox()

        def produce() -> None:
            try:
                for item in function(*args, **kwargs):
                    mailbox.put(item)
            finally:
                mailbox.end()

        async for item in mailbox.items(self._pool.submit(lambda: _called(produce))):
            yield item

    def hook(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Run on a thread of its own: the pool may be busy for ever."""
        return in_thread(function, *args)


class LoopLane:
    """The lane of async classes."""

    def __init__(self, limit: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._limit = asyncio.Semaphore(limit)
        threading.Thread(target=self._loop.run_forever, name="callboard-loop", daemon=True).start()

    def build(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        return self.call(function, *args)

    def enter(self, function: Callable[..., Any], /) -> Future[Any]:
        return self.call(function)

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        async def run() -> Any:
            async with self._limit:
                result = function(*args, **kwargs)
                return await result if inspect.isawaitable(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    async def stream(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Iterate on the loop."""
        mailbox = _Mailbox()

        async def produce() -> None:
            try:
                async with self._limit:
                    async for item in _as_async(function(*args, **kwargs)):
                        await asyncio.to_thread(mailbox.put, item)
            finally:
                mailbox.end()

        async for item in mailbox.items(asyncio.run_coroutine_threadsafe(produce(), self._loop)):
            yield item

    def hook(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Async hooks share the loop with the state they touch; sync ones must not wait for it."""
        if inspect.iscoroutinefunction(function):
            return asyncio.run_coroutine_threadsafe(function(*args), self._loop)
        return in_thread(function, *args)


async def _as_async(items: Any) -> AsyncIterator[Any]:
    if hasattr(items, "__aiter__"):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


_END = object()


class _ReaderGone(Exception):
    """Nobody reads the stream any more."""


class _Mailbox:
    """Carries a stream from the thread that makes it to the loop that reads it, a few items ahead."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        self._room = threading.Semaphore(_STREAM_AHEAD)
        self._abandoned = False

    def put(self, item: Any) -> None:
        """Hand over one item, from any thread; waits for room."""
        self._room.acquire()
        if self._abandoned:
            raise _ReaderGone
        self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    def end(self) -> None:
        """No more items."""
        self._loop.call_soon_threadsafe(self._items.put_nowait, _END)

    async def items(self, producer: Future[Any]) -> AsyncIterator[Any]:
        """What was put, then the error of the producer if it had one."""
        try:
            while (item := await self._items.get()) is not _END:
                self._room.release()
                yield item
            await asyncio.wrap_future(producer)
        finally:
            self._abandoned = True
            self._room.release()
