"""The reports of others that a placement text can bring back, each with the outcome that must hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from callboard.model.faults import InvalidInput
from callboard.placement import Cluster, Node, PackedPlacementStrategy, parse, render
from tests.placement.support import charged, faults, nodes, of, plan, refused, seen, warned

TWO_GROUPS = "[{label: a, node_ranks: 0}, {label: b, node_ranks: 1}]"


class TestPS01:
    """A pair without quotes is never a number of base 60."""

    def test_ps_01_a_bare_pair_in_a_file_is_the_pair(self) -> None:
        found = plan(of("rollout: 1:0"), "4")
        assert seen(found, "rollout") == [(0, ("1",))]

    def test_ps_01_gpu_60_is_never_taken_for_it(self) -> None:
        found = plan(of("rollout: 1:0"), "64+64")
        assert seen(found, "rollout") == [(0, ("1",))]

    @pytest.mark.parametrize("text", ["1:1", "1:20"])
    def test_ps_01_its_process_rank_is_checked_as_written(self, text: str) -> None:
        assert f"start at 0 (got {text[2:]})" in refused(of(f"rollout: {text}"), "128")

    @pytest.mark.parametrize("text", ["010", "1_0", "no", "0x8", "1e1", "0o7", "0-07", "\uff11"])
    def test_ps_01_no_other_way_of_writing_numbers_is_guessed(self, text: str) -> None:
        assert refused(of(f"rollout: {text}"), "128")

    @pytest.mark.parametrize("parsed", [60, 61, 80, 3600])
    def test_ps_01_a_parsed_number_that_may_have_been_a_pair_is_refused(self, parsed: int) -> None:
        message = refused({"cluster": {"component_placement": {"rollout": parsed}}}, "64x64")
        assert "quote it" in message
        assert f'"{parsed // 60}:{parsed % 60}"' in message

    @pytest.mark.parametrize("parsed", [False, 1.0, None, 1e300, float("nan"), 10**50, b"0", object()])
    def test_ps_01_a_parsed_value_whose_text_is_lost_is_refused(self, parsed: object) -> None:
        assert refused({"cluster": {"component_placement": {"rollout": parsed}}}, "128")

    @pytest.mark.parametrize("value", ["0", '"0"', "0-0", '"0-0"'])
    def test_ps_01_the_four_ways_to_say_one_gpu_mean_the_same(self, value: str) -> None:
        assert plan(of(f"rollout: {value}"), "4") == plan({"cluster": {"component_placement": {"rollout": 0}}}, "4")


class TestPS02:
    """Labels are compared as texts; what is not a text for another reader must be quoted."""

    @pytest.mark.parametrize(("label", "used"), [("4090", '"4090"'), ('"4090"', "4090"), ("4090", "4090")])
    def test_ps_02_4090_matches_with_and_without_quotes(self, label: str, used: str) -> None:
        groups = f"[{{label: {label}, node_ranks: 0}}]"
        found = plan(of(f"actor: {{node_group: {used}, placement: 0}}", groups=groups), "2")
        assert found.workers[0].placement.node_group_label == "4090"

    def test_ps_02_a_parsed_number_is_its_text(self) -> None:
        section = {
            "component_placement": {"actor": {"node_group": "4090", "placement": 0}},
            "node_groups": [{"label": 4090, "node_ranks": 0}],
        }
        assert plan({"cluster": section}, "2").workers[0].placement.node_group_label == "4090"

    @pytest.mark.parametrize("label", ["on", "1e3", "0x4090", "no", "Yes", "1.10", "1_000", "2024-01-01", "010"])
    def test_ps_02_labels_that_another_reader_loses_must_be_quoted(self, label: str) -> None:
        groups = f"[{{label: {label}, node_ranks: 0}}]"
        (fault,) = faults(of(f'actor: {{node_group: "{label}", placement: 0}}', groups=groups), "2")
        assert "quote this label" in fault.message
        assert fault.line == 3

    @pytest.mark.parametrize("label", ["on", "1e3", "0x4090"])
    def test_ps_02_quoted_they_are_labels(self, label: str) -> None:
        groups = f'[{{label: "{label}", node_ranks: 0}}]'
        found = plan(of(f'actor: {{node_group: "{label}", placement: 0}}', groups=groups), "2")
        assert found.workers[0].placement.node_group_label == label

    @pytest.mark.parametrize("label", [True, 1000.0, None])
    def test_ps_02_parsed_labels_that_are_lost_are_refused(self, label: object) -> None:
        section = {"component_placement": {"a": 0}, "node_groups": [{"label": label, "node_ranks": 0}]}
        assert refused({"cluster": section}, "2")


@pytest.mark.parametrize("group", ["[a, b]", '"a,b"', "'a, b'"])
def test_ps_04_several_groups_may_be_a_list_or_a_text(group: str) -> None:
    found = plan(of(f"env: {{node_group: {group}, placement: 0-3}}", groups=TWO_GROUPS), "2+2")
    assert seen(found, "env") == [(0, ("0",)), (0, ("1",)), (1, ("0",)), (1, ("1",))]


def test_ps_05_process_ranks_start_at_0() -> None:
    (fault,) = faults(of("env: 0-1:5-6"), "4")
    assert "process ranks must start at 0 (got 5)" in fault.message
    assert (fault.component, fault.segment, fault.segment_column) == ("env", "0-1:5-6", 5)
    assert (fault.read, fault.allowed) == ("5", "0")


def test_ps_05_process_ranks_go_on_without_a_gap() -> None:
    (fault,) = faults(of('env: "0-0:0,1-1:2"'), "4")
    assert "process ranks must go on at 1 (got 2)" in fault.message


class TestPS07:
    """Nothing is placed when one process would need two nodes."""

    def test_ps_07_the_whole_config_is_refused(self) -> None:
        message = refused(of('actor: 0-1, env: "0-3:0"'), "2+2")
        assert "process 0 would span nodes 0,1: GPU ranks 0-3" in message

    def test_ps_07_over_two_groups_too(self) -> None:
        message = refused(of('env: {node_group: "a,b", placement: "1-2:0"}', groups=TWO_GROUPS), "2+2")
        assert "nodes 0,1" in message

    def test_ps_07_with_only_nodes_as_resources(self) -> None:
        assert "nodes 0,1" in refused(of('env: {node_group: node, placement: "0-1:0"}'), "2+2")


class TestPS08:
    """A block of ranks lies on one node, and the rank after a node's last is not of this node."""

    @pytest.mark.parametrize(("first", "last", "each"), [(3, 6, 2), (1, 4, 4)])
    def test_ps_08_a_process_beyond_its_node_is_refused(self, first: int, last: int, each: int) -> None:
        with pytest.raises(InvalidInput, match="process 0 would span nodes 0,1"):
            PackedPlacementStrategy(first, last, each).resolve(Cluster.from_nodes("4+4"))

    def test_ps_08_a_strided_block_beyond_its_node_is_refused(self) -> None:
        with pytest.raises(InvalidInput, match="processes 0 to 1 would span nodes 0,1"):
            PackedPlacementStrategy(2, 5, 2, 2).resolve(Cluster.from_nodes("4+4"))

    def test_ps_08_what_fits_uses_every_rank_once(self) -> None:
        placed = PackedPlacementStrategy(0, 7, 2, 2).resolve(Cluster.from_nodes("4+4"))
        assert [(one.cluster_node_rank, one.local_hardware_ranks) for one in placed] == [
            (0, (0, 2)),
            (0, (1, 3)),
            (1, (0, 2)),
            (1, (1, 3)),
        ]


