"""The cluster that is meant: described by a text, or the nodes that a controller has now."""

from __future__ import annotations

from collections.abc import Sequence

from callboard.cli.show import words
from callboard.cli.show.exits import NO_PLAN, CommandFailed
from callboard.cli.show.verb_guard import with_client
from callboard.client.calls.cluster_calls import GONE
from callboard.client.client import Client
from callboard.model.cluster_text import parse_cluster
from callboard.model.frozen import dataclass
from callboard.v1.node_pb2 import Node, NodeState

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """A node as a placement sees it.

    Attributes:
        group: its node group, or what its GPUs are; empty: like all others.
        memory_gib: memory per GPU; None: not known.
    """

    gpus: int
    group: str = ""
    memory_gib: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSource:
    """A cluster and where it came from.

    Attributes:
        nodes: in the order of their ranks.
        revision: of the live inventory; None: described.
        notes: what was left out, one sentence each.
    """

    nodes: tuple[ClusterNode, ...]
    revision: int | None = None
    notes: tuple[str, ...] = ()


def described_cluster(text: str) -> ClusterSource:
    """The cluster of ``--nodes``.

    Raises:
        InvalidInput: every fault of the text.
    """
    found = parse_cluster(text, "--nodes")
    return ClusterSource(nodes=tuple(ClusterNode(gpus=node.gpus, group=node.gpu_model) for node in found))


def live_cluster(controller: str) -> ClusterSource:
    """The nodes of a controller that take work now. A node that left, or was told to, is no place to plan for."""

    async def action(client: Client) -> ClusterSource:
        return _source_of(await client.list_nodes(), client.address)

    return with_client(action, controller)


def _source_of(nodes: Sequence[Node], address: str) -> ClusterSource:
    ready = sorted((node for node in nodes if node.state == NodeState.NODE_STATE_READY), key=lambda node: node.rank)
    if not any(node.devices for node in ready):
        raise CommandFailed(
            f"Controller {address} has no GPU that could be planned for.",
            ", ".join(f"{words.node_id(node)} is {words.node_state(node)}" for node in nodes) or "It has no nodes.",
            "Let nodes join, or describe a cluster with --nodes.",
            NO_PLAN,
        )
    notes = []
    away = [f"{words.node_id(node)} ({words.node_state(node).lower()})" for node in nodes if node not in ready]
    if away:
        notes.append(f"not planned for, because they take no work: {', '.join(away)}")
    behind = [node for node in nodes if node not in ready and node.state not in GONE and node.rank < ready[-1].rank]
    if behind:
        names = ", ".join(words.node_id(node) for node in behind)
        notes.append(
            f"GPU ranks are counted without {names}: let it leave, or take work, before a job starts with them"
        )
    busy = sum(1 for node in ready for use in node.devices if use.used_milli or use.held_milli or use.quarantined_milli)
    if busy:
        notes.append(f"{busy} of the GPUs are in use now; a job with this placement has to wait for them or preempt")
    return ClusterSource(
        nodes=tuple(_node(node) for node in ready), revision=max(node.revision for node in ready), notes=tuple(notes)
    )


def _node(node: Node) -> ClusterNode:
    memory = [use.device.memory_bytes / _GIB for use in node.devices if use.device.memory_bytes]
    return ClusterNode(
        gpus=len(node.devices), group=node.node_group, memory_gib=round(min(memory), 2) if memory else None
    )
