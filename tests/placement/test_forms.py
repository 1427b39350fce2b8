"""Do RLinf's own configs mean here what they mean there? Every form of its files, its tests and its documents."""

from __future__ import annotations

import pytest

from callboard.model.faults import InvalidInput
from callboard.placement import (
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PlacementMode,
    component_placement_for,
    plan_placement,
)
from callboard.placement.cluster.cluster import Cluster
from tests.placement.support import Seen, faults, nodes, of, plan, refused, seen

ONE = [(0, ("0",))]
FOUR = [(0, (str(i),)) for i in range(4)]


class TestValues:
    """Forms of a value in shipped files, each with its count there."""

    @pytest.mark.parametrize(
        ("value", "places"),
        [
            ("all", FOUR),  # 184
            ("ALL", FOUR),
            ("0-3", FOUR),  # 155
            ("0", ONE),  # 137
            ("0-0", ONE),  # 80
            ("0:0-1", ONE * 2),  # 5
            ("'0-1:0'", [(0, ("0", "1"))]),  # 2
            ("'0:0-1, 1:2-3'", ONE * 2 + [(0, ("1",))] * 2),  # 2
            ("'0-1,3'", [FOUR[0], FOUR[1], FOUR[3]]),
            ("' 0 - 1 : 0 - 3 '", [FOUR[0], FOUR[0], FOUR[1], FOUR[1]]),
        ],
    )
    def test_a_value_means(self, value: str, places: Seen) -> None:
        assert seen(plan(of(f"actor: {value}"), "4"), "actor") == places

    def test_segments_without_processes_go_on_counting(self) -> None:
        found = plan(of("actor: '0-1:0-3,3-5,7-10:7-14'"), "16")
        assert len(found.workers) == 15
        assert [ids for _, ids in seen(found, "actor")][4:9] == [("3",), ("4",), ("5",), ("7",), ("7",)]

    def test_segments_with_several_resources_per_process(self) -> None:
        found = plan(of("actor: '0-3:0-1,4-5:2'"), "8")
        assert [ids for _, ids in seen(found, "actor")] == [("0", "1"), ("2", "3"), ("4", "5")]

    def test_robots_before_nodes(self) -> None:
        groups = "[{label: r, node_ranks: 0-1, hardware: {type: X, configs: [{node_rank: 0, a: 1}, {node_rank: 1}]}}]"
        found = plan(of("env: {node_group: r, placement: all}", groups=groups), "2+2")
        assert seen(found, "env") == [(0, ()), (1, ())]
        assert [unit.type for worker in found.workers for unit in worker.hardware] == ["X", "X"]


class TestKeys:
    """Forms of a key."""

    @pytest.mark.parametrize("key", ["actor", '"actor,env"', '"actor, env"', '" actor , env "', "? actor,env\n  "])
    def test_names_share_their_value(self, key: str) -> None:
        text = f"cluster:\n  component_placement:\n    {key}: 0-1\n" if "?" not in key else (
            "cluster:\n  component_placement:\n    ? actor,env\n    : 0-1\n"
        )  # fmt: skip
        found = plan(text, "2")
        for component in found.components:
            assert seen(found, component.name) == [(0, ("0",)), (0, ("1",))]

    @pytest.mark.parametrize(
        "key", ['"actor,"', '",actor"', '"a,,b"', '""', '"1a"', '"a b"', '"a/b"', '"ä"', "on", "~"]
    )
    def test_names_that_are_none_are_refused(self, key: str) -> None:
        assert faults(of(f"{key}: 0"), "2")

    @pytest.mark.parametrize("keys", ['"actor,actor": 0', 'actor: 0, "env, actor": 1', '"a,b": 0, "b,c": 1'])
    def test_a_name_appears_once_over_all_keys(self, keys: str) -> None:
        assert "placed twice" in refused(of(keys), "2")

    def test_a_key_twice_is_refused(self) -> None:
        assert "occurs twice, first in line 3" in refused("cluster:\n  component_placement:\n    a: 0\n    a: 1\n", "2")


