"""Whose Ray is asked how full the object stores are?"""

from __future__ import annotations

from callboard.client.calls.cluster_calls import node_to_ask
from callboard.v1.node_pb2 import Node, NodeState


def node(rank: int, *, head: bool = False, ray: str = "aa", state: str = "READY") -> Node:
    said = NodeState.Value(f"NODE_STATE_{state}")
    return Node(name=f"nodes/n{rank}", rank=rank, ray_head=head, ray_node_id=ray, state=said)


def test_it_is_that_of_the_head_which_knows_best() -> None:
    assert node_to_ask([node(0), node(1, head=True), node(2)]) == "n1"


def test_where_the_head_is_not_ours_or_does_not_answer_it_is_the_lowest_rank() -> None:
    assert node_to_ask([node(2), node(1)]) == "n1"
    assert node_to_ask([node(0, head=True, state="SUSPECT"), node(2), node(1, state="DRAINING")]) == "n1"


def test_nobody_is_asked_where_nobody_is_in_ray() -> None:
    assert node_to_ask([]) == ""
    assert node_to_ask([node(0, ray=""), node(1, state="LOST")]) == ""
