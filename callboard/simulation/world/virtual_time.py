"""Virtual time: the event loop on which production code runs, and the clock that everything simulated reads.

The loop keeps asyncio's contract as far as our programs use it: callbacks in the order in which they were asked for,
timers, futures, tasks, work in threads (done at once, answered a moment later). Time passes only when nothing is ready;
then whatever is due next happens. Times are integers (microseconds), so that no sum depends on the order of its parts.

Programs are told apart (:class:`Process`), because what happens to a program happens to all that it left to be done:
of a killed one nothing is ever done, not even a ``finally``; with a stopped one (SIGSTOP) it waits.

The order in which ready tasks go on may be drawn from a seed: a race between two coroutines of one program is then met
as well as one between two programs. Plain callbacks keep the order that asyncio promises.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextvars import Context, ContextVar, copy_context
from functools import partial
from random import Random
from types import CoroutineType
from typing import Any, TypeVar

T = TypeVar("T")

EPOCH_MS = 1_800_000_000_000
"""Wall time at the beginning, in milliseconds since 1970."""

_US_PER_S = 1_000_000
_US_PER_MS = 1_000


class Process:
    """One run of a program in the simulated world.

    Attributes:
        name: which program, for people.
        alive: False: it was killed; nothing of it is ever done again.
        frozen: True: it is stopped; nothing of it is done until it goes on.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.handlers: dict[int, Callable[[], object]] = {}
        """What it does about signals."""
        self.frozen = False
        self._held: list[_Handle] = []
        self._tasks: dict[asyncio.Task[Any], None] = {}

    @property
    def tasks(self) -> int:
        """How many things it is at work on."""
        return len(self._tasks)

    def run(self, work: Callable[..., T], *args: Any) -> T:
        """Calls ``work`` inside this program: what it leaves to be done is this program's."""
        context = copy_context()
        context.run(_process.set, self)
        return context.run(work, *args)

    def start(self, loop: Timeline, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begins a task of this program."""
        loop.programs[self] = None
        return self.run(lambda: loop.create_task(work))

    def kill(self) -> None:
        """Ends it at once, as SIGKILL and power cuts do.

        Its coroutines are unwound here and now: left to the garbage collector, they would be at a moment that no seed
        determines. Their last lines reach nothing: the world asks ``alive`` before it lets a program act.
        """
        self.alive = False
        tasks, self._tasks = list(self._tasks), {}
        self._held.clear()
        for task in tasks:
            coroutine = task.get_coro()
            assert isinstance(coroutine, Coroutine)
            self.run(_unwind, coroutine)

    def signal(self, loop: Timeline, number: int) -> None:
        """Sends it a signal; one that it does nothing about ends it."""
        handler = self.handlers.get(number)
        if handler is None:
            self.kill()
        elif self.alive:
            self.run(loop.call_soon, handler)

    def freeze(self) -> None:
        """Stops it, as SIGSTOP does."""
        self.frozen = True

    def thaw(self) -> None:
        """Lets it go on: what became due meanwhile is done now, in order."""
        self.frozen = False
        held, self._held = self._held, []
        for handle in held:
            handle.loop.ready.append(handle)

    def began(self, task: asyncio.Task[Any]) -> None:
        """A task of this program began."""
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def keep(self, handle: _Handle) -> None:
        """Something of it is not done now: what a stopped program should do is kept, of a killed one nothing."""
        if self.alive:
            self._held.append(handle)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)


def _unwind(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Throws a coroutine out of where it waits, as often as its last lines wait again."""
    assert isinstance(coroutine, CoroutineType)
    while coroutine.cr_frame is not None and not coroutine.cr_running:  # a program may end itself
        # Whatever it raises is of the dead: that it waited again, or could not do what it wanted to.
        with contextlib.suppress(BaseException):
            coroutine.close()


_WORLD = Context()
"""Where no program is set."""


def in_dead_process() -> bool:
    """Whether what runs now belongs to a program that was killed: it is being unwound and tells nothing."""
    process = _process.get()
    return process is not None and not process.alive


_process: ContextVar[Process | None] = ContextVar("process", default=None)


class _Task(asyncio.Task[T]):
    """A task that knows whose it is, also when it is looked at last."""

    owner: Process | None = None


class _Handle(asyncio.TimerHandle):
    """Something that will be done, unless it is cancelled."""

    __slots__ = ("do", "dropped", "loop", "owner")

    def __init__(
        self, when_s: float, callback: Callable[..., Any], args: tuple[Any, ...], loop: Timeline, context: Context
    ) -> None:
        # Not as `asyncio.TimerHandle` does, which asks the loop about debugging each time: tens of thousands are made
        # in a second.
        self._when = when_s
        self.dropped = False
        self.loop = loop
        self.do = (context, callback, args)
        self.owner = context.get(_process)

    def cancel(self) -> None:
        """It will not be done; it is left in the queue and passed over."""
        self.dropped = True

    def cancelled(self) -> bool:
        return self.dropped


class Timeline(asyncio.BaseEventLoop):
    """An event loop without a machine below it."""

    def __init__(self, chance: Random | None = None) -> None:
        """
        Args:
            chance: where the order of tasks that are ready at once comes from; None: they go on as they got ready.
        """
        super().__init__()
        self.wall_offset_ms = 0
        """How far the wall clock was set forward or back."""
        self.ready: deque[_Handle] = deque()
        self.chance = chance
        self.choices = 0
        """How often several tasks could go on at once, and which was first was drawn."""
        self.order = 0
        """Stands for all that was drawn: two runs of one history are the same interleaving if it is equal."""
        self.programs: dict[Process, None] = {}
        """Every run of a program that did anything."""
        self._now_us = 0
        self._now_s = 0.0
        self._timers: list[tuple[int, int, _Handle]] = []
        self._numbers = itertools.count()
        self._broken: BaseException | None = None

    # ---- time ----

    @property
    def now_ms(self) -> int:
        """Milliseconds since the beginning."""
        return self._now_us // _US_PER_MS

    @property
    def now_ns(self) -> int:
        """Nanoseconds since the beginning: the monotonic clock."""
        return self._now_us * 1_000

    @property
    def wall_ms(self) -> int:
        return EPOCH_MS + self.now_ms + self.wall_offset_ms

    def time(self) -> float:
        """Seconds since the beginning."""
        return self._now_s

    def after(self, wait_ms: float, do: Callable[[], object]) -> asyncio.TimerHandle:
        """The world does something in ``wait_ms`` whole milliseconds, whatever becomes of the program that asked."""
        return self._put(self._now_us + max(0, int(wait_ms)) * _US_PER_MS, do, (), _WORLD)

    def close_down(self) -> None:
        """Ends every program when nothing is simulated any more."""
        asyncio._set_running_loop(self)  # noqa: SLF001
        try:
            for process in self.programs:
                process.kill()
        finally:
            asyncio._set_running_loop(None)  # noqa: SLF001

    def step(self, until_ms: int | None = None) -> bool:
        """Does what is ready, or what is due next, and all that this makes ready; False when nothing is, or nothing
        before ``until_ms``.

        Raises:
            BaseException: what code of ours raised and nobody handled.
        """
        if self._broken is not None:
            self._check()  # What was let go of last may have been a task whose error nobody looked at.
        if not self.ready and not self._advance(None if until_ms is None else until_ms * _US_PER_MS):
            return False
        asyncio._set_running_loop(self)  # noqa: SLF001 - documented, for those who make loops
        try:
            while self.ready:
                # What one alone makes ready comes next either way.
                for handle in self._batch() if len(self.ready) > 1 else (self.ready.popleft(),):
                    owner = handle.owner
                    if handle.dropped:
                        continue
                    if owner is not None and (owner.frozen or not owner.alive):
                        owner.keep(handle)
                        continue
                    context, callback, args = handle.do
                    context.run(callback, *args)
                    if self._broken is not None:
                        self._check()
        finally:
            asyncio._set_running_loop(None)  # noqa: SLF001
        return True

    def fail(self, error: BaseException) -> None:
        """Ends the simulation with an error, whoever catches it on its way."""
        if self._broken is None:
            self._broken = error

    def _advance(self, until_us: int | None) -> bool:
        timers = self._timers
        while timers and timers[0][2].dropped:
            heapq.heappop(timers)
        due_us = timers[0][0] if timers else None
        if due_us is None or (until_us is not None and due_us > until_us):
            self._move(until_us or 0)
            return False
        self._move(due_us)
        now_us, pop = self._now_us, heapq.heappop
        while timers and timers[0][0] <= now_us:
            self.ready.append(pop(timers)[2])
        return True

    def _move(self, to_us: int) -> None:
        if to_us > self._now_us:
            self._now_us, self._now_s = to_us, to_us / _US_PER_S

    def _batch(self) -> Iterable[_Handle]:
        """What is ready now; what it makes ready comes next."""
        batch, self.ready = self.ready, deque()
        if self.chance is not None:
            task = asyncio.Task
            places = [
                place for place, handle in enumerate(batch) if isinstance(getattr(handle.do[1], "__self__", None), task)
            ]
            if len(places) > 1:
                drawn = _shuffled(places, self.chance._randbelow)  # type: ignore[attr-defined]  # noqa: SLF001
                self.choices += 1
                self.order = hash((self.order, *drawn))
                handles = list(batch)
                for place in places:
                    handles[place] = batch[drawn.pop()]
                return handles
        return batch

    def _check(self) -> None:
        if self._broken is not None:
            broken, self._broken = self._broken, None
            raise broken

    # ---- what asyncio asks of a loop ----

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = _Handle(self._now_s, callback, args, self, copy_context() if context is None else context)
        self.ready.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Does something next: there is one thread."""
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Does something at a time of this loop, in seconds."""
        # The nearest microsecond at which `time()` is not below `when`.
        due_us = round(when * _US_PER_S)
        return self._put(due_us + (due_us / _US_PER_S < when), callback, args, context)

    def _put(
        self, due_us: int, callback: Callable[..., Any], args: tuple[Any, ...], context: Context | None
    ) -> asyncio.TimerHandle:
        # Not `or`: an empty context is false.
        handle = _Handle(due_us / _US_PER_S, callback, args, self, copy_context() if context is None else context)
        heapq.heappush(self._timers, (due_us, next(self._numbers), handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        """A task of the program that asks for it."""
        task = _Task(coro, loop=self, name=name, context=context)
        task.owner = _process.get()
        if task.owner is not None:
            task.owner.began(task)
        return task

    def run_in_executor(  # type: ignore[override]
        self,
        executor: Any,  # noqa: ARG002 - there is one thread
        func: Callable[..., T],
        *args: Any,
    ) -> asyncio.Future[T]:
        """Work of a thread: done now, answered a moment later."""
        answer: asyncio.Future[T] = self.create_future()
        try:
            value = func(*args)
        except Exception as error:  # noqa: BLE001 - it is the caller's, as from a thread
            self.call_later(0.001, _fail, answer, error)
        else:
            self.call_later(0.001, _answer, answer, value)
        return answer

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Of the program that asks for it."""
        process = _process.get()
        assert process is not None
        process.handlers[sig] = partial(callback, *args)

    def remove_signal_handler(self, sig: int) -> bool:
        """Of the program that asks for it."""
        process = _process.get()
        assert process is not None
        return process.handlers.pop(sig, None) is not None

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A task failed and nobody looked: that ends the simulation, unless the program is dead that should have."""
        task, error = context.get("future"), context.get("exception")
        if isinstance(task, _Task) and (task.owner is None or task.owner.alive) and error is not None:
            self.fail(error)

    get_debug = staticmethod(bool)
    """No. Every future asks."""

    def is_closed(self) -> bool:
        """There is nothing to close."""
        return True

    def _check_closed(self) -> None:
        """It never is in anybody's way."""


def _shuffled(places: Sequence[int], below: Callable[[int], int]) -> list[int]:
    """As ``Random.sample`` of all of them, which is asked thousands of times, draws them."""
    left, drawn = list(places), []
    for count in range(len(left), 0, -1):
        place = below(count)
        drawn.append(left[place])
        left[place] = left[count - 1]
    return drawn


def _answer(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
