"""Admission: whether a node may join, by what the controller knows, and what it is told first."""

from __future__ import annotations

from collections.abc import Sequence

from callboard._version import __version__
from callboard.controller.convert.commands import worker_key
from callboard.controller.convert.hello import minor_of
from callboard.controller.options import ControllerOptions
from callboard.model.log import structlog
from callboard.scheduler import State
from callboard.scheduler.records.events import Admission
from callboard.scheduler.records.node_record import NodeRecord
from callboard.scheduler.records.states import NodeState
from callboard.v1 import agent_pb2
from callboard.wire.refusals import Unavailable, VersionMismatch, WrongState

log = structlog.get_logger(__name__)

GONE = frozenset({NodeState.LOST, NodeState.LEFT})
"""Nodes in these states have no agent, so nothing of theirs is taken."""

STUCK_MS = 300_000
"""Longer than what a dead process has sent is tried again: with Linux's `tcp_orphan_retries` about 100 s. A clock that
is further behind was set back."""


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


def check_peers(hello: agent_pb2.Hello, state: State) -> None:
    """A Ray cluster is of one Ray and of one minor version of Python: Ray itself refuses others, late and in a log.

    Raises:
        VersionMismatch: the node's are others than those of the nodes that are there.
    """
    peer = _peer(hello, state)
    if peer is None:
        return
    own = {"Ray": hello.ray_version, "Python": minor_of(hello.python_version)}
    theirs = {"Ray": peer.ray_version, "Python": minor_of(peer.python_version)}
    for name, there in theirs.items():
        if own[name] and there and own[name] != there:
            whole = (hello.python_version, peer.python_version) if name == "Python" else (own[name], there)
            raise VersionMismatch(
                f"node {hello.node_id} has {name} {whole[0]}, and the cluster has {name} {whole[1]} (on "
                f"{peer.node_id}); install {name} {there} on {hello.node_id}, or end the other agents first",
                metadata={"agent": whole[0], "cluster": whole[1]},
            )


def unusual(hello: agent_pb2.Hello, state: State) -> list[str]:
    """What is unusual about a node and does not keep it out, a sentence each."""
    found = []
    if hello.version != __version__:
        found.append(f"the agent of {hello.node_id} is callboard {hello.version}, the controller {__version__}")
    peer = _peer(hello, state)
    if peer is not None and hello.python_version and hello.python_version != peer.python_version:
        found.append(f"{hello.node_id} has Python {hello.python_version}, {peer.node_id} has {peer.python_version}")
    for text in found:
        log.warning("unusual", node=hello.node_id, what=text)
    return found


def _peer(hello: agent_pb2.Hello, state: State) -> NodeRecord | None:
    """The node that the others of a Ray cluster are compared with: the one with Ray's head, else the lowest rank."""
    if hello.runtime != agent_pb2.RUNTIME_RAY:
        return None
    others = (
        node
        for node in state.nodes.values()
        if node.node_id != hello.node_id and node.runtime == "ray" and node.state not in GONE and node.ray_version
    )
    return min(others, key=lambda node: (not (node.ray is not None and node.ray.head), node.rank), default=None)


def check_order(hello: agent_pb2.Hello, state: State) -> None:
    """A Hello may arrive after a later one: it was stuck on a connection that its agent gave up, or left behind when it
    died. What it says runs there is of the past, and taking it for now would free the room of workers that live (I4).

    Of one run of the agent program the numbers say which is later; of two runs, the clock of their machine, unless it
    was set far back. The node's record holds what the last Hello that was let in said, so that a controller that
    replayed its journal knows it, too: workers whose room is at stake outlive the controller. A node that left has
    none.

    Raises:
        Unavailable: it is not the latest; the stream it came on is dead anyway.
    """
    node = state.nodes.get(hello.node_id)
    if node is None:
        return
    if node.instance == hello.instance:
        if hello.number and hello.number <= node.hello_number:
            raise Unavailable(f"a later Hello of the agent of {hello.node_id} is known")
        return
    behind_ms = node.hello_clock_ms - hello.clock_ms if hello.clock_ms and node.state is not NodeState.LEFT else 0
    if 0 < behind_ms <= STUCK_MS:
        raise Unavailable(f"a Hello of a later run of the agent of {hello.node_id} is known")


def welcome(
    admission: Admission,
    state: State,
    options: ControllerOptions,
    *,
    bootstrap: agent_pb2.RayBootstrap | None,
    known_report_ids: list[str],
    controller_id: str,
    warnings: Sequence[str] = (),
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
            warnings=warnings,
        )
    )
