"""Is a cluster described once and for all? The text of ``--nodes``, with its bounds and its faults."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard.model.cluster_text import MAX_GPUS_PER_NODE, NodeText, format_cluster, parse_cluster
from callboard.model.faults import InvalidInput

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("8", [NodeText(8)]),
        ("8+4", [NodeText(8), NodeText(4)]),
        ("0+0", [NodeText(), NodeText()]),
        ("3x2", [NodeText(2)] * 3),
        ("2x(2gpu,32cpu)", [NodeText(2, 32_000)] * 2),
        ("1x(8gpu,32cpu)+2x(32cpu)", [NodeText(8, 32_000), *[NodeText(0, 32_000)] * 2]),
        ("(8gpu:H100, 1.5 CPU, 512GiB) + 1", [NodeText(8, 1500, 512 * GIB, "h100"), NodeText(1)]),
        (" 2 X ( 1gpus ) ", [NodeText(1)] * 2),
    ],
)
def test_a_text_describes_nodes_in_its_order(text: str, nodes: list[NodeText]) -> None:
    assert parse_cluster(text) == tuple(nodes)


@pytest.mark.parametrize(
    ("text", "columns", "said"),
    [
        ("", [1], "nothing describes no node"),
        ("8+", [3], "nothing describes no node"),
        ("x8", [1], "'x8' describes no node"),
        ("8+9z", [3], "'9z' describes no node"),
        ("8x(8gpu,8gpu)", [9], "stated already"),
        ("(3foo)", [2], "unknown unit"),
        ("(1.5gpu)", [2], "not a whole number of GPUs"),
        ("(0.0001cpu)", [2], "finer than a thousandth"),
        ("(3cpu:h)", [2], "only GPUs have a model"),
        ("0x8", [1], "1 to 100000 nodes"),
        ("9" * 300 + "x8", [1], "1 to 100000 nodes"),
        (f"{MAX_GPUS_PER_NODE + 1}", [1], "0 to 1024 GPUs"),
        ("60000x1+60000x1", [9], "more than 100000 nodes"),
        ("100000x1024", [1], "more than 1000000 GPUs"),
        ("()", [2], "nothing is not an amount"),
        ("((8gpu))", [1], "describes no node"),
        ("-1+é", [1, 4], "describes no node"),
        ("+" * 5000, [1], "4096 are allowed"),
    ],
)
def test_faults_have_their_column(text: str, columns: list[int], said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_cluster(text, "--nodes")
    assert [fault.column for fault in caught.value.faults] == columns
    assert {(fault.field, fault.line) for fault in caught.value.faults} == {("--nodes", 1)}
    assert said in caught.value.faults[0].message


def test_all_faults_are_told_at_once_but_not_without_end() -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_cluster("+".join(["z"] * 1000))
    assert len(caught.value.faults) == 20


NODES = st.builds(
    NodeText,
    gpus=st.integers(0, MAX_GPUS_PER_NODE),
    cpu_milli=st.none() | st.integers(0, 10**6),
    memory_bytes=st.none() | st.integers(0, 1 << 50),
    gpu_model=st.sampled_from(["", "h100", "a800"]),
)


@given(st.lists(NODES, min_size=1, max_size=6))
def test_the_shortest_text_means_the_same_nodes(nodes: list[NodeText]) -> None:
    assert parse_cluster(format_cluster(nodes)) == tuple(nodes)


@given(st.text(alphabet="0123456789x+(),gpcuib. :", max_size=40))
def test_any_text_is_nodes_or_faults(text: str) -> None:
    try:
        nodes = parse_cluster(text)
    except InvalidInput as error:
        columns = [fault.column for fault in error.faults]
    else:
        columns = []
        assert parse_cluster(format_cluster(nodes)) == nodes
    assert all(1 <= column <= len(text) + 1 for column in columns)
