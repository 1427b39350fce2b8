"""The driver: the loop between what arrives and what leaves.

Take what arrived → let the scheduler decide → one journal commit for the batch → tell agents, watchers and callers.

Guaranteed: nothing leaves before it is journaled; what arrived first is decided first, and so is a report that came
before its deadline, however late it is looked at; a refused call changes nothing for others. When the journal fails,
everything is refused with STORE_FAILED and the state in memory, which may be ahead of the disk, is thrown away: the
loop goes on from the last good state once the journal can be written, exactly as after a restart. Not guaranteed: that
a call whose caller went away had no effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from callboard.controller.journal.codec import Decision
from callboard.controller.journal.commits import Commits, store_failed
from callboard.controller.journal.journal import Followed, Following, Journal, not_leader
from callboard.controller.journal.state_dir import StoreFailed
from callboard.controller.loop.clock import Clock
from callboard.controller.loop.inbox import Ask, Inbox, new_cause
from callboard.controller.loop.liveness import HELD_UP_S
from callboard.controller.loop.questions import MOST_WAITING, Questions
from callboard.model.durations import Backoff
from callboard.model.faults import InvalidInput
from callboard.model.log import structlog
from callboard.scheduler import Outcome, Scheduler, State
from callboard.scheduler.records.commands import Command
from callboard.scheduler.records.events import ControllerStarted, Event, Make, Tick
from callboard.scheduler.records.job_records import Change, EventRecord
from callboard.scheduler.records.refusals import ImpossibleTransition, Refusal
from callboard.wire.refusals import CallboardError, ErrorReason, InternalError, LimitReached, Unavailable

T = TypeVar("T")

BATCH_BUDGET_S = 0.005
"""A batch takes no more events after deciding for this long, so that reads in between (GetStats) stay far below
their 50 ms."""

RETRY_FIRST_S = 0.5
RETRY_LONGEST_S = 10.0
"""How often a failed journal is tried again. A full disk is freed by a person: seconds don't matter to them."""

log = structlog.get_logger(__name__)

MOST_FRUITLESS = 32
"""Most decisions that changed nothing and wait to be journaled with the next change."""

Decided = list[tuple[Ask[Any] | None, Outcome]]
"""What a batch decided, in order; no ask for the passing of time."""


class Listener:
    """Who is told what was decided, after it was journaled. Each takes what concerns it."""

    def started(self, events: Sequence[EventRecord]) -> None:
        """A new term began; what was known of the state before is void. ``events``: the newest in the journal."""

    def outage(self) -> None:
        """The journal failed; agents must join again once it works."""

    def deliver(self, commands: Sequence[Command]) -> None:
        """Commands for agents, in order."""

    def publish(self, events: Sequence[EventRecord]) -> None:
        """Entries of the event log, in order."""


