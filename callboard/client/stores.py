"""The object stores of Ray's nodes and how full they are: one node is asked, its Ray knows those of all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from callboard.v1.inspection_pb2 import RayObjectStore
from callboard.v1.node_pb2 import Node, NodeState

_ANSWERING = (NodeState.NODE_STATE_READY, NodeState.NODE_STATE_CORDONED, NodeState.NODE_STATE_DRAINING)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStore:
    """The object store of one node of Ray.

    Attributes:
        node_id: the node; empty: a node of Ray that no agent runs.
        ray_node_id: Ray's id of it (hex).
        used_bytes: what its objects take; what was spilled to disk is not counted.
        total_bytes: what it may take.
    """

    node_id: str
    ray_node_id: str
    used_bytes: int
    total_bytes: int


def node_to_ask(nodes: Iterable[Node]) -> str:
    """Id of the node whose agent is asked: that of Ray's head where it is one of ours; empty: none is in Ray."""
    inside = [node for node in nodes if node.ray_node_id and node.state in _ANSWERING]
    first = min(inside, key=lambda node: (not node.ray_head, node.rank), default=None)
    return "" if first is None else first.name.removeprefix("nodes/")


def stores_of(nodes: Sequence[Node], told: Iterable[RayObjectStore]) -> list[ObjectStore]:
    """What Ray told, by the ranks of our nodes; those that aren't ours come last."""
    ours = {node.ray_node_id: node for node in nodes if node.ray_node_id}
    rank_of = {ray_node_id: (0, node.rank) for ray_node_id, node in ours.items()}
    return [
        ObjectStore(
            node_id=ours[store.ray_node_id].name.removeprefix("nodes/") if store.ray_node_id in ours else "",
            ray_node_id=store.ray_node_id,
            used_bytes=store.used_bytes,
            total_bytes=store.total_bytes,
        )
        for store in sorted(told, key=lambda store: (rank_of.get(store.ray_node_id, (1, 0)), store.ray_node_id))
    ]