@pytest.mark.parametrize(
    ("ranks", "members"),
    [
        ("0", [0]),
        ("1-1", [1]),
        ("0-2", [0, 1, 2]),
        ("all", [0, 1, 2]),
        ('"1,2"', [1, 2]),
        ("[0, 2]", [0, 2]),
        ("0-0,2", [0, 2]),
    ],
)
def test_node_ranks_mean(ranks: str, members: list[int]) -> None:
    quoted = f'"{ranks}"' if "," in ranks and ranks[0] not in '"[' else ranks
    found = plan(of("a: {node_group: g, placement: all}", groups=f"[{{label: g, node_ranks: {quoted}}}]"), "1+1+1")
    assert [node for node, _ in seen(found, "a")] == members


@pytest.mark.parametrize(
    "ranks", ["bad-format", "0-3", "-1", "1-0", '"1,0"', '"0,0"', "1:0", "on", "~", "[]", "[[0]]", "{}", "010", "''"]
)
def test_node_ranks_that_are_none_are_refused(ranks: str) -> None:
    assert faults(of("a: 0", groups=f"[{{label: g, node_ranks: {ranks}}}]", num_nodes=2), "1+1")


class TestUnitTests:
    """Inputs of RLinf's unit tests with the outcome that they have there, unless design says otherwise."""

    def test_groups_and_nodes_together(self) -> None:
        groups = "[{label: train, node_ranks: 0-1}]"
        text = (
            "actor: {node_group: train, placement: 0-3}, env: {node_group: node, placement: 0-1:0-3}, "
            "reward: {node_group: train, placement: 0-1}"
        )
        found = plan(of(text, groups=groups, num_nodes=2), "2+2")
        assert seen(found, "env") == [(0, ()), (0, ()), (1, ()), (1, ())]
        assert isinstance(found.by_name["env"].strategy, NodePlacementStrategy)

    def test_gaps_are_fine(self) -> None:
        found = plan(of('actor: "0-2,5,7", inference: 3-4, reward: 0-2'), "8")
        assert found.by_name["actor"].strategy.hardware_ranks == (0, 1, 2, 5, 7)

    def test_names_of_one_key_have_equal_strategies(self) -> None:
        found = plan(of('"actor,inference": 0-1'), "2")
        assert found.by_name["actor"].strategy == found.by_name["inference"].strategy
        assert isinstance(found.by_name["actor"].strategy, FlexiblePlacementStrategy)

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            ('"0-1,1-2"', "ascend and occur once: 1 comes after 1"),
            ('"0-0:0,1-1:2"', "process ranks must go on at 1 (got 2)"),
            ('"2,1"', "ascend and occur once: 1 comes after 2"),
            ('"all,0"', "ascend and occur once: 0 comes after 3"),
        ],
    )
    def test_orders_that_are_refused(self, value: str, said: str) -> None:
        assert said in refused(of(f"actor: {value}"), "4")

    def test_ranks_are_local_to_the_group(self) -> None:
        groups = "[{label: train, node_ranks: 0}, {label: infer, node_ranks: 1}]"
        text = "actor: {node_group: train, placement: 0-1}, rollout: {node_group: infer, placement: 0}"
        found = plan(of(text, groups=groups), "2+2")
        assert seen(found, "rollout") == [(1, ("0",))]

    def test_a_gpu_group_and_a_robot_group_of_one_node(self) -> None:
        groups = (
            "[{label: gpu, node_ranks: 0, env_configs: [{env_vars: [{A: gpu}]}]}, "
            "{label: franka, node_ranks: 0, hardware: {type: Franka, configs: [{node_rank: 0, robot_ip: 10.0.0.1}]}, "
            "env_configs: [{env_vars: [{A: robot}]}]}]"
        )
        found = plan(of('env: {node_group: "gpu,franka", placement: "0,4"}', groups=groups), "4")
        first, second = found.workers
        assert (first.placement.visible_accelerators, first.env) == (("0",), (("A", "gpu"),))
        assert (second.placement.visible_accelerators, second.env) == ((), (("A", "robot"),))
        assert second.hardware[0].config_json == '{"robot_ip":"10.0.0.1"}'
        assert second.placement.node_group_label == "franka"

    def test_a_process_over_two_groups_is_refused(self) -> None:
        groups = (
            "[{label: gpu, node_ranks: 0}, {label: r, node_ranks: 0, hardware: {type: X, configs: [{node_rank: 0}]}}]"
        )
        message = refused(of('env: {node_group: "gpu,r", placement: "3-4:0"}', groups=groups), "4")
        assert "process 0 would get gpu and X on node 0" in message

    @pytest.mark.parametrize("label", ["node", "cluster"])
    def test_reserved_labels_are_refused(self, label: str) -> None:
        assert "is reserved" in refused(of("a: 0", groups=f"[{{label: {label}, node_ranks: 0}}]"), "1")

    @pytest.mark.parametrize(
        ("env", "said"),
        [
            ("[{A: 1, B: 2}]", "2 variables"),
            ("[A=1]", "mapping"),
            ("A=1", "a list was expected"),
            ("{A: 1}", "a list was expected"),
            ("[{}]", "0 variables"),
            ("[{1A: x}]", "is not a variable"),
            ("[{A: x}, {A: y}]", "A is set twice"),
            ("[{A: [1]}]", "the value of A is not a text"),
            ("[{A: ~}]", "the value of A is not a text"),
        ],
    )
    def test_env_vars_that_are_refused(self, env: str, said: str) -> None:
        groups = f"[{{label: g, node_ranks: 0, env_configs: [{{env_vars: {env}}}]}}]"
        assert said in refused(of("a: 0", groups=groups), "1")

    @pytest.mark.parametrize(
        ("hardware", "said"),
        [
            ("{type: X, configs: [{node_rank: 1}]}", "the group g has the nodes 0"),
            ("{type: X, configs: [{a: 1}]}", "needs its node_rank"),
            ("{type: X, config: []}", "did you mean configs?"),
            ("{configs: [{node_rank: 0}]}", "hardware needs a type"),
            ("{type: X, configs: [{node_rank: 0}, {node_rank: 0}]}", "stated twice"),
            ("{type: X}", "no node of the group g declared a X"),
            ("{type: X, configs: []}", "the list of configs is empty; write e.g. [{node_rank: 0}]"),
            ("franka", "is not a mapping"),
        ],
    )
    def test_hardware_that_is_refused(self, hardware: str, said: str) -> None:
        found = faults(of("a: 0", groups=f"[{{label: g, node_ranks: 0, hardware: {hardware}}}]"), "1+1")
        assert any(said in fault.message for fault in found)

    def test_hardware_of_one_type_of_a_node_is_in_one_group(self) -> None:
        one = "hardware: {type: X, configs: [{node_rank: 0}]}"
        message = refused(
            of("a: 0", groups=f"[{{label: g, node_ranks: 0, {one}}}, {{label: h, node_ranks: 0, {one}}}]"), "1"
        )
        assert "both number the Xs of node 0" in message

    @pytest.mark.parametrize("groups", ["[gpu]", "gpu", "{label: g}", "[[]]", "[{}]", "[{node_ranks: 0}]"])
    def test_groups_that_are_none_are_refused(self, groups: str) -> None:
        assert faults(of("a: 0", groups=groups), "1")

    def test_labels_are_unique(self) -> None:
        groups = "[{label: g, node_ranks: 0}, {label: g, node_ranks: 1}]"
        assert "the label 'g' occurs twice" in refused(of("a: 0", groups=groups), "1+1")

    def test_ignored_hardware_makes_plain_nodes(self) -> None:
        found = plan(
            of("a: {node_group: g, placement: all}", groups="[{label: g, node_ranks: all, ignore_hardware: true}]"),
            "2+2",
        )
        assert seen(found, "a") == [(0, ()), (1, ())]
        both = "[{label: g, node_ranks: 0, ignore_hardware: true, hardware: {type: X, configs: [{node_rank: 0}]}}]"
        assert "excludes hardware" in refused(of("a: 0", groups=both), "1")