class TestPS10:
    """No device gets two ranks."""

    def test_ps_10_a_group_twice_is_refused(self) -> None:
        message = refused(of('env: {node_group: "a,a", placement: 0-3}', groups=TWO_GROUPS), "2+2")
        assert "named twice" in message
        assert "resources:processes" in message

    @pytest.mark.parametrize("used", ['"a,b"', "[b, a]", '"cluster,a"', '"a,cluster"'])
    def test_ps_10_groups_that_share_a_node_are_refused(self, used: str) -> None:
        groups = "[{label: a, node_ranks: 0}, {label: b, node_ranks: 0}]"
        message = refused(of(f"env: {{node_group: {used}, placement: 0-3}}", groups=groups), "2+2")
        assert "both number the accelerators of node 0" in message

    def test_ps_10_sharing_is_asked_for_with_processes(self) -> None:
        found = plan(of('env: {node_group: a, placement: "0-1:0-3"}', groups=TWO_GROUPS), "2+2")
        assert seen(found, "env") == [(0, ("0",)), (0, ("0",)), (0, ("1",)), (0, ("1",))]


def test_ps_11_groups_number_their_ranks_in_the_order_written() -> None:
    found = plan(of('env: {node_group: "b,a", placement: 0-3}', groups=TWO_GROUPS), "2+2")
    assert seen(found, "env") == [(1, ("0",)), (1, ("1",)), (0, ("0",)), (0, ("1",))]
    assert [worker.placement.placement_node_rank for worker in found.workers] == [0, 0, 1, 1]


