"""Is every fault told at once, where it is, with what is allowed?"""

from __future__ import annotations

import pytest

from callboard.model.faults import InvalidInput
from callboard.placement import Diagnostic
from tests.placement.support import faults, of, plan, refused

BAD = """\
runner: {task_type: embodied}
cluster:
  num_node: 2
  component_placement:
    actor: 0-1,1-2
    "rollout,": 3:5-6
    env: {node_group: gpuss, placment: 0}
    critic: {node_group: gpus, placement: " 0-1 , 9", share: 2000}
  node_groups:
    - label: gpus
      node_ranks: 0
      env_configs:
        - env_vars:
            - RANK: 1
    - {label: node, node_rank: 0}
"""


def test_every_fault_of_a_file_in_one_run_in_the_order_of_the_file() -> None:
    assert [(fault.line, fault.column, fault.component) for fault in faults(BAD, "4+4")] == [
        (3, 3, ""),  # num_node
        (5, 16, "actor"),  # 1-2
        (6, 14, ""),  # the empty name
        (6, 19, "rollout"),  # process 5
        (7, 23, "env"),  # gpuss
        (7, 30, "env"),  # placment
        (8, 62, "critic"),  # share
        (14, 15, ""),  # RANK
        (15, 15, ""),  # the reserved label
        (15, 21, ""),  # node_rank
    ]


def test_a_fault_of_a_definition_is_not_told_again_by_its_users() -> None:
    groups = "[{label: g, node_ranks: 9}]"
    message = refused(of("a: {node_group: g, placement: 0}, b: {node_group: g, placement: 0}", groups=groups), "1")
    assert "no node of rank 9" in message


@pytest.mark.parametrize(
    "text", ["env: '0,9'", 'env: "0,9"', "env: {placement: '0, 9'}", "env: 0:9", "env: 9", "env: 1-9"]
)
def test_the_column_is_the_one_in_the_file(text: str) -> None:
    (fault,) = faults(of(f"actor: 0-1, {text}"), "4")
    assert fault.line == 2
    said = of(f"actor: 0-1, {text}").splitlines()[1][fault.column - 1 :]
    assert said[0] == "9" or said.startswith("1-9")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (of("a: {placement: 0,2, share: 0.5}"), ['write placement: "0,2"']),
        (of("a: {placement: 0-1:0-3,3:4}"), ['write placement: "0-1:0-3,3:4"']),
        (of("a: {node_group: g, placement: 0}", groups="[{label: g, node_ranks: 0,1,3-4}]"), ['node_ranks: "0,1,3-4"']),
        (of("a: {node_group: g, placement: 0}", groups="[{label: g, nodes: 0}]"), ["did you mean node_ranks?"]),
        (
            of("a: {node_group: g, placement: 0}", groups="[{label: g, node_ranks: 0, hardware: {typ: Franka}}]"),
            ["did you mean type?"],
        ),
        (of("a: {gpus: 0-3}"), ["did you mean placement?"]),
        (of("a: {group: g, placement: 0}", groups="[{name: g, node_ranks: 0}]"), ["mean node_group?", "mean label?"]),
        (of("a: '???'"), ["it marks a value that is still missing"]),
        ("runner: {task_typ: reasoning}\n" + of("a: 0"), ["did you mean task_type?"]),
        (
            "runner: {task_type: reasoning}\nrollout: {tensor_paralel_size: 2}\n" + of("'actor,rollout,reward': 0-1"),
            ["did you mean tensor_parallel_size?"],
        ),
        ("clusters:\n  component_placement: {a: 0}\n", ["is this meant as cluster?"]),
        ("Component-Placement: {a: 0}\n", ["is this meant as component_placement?"]),
        (of("a: 1-4:0-1"), ["all of a process are on one; the last rank of node 0 is 3"]),
        (
            of("a: {node_group: g, placement: 0}", groups="[{label: node, node_ranks: 0}]"),
            ["are cluster, node", "reserved"],
        ),
    ],
)
def test_one_mistake_is_told_once_with_what_was_meant(text: str, said: list[str]) -> None:
    found = faults(text, "4+4")
    assert len(found) == len(said)
    assert all(fault.line and fault.message.find(end) >= 0 for fault, end in zip(found, said, strict=True))


