"""The inbox: asks that wait to be decided, each with its answer to come, in a bounded queue."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from callboard.scheduler import Outcome
from callboard.scheduler.records.events import Make
from callboard.wire.refusals import LimitReached, Unavailable, exception_for

T = TypeVar("T")

_chance = random.Random()  # noqa: S311 - an id is no secret, and asking the kernel for each costs as much as an event


@dataclass(slots=True, eq=False)
class Ask(Generic[T]):
    """One event to be decided.

    Attributes:
        then: makes the answer; called once the outcome is journaled, whether or not somebody still waits for it.
        cause: id that threads through everything the event leads to.
        answer: what ``then`` returned, or why there is none.
        came_ms: when it came, in the controller's time.
    """

    make: Make
    then: Callable[[Outcome], T]
    cause: str
    answer: asyncio.Future[T]
    came_ms: int

    def fail(self, error: Exception) -> None:
        """Answers with an error, unless the caller went away."""
        if not self.answer.done():
            self.answer.set_exception(error)


def new_cause(source: str) -> str:
    """A fresh id for what a call or message leads to."""
    return f"{source}-{_chance.getrandbits(32):08x}"


class Inbox:
    """The queue. A ``None`` in it only wakes the loop."""

    def __init__(self, bound: int, now_ms: Callable[[], int], new_cause: Callable[[str], str] = new_cause) -> None:
        """
        Args:
            bound: most asks that wait.
            now_ms: the controller's time.
            new_cause: makes a fresh cause id for what a source asks.
        """
        self._now_ms = now_ms
        self._new_cause = new_cause
        self._queue: asyncio.Queue[Ask[Any] | None] = asyncio.Queue(bound)
        self.closed: Unavailable | None = None
        """Why nothing is accepted; None: asks are."""

    def check_open(self) -> None:
        """
        Raises:
            Unavailable: nothing is accepted.
        """
        if self.closed is not None:
            raise exception_for(self.closed.error)  # a new one for each who asks: it gets a traceback

    def put(self, make: Make, then: Callable[[Outcome], T], source: str) -> asyncio.Future[T]:
        """Adds an ask.

        Raises:
            Unavailable: nothing is accepted.
            LimitReached: the queue is full.
        """
        self.check_open()
        ask = self._ask(make, then, source)
        try:
            self._queue.put_nowait(ask)
        except asyncio.QueueFull:
            raise LimitReached(f"{self._queue.maxsize} calls wait already; try again later") from None
        return ask.answer

    async def put_patiently(self, make: Make, then: Callable[[Outcome], T], source: str) -> asyncio.Future[T]:
        """Adds an ask as soon as there is room.

        Raises:
            Unavailable: nothing is accepted.
        """
        self.check_open()
        ask = self._ask(make, then, source)
        await self._queue.put(ask)
        if self.closed is not None:
            # It was closed while we waited for room; nobody might look at the queue any more.
            ask.fail(self.closed)
        return ask.answer

    async def get(self) -> Ask[Any] | None:
        """The next ask, or None for a wake-up."""
        return await self._queue.get()

    def get_nowait(self) -> Ask[Any] | None:
        """The next ask; the queue must not be empty."""
        return self._queue.get_nowait()

    def empty(self) -> bool:
        return self._queue.empty()

    def wake(self) -> None:
        """Makes the loop look at the time. A full queue needs none: the loop looks with every batch."""
        if not self._queue.full():
            self._queue.put_nowait(None)

    def drop(self, error: Exception) -> None:
        """Answers everything that waits with an error."""
        while not self._queue.empty():
            ask = self._queue.get_nowait()
            if ask is not None:
                ask.fail(error)

    def _ask(self, make: Make, then: Callable[[Outcome], T], source: str) -> Ask[T]:
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        return Ask(make, then, self._new_cause(source), answer, self._now_ms())