class TestPS13:
    """Without accelerators a rank is a node, and that is said."""

    def test_ps_13_a_cpu_cluster_is_warned_of(self) -> None:
        found = plan(of('"actor,env,rollout": all'), "0+0")
        assert seen(found, "env") == [(0, ()), (1, ())]
        assert "no accelerators found on nodes 0-1" in warned(found)
        assert "resource = node" in warned(found)

    def test_ps_13_a_component_that_asks_for_gpus_is_refused(self) -> None:
        message = refused(of("actor: all"), "0+0", gpu_components=["actor"])
        assert "no accelerators were found on nodes 0-1" in message
        assert refused(of("actor: {placement: all, share: 500}"), "0+0")
        job = "components: [{name: a, actor: p:A, resources: {gpu: 1}, component_placement: all}]"
        assert refused(job, "0+0")

    def test_ps_13_nodes_without_any_among_others_are_left_out_and_named(self) -> None:
        found = plan(of("actor: all"), "4+0")
        assert len(seen(found, "actor")) == 4
        assert "node 1 of the group cluster left out" in warned(found)

    def test_ps_13_a_node_that_lost_its_gpus_is_flagged(self) -> None:
        first, second = Cluster.from_nodes("2+0").nodes
        found = plan(of("actor: all"), Cluster((first, replace(second, lost_accelerators=2))))
        assert "node 1 (node-1) had 2 accelerators more than it reports now" in warned(found)


def test_ps_14_hardware_outside_its_group_is_refused() -> None:
    groups = "[{label: franka, node_ranks: 1-2, hardware: {type: DualFranka, configs: [{node_rank: 0}]}}]"
    message = refused(of("env: {node_group: franka, placement: 0}", groups=groups, num_nodes=3), "0+0+0")
    assert "node rank 0" in message
    assert "the group franka has the nodes 1-2" in message


@pytest.mark.parametrize(
    ("text", "counts", "nearest"),
    [
        ("0-4:0-1", "2 processes can't be spread evenly over 5 resources", "1 or 5"),
        ("0-1:0-4", "5 processes can't be spread evenly over 2 resources", "4 or 6"),
        ("0-2:0-1", "2 processes can't be spread evenly over 3 resources", "1 or 3"),
        ("0-11:0-4", "5 processes can't be spread evenly over 12 resources", "4 or 6"),
    ],
)
def test_ps_16_both_counts_and_the_nearest_are_named(text: str, counts: str, nearest: str) -> None:
    message = refused(of(f"env: {text}"), "16")
    assert counts in message
    assert f"the nearest are {nearest} processes" in message