@pytest.mark.parametrize("nodes", ["4+4", "[{accelerators: 4}, {accelerators: 4}]"])
def test_nodes_may_stand_beside_the_cluster_too(nodes: str) -> None:
    assert plan(f"nodes: {nodes}\n" + of("a: all"), None).workers[-1].placement.cluster_node_rank == 1
    (fault,) = faults("nodes: [{gpu: 8}]\n" + of("a: {node_group: node, placement: 0}"))
    assert "did you mean accelerators?" in fault.message


@pytest.mark.parametrize(
    ("text", "segment"),
    [('"0-1, 3-4:2"', "3-4:2"), ('"0,1-4:1-2"', "1-4:1-2"), ('"0-2:0-2,3-4:3,5-7"', "3-4:3")],
)
def test_a_process_that_would_span_nodes_is_told_at_its_segment(text: str, segment: str) -> None:
    (fault,) = faults(of(f"actor: 0, env: {text}"), "4+4")
    assert "would span nodes 0,1" in fault.message
    assert fault.segment == segment
    assert of(f"actor: 0, env: {text}").splitlines()[1][fault.column - 1 :].startswith(segment)


def test_every_segment_that_spans_nodes_is_told() -> None:
    found = faults(of('actor: "1-2:0,3-4:1,6,7-8:3"'), "2+2+2+2+2")
    assert [fault.segment for fault in found] == ["1-2:0", "3-4:1", "7-8:3"]
    assert [fault.message.partition(": process ")[2][0] for fault in found] == ["0", "1", "3"]


@pytest.mark.parametrize(
    ("config", "said", "place"),
    [
        ("cluster: [a]", "a list is not a mapping", (1, 10)),
        ("cluster: {component_placements: {a: 0}}", "did you mean component_placement?", (1, 11)),
        ("cluster:\n  component_placement:\n    ? [a, b]\n    : 0\n", "a key is a mapping or a list", (3, 7)),
        ("cluster: {num_nodes: 1}", "no component has a placement", (1, 10)),
        ("cluster: {component_placement: {a: ~}}", "the placement is empty", (1, 36)),
    ],
)
def test_what_leaves_no_component_is_told_once(config: str, said: str, place: tuple[int, int]) -> None:
    (fault,) = faults(config, "1")
    assert said in fault.message
    assert (fault.line, fault.column) == place


def test_a_group_without_a_label_is_no_suggestion() -> None:
    found = faults(of("a: {node_group: x, placement: 0}", groups="[{label: [x], node_ranks: 0}]"), "1")
    assert "known are cluster, node" in found[0].message
    assert "?" not in found[0].message


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ("num_gpus_per_node: 0", "0 GPUs per node are stated, but node 0 (node-0) has 4"),
        ("gpus_per_node: 8", "8 GPUs per node are stated"),
        ("num_gpus_per_node: 4, gpus_per_node: 8", "they mean the same, so state one"),
    ],
)
def test_ps_17_numbers_of_gpus_are_honoured_or_refused(stated: str, said: str) -> None:
    assert said in refused(f"cluster: {{{stated}, component_placement: {{a: 0}}}}", "4")


@pytest.mark.parametrize(
    ("text", "said", "place"),
    [
        ("a: b\ncluster: x\x00y", "the character '\\x00' is not allowed", (2, 11)),
        ("# é\x0c\ncluster: 0", "the character '\\x0c' is not allowed", (1, 4)),
        ("a: b\r\nc: '\ud800'", "the character '\\ud800' is not allowed", (2, 5)),
        ("cluster:\n\tcomponent_placement: 0", "a tab stands here, and YAML indents with spaces", (2, 1)),
        ("cluster:\n  component_placement:\n    actor: 0-3:\n", "':' at its end needs quotes", (3, 15)),
    ],
)
def test_what_is_no_yaml_is_told_where_it_is(text: str, said: str, place: tuple[int, int]) -> None:
    with pytest.raises(InvalidInput) as caught:
        plan(text, "1")
    (fault,) = caught.value.faults
    assert said in fault.message
    assert (fault.line, fault.column) == place


