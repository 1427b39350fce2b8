"""Which mappings are problems, and what is said of those that aren't?"""

from __future__ import annotations

import math
from typing import Any

import pytest

from callboard.autoplace import Async, EdgeKind, Layout, NoPlan, Problem, Sync
from callboard.model import InvalidInput


def general(**changes: Any) -> dict[str, Any]:
    """A workflow in the general form."""
    base: dict[str, Any] = {
        "workflow": {
            "chunks": 4,
            "components": {
                "rollout": {"seconds_by_gpus": {1: 8.0, 2: 4.0}, "memory_gib": 30, "offload_seconds": 1.0},
                "actor": {"seconds_by_gpus": {2: 6.0}},
            },
            "edges": [["rollout", "actor", "stream"]],
        },
        "cluster": {"nodes": [{"gpus": 2, "memory_gib": 80, "group": "h100"}]},
    }
    return {**base, **changes}


def faults_of(mapping: object) -> dict[str, str]:
    """Sentence by path."""
    with pytest.raises(InvalidInput) as caught:
        Problem.from_mapping(mapping)  # type: ignore[arg-type]
    return {fault.field: fault.message for fault in caught.value.faults}


def test_the_general_form_is_read() -> None:
    problem = Problem.from_mapping(general(objective={"async": {"staleness": 2}}, weight_sync_seconds=0.6))
    rollout = problem.component("rollout")
    assert [(mode.gpus, mode.seconds, mode.memory_gib, mode.estimated) for mode in rollout.modes] == [
        (1, 8.0, 30.0, False),
        (2, 4.0, 30.0, False),
    ]
    assert problem.pool("h100").gpu_ranks == (0, 1)
    assert problem.objective == Async(2.0)
    assert (problem.chunks, problem.weight_sync_seconds, problem.switch_always) == (4, 0.6, False)
    assert problem.edges[0].kind is EdgeKind.STREAM


def test_the_plain_form_takes_only_the_listed_counts_and_always_pays_for_switching() -> None:
    problem = Problem.from_mapping(
        {
            "name": "x",
            "gpus": 4,
            "chunks": 2,
            "components": {"a": {"seconds_by_gpus": {"1": 4, "4": 1}, "switch_seconds": 1.5}},
            "edges": [],
            "optimum_seconds": 2.5,
        }
    )
    assert [mode.gpus for mode in problem.components[0].modes] == [1, 4]
    assert problem.switch_always
    assert problem.objective == Sync()
    assert problem.layout is Layout.ANY


def test_every_fault_is_told_at_once_with_its_path() -> None:
    found = faults_of(
        {
            "workflow": {
                "chunks": 0,
                "components": {
                    "a": {"seconds_by_gpus": {"1": -1, "x": 1, 2: 0, 3: math.nan, 4: math.inf, -1: 2, True: 1}},
                    "b": {"seconds_by_gpu": {1: 1}},
                    "c c": {"seconds_by_gpus": {1: 1}},
                    "d": {"seconds_by_gpus": {1: 1}, "memory_gib": -3, "scaling": {"model": "magic"}},
                },
                "edges": [["a", "b", "river"], ["a"]],
            },
            "cluster": {"nodes": [{"gpus": -1}]},
            "objective": "fast",
        }
    )
    table = "workflow.components.a.seconds_by_gpus"
    assert found["workflow.chunks"] == "0 is out of bounds; 1 to 1000000 is allowed"
    assert "-1 is out of bounds" in found[f'{table}["1"]']
    assert "'x' is not a whole number" in found[f"{table}.x"]
    assert "0 is out of bounds; above 0" in found[f"{table}[2]"]
    assert found[f"{table}[3]"] == "nan is not a finite number"
    assert found[f"{table}[4]"] == "inf is not a finite number"
    assert "-1 is out of bounds" in found[f"{table}[-1]"]
    assert any("true" in sentence for sentence in found.values())
    assert "did you mean seconds_by_gpus" in found["workflow.components.b.seconds_by_gpu"]
    assert "is not a name" in found['workflow.components["c c"]']
    assert "out of bounds" in found["workflow.components.d.memory_gib"]
    assert "use amdahl, usl, linear" in found["workflow.components.d.scaling"]
    assert "use stream or barrier" in found["workflow.edges[0].kind"]
    assert "two or three items" in found["workflow.edges[1]"]
    assert "out of bounds" in found["cluster.nodes[0].gpus"]
    assert "write sync or" in found["objective"]