class TestPS17:
    """A number of nodes that is stated is honoured or refused."""

    def test_ps_17_it_is_honoured(self) -> None:
        config = "cluster: {num_nodes: 2, gpus_per_node: 1, component_placement: {actor: 0-1}}"
        assert seen(plan(config, "1+1"), "actor") == [(0, ("0",)), (1, ("0",))]

    def test_ps_17_a_placement_beyond_it_is_refused(self) -> None:
        message = refused(of("actor: 0-1", num_nodes=1), "1+1")
        assert "num_nodes is 1, but the placement needs 2 nodes" in message

    def test_ps_17_all_means_the_nodes_that_are_stated(self) -> None:
        assert seen(plan(of("actor: all", num_nodes=1), "1+1"), "actor") == [(0, ("0",))]

    def test_ps_17_more_than_joined_is_refused_with_both_numbers(self) -> None:
        assert "num_nodes is 3, but 2 nodes are there" in refused(of("actor: 0", num_nodes=3), "1+1")

    def test_ps_17_so_is_a_number_of_gpus_that_nodes_do_not_have(self) -> None:
        config = "cluster: {num_gpus_per_node: 8, component_placement: {actor: 0}}"
        message = refused(config, "4+8+2")
        assert "8 GPUs per node are stated, but node 0 (node-0) has 4, node 2 (node-2) has 2" in message

    @pytest.mark.parametrize("number", ["0", "-1", "1.5", "two", "010", "1e9", "9999999"])
    def test_ps_17_numbers_that_are_none_are_refused(self, number: str) -> None:
        assert any("num_nodes" in fault.message for fault in faults(of("actor: 0", num_nodes=number), "1"))  # type: ignore[arg-type]


class TestPS19:
    """A component that is missing or empty is one clear fault."""

    def test_ps_19_reasoning_needs_an_actor(self) -> None:
        message = refused(of("rollout: 0-1", more="runner: {task_type: reasoning}\n"), "2")
        assert "needs the component actor" in message

    def test_ps_19_other_work_does_not(self) -> None:
        assert plan(of("rollout: 0-1"), "2").by_name.keys() == {"rollout"}

    def test_ps_19_an_empty_placement_and_an_unknown_key_are_both_told(self) -> None:
        found = [fault.message for fault in faults(of("actor: {placement: '', external: true}"), "2")]
        assert len(found) == 2
        assert "the placement is empty" in found[0]
        assert "unknown key 'external'" in found[1]

    @pytest.mark.parametrize("text", ["-1", "0:-1", "0-1:0--1", "1-0", "''", "~", "','", "'0,'", "':0'", "'0:'"])
    def test_ps_19_counts_that_are_none_are_refused(self, text: str) -> None:
        assert faults(of(f"actor: {text}"), "4")

    def test_ps_19_no_component_at_all_is_refused(self) -> None:
        assert "no component has a placement" in refused("cluster: {num_nodes: 1}", "1")
        assert "no component has a placement" in refused("cluster: {component_placement: {}}", "1")


def test_ps_20_a_plan_that_is_written_down_and_read_again_keeps_group_and_map() -> None:
    groups = "[{label: g0, node_ranks: 0}, {label: g1, node_ranks: 1}]"
    found = plan(of("rollout: {node_group: g1, placement: 0-1}", groups=groups), "2+2")
    again = parse(render(found))
    assert again == found
    assert seen(again, "rollout") == [(1, ("0",)), (1, ("1",))]
    assert again.by_name["rollout"].strategy.node_group == ("g1",)


def test_ps_20_packing_by_model_parallelism_keeps_the_group_too() -> None:
    groups = "[{label: g0, node_ranks: 0}, {label: g1, node_ranks: 1}]"
    text = "actor: {node_group: g0, placement: 0-3}, rollout: {node_group: g1, placement: 0-3}"
    more = "runner: {task_type: reasoning}\nrollout: {tensor_parallel_size: 2}\n"
    found = plan(of(text, groups=groups, more=more), "4+4")
    assert found.mode == "DISAGGREGATED"  # equal numbers in two groups are not equal GPUs
    assert seen(found, "rollout") == [(1, ("0", "1")), (1, ("2", "3"))]