def test_se_04_the_mask_of_a_secret_is_not_its_value() -> None:
    groups = "[{label: g, node_ranks: 0, env_configs: [{env_vars: [{A_TOKEN: '********'}]}]}]"
    assert "is the mask of a secret" in refused(of("a: 0", groups=groups), "1")


def test_a_comma_in_braces_without_quotes_is_explained() -> None:
    assert any("needs quotes" in fault.message for fault in faults(of("actor: 0,2"), "4"))


@pytest.mark.parametrize("text", ['"0,\\x39"', "'0,\n      9'", "|\n      0,9\n", "&x 0,9", "!!str 0,9"])
def test_where_columns_can_t_be_counted_the_start_is_told(text: str) -> None:
    (fault,) = faults(f"cluster:\n  component_placement:\n    actor: {text}\n", "4")
    assert fault.line == 3
    assert fault.column >= 12
    assert fault.segment == "9"


def test_a_mapping_has_no_lines_but_fields() -> None:
    (fault,) = faults({"cluster": {"component_placement": {"actor": "0-9"}}}, "4")
    assert (fault.field, fault.line, fault.column) == ("cluster.component_placement.actor", 0, 0)


def test_a_diagnostic_says_what_was_read_and_what_is_allowed() -> None:
    (fault,) = faults(of("env: {nod_group: x, placement: 0}"), "4")
    assert isinstance(fault, Diagnostic)
    assert (fault.component, fault.read, fault.nearest) == ("env", "nod_group", "node_group")
    assert fault.allowed == "node_group, placement, share, visible"
    (fault,) = faults(of("env: 0-7"), "4")
    assert (fault.segment, fault.segment_column, fault.read, fault.allowed) == ("0-7", 1, "7", "0 to 3")


def test_very_many_faults_are_counted_instead_of_told() -> None:
    with pytest.raises(InvalidInput) as caught:
        plan(of("actor: '" + ",".join(["x"] * 500) + "'"), "4")
    assert len(caught.value.faults) == 101
    assert caught.value.faults[-1].message == "and 400 more faults"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("cluster: {component_placement: {a: 0}, clusterr: 1}", "unknown key 'clusterr'"),
        ("cluster: {component_placement: {a: 0}, num_nods: 1}", "did you mean num_nodes?"),
        ("component_placement: {a: 0}\nnum-nodes: 1", "did you mean num_nodes?"),
        ("cluster: {component_placement: {a: {placement: 0, Visible: all}}}", "did you mean visible?"),
        ("cluster: {component_placement: {a: 0}, nodes: [{node_id: a, acelerators: 1}]}", "did you mean accelerators?"),
    ],
)
def test_unknown_keys_are_refused_everywhere(config: str, said: str) -> None:
    cluster = None if "nodes: [" in config else "1"
    assert said in faults(config, cluster)[0].message


@pytest.mark.parametrize(
    ("share", "said"),
    [
        ("0", "out of bounds"),
        ("1", "may mean one milli-GPU or one GPU"),
        ("1001", "out of bounds"),
        ("-1", "not a share"),
        ("1.5", "not a share"),
        ("half", "not a share"),
        ("~", ""),
        ("[1]", "not a share"),
        ("0.0001", "not a share"),
        ("1e2", "not a share"),
    ],
)
def test_shares_that_are_none_are_refused(share: str, said: str) -> None:
    config = of(f"a: {{placement: 0, share: {share}}}")
    if said:
        assert said in refused(config, "1")
    else:
        assert plan(config, "1").workers[0].devices[0].milli == 1000