@pytest.mark.parametrize(
    ("edges", "path", "says"),
    [
        ([["rollout", "critic", "stream"]], "workflow.edges[0]", "no component is called 'critic'"),
        ([["rollout", "rollout", "stream"]], "workflow.edges[0]", "can't wait for itself"),
        ([["rollout", "actor"], ["rollout", "actor", "barrier"]], "workflow.edges[1]", "listed twice"),
        ([["rollout", "actor"], ["actor", "rollout", "barrier"]], "workflow.edges[1]", "rollout → actor → rollout"),
    ],
)
def test_edges_that_make_no_sense_are_refused(edges: list[list[str]], path: str, says: str) -> None:
    mapping = general()
    mapping["workflow"]["edges"] = edges
    assert says in faults_of(mapping)[path]


@pytest.mark.parametrize(
    ("edge", "found"),
    [
        ({"from": "rollout"}, {".to": "is required"}),
        (["rollout", None], {".to": "is required"}),
        ({"from": "rollout", "too": "actor"}, {".too": "unknown key 'too'; did you mean to?"}),
        ({"source": "rollout", "to": "actor"}, {".source": "unknown key source; here it is called from"}),
        ("rollout -> actor", {"": "'rollout -> actor' is not an edge; write e.g. [rollout, actor, stream]"}),
        (["rollout", "actr"], {"": "no component is called 'actr'; did you mean actor?"}),
    ],
)
def test_an_edge_says_what_is_missing_and_what_was_meant(edge: object, found: dict[str, str]) -> None:
    mapping = general()
    mapping["workflow"]["edges"] = [edge]
    assert faults_of(mapping) == {f"workflow.edges[0]{place}": message for place, message in found.items()}


@pytest.mark.parametrize(
    ("changes", "place", "says"),
    [
        ({"cluster": {"nodes": [8]}}, "cluster.nodes[0]", "8 is not a node; write e.g. {gpus: 8}"),
        ({"cluster": {"nodes": True}}, "cluster.nodes", "is not a list; write 8+8, or"),
        ({"chunks": 8}, "chunks", "unknown key chunks; it belongs to workflow"),
        ({"workflow": {"components": {"a": 5}}}, "workflow.components.a", "5 is not a component; write e.g."),
        (
            {"workflow": {"components": {"a": {8: 5}}}},
            "workflow.components.a",
            "8 is not a text; keys are seconds_by_gpus",
        ),
    ],
)
def test_what_stands_in_another_shape_or_place_is_told_with_its_own(
    changes: dict[str, Any], place: str, says: str
) -> None:
    found = faults_of(general(**changes))
    assert says in found[place]


@pytest.mark.parametrize(
    ("component", "place", "says"),
    [
        ({"secnds": {1: 8.0}}, "secnds", "did you mean seconds_by_gpus?"),
        ({"seconds": {1: 8.0}}, "seconds", "did you mean seconds_by_gpus?"),
        ({"tail_secnds": 8.0}, "tail_secnds", "did you mean tail_seconds?"),
        ({"switch": 8.0}, "switch", "did you mean switch_seconds?"),
        ({"seconds_by_gpus": {1: "1e3"}}, "seconds_by_gpus[1]", "write it without quotes, units and powers of ten"),
        ({"seconds_by_gpus": {1: 8.0}, "scaling": "amdahl"}, "scaling", "needs two measured counts"),
        ({"seconds_by_gpus": {1: 8.0}, "scaling": {"model": ["amdahl"]}}, "scaling", "use amdahl, usl"),
        ({"seconds_by_gpus": {1: 8.0}, "scaling": {"modle": "amdahl"}}, "scaling.model", "is required; use amdahl"),
        ({"seconds_by_pool": {"h100": {1: 8.0}}, "scaling": "rollout"}, "scaling", "needs requests"),
        ({"seconds_by_gpus": {1: 8.0}, "gpus": {"min": 8, "max": 4}}, "gpus.min", "8 is more than max, 4"),
        ({"seconds_by_gpus": {1: 8.0}, "pools": ["h10"]}, "pools", "did you mean h100?"),
    ],
)
def test_a_component_says_what_is_wrong_with_it_and_what_was_meant(
    component: dict[str, Any], place: str, says: str
) -> None:
    mapping = general()
    mapping["workflow"]["components"]["rollout"] = component
    found = faults_of(mapping)
    assert says in found.pop(f"workflow.components.rollout.{place}")
    assert not found


@pytest.mark.parametrize("mapping", [None, [], "x", {}, {"workflow": 3, "cluster": []}, {"components": []}, {1: 2}])
def test_anything_else_is_refused_without_a_crash(mapping: object) -> None:
    assert faults_of(mapping)


