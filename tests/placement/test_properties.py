"""What holds of every placement that is accepted? Random clusters and texts, against the meaning of the text itself."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from callboard.model.faults import InvalidInput
from callboard.placement import (
    Accelerator,
    Cluster,
    HardwareUnit,
    Node,
    PackedPlacementStrategy,
    PlacementPlan,
    parse,
    plan_placement,
    render,
)

Expected = list[tuple[int, ...]]
"""Resource ranks of each process, by rank."""


@st.composite
def clusters(draw: DrawFn) -> Cluster:
    """One to four nodes with zero to five GPUs each, of odd ids, and at least one GPU."""
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any))
    kinds = draw(
        st.lists(st.sampled_from(["gpu", "a100", "NVIDIA H100 80GB"]), min_size=len(sizes), max_size=len(sizes))
    )
    ids = [[f"{rank}-{index}" if index % 2 else str(index) for index in range(size)] for rank, size in enumerate(sizes)]
    gap = draw(st.integers(0, 2))
    return Cluster(
        tuple(
            Node(
                node_id=f"n{rank}",
                rank=rank * (1 + gap),
                accelerators=tuple(Accelerator(name, kind) for name in names),
                labels=(("zone", f"z{rank}"),),
                node_group=draw(st.sampled_from(["", "spare", "4090"])),
                hardware=(HardwareUnit("Franka", '{"arm":"left","port":10}'),) if rank % 2 else (),
                interpreters=draw(st.none() | st.just(("/opt/py/bin/python",))),
                cpu_milli=draw(st.none() | st.integers(0, 64_000)),
                memory_bytes=draw(st.none() | st.integers(0, 1 << 40)),
                lost_accelerators=draw(st.integers(0, 1)),
            )
            for rank, (names, kind) in enumerate(zip(ids, kinds, strict=True))
        )
    )


@st.composite
def texts(draw: DrawFn, total: int) -> tuple[str, Expected]:
    """A text of the grammar on ``total`` resources, and what it says by its definition."""
    segments: list[str] = []
    expected: Expected = []
    at = draw(st.integers(0, max(0, total - 1)))
    while at < total and len(segments) < 4:
        size = draw(st.integers(1, min(4, total - at)))
        counts = [n for n in range(1, 13) if n % size == 0 or size % n == 0]
        processes = draw(st.sampled_from(counts))
        ranks = list(range(at, at + size))
        text = str(at) if size == 1 and draw(st.booleans()) else f"{at}-{at + size - 1}"
        if processes != size or draw(st.booleans()):
            first, last = len(expected), len(expected) + processes - 1
            text += f":{first}-{last}" if first != last or draw(st.booleans()) else f":{first}"
        segments.append(text)
        for process in range(processes):
            if processes >= size:
                expected.append((ranks[process * size // processes],))
            else:
                each = size // processes
                expected.append(tuple(ranks[process * each : (process + 1) * each]))
        at += size + draw(st.integers(0, 2))
    return ",".join(segments), expected


@st.composite
def cases(draw: DrawFn) -> tuple[Cluster, dict[str, tuple[str, Expected]]]:
    """A cluster, and one to three components."""
    cluster = draw(clusters())
    names = draw(st.lists(st.sampled_from(["actor", "rollout", "env", "x.y-z_1"]), min_size=1, max_size=3, unique=True))
    return cluster, {name: draw(texts(cluster.num_accelerators)) for name in names}


def planned(cluster: Cluster, components: dict[str, tuple[str, Expected]]) -> PlacementPlan | None:
    """The plan; None when it is refused, which must be for a process over two nodes."""
    section = {"component_placement": {name: text for name, (text, _) in components.items()}}
    try:
        return plan_placement({"cluster": section}, cluster)
    except InvalidInput as error:
        said = [fault.message for fault in error.faults if "would span nodes" not in fault.message]
    assert said == []
    return None


def homes(cluster: Cluster) -> list[tuple[int, int, str]]:
    """Node rank, position and id of each GPU by its rank."""
    return [
        (node.rank, position, device.id) for node in cluster.nodes for position, device in enumerate(node.accelerators)
    ]


@given(cases())
def test_a_text_is_refused_exactly_when_a_process_needs_two_nodes(
    case: tuple[Cluster, dict[str, tuple[str, Expected]]],
) -> None:
    cluster, components = case
    where = homes(cluster)
    spans = any(
        len({where[rank][0] for rank in ranks}) > 1 for _, expected in components.values() for ranks in expected
    )
    assert (planned(cluster, components) is None) == spans


@given(cases())
def test_each_process_has_what_its_text_says(case: tuple[Cluster, dict[str, tuple[str, Expected]]]) -> None:
    cluster, components = case
    found = planned(cluster, components)
    if found is None:
        return
    where = homes(cluster)
    for name, (_, expected) in components.items():
        workers = found.by_name[name].workers
        assert [worker.placement.rank for worker in workers] == list(range(len(expected)))
        for worker, ranks in zip(workers, expected, strict=True):
            node, ids = cluster.by_rank[worker.placement.cluster_node_rank], [where[rank][2] for rank in ranks]
            assert {where[rank][0] for rank in ranks} == {node.rank}
            assert worker.node_id == node.node_id
            assert list(worker.placement.visible_accelerators) == ids == [device.id for device in worker.devices]
            assert [where[rank][1] for rank in ranks] == list(worker.placement.local_hardware_ranks)
            assert set(ids) <= {device.id for device in node.accelerators}


@given(cases())
def test_local_ranks_count_the_processes_of_each_node(case: tuple[Cluster, dict[str, tuple[str, Expected]]]) -> None:
    found = planned(*case)
    for component in found.components if found is not None else ():
        on_node: dict[int, list[int]] = {}
        for worker in component.workers:
            on_node.setdefault(worker.placement.cluster_node_rank, []).append(worker.placement.local_rank)
        assert all(local == list(range(len(local))) for local in on_node.values())
        assert all(
            worker.placement.local_world_size == len(on_node[worker.placement.cluster_node_rank])
            and worker.placement.placement_node_rank == list(on_node).index(worker.placement.cluster_node_rank)
            for worker in component.workers
        )


@given(cases())
def test_i1_no_device_is_charged_more_than_it_is_and_demand_counts_it_once(
    case: tuple[Cluster, dict[str, tuple[str, Expected]]],
) -> None:
    found = planned(*case)
    if found is None:
        return
    charges: Counter[tuple[str, int]] = Counter()
    holders: Counter[tuple[str, int]] = Counter()
    for worker in found.workers:
        for device in worker.devices:
            charges[worker.node_id, device.position] += device.milli
            holders[worker.node_id, device.position] += 1
    for worker in found.workers:
        for device in worker.devices:
            assert device.milli - 1000 // holders[worker.node_id, device.position] in (0, 1)
    assert all(milli == 1000 for milli in charges.values())
    assert {(node.node_id, position) for node in found.demand for position, _ in node.devices} == set(charges)
    assert all(milli == 1000 for node in found.demand for _, milli in node.devices)
    assert found.gpus == len(charges)


@given(cases())
def test_a_plan_that_is_written_down_is_read_again(case: tuple[Cluster, dict[str, tuple[str, Expected]]]) -> None:
    found = planned(*case)
    if found is not None:
        text = render(found)
        assert parse(text) == found
        assert render(parse(text)) == text


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.integers(0, 8),
    st.integers(0, 24),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_a_packed_range_uses_every_rank_once_on_its_own_node(
    sizes: list[int], start: int, length: int, each: int, stride: int
) -> None:
    cluster = Cluster.from_nodes("+".join(str(size) for size in sizes))
    try:
        placed = PackedPlacementStrategy(start, start + length, each, stride).resolve(cluster)
    except InvalidInput:
        return
    first_of = {rank: sum(sizes[:rank]) for rank in range(len(sizes))}
    used = [first_of[one.cluster_node_rank] + position for one in placed for position in one.local_hardware_ranks]
    assert sorted(used) == list(range(start, start + length + 1))
    assert all(position < sizes[one.cluster_node_rank] for one in placed for position in one.local_hardware_ranks)


GROUPS = """
cluster:
  num_nodes: 4
  num_gpus_per_node: 2
  component_placement:
    a: {{node_group: [{first}, {second}], placement: all, share: {share}}}
    b: {{node_group: node, placement: "0-3:0-7", visible: {visible}}}
  node_groups:
    - label: g
      node_ranks: 0-1
      env_configs:
        - {{node_ranks: 0, python_interpreter_path: /opt/py, env_vars: [{{A: "010"}}, {{B: on}}, {{C: ''}}]}}
        - {{node_ranks: 1, env_vars: [{{A: 1e3}}]}}
    - {{label: "1e3", node_ranks: "2,3"}}
    - {{label: r, node_ranks: 2-3, hardware: {{type: X, configs: [
        {{node_rank: 2, f: 1.5, b: true, s: "1", n: ~, l: [1, 1e3], m: {{k: "on"}},
         e: 1.0e-7, z: 12345678901234567890}}]}}}}
    - {{label: plain, node_ranks: all, ignore_hardware: true}}
"""


@pytest.mark.parametrize(
    ("first", "second"), [("g", '"1e3"'), ('"1e3"', "g"), ("g", "r"), ("plain", "g"), ("r", "plain")]
)
@pytest.mark.parametrize(("share", "visible"), [("0.25", "all"), ("1000", "own"), ("500m", "all")])
def test_groups_environments_and_hardware_are_read_again_as_they_were_written(
    first: str, second: str, share: str, visible: str
) -> None:
    text = GROUPS.format(first=first, second=second, share=share, visible=visible)
    if (first, second) == ("r", "plain"):
        text = text.replace(f", share: {share}", "")
    found = plan_placement(text, Cluster.from_nodes("4x2"))
    assert parse(render(found)) == found
    assert [group.label for group in parse(render(found)).cluster.groups] == ["g", "1e3", "r", "plain"]