@pytest.mark.parametrize(
    ("share", "milli"), [("2", 2), ("500", 500), ("500m", 500), ("1m", 1), ("0.5", 500), (".25", 250), ("1.0", 1000)]
)
def test_shares_are_milli_or_a_part(share: str, milli: int) -> None:
    assert plan(of(f"a: {{placement: 0, share: {share}}}"), "1").workers[0].devices[0].milli == milli


class TestCharges:
    """Who is charged what."""

    def test_those_without_a_share_divide_what_is_left(self) -> None:
        found = plan(of("a: {placement: 0, share: 700}, b: '0:0-1'"), "1")
        assert [worker.devices[0].milli for worker in found.workers] == [700, 150, 150]
        assert found.demand[0].gpu_milli == 1000

    def test_stated_shares_alone_leave_the_rest_of_the_gpu(self) -> None:
        found = plan(of("a: {placement: 0, share: 700}, b: {placement: 0, share: 0.2}"), "1")
        assert found.demand[0].gpu_milli == 900

    def test_a_full_gpu_has_nothing_left(self) -> None:
        message = refused(of("a: {placement: 0, share: 1000}, b: 0"), "1")
        assert "GPU 0 of node 0 is shared by a, b: shares of 1000 milli-GPU and 1 worker that states none" in message

    def test_alike_gpus_of_a_node_are_told_at_once_with_what_helps(self) -> None:
        messages = [
            fault.message
            for fault in faults(of("a: {placement: all, share: 0.6}, b: {placement: 0-5, share: 0.6}"), "4+4")
        ]
        assert [message.partition(" is shared")[0].removeprefix("component a: ") for message in messages] == [
            "each GPU of 0-3 of node 0",
            "each GPU of 0-1 of node 1",
        ]
        assert messages[0].endswith("lower the shares, or leave them out for equal parts")

    def test_a_thousand_may_share_and_one_more_may_not(self) -> None:
        assert plan(of("a: '0:0-999'"), "1").workers[0].devices[0].milli == 1
        assert "do not fit into 1000 milli-GPU" in refused(of("a: '0:0-1000'"), "1")

    def test_ft_b5_a_share_is_of_each_gpu_of_a_worker(self) -> None:
        found = plan(of("a: {placement: '0-1:0', share: 0.7}, b: {placement: '1:0', share: 300}"), "2")
        assert [(device.position, device.milli) for device in found.workers[0].devices] == [(0, 700), (1, 700)]
        assert found.demand[0].devices == ((0, 700), (1, 1000))
        assert "do not fit into 1000 milli-GPU" in refused(
            of("a: {placement: '0-1:0', share: 0.7}, b: {placement: '1:0', share: 301}"), "2"
        )

    @pytest.mark.parametrize(
        ("workers", "stated"), [*((n, 0) for n in (1, 3, 7, 48, 300, 600, 999, 1000)), (3, 200), (300, 200), (800, 200)]
    )
    def test_ft_b6_a_gpu_that_is_shared_without_stated_shares_is_charged_whole(self, workers: int, stated: int) -> None:
        text = f"a: '0:0-{workers - 1}'" + (f", b: {{placement: 0, share: {stated}}}" if stated else "")
        found = plan(of(text), "1")
        shares = [worker.devices[0].milli for worker in found.workers]
        assert sum(shares) == found.demand[0].gpu_milli == 1000
        equal = shares[:workers]
        assert max(equal) - min(equal) <= 1
        assert equal == sorted(equal, reverse=True)

    def test_a_worker_of_several_gpus_is_charged_on_each(self) -> None:
        found = plan(of("a: '0-1:0', b: 1"), "2")
        assert [(device.position, device.milli) for device in found.workers[0].devices] == [(0, 1000), (1, 500)]

    def test_groups_that_name_one_gpu_in_two_ways_share_it(self) -> None:
        groups = "[{label: g, node_ranks: 1}]"
        found = plan(of("a: {node_group: g, placement: 0}, b: 1", groups=groups), "1+1")
        assert [worker.devices[0].milli for worker in found.workers] == [500, 500]