class TestDocuments:
    """Forms that only the documents have."""

    def test_nine_ranks_of_eight_gpus_are_refused(self) -> None:
        assert "GPU rank 8 does not exist; there are 8 here" in refused(of("actor: 0-8"), "8")

    def test_the_documented_agents_that_do_not_divide_are_refused(self) -> None:
        first, second = faults(of('agent: {node_group: node, placement: "0-1:0-200,2-3:201-511"}'), "0+0+0+0")
        assert "201 processes can't be spread evenly over 2 resources" in first.message
        assert "311 processes can't be spread evenly over 2 resources" in second.message

    def test_the_other_page_s_agents_are_fine(self) -> None:
        found = plan(of('agent: {node_group: node, placement: "0-1:0-199,2-3:200-399"}'), "0+0+0+0")
        assert [w.placement.local_world_size for w in found.workers] == [100] * 400

    def test_a_group_that_nobody_uses_is_fine(self) -> None:
        groups = "[{label: rollout_gpu, node_ranks: 1}, {label: spare, node_ranks: 0}]"
        found = plan(of("rollout: {node_group: rollout_gpu, placement: all}", groups=groups), "1+2")
        assert seen(found, "rollout") == [(1, ("0",)), (1, ("1",))]

    def test_cloud_and_edge(self) -> None:
        groups = "[{label: cloud, node_ranks: 0}, {label: edge, node_ranks: 1}]"
        text = 'actor: {node_group: cloud, placement: 0-3}, "rollout,env": {node_group: edge, placement: 0-0}'
        assert seen(plan(of(text, groups=groups), "4+1"), "env") == [(1, ("0",))]

    def test_groups_as_a_mapping_and_without_nodes_are_refused(self) -> None:
        assert faults(of("a: 0", groups="{hardware: {type: Franka}}"), "1")
        assert "needs node_ranks" in refused(of("a: 0", groups="[{label: franka}]"), "1")

    def test_the_page_s_cluster_as_a_whole(self) -> None:
        text = """
cluster:
  num_nodes: 18
  component_placement:
    actor:   {node_group: a800, placement: 0-63}
    rollout: {node_group: "4090", placement: 0-63}
    env:     {node_group: franka, placement: 0-1}
    agent:   {node_group: node, placement: "0-1:0-199,2-3:200-399"}
    critic,reward: all
  node_groups:
    - label: a800
      node_ranks: 0-7
      env_configs:
        - node_ranks: 0-7
          python_interpreter_path: /opt/venv/bin/python3
          env_vars: [{GLOO_SOCKET_IFNAME: eth0}]
    - {label: 4090, node_ranks: 8-15}
    - label: franka
      node_ranks: 16-17
      hardware: {type: Franka, configs: [{node_rank: 16, robot_ip: 10.10.10.1}, {node_rank: 17, robot_ip: 10.10.10.2}]}
"""
        found = plan(text, "16x8+0+0")
        sizes = {component.name: component.world_size for component in found.components}
        assert sizes == {"actor": 64, "rollout": 64, "env": 2, "agent": 400, "critic": 128, "reward": 128}
        actor = found.by_name["actor"].workers[63]
        assert (actor.placement.cluster_node_rank, actor.interpreter) == (7, "/opt/venv/bin/python3")
        assert actor.env == (("GLOO_SOCKET_IFNAME", "eth0"),)
        assert [w.hardware[0].config_json for w in found.by_name["env"].workers] == [
            '{"robot_ip":"10.10.10.1"}',
            '{"robot_ip":"10.10.10.2"}',
        ]
        assert found.gpus == 128


