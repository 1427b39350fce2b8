"""What does the controller do? The loop of ``callboard.controller.driver``: decide, journal, then tell.

A crash throws away everything but the journal. The batch on its way is lost or, as often, on disk without anybody
having been told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from callboard.controller.clock import Clock
from callboard.scheduler import Outcome, Refusal, Scheduler
from callboard.scheduler.commands import Command
from callboard.scheduler.events import ControllerStarted, Event, Tick
from callboard.scheduler.records import EventRecord
from callboard.simulation.journal import Journal
from callboard.simulation.options import Fault
from callboard.simulation.site import Site
from callboard.simulation.timeline import Timer
from callboard.wire.refusals import CallboardError

Make = Callable[[int, str], Event]
"""Makes an event of the time and a cause."""

Fail = Callable[[Exception], None]
"""Told why there is no answer."""

MAX_BATCH = 64

HISTORY = 200
"""Ended jobs kept: fewer than in production, so that being forgotten is met, and a crash costs less to replay."""


class Unavailable(Exception):
    """The controller is away."""


@dataclass(slots=True, eq=False)
class Ask:
    """One event to be decided."""

    make: Make
    then: Callable[[Outcome], None]
    fail: Fail
    source: str


class Watcher(Protocol):
    """Who checks what is decided."""

    def started(self, scheduler: Scheduler) -> None:
        """A state was rebuilt from the journal."""

    def before(self, scheduler: Scheduler, event: Event) -> None:
        """An event is about to be decided."""

    def decided(self, scheduler: Scheduler, event: Event, outcome: Outcome) -> None:
        """It was."""

    def committed(self, outcomes: Sequence[Outcome]) -> None:
        """These are on disk, and nobody was told yet."""


class Listener(Protocol):
    """Who is told what was decided."""

    def started(self) -> None:
        """A new term began."""

    def stopped(self) -> None:
        """The controller is gone."""

    def deliver(self, commands: Sequence[Command]) -> None:
        """Commands for agents, in order."""


class Controller:
    """One controller, through all its lives."""

    def __init__(self, site: Site, journal: Journal, watcher: Watcher, *, history: int = HISTORY) -> None:
        self.scheduler = Scheduler()
        self.journal = journal
        self.alive = False
        self.started_at_ms = 0
        self.handle_ns = 0
        """Nanoseconds of real time inside the scheduler; nothing depends on it."""
        self.listener: Listener | None = None
        self.make_scheduler: Callable[..., Scheduler] = Scheduler
        self._site = site
        self._watcher = watcher
        self._history = history
        self._inbox: list[Ask] = []
        self._life = 0
        self._causes = 0
        self._busy = False
        self._on_its_way: list[tuple[Ask | None, Outcome]] = []
        self._clock = Clock()
        self._wake: Timer | None = None
        self._events: list[EventRecord] = []

    # ---- life ----

    def start(self) -> None:
        """Replays the journal and begins a new term."""
        if self.alive:
            return
        self._life += 1
        state = self.journal.replay()
        self.scheduler = self.make_scheduler(state, self._history)
        timeline = self._site.timeline
        self._clock = Clock(
            state.meta.now_ms,
            wall_ns=lambda: timeline.wall_ms * 1_000_000,
            monotonic_ns=lambda: timeline.now_ms * 1_000_000,
        )
        self.alive = True
        self.started_at_ms = timeline.now_ms
        self._watcher.started(self.scheduler)
        grace_ms = self._site.options.reconcile_grace_ms
        started = ControllerStarted(now_ms=self.now_ms(), cause=self._cause("start"), grace_ms=grace_ms)
        outcome = self._handle(started)
        self._write([(None, outcome)])
        assert self.listener is not None
        self.listener.started()
        self.listener.deliver(outcome.commands)
        self._arm()

    def crash(self) -> None:
        """The controller is killed."""
        if not self.alive:
            return
        self.alive = False
        self._life += 1
        if self._on_its_way and self._site.chance.controller.random() < 0.5:
            self._site.count("crash after commit, before anybody was told")
            self._write(self._on_its_way)
        lost = [ask for ask, _ in self._on_its_way if ask is not None] + self._inbox
        self._on_its_way, self._inbox, self._busy = [], [], False
        if self._wake is not None:
            self._wake.cancel()
        assert self.listener is not None
        self.listener.stopped()
        for ask in lost:
            ask.fail(Unavailable("the controller died"))

    def now_ms(self) -> int:
        """The controller's time in milliseconds since 1970."""
        return max(self._clock.now_ms(), self.scheduler.state.meta.now_ms)

    # ---- the loop ----

    def ask(self, make: Make, then: Callable[[Outcome], None], fail: Fail, *, source: str) -> None:
        """Has an event decided; ``then`` is called once that is journaled."""
        if not self.alive:
            fail(Unavailable("the controller is away"))
            return
        self._inbox.append(Ask(make, then, fail, source))
        self._look_soon()

    def _look_soon(self) -> None:
        if not self._busy:
            self._busy = True
            life = self._life
            self._site.timeline.after(0, lambda: self._batch(life))

    def _batch(self, life: int) -> None:
        if life != self._life:
            return
        decided: list[tuple[Ask | None, Outcome]] = []
        wake_ms = self.scheduler.next_wake_ms()
        if wake_ms is not None and wake_ms <= self.now_ms():
            decided.append((None, self._handle(Tick(now_ms=self.now_ms(), cause=self._cause("tick")))))
        taken, self._inbox = self._inbox[:MAX_BATCH], self._inbox[MAX_BATCH:]
        for ask in taken:
            try:
                outcome = self._handle(ask.make(self.now_ms(), self._cause(ask.source)))
            except (Refusal, CallboardError) as refusal:
                self._site.count("calls refused")
                ask.fail(refusal)
            else:
                decided.append((ask, outcome))
        self._on_its_way = decided
        chance = self._site.chance.controller
        wait_ms = chance.randint(1, 6)
        if chance.random() < 0.002 and Fault.DELAY in self._site.faults:
            self._site.count("slow disk")
            wait_ms = chance.randint(100, 3_000)
        self._site.timeline.after(wait_ms, lambda: self._committed(life))

    def _committed(self, life: int) -> None:
        if life != self._life:
            return
        decided, self._on_its_way = self._on_its_way, []
        self._write(decided)
        assert self.listener is not None
        for _, outcome in decided:
            self.listener.deliver(outcome.commands)
        for ask, outcome in decided:
            if ask is not None:
                ask.then(outcome)
        self._busy = False
        if self._inbox:
            self._look_soon()
        else:
            self._arm()

    def _handle(self, event: Event) -> Outcome:
        self._watcher.before(self.scheduler, event)
        begun_ns = time.perf_counter_ns()
        outcome = self.scheduler.handle(event)
        self.handle_ns += time.perf_counter_ns() - begun_ns
        self._watcher.decided(self.scheduler, event, outcome)
        return outcome

    def _write(self, decided: Sequence[tuple[Ask | None, Outcome]]) -> None:
        outcomes = [outcome for _, outcome in decided]
        self.journal.commit(
            [change for outcome in outcomes for change in outcome.changes],
            [event for outcome in outcomes for event in outcome.events],
        )
        self._watcher.committed(outcomes)
        self.journal.compact(self.scheduler.state)

    def _arm(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
        wake_ms = self.scheduler.next_wake_ms()
        if wake_ms is not None:
            self._wake = self._site.timeline.after(max(1, wake_ms - self.now_ms()), self._look_soon)

    def _cause(self, source: str) -> str:
        self._causes += 1
        return f"{source}-{self._causes}"


def nothing(_: Any) -> None:
    """Nobody waits for an answer."""
