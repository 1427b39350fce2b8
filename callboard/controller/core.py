"""The controller without its network and its disk: the loop that decides, the agents' sessions, the event log.

``callboard.controller.server`` gives it gRPC, SQLite and the machine's clock; ``callboard.simulation`` runs the same
objects on a virtual event loop, with a disk, a network and clocks that fail as a seed says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from callboard.controller.journal.journal import Journal
from callboard.controller.loop.clock import Clock
from callboard.controller.loop.driver import Driver, Listener
from callboard.controller.loop.event_log import EventLog
from callboard.controller.loop.inbox import new_cause
from callboard.controller.options import ControllerOptions
from callboard.controller.searches.placements import AwaitedPlacements
from callboard.controller.services.agent import AgentService
from callboard.controller.sessions.outputs import OutputReads
from callboard.controller.sessions.sessions import Sessions
from callboard.controller.sessions.spare_targets import SpareTargets
from callboard.scheduler import Scheduler, State
from callboard.scheduler.records.job_records import EventRecord
from callboard.wire.refusals import ErrorReason, Unavailable


class Core:
    """What decides, put together.

    Attributes:
        driver: the loop; start it, then run it.
        outputs: who reads the output of which workers.
    """

    def __init__(
        self,
        options: ControllerOptions,
        journal: Journal,
        *,
        identity: Callable[[], str],
        set_health: SetHealth,
        measured: Callable[[str, float], None] = lambda _what, _seconds: None,
        new_clock: Callable[[int], Clock] = Clock,
        new_cause: Callable[[str], str] = new_cause,
        new_scheduler: Callable[[State, int], Scheduler] = Scheduler,
        threads: bool = True,
    ) -> None:
        """
        Args:
            journal: where batches go first.
            identity: of the controller's state, known once that is open.
            set_health: changes what the health service says.
            measured, new_clock, new_cause, new_scheduler, threads: as :class:`Driver` takes them.
        """
        limits = options.limits
        self.driver = Driver(
            journal,
            reconcile_grace_ms=options.reconcile_grace_ms,
            inbox=limits.inbox,
            ended_jobs=limits.ended_jobs,
            newest_events=limits.events_in_memory,
            new_clock=new_clock,
            new_cause=new_cause,
            new_scheduler=new_scheduler,
            threads=threads,
            measured=measured,
        )
        self.events = EventLog(self.driver.read_events, in_memory=limits.events_in_memory, watchers=limits.watchers)
        self.sessions = Sessions(self.driver, options, identity)
        self.outputs = OutputReads(self.driver, self.sessions.live)
        self.agents = AgentService(self.driver, self.sessions, self.outputs, options)
        log_follower = LogFollower(self.events, set_health)
        self.driver.subscribe(log_follower)
        self.driver.tell_followed = log_follower.followed
        self.driver.subscribe(self.sessions)
        self.driver.subscribe(self.outputs)
        self.driver.subscribe(SpareTargets(self.sessions.live, lambda: self.driver.state))
        self.driver.subscribe(AwaitedPlacements(self.driver))


class SetHealth(Protocol):
    """Changes what the health service says."""

    def __call__(self, *, serving: bool) -> None: ...


class LogFollower(Listener):
    """Feeds the event log and keeps the health status true."""

    def __init__(self, events: EventLog, set_health: SetHealth) -> None:
        self._events = events
        self._set_health = set_health

    def started(self, events: Sequence[EventRecord]) -> None:
        """A term began: the log goes on where the journal ends."""
        self._events.load(events)
        self._set_health(serving=True)

    def followed(self, events: Sequence[EventRecord], anew: bool) -> None:
        """Another controller leads, and its log is ours."""
        if anew:
            self._events.load(events)
        self._events.publish(() if anew else events)
        self._set_health(serving=True)

    def outage(self) -> None:
        """Watches end: what they would see next is not journaled."""
        self._set_health(serving=False)
        self._events.close(Unavailable("the controller can't use its journal", reason=ErrorReason.STORE_FAILED))

    def publish(self, events: Sequence[EventRecord]) -> None:
        """Adds to the log."""
        self._events.publish(events)