class TestVisibility:
    """Ranks are positions in a node's visible list."""

    def test_gv_01_a_restricted_node_offers_what_it_sees(self) -> None:
        restricted = nodes(["1", "2", "3"])
        assert "GPU rank 3 does not exist; there are 3 here, 0 to 2" in refused(of("actor: 1-3"), restricted)
        found = plan(of("actor: 0-2"), restricted)
        assert seen(found, "actor") == [(0, ("1",)), (0, ("2",)), (0, ("3",))]
        assert charged(found, "actor") == [[(0, 1000)], [(1, 1000)], [(2, 1000)]]

    def test_gv_02_two_slices_of_a_machine_give_their_own_ids(self) -> None:
        found = plan(of("a: {node_group: one, placement: 0-1}, b: {node_group: two, placement: 0-1}",
                        groups="[{label: one, node_ranks: 0}, {label: two, node_ranks: 1}]"),
                     nodes(["0", "1"], ["4", "5"]))  # fmt: skip
        assert [ids for _, ids in seen(found, "a")] == [("0",), ("1",)]
        assert [ids for _, ids in seen(found, "b")] == [("4",), ("5",)]

    def test_gv_05_shares_stay_on_the_card_that_was_named(self) -> None:
        text = ", ".join(f"c{i}: {{placement: '{i}:0', share: 0.5}}" for i in range(4))
        found = plan(of(text), "4")
        for i in range(4):
            assert seen(found, f"c{i}") == [(0, (str(i),))]
            assert charged(found, f"c{i}") == [[(i, 500)]]

    def test_gv_05_three_shares_of_0_4_do_not_fit_on_one_card(self) -> None:
        assert "shares of 1200 milli-GPU do not fit" in refused(of("a: {placement: '0:0-2', share: 0.4}"), "2")
        found = plan(of("a: {placement: '0:0-1,1:2', share: 0.4}"), "2")
        assert [position for [(position, _)] in charged(found, "a")] == [0, 0, 1]

    def test_gv_07_two_groups_of_local_ranks_do_not_collide(self) -> None:
        found = plan(of("a: 0-1, b: 2-3"), "4")
        assert [w.placement.local_rank for w in found.by_name["b"].workers] == [0, 1]
        assert seen(found, "a") == [(0, ("0",)), (0, ("1",))]
        assert seen(found, "b") == [(0, ("2",)), (0, ("3",))]

    def test_gv_08_a_slice_is_its_own_and_no_other(self) -> None:
        found = plan(of('actor: 0-1, rollout: "2-7:0"'), "8")
        assert seen(found, "rollout") == [(0, ("2", "3", "4", "5", "6", "7"))]
        assert all(milli == 1000 for milli in dict(found.demand[0].devices).values())

    def test_gv_13_ids_are_of_the_worker_s_own_node(self) -> None:
        found = plan(of("actor: 0-4"), "1+4")
        assert seen(found, "actor") == [(0, ("0",)), *[(1, (str(i),)) for i in range(4)]]


class TestNodes:
    """Nodes and their order."""

    def test_pg_01_ranks_follow_nodes_and_devices_however_nodes_are_given(self) -> None:
        first, second = Cluster.from_nodes("4+4").nodes
        assert plan(of("actor: all"), Cluster((second, first))) == plan(of("actor: all"), Cluster((first, second)))

    def test_pg_08_a_process_larger_than_every_node_is_refused(self) -> None:
        assert "would span nodes 0,1" in refused(of("a: '0-1:0'"), "1+1")
        assert "GPU rank 998 does not exist" in refused(of("a: 0-998"), "1+1")

    def test_pg_11_a_head_without_gpus_is_skipped_and_named(self) -> None:
        found = plan(of("actor: all"), "0+2+2")
        assert seen(found, "actor") == [(1, ("0",)), (1, ("1",)), (2, ("0",)), (2, ("1",))]
        assert "node 0 of the group cluster left out: no accelerators there" in warned(found)

    def test_pg_13_an_unknown_node_is_told_with_those_that_are_known(self) -> None:
        groups = "[{label: a, node_ranks: 5}]"
        message = refused(of("a: {node_group: a, placement: 0}", groups=groups), "2+2")
        assert "there is no node of rank 5; nodes are 0-1" in message

    @pytest.mark.parametrize(("described", "sizes"), [("4+2", [4, 2]), ("2+4", [2, 4])])
    def test_pg_16_uneven_nodes_have_their_own_local_world_size(self, described: str, sizes: list[int]) -> None:
        workers = plan(of("actor: all"), described).workers
        assert [w.placement.local_world_size for w in workers] == [size for size in sizes for _ in range(size)]

    def test_nj_13_ranks_that_are_twice_are_no_cluster(self) -> None:
        with pytest.raises(InvalidInput, match="2 nodes have the rank 0"):
            Cluster((Node(node_id="a", rank=0), Node(node_id="b", rank=0)))
