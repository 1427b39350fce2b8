"""Warm spares: how many each node keeps: its own setting while work is about, else none (docs/agents.md).

Work is any job that has not ended and any placement group: a reserved one gets its spares before its first job comes.
Told after the commands of the same commit, so that a start never waits behind the making of a spare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from callboard.controller.sessions.session import AgentSession
from callboard.scheduler import State
from callboard.scheduler.records.commands import Command
from callboard.scheduler.records.job_records import EventRecord
from callboard.scheduler.records.states import ENDED, JobState
from callboard.v1 import agent_pb2

_UNENDED = tuple(state for state in JobState if state not in ENDED)


def is_work_about(state: State) -> bool:
    """Whether a start may come soon."""
    return bool(state.groups) or any(state.jobs_by_state[each] for each in _UNENDED)


class SpareTargets:
    """Tells agents how many spares to keep, whenever that changes. Listens to the driver, after the sessions."""

    def __init__(self, live: Mapping[str, AgentSession], state: Callable[[], State]) -> None:
        """
        Args:
            live: the session of each connected node.
            state: what is true now.
        """
        self._live = live
        self._state = state
        self._told: bool | None = None
        """Whether work is about, as every connected agent was told last; None: not known."""

    def started(self, events: Sequence[EventRecord]) -> None:  # noqa: ARG002 - only the state counts
        """Sessions end with a term; each agent is told anew when it joins."""
        self._told = None

    def outage(self) -> None:
        """Nobody is connected then."""

    def deliver(self, commands: Sequence[Command]) -> None:
        """Commands are the sessions' business."""

    def publish(self, events: Sequence[EventRecord]) -> None:
        """What is about never changes without an entry in the log."""
        if not events:
            return
        about = is_work_about(self._state())
        if about is self._told:
            return  # whoever joined meanwhile was told then: a walk through every session for each join is one too many
        self._told = about
        for session in self._live.values():
            _tell(session, about=about)


def tell_spares(session: AgentSession, state: State) -> None:
    """Tells one agent, which has just joined."""
    _tell(session, about=is_work_about(state))


def _tell(session: AgentSession, *, about: bool) -> None:
    count = session.warm_spares if about else 0
    if count != session.spare_target:
        session.spare_target = count
        session.send(agent_pb2.SessionResponse(spare_target=agent_pb2.SpareTarget(count=count)))
