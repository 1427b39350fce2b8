"""The controller without its network and its disk: the loop that decides, the agents' sessions, the event log.

``callboard.controller.server`` gives it gRPC, SQLite and the machine's clock; ``callboard.simulation`` runs the same
objects on a virtual event loop, with a disk, a network and clocks that fail as a seed says.
"""

from __future__ import annotations

from collections.abc import Callable

from callboard.controller.journal.journal import Journal
from callboard.controller.loop.clock import Clock
from callboard.controller.loop.driver import Driver
from callboard.controller.loop.event_log import EventLog
from callboard.controller.loop.followers import LogFollower, SetHealth
from callboard.controller.loop.inbox import new_cause
from callboard.controller.options import ControllerOptions
from callboard.controller.searches.placements import AwaitedPlacements
from callboard.controller.services.agent import AgentService
from callboard.controller.sessions.outputs import OutputReads
from callboard.controller.sessions.sessions import Sessions
from callboard.controller.sessions.spares import SpareTargets
from callboard.scheduler import Scheduler, State


class Core:
    """What decides, put together.

    Attributes:
        driver: the loop; start it, then run it.
        events: the event log.
        sessions: the agents that are connected.
        outputs: who reads the output of which workers.
        agents: what agents say.
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
            options: how it runs.
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
        self.driver.subscribe(LogFollower(self.events, set_health))
        self.driver.subscribe(self.sessions)
        self.driver.subscribe(self.outputs)
        self.driver.subscribe(SpareTargets(self.sessions.live, lambda: self.driver.state))
        self.driver.subscribe(AwaitedPlacements(self.driver))