def test_pools_follow_groups_and_ranks_follow_nodes() -> None:
    mapping = general(
        cluster={
            "nodes": [
                {"gpus": 2, "group": "h100", "memory_gib": 80},
                {"gpus": 3, "group": "4090", "memory_gib": 24},
                {"gpus": 2, "group": "h100", "memory_gib": 94},
                {"gpus": 0, "group": "cpu"},
            ]
        }
    )
    problem = Problem.from_mapping(mapping)
    assert [(pool.name, pool.gpu_ranks, pool.node_ranks, pool.memory_gib) for pool in problem.pools] == [
        ("h100", (0, 1, 5, 6), (0, 2), 80.0),
        ("4090", (2, 3, 4), (1,), 24.0),
        ("cpu", (), (3,), None),
    ]
    # 30 GiB don't fit a GPU of 24.
    assert {mode.pool for mode in problem.component("rollout").modes} == {"h100"}
    assert {mode.pool for mode in problem.component("actor").modes} == {"h100", "4090"}


def test_unknown_pools_are_named() -> None:
    mapping = general()
    mapping["workflow"]["components"]["actor"] = {"seconds_by_pool": {"b200": {1: 1.0}}}
    assert "'b200'" in faults_of(mapping)["workflow.components.actor.seconds_by_pool"]


def test_legal_counts_apply_to_every_candidate_the_full_size_included() -> None:
    mapping = general(cluster={"nodes": [{"gpus": 12}]})
    mapping["workflow"]["components"]["actor"] = {
        "seconds_by_gpus": {2: 12.0, 12: 3.0},
        "gpus": {"multiple_of": 2, "data_parallel_divides": 8, "max": 10},
    }
    actor = Problem.from_mapping(mapping).component("actor")
    assert [(mode.gpus, mode.estimated) for mode in actor.modes] == [(2, False), (4, True), (8, True)]


def test_a_cluster_without_room_names_component_and_counts() -> None:
    mapping = general(cluster={"nodes": [{"gpus": 1}]})
    with pytest.raises(NoPlan) as caught:
        Problem.from_mapping(mapping)
    (cause,) = caught.value.causes
    assert cause.component == "actor"
    assert cause.gpus
    assert "measured: 2" in cause.reason


def test_built_in_graphs_bridge_what_is_not_there() -> None:
    mapping = general()
    del mapping["workflow"]["edges"]
    mapping["workflow"]["graph"] = "reasoning"
    edges = Problem.from_mapping(mapping).edges
    assert [(edge.source, edge.target, edge.kind) for edge in edges] == [("rollout", "actor", EdgeKind.STREAM)]
    mapping["workflow"]["graph"] = "resoning"
    assert "use reasoning, embodied, ppo" in faults_of(mapping)["workflow.graph"]


def test_faults_of_edges_are_told_beside_those_of_others() -> None:
    """One run tells all, although some of the edges and components can't be read."""
    workflow = {
        "components": {"rollout": {"seconds_by_gpus": {1: -8.0}}, "actor": {"seconds_by_gpus": {2: 6.0}}},
        "edges": [["rollout", "nobody"], ["rollout"], ["actor", "rollout"]],
    }
    assert faults_of(general(workflow=workflow)) == {
        "workflow.components.rollout.seconds_by_gpus[1]": "-8.0 is out of bounds; above 0 to 1e+07 is allowed",
        "workflow.edges[1]": "an edge has two or three items, not 1; write e.g. [rollout, actor, stream]",
        "workflow.edges[0]": "no component is called 'nobody'; there are actor, rollout",
    }
    components = {"a": {"seconds_by_gpus": {1: 1.0}}, "b": {"seconds_by_gpu": {1: 1.0}}}
    cycle = {"gpus": 1, "components": components, "edges": [["a"], ["a", "b", "barrier"], ["b", "a"]]}
    assert set(faults_of(cycle)) == {
        "components.b.seconds_by_gpu",
        "edges[0]",
        "edges[1]",
    }


def test_nodes_may_be_a_text() -> None:
    listed = Problem.from_mapping(general(cluster={"nodes": [{"gpus": 2}, {"gpus": 2}, {"gpus": 1, "group": "h100"}]}))
    assert Problem.from_mapping(general(cluster={"nodes": "2+2+(1gpu:h100)"})).pools == listed.pools
    assert Problem.from_mapping(general(cluster={"nodes": 2})).pools[0].gpu_ranks == (0, 1)
    assert "describes no node" in faults_of(general(cluster={"nodes": "2+x"}))["cluster.nodes"]