class Driver:
    """Owns the scheduler. Everything here runs on one event loop."""

    def __init__(
        self,
        journal: Journal,
        *,
        reconcile_grace_ms: int,
        inbox: int = 10_000,
        ended_jobs: int = 1_000,
        newest_events: int = 10_000,
        new_clock: Callable[[int], Clock] = Clock,
        new_cause: Callable[[str], str] = new_cause,
        new_scheduler: Callable[[State, int], Scheduler] = Scheduler,
        threads: bool = True,
        measured: Callable[[str, float], None] = lambda _what, _seconds: None,
    ) -> None:
        """
        Args:
            journal: where batches go first.
            reconcile_grace_ms: how long to wait for known nodes after a start.
            inbox: most asks that wait.
            newest_events: events of before that listeners are told at a start.
            new_clock: makes the clock of a term; its argument is the last time journaled.
            new_cause: makes a fresh cause id for what a source asks.
            new_scheduler: makes the scheduler of a term from its state and the most ended jobs kept.
            threads: questions are answered in a thread; else on the loop.
            measured: is told how many seconds a "decision" or a "commit" took.
        """
        self._commits = Commits(journal)
        self._reconcile_grace_ms = reconcile_grace_ms
        self._new_clock = new_clock
        self._new_cause = new_cause
        self._new_scheduler = new_scheduler
        self._measured = measured
        self._ended_jobs = ended_jobs
        self._newest_events = newest_events
        self._questions = Questions(ended_jobs, beside=threads)
        self._inbox = Inbox(inbox, self.now_ms, new_cause)
        self._inbox.closed = _stopping("starting")
        self._listeners: list[Listener] = []
        self._changed: list[Callable[[Sequence[Change]], None]] = []
        self._to_journal: list[Decision] = []
        """What was decided since the last commit, in order."""
        self._scheduler = Scheduler()
        self._clock = new_clock(0)
        self._timer: asyncio.TimerHandle | None = None
        self._following: Following | None = None
        self.tell_followed: Callable[[Sequence[EventRecord], bool], None] = lambda _events, _anew: None
        """Told what a leader added to the event log; True: its newest events, and those of before are void."""
        self._not_before_s = 0.0
        """Nothing is judged to be overdue before, by the loop's clock."""
        self._stop = asyncio.Event()

    # ---- what others use ----

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    @property
    def state(self) -> State:
        """What is true in memory; it may be one commit ahead of the journal (see :meth:`read`)."""
        return self._scheduler.state

    @property
    def started_ms(self) -> int:
        """When this term began."""
        return self._clock.started_ms

    def now_ms(self) -> int:
        """Time of the controller in milliseconds since 1970."""
        return max(self._clock.now_ms(), self.state.meta.now_ms)

    def subscribe(self, listener: Listener) -> None:
        """Adds somebody who is told what was decided. Those who came first are told first."""
        self._listeners.append(listener)

    def follow_changes(self, changed: Callable[[Sequence[Change]], None]) -> None:
        """Adds somebody who is told which records changed, after it was journaled."""
        self._changed.append(changed)

    async def ask(self, make: Make, then: Callable[[Outcome], T], *, source: str) -> T:
        """Has an event decided and returns ``then(outcome)``, called once the outcome is journaled.

        Args:
            then: makes the answer; runs on the loop, with the state as it is after the batch.
            source: who asks; the first part of the cause id.

        Raises:
            Refusal, CallboardError, InvalidInput: the scheduler or ``make`` refused; nothing changed.
            LimitReached: the inbox is full.
            Unavailable: not serving, or the journal failed.
            InternalError: a defect, which is logged; nothing changed.
        """
        return await self._inbox.put(make, then, source)

    async def enqueue(self, make: Make, then: Callable[[Outcome], T], *, source: str) -> asyncio.Future[T]:
        """Like :meth:`ask` for callers that can be held back: waits for room in the inbox, not for the answer."""
        return await self._inbox.put_patiently(make, then, source)

    async def read(self, build: Callable[[State], T]) -> T:
        """What ``build`` makes of the state, returned once all of it is journaled.

        Raises:
            Unavailable: not serving, or the journal failed meanwhile.
        """
        self.check_readable()
        value = build(self.state)
        await self.journaled()
        return value

    async def question(self, build: Callable[[Scheduler], T]) -> T:
        """What ``build`` makes of the scheduler as it is at this moment, worked out beside the loop; returned once all
        of it is journaled. For what may take long.

        Args:
            build: runs in another thread: it uses nothing but the scheduler that it is given, and changes nothing.

        Raises:
            Unavailable: not serving, or the journal failed meanwhile.
            LimitReached: too many questions wait.
        """
        while True:
            self.check_readable()
            asked_of = self._scheduler
            value = await self._questions.ask(asked_of, build)
            await self.journaled()
            if self._scheduler is asked_of:
                return value
            # The journal failed meanwhile and works again: what was asked of may never have been written.

    async def trial(self, make: Make) -> Event:
        """Decides an event as if it was asked, beside the loop, and takes everything back; returns the event.

        Raises:
            Refusal: the scheduler would refuse it.
            Unavailable, LimitReached: as :meth:`question` does.
        """
        self.check_serving()
        event = make(now_ms=self.now_ms(), cause="trial")
        await self.question(lambda scheduler: scheduler.rehearse(event))
        return event

    async def journaled(self) -> None:
        """Returns once everything decided so far is on disk.

        Raises:
            Unavailable: not serving, or the journal failed.
        """
        await self._commits.settled()
        self.check_readable()

    def check_serving(self) -> None:
        """
        Raises:
            NotLeader: another controller decides.
            Unavailable: starting, stopping, or the journal failed.
        """
        self._inbox.check_open()
        self._commits.check()

    def check_readable(self) -> None:
        """
        Raises:
            Unavailable: there is nothing to be read: it does not decide, nor follow who does.
        """
        if self._following is None or self._stop.is_set():
            self.check_serving()

    async def read_events(self, first_revision: int, limit: int) -> tuple[int, list[EventRecord]]:
        """The oldest revision kept on disk and events from a revision on, oldest first.

        Raises:
            Unavailable: the journal can't be read.
        """
        return await self._commits.read_events(first_revision, limit)

    # ---- life ----

    async def start(self) -> bool:
        """Replays the journal and begins a new term; where others share the journal, once this controller leads.

        Returns:
            False: it was stopped before.

        Raises:
            StoreFailed: the journal can't be read or written.
        """
        if not await self._commits.lead(self):
            return False
        state, events = await self._commits.open(self._newest_events)
        self._scheduler = self._new_scheduler(state, self._ended_jobs)
        self._questions.forget()
        self._clock = self._new_clock(state.meta.now_ms)
        decided: Decided = []
        cause, grace_ms = self._new_cause("start"), self._reconcile_grace_ms
        self._to_journal.clear()
        self._handle(None, ControllerStarted(now_ms=self.now_ms(), cause=cause, grace_ms=grace_ms), decided)
        await self._write(decided)
        ((_, outcome),) = decided
        self._following = None
        if not self._stop.is_set():
            self._inbox.closed = None
        for listener in self._listeners:
            listener.started(events)
            listener.publish(outcome.events)
            listener.deliver(outcome.commands)
        self._arm()
        log.info("term begins", term=state.meta.term, jobs=len(state.jobs), nodes=len(state.nodes))
        return True

    async def run(self, *, started: bool = True) -> None:
        """Handles what arrives until :meth:`stop`, then takes a snapshot and closes the journal.

        Args:
            started: False: it starts by itself, as soon as it leads.
        """
        good = True
        try:
            good = started or await self._begin()
            while good and not (self._stop.is_set() and self._inbox.empty()):
                try:
                    await self._batch(await self._inbox.get())
                except StoreFailed as failure:
                    good = await self._recover(failure)
                    if not good:
                        break
        except BaseException:
            good = False
            raise
        finally:
            self._disarm()
            self._inbox.closed = _stopping("stopping")
            self._inbox.drop(self._inbox.closed)
            self._questions.close()
            await self._commits.close(self.state if good else None)

    def stop(self) -> None:
        """Accepts nothing more; what is in the inbox is still handled."""
        self._stop.set()
        if self._inbox.closed is None:
            self._inbox.closed = _stopping("stopping")
        self._inbox.wake()

    # ---- the loop ----

    async def _batch(self, first: Ask[Any] | None) -> None:
        self._check_leading(first)
        decided: Decided = []
        clock = asyncio.get_running_loop().time
        enough = clock() + BATCH_BUDGET_S
        self._notice_hold_up(clock())
        ask = first
        while True:
            if ask is not None:
                # What was due before it came is judged before it, and nothing that came after.
                self._pass_time(decided, ask.came_ms)
                self._decide(ask, decided)
            if clock() >= enough or self._inbox.empty():
                break
            ask = self._inbox.get_nowait()
        if self._inbox.empty():
            self._pass_time(decided, self.now_ms())
        await self._commit(decided)
        self._publish(decided)
        await self._commits.compact(self.state)
        self._arm()

    def _check_leading(self, first: Ask[Any] | None) -> None:
        try:
            self._commits.check_leading()
        except StoreFailed as failure:
            if first is not None:
                first.fail(store_failed(failure))
            raise

    def _notice_hold_up(self, now_s: float) -> None:
        """Lets nothing be overdue for a while after this program was held up (stopped, swapped out): the reports that
        came meanwhile lie unread in its sockets."""
        if self._timer is not None and now_s - self._timer.when() > HELD_UP_S:
            log.warning("held up: deadlines wait for what was reported meanwhile", seconds=now_s - self._timer.when())
            self._not_before_s = now_s + HELD_UP_S

    def _pass_time(self, decided: Decided, until_ms: int) -> None:
        """Judges what was due by a time by which everything that came was decided."""
        wake_ms = self._scheduler.next_wake_ms()
        if wake_ms is None or wake_ms > until_ms or asyncio.get_running_loop().time() < self._not_before_s:
            return
        try:
            self._handle(None, Tick(now_ms=until_ms, cause=self._new_cause("tick")), decided)
        except Exception:
            log.exception("a defect: the passing of time could not be handled; nothing changed")

    def _decide(self, ask: Ask[Any], decided: Decided) -> None:
        if ask.answer.done():
            return  # its caller went away before anything was decided
        began = time.perf_counter()
        try:
            self._handle(ask, ask.make(now_ms=self.now_ms(), cause=ask.cause), decided)
            self._measured("decision", time.perf_counter() - began)
        except Refusal as refusal:
            self._refuse(ask, refusal)
        except (CallboardError, InvalidInput) as refusal:
            ask.fail(refusal)
        except ImpossibleTransition as defect:
            log.exception("a defect: an impossible transition; nothing changed", story=str(defect), cause=ask.cause)
            ask.fail(InternalError(f"the controller met a defect, nothing changed (cause {ask.cause}): {defect}"))
        except Exception:
            log.exception("a defect: an event could not be handled; nothing changed", cause=ask.cause)
            ask.fail(InternalError(f"the controller met a defect, nothing changed (cause {ask.cause})"))

    def _refuse(self, ask: Ask[Any], refusal: Refusal) -> None:
        """Answers with a refusal, once it has its account: that is worked out beside the loop, as of this moment."""
        if refusal.about is None:
            ask.fail(refusal)
            return
        try:
            accounted = self._questions.put(
                self._scheduler, lambda scheduler: scheduler.accounted(refusal), most=MOST_WAITING // 2
            )
        except LimitReached:
            ask.fail(refusal)
            return

        def told(done: asyncio.Future[Refusal]) -> None:
            error = None if done.cancelled() else done.exception()
            if error is not None:
                log.error("a defect: the account of a refusal could not be made", cause=ask.cause, exc_info=error)
            ask.fail(refusal if done.cancelled() or error is not None else done.result())

        if accounted.done():  # nobody is beside the loop
            told(accounted)
        else:
            accounted.add_done_callback(told)

    def _handle(self, ask: Ask[Any] | None, event: Event, decided: Decided) -> None:
        try:
            outcome = self._scheduler.handle(event)
        except Refusal as refusal:
            self._note(event, refusal, 0)
            raise
        self._questions.follow(outcome.changes)
        if outcome.changes or outcome.commands:
            self._note(event, outcome, len(outcome.changes))
        decided.append((ask, outcome))

    def _note(self, event: Event, outcome: Outcome | Refusal, changes: int) -> None:
        """Keeps what was decided for the next commit. What changed nothing is worth none of its own, and not kept
        without end until there is one."""
        if not changes:
            fruitless = [place for place, each in enumerate(self._to_journal) if not each.changes]
            if len(fruitless) >= MOST_FRUITLESS:
                del self._to_journal[fruitless[0]]
        wake_ms = self._scheduler.next_wake_ms()
        self._to_journal.append(
            Decision(event=event, changes=changes, wake_ms=wake_ms, ended_jobs=self._ended_jobs, outcome=outcome)
        )

    async def _write(self, decided: Decided) -> None:
        changes = [change for _, outcome in decided for change in outcome.changes]
        events = [event for _, outcome in decided for event in outcome.events]
        if changes or events:
            decisions, self._to_journal = self._to_journal, []
            await self._commits.write(changes, events, decisions)

    async def _commit(self, decided: Decided) -> None:
        began = time.perf_counter()
        try:
            await self._write(decided)
        except StoreFailed as failure:
            for ask, _ in decided:
                if ask is not None:
                    ask.fail(store_failed(failure))
            raise
        if decided:
            self._measured("commit", time.perf_counter() - began)

    def _publish(self, decided: Decided) -> None:
        for changed in self._changed:
            for _, outcome in decided:
                changed(outcome.changes)
        for listener in self._listeners:
            for _, outcome in decided:
                listener.publish(outcome.events)
                listener.deliver(outcome.commands)
        # After the commands: an agent that joined in this batch gets all it owes in one go, and nothing twice.
        for ask, outcome in decided:
            if ask is not None:
                _answer(ask, outcome)

    # ---- the journal failed ----

    async def _recover(self, failure: StoreFailed) -> bool:
        """Returns True once the journal works again, False when told to stop before."""
        log.error("the journal failed; nothing is accepted until it works", why=str(failure))
        self._disarm()
        self._following = None
        self._inbox.closed = store_failed(failure)
        for listener in self._listeners:
            listener.outage()
        return await self._begin(Backoff(RETRY_FIRST_S, RETRY_LONGEST_S).next_s())

    async def _begin(self, wait_s: float = 0.0) -> bool:
        """Returns True once a term has begun, False when told to stop before."""
        backoff = Backoff(RETRY_FIRST_S, RETRY_LONGEST_S)
        backoff.next_s()
        while not self._stop.is_set():
            self._inbox.drop(self._inbox.closed or _stopping("starting"))
            with contextlib.suppress(TimeoutError):
                # Not `wait_for`: whether that makes a task depends on the version of Python, and so would simulations.
                async with asyncio.timeout(wait_s):
                    await self._stop.wait()
                break
            try:
                if await self.start():
                    log.info("the journal works")
                    return True
            except StoreFailed as again:
                wait_s = backoff.next_s()
                self._inbox.closed = store_failed(again)
                log.warning("the journal still fails", why=str(again), next_try_s=wait_s)
        return False

    # ---- another controller leads ----

    @property
    def following(self) -> Following | None:
        """What is known of the leader; None: this controller leads, or nothing is known."""
        return self._following

    def age_ms(self) -> int:
        """How long ago the state of a leader was read; 0: it is our own."""
        known = self._following
        return 0 if known is None else round((asyncio.get_running_loop().time() - known.heard_s) * 1000)

    @property
    def wants_to_lead(self) -> bool:
        """Whether this controller goes on."""
        return not self._stop.is_set()

    def woken(self) -> None:
        """The leadership is lost: the loop looks at once."""
        self._inbox.wake()

    def followed(self, seen: Followed) -> None:
        """The leader wrote something, or nothing."""
        known = self._following
        if seen.anew:
            state = State()
            for change in seen.changes:
                state.apply(change)
            self._scheduler = self._new_scheduler(state, self._ended_jobs)
            self._questions.forget()
            self._clock = self._new_clock(state.meta.now_ms)
        elif known is not None:
            for change in seen.changes:
                self.state.apply(change)
            self._questions.follow(seen.changes)
        if known is None and not seen.anew:
            self._inbox.closed = (
                _stopping("starting")
                if not seen.trouble
                else Unavailable(
                    f"the controller can't use its journal: {seen.trouble}", reason=ErrorReason.STORE_FAILED
                )
            )
            return
        heard_s = known.heard_s if known is not None and seen.trouble else asyncio.get_running_loop().time()
        self._following = Following(seen.leader, heard_s, seen.trouble)
        self._inbox.closed = not_leader(seen.leader)
        self._inbox.drop(self._inbox.closed)
        self.tell_followed(seen.events, seen.anew)
        if known is None or known.leader != seen.leader or known.trouble != seen.trouble:
            log.info("follows", leader=seen.leader.address, revision=self.state.meta.revision, trouble=seen.trouble)

    # ---- time ----

    def _arm(self) -> None:
        self._disarm()
        wake_ms = self._scheduler.next_wake_ms()
        if wake_ms is not None and not self._stop.is_set():
            loop = asyncio.get_running_loop()
            wait_s = max((wake_ms - self.now_ms()) / 1000, self._not_before_s - loop.time(), 0.001)
            self._timer = loop.call_later(wait_s, self._inbox.wake)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _answer(ask: Ask[Any], outcome: Outcome) -> None:
    try:
        answer = ask.then(outcome)
    except CallboardError as refusal:
        ask.fail(refusal)
    except Exception:
        log.exception("a defect: an answer could not be made", cause=ask.cause)
        ask.fail(InternalError(f"the controller met a defect (cause {ask.cause})"))
    else:
        if not ask.answer.done():
            ask.answer.set_result(answer)


def _stopping(what: str) -> Unavailable:
    return Unavailable(f"the controller is {what}", reason=ErrorReason.STOPPING)