def test_an_old_style_job_says_its_mode() -> None:
    placement = component_placement_for(of("actor: 0-1, env: 0-1"), Cluster.from_nodes("2"))
    assert placement.placement_mode is PlacementMode.HYBRID
    assert placement.components == ["actor", "env"]
    assert placement.get_world_size("actor") == 2
    assert placement.get_hardware_ranks("env") == [0, 1]
    assert placement.get_strategy("env") == placement.strategy("actor")
    assert placement.get_placement("actor") == placement.resolve("actor") == placement.resolve_all()["actor"]
    with pytest.raises(KeyError, match="did you mean actor"):
        placement.resolve("actr")


def test_observers_see_every_gpu_of_their_node_and_are_charged_for_their_own() -> None:
    found = plan(
        of("a: {placement: 0-1, visible: all}, w: {node_group: node, placement: all, visible: all}"), nodes("46", "9")
    )
    assert seen(found, "w") == [(0, ("4", "6")), (1, ("9",))]
    assert all(worker.observer and not worker.devices for worker in found.by_name["w"].workers)
    own = found.by_name["a"].workers[1]
    assert (own.placement.visible_accelerators, [d.id for d in own.devices], own.observer) == (("4", "6"), ["6"], True)
    assert [(node.workers, node.gpu_milli) for node in found.demand] == [(3, 2000), (1, 0)]


