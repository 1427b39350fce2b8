"""The followers of the driver beside the agents' sessions: the event log and the health service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from callboard.controller.loop.event_log import EventLog
from callboard.scheduler.records.commands import Command
from callboard.scheduler.records.job_records import EventRecord
from callboard.wire.refusals import ErrorReason, Unavailable


class SetHealth(Protocol):
    """Changes what the health service says."""

    def __call__(self, *, serving: bool) -> None: ...


class LogFollower:
    """Feeds the event log and keeps the health status true."""

    def __init__(self, events: EventLog, set_health: SetHealth) -> None:
        self._events = events
        self._set_health = set_health

    def started(self, events: Sequence[EventRecord]) -> None:
        """A term began: the log goes on where the journal ends."""
        self._events.load(events)
        self._set_health(serving=True)

    def outage(self) -> None:
        """Watches end: what they would see next is not journaled."""
        self._set_health(serving=False)
        self._events.close(Unavailable("the controller can't use its journal", reason=ErrorReason.STORE_FAILED))

    def deliver(self, commands: Sequence[Command]) -> None:
        """Commands are for agents."""

    def publish(self, events: Sequence[EventRecord]) -> None:
        """Adds to the log."""
        self._events.publish(events)
