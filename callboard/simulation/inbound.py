"""What becomes of an agent's report? The rules of the controller's agent service.

A report is an event once, however often it comes; it is acknowledged when that is journaled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from callboard.controller.convert.reports import event_of, refused_event
from callboard.scheduler.commands import Command
from callboard.simulation.controller import Controller, Make, Unavailable
from callboard.simulation.network import Stream
from callboard.simulation.site import Site
from callboard.v1 import agent_pb2

REPORTS_REMEMBERED = 10_000


class Session:
    """One stream of one agent, from its Hello on."""

    def __init__(self, stream: Stream, hello: agent_pb2.Hello) -> None:
        self.stream = stream
        self.node_id = hello.node_id
        self.instance = hello.instance
        self.epoch = 0
        self.leaving = False
        self.awaited: dict[str, Command] = {}
        self.refusals: dict[str, int] = {}


class Office(Protocol):
    """The sessions, as reports see them."""

    def is_current(self, session: Session) -> bool:
        """Whether the session is its node's newest."""

    def send(self, session: Session, command: Command) -> None:
        """Sends a command."""

    def ray_events(self, session: Session, ray: agent_pb2.RayNode) -> list[Make]:
        """What it means that a node's part in Ray is now ``ray``."""


class Reports:
    """Takes reports; what it remembers dies with the controller."""

    def __init__(self, site: Site, controller: Controller, office: Office) -> None:
        self._site = site
        self._controller = controller
        self._office = office
        self._seen: dict[str, dict[str, None]] = {}

    def seen(self, node_id: str) -> list[str]:
        """Reports of a node that were journaled."""
        return list(self._seen.get(node_id, ()))

    def forget(self, node_id: str) -> None:
        """A node is gone."""
        self._seen.pop(node_id, None)

    def take(self, session: Session, report: agent_pb2.Report) -> None:
        """A report came; it is acknowledged once it is journaled, or changes nothing."""
        if report.report_id in self._seen.get(session.node_id, ()):
            self._acknowledge(session, report.report_id)
            return
        command = session.awaited.pop(report.command_id, None)
        if command is not None and self._is_owed_again(session, report, command):
            self._acknowledge(session, report.report_id)
            return
        makes = self._makes(session, report, command)
        if not makes:
            self._settle(session, report.report_id)
        for place, make in enumerate(makes, 1):
            last = place == len(makes)

            def settle(_: object, *, last: bool = last) -> None:
                if last:
                    self._settle(session, report.report_id)

            def failed(error: Exception, *, last: bool = last) -> None:
                if last and not isinstance(error, Unavailable):
                    self._settle(session, report.report_id)

            self._controller.ask(make, settle, failed, source="report")

    def _makes(self, session: Session, report: agent_pb2.Report, command: Command | None) -> list[Make]:
        what = report.WhichOneof("content")
        if what == "ray_node_exited":
            return self._office.ray_events(session, agent_pb2.RayNode())
        if what == "command_refused":
            if command is None:
                return []
            message = report.command_refused.message
            return [_certain(lambda now_ms, cause: refused_event(command, session.node_id, message, now_ms, cause))]
        return [_certain(lambda now_ms, cause: event_of(report, session.node_id, now_ms, cause))]

    def _is_owed_again(self, session: Session, report: agent_pb2.Report, command: Command) -> bool:
        message = report.command_refused.message
        if not report.HasField("command_refused") or refused_event(command, session.node_id, message, 0, ""):
            return False
        times = session.refusals.get(command.command_id, 0)
        session.refusals[command.command_id] = times + 1
        self._site.timeline.after(min(1_000 * 2**times, 30_000), lambda: self._send_again(session, command.command_id))
        return True

    def _send_again(self, session: Session, command_id: str) -> None:
        if self._office.is_current(session):
            for command in self._controller.scheduler.owed_commands(session.node_id):
                if command.command_id == command_id:
                    self._office.send(session, command)

    def _settle(self, session: Session, report_id: str) -> None:
        seen = self._seen.setdefault(session.node_id, {})
        seen[report_id] = None
        if len(seen) > REPORTS_REMEMBERED:
            del seen[next(iter(seen))]
        self._acknowledge(session, report_id)

    def _acknowledge(self, session: Session, report_id: str) -> None:
        self._site.network.send(session.stream, "down", ("ack", [report_id]))


def _certain(make: Callable[[int, str], object]) -> Make:
    return make  # type: ignore[return-value]
