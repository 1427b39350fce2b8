"""Questions: long work on the state, done beside the loop that decides.

The records alone determine every decision. So a scheduler made of them says what the live one would have said at the
moment of the question: a copy of it lives in a thread of its own and follows the live one by its changes. Records never
change, so both share them, and a question costs the loop no more than to hand over what changed since the last one.

A thread and not a process: the records of a process would have to be encoded on the loop, which takes longer than most
questions. The loop gets the interpreter back after :data:`SWITCH_S` at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from callboard.controller.loop.collector import uncollected
from callboard.scheduler import Scheduler, State
from callboard.scheduler.records.job_records import Change, Record
from callboard.wire.refusals import ErrorReason, LimitReached, Unavailable

T = TypeVar("T")

SWITCH_S = 0.001
"""How long a thread keeps the interpreter while the loop wants it; Python's own is five times as long."""

MOST_FOLLOWED = 100_000
"""Most changes kept for a copy that nobody asks; beyond, it is made anew for the next question."""

MOST_WAITING = 100
"""Most questions that wait."""


class _Copy:
    """The scheduler in the thread. Only the thread touches it."""

    def __init__(self, records: Sequence[Record], ended_jobs: int) -> None:
        self._records: Sequence[Record] = records
        self._ended_jobs = ended_jobs
        self._scheduler: Scheduler | None = None

    def answer(self, changes: Sequence[Change], build: Callable[[Scheduler], T], wanted: Callable[[], bool]) -> T:
        """What is asked, after these changes."""
        if self._scheduler is None:
            self._scheduler = Scheduler(State.of(self._records), self._ended_jobs)
            self._records = ()
        for change in changes:
            self._scheduler.state.apply(change)
        if not wanted():
            raise Unavailable("nobody waits for the answer any more", reason=ErrorReason.STOPPING)
        try:
            return build(self._scheduler)
        except StopIteration as defect:
            raise RuntimeError("a question raised StopIteration") from defect  # no future takes it


class Questions:
    """Those who ask, one after another."""

    def __init__(self, ended_jobs: int, *, beside: bool = True) -> None:
        """
        Args:
            ended_jobs: most ended jobs kept, as the live scheduler has it.
            beside: in a thread; else at once, on the live state, where no thread may be (simulations).
        """
        self._ended_jobs = ended_jobs
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="questions") if beside else None
        self._copy: _Copy | None = None
        self._changes: list[Change] = []
        """What changed since the last question, if there is a copy."""
        self._waiting = 0

    def follow(self, changes: Sequence[Change]) -> None:
        """The live scheduler changed."""
        if self._copy is not None:
            self._changes += changes
            if len(self._changes) > MOST_FOLLOWED:
                self.forget()

    def forget(self) -> None:
        """The live scheduler is another one, or has gone too far."""
        self._copy = None
        self._changes = []

    def close(self) -> None:
        """Nobody is answered any more."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def ask(self, live: Scheduler, build: Callable[[Scheduler], T]) -> T:
        """What ``build`` makes of the scheduler as it is at this moment. It runs in the thread.

        Raises:
            LimitReached: too many questions wait.
            Unavailable: the controller stops.
        """
        is_asked = True
        asked = self.put(live, build, lambda: is_asked)
        try:
            await asyncio.wait({asked})
        except asyncio.CancelledError:
            asked.add_done_callback(_let_go)
            raise
        finally:
            is_asked = False
        if asked.cancelled():
            raise Unavailable("the controller is stopping", reason=ErrorReason.STOPPING)
        return asked.result()

    def put(
        self,
        live: Scheduler,
        build: Callable[[Scheduler], T],
        wanted: Callable[[], bool] = lambda: True,
        *,
        most: int = MOST_WAITING,
    ) -> asyncio.Future[T]:
        """Asks without waiting; what becomes of the live scheduler from now on is no part of the answer.

        Args:
            wanted: whether somebody still waits for it.
            most: most questions that may wait already.

        Raises:
            LimitReached: more do.
        """
        if self._thread is None:
            return _done(live, build)
        if self._waiting >= most:
            raise LimitReached(f"{self._waiting} questions wait already; ask again later")
        if self._copy is None:
            self._copy = _Copy(list(live.state.records()), self._ended_jobs)
        changes, self._changes = self._changes, []
        answer: Future[T] = self._thread.submit(uncollected, self._copy.answer, changes, build, wanted)
        self._waiting += 1
        asked = asyncio.wrap_future(answer)
        asked.add_done_callback(self._answered)
        return asked

    def _answered(self, _asked: asyncio.Future[T]) -> None:
        self._waiting -= 1


def _let_go(asked: asyncio.Future[T]) -> None:
    """Whoever asked is gone: an error is read, so that asyncio doesn't call it a defect that nobody did."""
    if not asked.cancelled():
        asked.exception()


def _done(live: Scheduler, build: Callable[[Scheduler], T]) -> asyncio.Future[T]:
    asked: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    try:
        asked.set_result(build(live))
    except Exception as error:  # noqa: BLE001 - it is the answer
        asked.set_exception(error)
    return asked
