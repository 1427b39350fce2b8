"""What does one more node cost where there are many already? As much as where there are few (NJ-…)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard.model.quantities import Resources
from callboard.scheduler import Outcome, Scheduler
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.node_record import DeviceInfo, NodeRecord, RayInfo
from callboard.scheduler.records.states import NodeState
from callboard.scheduler.state.roster import GONE, Roster

FEW, MANY = 10, 500


def steps(work: Callable[[], object]) -> int:
    """Instructions of the interpreter that some work takes: what a clock measures, without the machine."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


class Cluster:
    """Nodes with two devices each."""

    def __init__(self, nodes: int) -> None:
        self.scheduler = Scheduler()
        self.nodes = nodes
        for number in range(nodes):
            self.join(number)

    def join(self, number: int, **fields: Any) -> Outcome:
        hello = ev.NodeJoined(
            now_ms=1,
            node_id=f"n{number}",
            instance="a",
            capacity=Resources.parse({"cpu": 8, "gpu": 2}),
            devices=tuple(DeviceInfo(id=str(i), uuid=f"GPU-{number}-{i}") for i in range(2)),
            ray=RayInfo(gcs_address="h:1", session="s", ray_node_id=f"ray-{number}"),
        )
        return self.scheduler.handle(replace(hello, **fields))

    def lose(self, number: int) -> None:
        node = self.scheduler.state.nodes[f"n{number}"]
        self.scheduler.handle(ev.NodeLost(now_ms=1, node_id=node.node_id, epoch=node.epoch, reason="silent"))

    def restart(self) -> None:
        self.scheduler.handle(ev.ControllerStarted(now_ms=1, grace_ms=60_000))


def a_new_node(cluster: Cluster) -> Callable[[], object]:
    return lambda: cluster.join(cluster.nodes)


def a_node_that_returns_after_a_restart(cluster: Cluster) -> Callable[[], object]:
    cluster.restart()
    cluster.join(0)
    return lambda: cluster.join(1)


def a_node_that_returns_after_it_was_given_up(cluster: Cluster) -> Callable[[], object]:
    cluster.lose(3)
    return lambda: cluster.join(3)


def a_node_that_takes_the_rank_of_a_lost_one(cluster: Cluster) -> Callable[[], object]:
    cluster.lose(3)
    return lambda: cluster.join(cluster.nodes)


def a_node_that_asks_for_a_rank(cluster: Cluster) -> Callable[[], object]:
    return lambda: cluster.join(cluster.nodes, rank=cluster.nodes + 7)


def a_node_that_is_given_up(cluster: Cluster) -> Callable[[], object]:
    return lambda: cluster.lose(3)


def a_stray_group_is_given_to_somebody(cluster: Cluster) -> Callable[[], object]:
    event = ev.GroupFound(now_ms=1, group_id="pg-9", ray_id="x", ray_session="s")
    return lambda: cluster.scheduler.handle(event)


def a_look_at_the_whole_cluster_after_another_node_joined(cluster: Cluster) -> Callable[[], object]:
    state = cluster.scheduler.state
    assert state.cluster_use.capacity.gpu_milli == 2_000 * cluster.nodes
    cluster.join(cluster.nodes)
    return lambda: state.cluster_use


@pytest.mark.parametrize(
    "case",
    [
        a_new_node,
        a_node_that_returns_after_a_restart,
        a_node_that_returns_after_it_was_given_up,
        a_node_that_takes_the_rank_of_a_lost_one,
        a_node_that_asks_for_a_rank,
        a_node_that_is_given_up,
        a_stray_group_is_given_to_somebody,
        a_look_at_the_whole_cluster_after_another_node_joined,
    ],
)
def test_costs_no_more_among_many_nodes_than_among_few(case: Callable[[Cluster], Callable[[], object]]) -> None:
    few, many = (steps(case(Cluster(nodes))) for nodes in (FEW, MANY))
    assert many < few + MANY // 2, f"{few} steps among {FEW} nodes, {many} among {MANY}"


NODE = NodeRecord(node_id="", rank=0, state=NodeState.READY)
MOVES = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from([*NodeState, None]), st.integers(-1, 7), st.booleans()), max_size=40
)


@given(MOVES)
def test_ranks_devices_and_who_is_connected_are_those_of_the_nodes_there_are(
    moves: list[tuple[int, NodeState | None, int, bool]],
) -> None:
    roster, nodes = Roster(), dict[str, NodeRecord]()
    for number, state, asked, simulated in moves:
        name = f"n{number}"
        there = {node.rank: node.node_id for node in nodes.values() if node.state not in GONE}
        lowest = next(rank for rank in range(9) if rank not in there)
        assert roster.lowest_free_rank() == lowest
        rank = lowest if asked < 0 else asked
        if state is None:
            new = None
        elif state not in GONE and there.get(rank, name) != name:
            assert roster.holder_of(rank) == there[rank]
            continue
        else:
            devices = (DeviceInfo(id="0", uuid=f"GPU-{number}"), DeviceInfo(id="1"))
            new = replace(NODE, node_id=name, rank=rank, state=state, devices=devices, simulated=simulated)
        roster.update(nodes.get(name), new)
        nodes.pop(name, None)
        if new is not None:
            nodes[name] = new
    present = [node for node in nodes.values() if node.state not in GONE]
    connected = [node for node in present if node.state in (NodeState.READY, NodeState.DRAINING)]
    assert {node.rank: roster.holder_of(node.rank) for node in present} == {n.rank: n.node_id for n in present}
    owners = {f"GPU-{n}": roster.owner_of(f"GPU-{n}") for n in range(6)}
    real = {node.node_id for node in present if not node.simulated}
    assert owners == {f"GPU-{n}": f"n{n}" if f"n{n}" in real else None for n in range(6)}
    first = min(connected, key=lambda node: node.rank).node_id if connected else ""
    assert roster.first_connected() == first
    assert roster.awaited == any(node.state in (NodeState.SUSPECT, NodeState.JOINING) for node in nodes.values())