FORMS = "write e.g. all, 0-3, 0,2,5-7 or 0-1:0-3"


@pytest.mark.parametrize(
    ("written", "column", "meant"),
    [
        ("0-3:0,1", 7, "a comma begins a new segment, so this 1 means GPUs: processes 0-1 on GPUs 0-3 are 0-3:0-1"),
        ("0-1:0,0-1:1", 7, "more processes on the same GPUs are one segment: 0-1:0-1"),
        ("0-3,0-3", 5, "more processes on the same GPUs are one segment: 0-3:0-7"),
        ("3,1", 3, "write 1,3"),
        ("7-0", 1, "write 0-7"),
        ("-1", 1, "never from the back, and all of them are 'all'"),
        ("0-3:-1", 5, "process ranks count from 0"),
        ("0-3:ALL", 5, "one process per resource is 0-3 without the ':'"),
        ("0-3:0-3:0-3", 8, "a segment is resources:processes"),
        ("0-3:0-1, 4-7:2-3:9", 17, "a segment is resources:processes"),
        ("0-3:1-4", 5, "write 0-3:0-3"),
        ("0-1:0,2:2", 9, "write 2:1"),
        ("0-3:0-2", 5, "0-3:0-1 or 0-3:0-3"),
        ("0-3:", 5, "process ranks are missing"),
        ("0,,2", 3, "resource ranks are missing"),
        ("0;1", 1, "commas part the segments"),
        ("0-3 4-7", 1, "commas part the segments"),
        ("0..3", 1, "a range is written with '-'"),
        ("0\u20133", 1, "a range is written with '-'"),
        ("[0]", 1, "there are no brackets"),
        ("GPU 0", 1, "ranks are plain numbers"),
        ("*", 1, "all resources are 'all'"),
        ("0-", 1, "a range has two ends"),
        ("01", 1, "write 1"),
    ],
)
def test_ft_i4_the_likely_misreading_is_named_at_its_column_with_the_forms_there_are(
    written: str, column: int, meant: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        plan_placement(f"cluster:\n  component_placement:\n    env: '{written}'\n", Cluster.from_nodes("8"))
    fault = caught.value.faults[0]
    assert meant in fault.message
    assert FORMS in fault.message
    assert f"(column {column})" in fault.message
    assert (fault.line, fault.column) == (3, len("    env: '") + column)


def test_ft_i4_a_comma_that_looks_like_a_list_of_processes_gets_a_note() -> None:
    def notes(written: str) -> list[str]:
        plan = plan_placement(f"cluster: {{component_placement: {{env: '{written}'}}}}", Cluster.from_nodes("8"))
        return [note.message for note in plan.warnings]

    (note,) = notes("0-3:0,4")
    assert "the comma begins a new segment, so process 1 is on GPU 4" in note
    assert "0-3:0-4" in note
    for clear in ("0-3,4", "0-3:0-3,4", "0-3:0,4:1", "0-1:0-3,3-5,7:7-14", "all:0-7"):
        assert notes(clear) == [], clear


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ('"actor,rollout": 0-1, "rollout ": 2-3', "by 'actor,rollout' and by 'rollout '"),
        ('"actor, rollout": 0-1, "env,rollout": 2-3', "by 'actor, rollout' and by 'env,rollout'"),
        ('"rollout,rollout": 0-1', "in 'rollout,rollout'"),
    ],
)
def test_ft_i5_both_keys_that_place_a_component_are_named(keys: str, said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        plan_placement(f"cluster: {{component_placement: {{{keys}}}}}", Cluster.from_nodes("8"))
    (message,) = [fault.message for fault in caught.value.faults]
    assert "the component rollout is placed twice" in message
    assert said in message
