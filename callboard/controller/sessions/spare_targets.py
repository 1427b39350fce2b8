"""Warm spares: how many each node keeps, and what they import: its own setting while work is about, else none
(docs/agents.md).

Work is any job that has not ended and any placement group: a reserved one gets its spares before its first job comes.
The modules that a pool preloads are told to the nodes that the pool may use, while there is work of the pool.
Told after the commands of the same commit, so that a start never waits behind the making of a spare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from callboard.controller.loop.driver import Listener
from callboard.controller.sessions.session import AgentSession
from callboard.model.names import Labels
from callboard.scheduler import State
from callboard.scheduler.records.job_records import EventRecord
from callboard.scheduler.records.states import ENDED, JobState
from callboard.v1 import agent_pb2

MAX_PRELOADS = 64
"""Lists of modules that one agent is told."""

_UNENDED = tuple(state for state in JobState if state not in ENDED)


def is_work_about(state: State) -> bool:
    """Whether a start may come soon."""
    return bool(state.groups) or any(state.jobs_by_state[each] for each in _UNENDED)


def preloads_about(state: State) -> tuple[tuple[Labels, tuple[str, ...]], ...]:
    """What pools with work preload, each with the labels of the nodes that it may use."""
    preloading = [pool.spec for pool in state.pools.values() if pool.spec.preload]
    if not preloading:
        return ()  # of most clusters, after every event
    waiting = {pool for shape in state.waiting for pool in shape.yield_class.pools}
    busy = [spec for spec in preloading if spec.name in waiting or state.group_index.of_pool.get(spec.name)]
    return tuple(dict.fromkeys((spec.node_selector, spec.preload) for spec in busy))


class SpareTargets(Listener):
    """Tells agents how many spares to keep, whenever that changes. Listens to the driver, after the sessions."""

    def __init__(self, live: Mapping[str, AgentSession], state: Callable[[], State]) -> None:
        """
        Args:
            live: the session of each connected node.
        """
        self._live = live
        self._state = state
        self._told: object = None
        """Whether work is about and what is preloaded, as every connected agent was told last; None: not known."""

    def started(self, events: Sequence[EventRecord]) -> None:  # noqa: ARG002 - only the state counts
        """Sessions end with a term; each agent is told anew when it joins."""
        self._told = None

    def publish(self, events: Sequence[EventRecord]) -> None:
        """What is about never changes without an entry in the log."""
        if not events:
            return
        state = self._state()
        about = is_work_about(state), preloads_about(state)
        if about == self._told:
            return  # whoever joined meanwhile was told then: a walk through every session for each join is one too many
        self._told = about
        for session in self._live.values():
            tell_spares(session, state)


def tell_spares(session: AgentSession, state: State) -> None:
    """Tells one agent what it should keep, if that is something else than before."""
    count = session.warm_spares if is_work_about(state) else 0
    node = state.nodes.get(session.node_id)
    own = dict(node.labels) if node is not None else {}
    lists = [
        modules for selector, modules in preloads_about(state) if all(own.get(key) == value for key, value in selector)
    ]
    target = agent_pb2.SpareTarget(
        count=count, preloads=[agent_pb2.Preload(modules=each) for each in lists[:MAX_PRELOADS] if count]
    )
    if target != session.spare_target:
        session.spare_target = target
        session.send(agent_pb2.SessionResponse(spare_target=target))
