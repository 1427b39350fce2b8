"""May it join, by what the controller knows, and what is it told first?"""

from __future__ import annotations

from callboard.controller.convert.commands import worker_key
from callboard.controller.options import ControllerOptions
from callboard.scheduler import State
from callboard.scheduler.events import Admission
from callboard.scheduler.records import NodeState
from callboard.v1 import agent_pb2
from callboard.wire.refusals import Unavailable, WrongState

GONE = frozenset({NodeState.LOST, NodeState.LEFT})
"""Nodes in these states have no agent, so nothing of theirs is taken."""


def check_epoch(hello: agent_pb2.Hello, state: State) -> None:
    """An agent that knows a later session than we do has seen another state: a removed one, or another cluster.

    Raises:
        WrongState: it has; commands of ours would be of the past for it (I9).
    """
    node = state.nodes.get(hello.node_id)
    known = node.epoch if node is not None else 0
    if hello.epoch_seen > known:
        raise WrongState(
            f"the agent of {hello.node_id} was in session {hello.epoch_seen}, this controller knows {known}: it is the "
            "agent of another controller, or this one's state was restored or removed. Restart the agent to join"
        )


def check_number(hello: agent_pb2.Hello, latest: tuple[str, int]) -> None:
    """A Hello may arrive after a later one of the same agent: it was stuck on a connection that the agent gave up. What
    it says runs there is of the past, and taking it for now would free the room of workers that live (I4).

    Args:
        latest: (instance, number) of the last Hello taken from this node.

    Raises:
        Unavailable: it is not the latest; the stream it came on is dead anyway.
    """
    if hello.number and latest[0] == hello.instance and hello.number <= latest[1]:
        raise Unavailable(f"a later Hello of the agent of {hello.node_id} is known")


def welcome(
    admission: Admission,
    state: State,
    options: ControllerOptions,
    *,
    bootstrap: agent_pb2.RayBootstrap | None,
    known_report_ids: list[str],
    controller_id: str,
) -> agent_pb2.SessionResponse:
    """The first message to an admitted agent."""
    kept = [state.workers[generation] for generation in admission.keep if generation in state.workers]
    return agent_pb2.SessionResponse(
        welcome=agent_pb2.Welcome(
            epoch=admission.epoch,
            term=state.meta.term,
            rank=admission.rank,
            lease_ms=options.lease_ms,
            heartbeat_ms=options.heartbeat_ms,
            ray_bootstrap=bootstrap,
            keep=[agent_pb2.WorkerRef(worker=worker_key(worker), generation=worker.generation) for worker in kept],
            orphan_grace_ms=options.orphan_grace_ms,
            known_report_ids=known_report_ids,
            controller_id=controller_id,
        )
    )
