"""What does each strategy give? RLinf's three, on their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from callboard.model.faults import InvalidInput
from callboard.placement import (
    Accelerator,
    Cluster,
    FlexiblePlacementStrategy,
    Node,
    NodeGroup,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    Placement,
    PlacementStrategy,
)
from tests.placement.support import nodes

FOUR = Cluster.from_nodes("2+2")


def own(placed: list[Placement]) -> list[tuple[int, tuple[int, ...]]]:
    return [(one.cluster_node_rank, one.local_hardware_ranks) for one in placed]


class TestFlexible:
    """A list of ranks for each process."""

    def test_processes_are_ordered_by_their_first_rank_and_sorted_inside(self) -> None:
        strategy = FlexiblePlacementStrategy([[3], [1, 0], [2]])
        assert own(strategy.resolve(FOUR)) == [(0, (0, 1)), (1, (0,)), (1, (1,))]
        assert strategy.hardware_ranks == (0, 1, 2, 3)

    def test_processes_may_share_a_rank(self) -> None:
        placed = FlexiblePlacementStrategy([[0], [0], [1]]).resolve(FOUR)
        assert [one.visible_accelerators for one in placed] == [("0",), ("0",), ("1",)]
        assert [(one.local_rank, one.local_world_size) for one in placed] == [(0, 3), (1, 3), (2, 3)]

    @pytest.mark.parametrize(
        ("lists", "said"),
        [
            ([], "the list is empty"),
            ([[0], []], "process 1 gets nothing"),
            ([[0, 1, 0]], "process 0 gets rank 0 twice"),
            ([[-1]], "negative"),
        ],
    )
    def test_lists_that_mean_nothing_are_refused(self, lists: list[list[int]], said: str) -> None:
        with pytest.raises(InvalidInput, match=said):
            FlexiblePlacementStrategy(lists)

    @pytest.mark.parametrize(
        ("lists", "said"),
        [
            ([0, 1], r"hardware_ranks_list\[0\]: 0 is not the ranks of one process"),
            (None, "nothing is not the ranks of each process"),
            ("01", "'01' is not the ranks of each process"),
            (["01"], "'01' is not the ranks of one process"),
            ([["0"]], "'0' is not a whole number"),
            ([[0.0]], "0.0 is not a whole number"),
            ([[True]], "is not a whole number"),
        ],
    )
    def test_what_is_no_list_of_ranks_is_refused_in_words(self, lists: Any, said: str) -> None:
        with pytest.raises(InvalidInput, match=said):
            FlexiblePlacementStrategy(lists)

    @pytest.mark.parametrize(("lists", "said"), [([[1, 2]], "span nodes 0,1"), ([[4]], "GPU rank 4 does not exist")])
    def test_lists_that_do_not_fit_are_refused(self, lists: list[list[int]], said: str) -> None:
        with pytest.raises(InvalidInput, match=said):
            FlexiblePlacementStrategy(lists).resolve(FOUR)

    def test_a_process_never_mixes_types(self) -> None:
        mixed = Cluster((Node(node_id="n", rank=0, accelerators=(Accelerator("0", "a"), Accelerator("1", "b"))),))
        assert FlexiblePlacementStrategy([[0], [1]]).resolve(mixed)[1].accelerator_type == "b"
        with pytest.raises(InvalidInput, match="a and b on node 0"):
            FlexiblePlacementStrategy([[0, 1]]).resolve(mixed)


class TestPacked:
    """A range, filled in the order of nodes."""

    def test_it_packs(self) -> None:
        assert own(PackedPlacementStrategy(0, 3, 2).resolve(FOUR)) == [(0, (0, 1)), (1, (0, 1))]

    def test_a_stride_interleaves(self) -> None:
        placed = PackedPlacementStrategy(0, 3, 2, 2).resolve(Cluster.from_nodes("4"))
        assert own(placed) == [(0, (0, 2)), (0, (1, 3))]

    def test_a_stride_alone_changes_no_set(self) -> None:
        assert own(PackedPlacementStrategy(0, 3, 1, 2).resolve(FOUR)) == [(0, (0,)), (0, (1,)), (1, (0,)), (1, (1,))]

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ((0, 4, 2), "has 5 ranks, which 2 per process × stride 1 = 2 does not divide"),
            ((0, 3, 2, 4), "does not divide"),
            ((3, 0), "descends"),
            ((-1, 3), "ranks count from 0"),
            ((0, 3, 0), "at least 1"),
            ((0, 3, 1, 0), "at least 1"),
            ((0, 10**9), "more than 100000 processes"),
        ],
    )
    def test_ranges_that_mean_nothing_are_refused(self, arguments: tuple[int, ...], said: str) -> None:
        with pytest.raises(InvalidInput, match=said):
            PackedPlacementStrategy(*arguments)  # type: ignore[arg-type]  # never six of them

    def test_the_rank_after_the_last_is_refused(self) -> None:
        with pytest.raises(InvalidInput, match="GPU rank 4 does not exist"):
            PackedPlacementStrategy(0, 4).resolve(FOUR)


class TestNode:
    """Nodes, and no accelerator."""

    def test_nothing_is_visible(self) -> None:
        placed = NodePlacementStrategy([0, 0, 1]).resolve(FOUR)
        assert [(one.cluster_node_rank, one.visible_accelerators) for one in placed] == [(0, ()), (0, ()), (1, ())]
        assert {one.local_accelerator_rank for one in placed} == {-1}
        assert {one.accelerator_type for one in placed} == {""}
        assert [(one.local_rank, one.local_world_size) for one in placed] == [(0, 2), (1, 2), (0, 1)]

    def test_without_isolation_the_whole_node_is(self) -> None:
        (placed,) = NodePlacementStrategy([1]).resolve(nodes("0", "67"), isolate_accelerator=False)
        assert placed.visible_accelerators == ("6", "7")
        assert placed.local_accelerator_rank == -1
        assert not placed.isolate_accelerator

    @pytest.mark.parametrize(("ranks", "said"), [([], "the list is empty"), ([-1], "negative")])
    def test_lists_that_mean_nothing_are_refused(self, ranks: list[int], said: str) -> None:
        with pytest.raises(InvalidInput, match=said):
            NodePlacementStrategy(ranks)

    def test_a_node_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(InvalidInput, match="node rank 2 does not exist"):
            NodePlacementStrategy([2]).resolve(FOUR)


GROUPED = FOUR.with_groups([NodeGroup(label="a", node_ranks=(0,)), NodeGroup(label="b", node_ranks=(1,))])


@pytest.mark.parametrize("group", ["b,a", ["b", "a"], ("b", "a"), "b, a"])
@pytest.mark.parametrize(
    "make",
    [
        lambda group: FlexiblePlacementStrategy([[0], [1], [2], [3]], group),
        lambda group: PackedPlacementStrategy(0, 3, node_group=group),
    ],
    ids=["flexible", "packed"],
)
def test_ranks_are_counted_in_the_groups_that_are_named(
    make: Callable[[object], PlacementStrategy], group: object
) -> None:
    placed = make(group).resolve(GROUPED)
    assert own(placed) == [(1, (0,)), (1, (1,)), (0, (0,)), (0, (1,))]
    assert [one.node_group_label for one in placed] == ["b", "b", "a", "a"]
    assert [one.placement_node_rank for one in placed] == [0, 0, 1, 1]


def test_an_unknown_group_is_told_with_the_nearest() -> None:
    with pytest.raises(InvalidInput, match="unknown node group 'node-s'; did you mean node"):
        NodePlacementStrategy([0], "node-s").resolve(GROUPED)


@pytest.mark.parametrize(
    "strategy", [FlexiblePlacementStrategy([[0, 1]]), PackedPlacementStrategy(0, 1, 2), NodePlacementStrategy([0])]
)
def test_a_strategy_gives_the_same_every_time_and_never_changes(strategy: PlacementStrategy) -> None:
    before = dataclasses.asdict(strategy)  # type: ignore[call-overload]
    assert strategy.resolve(FOUR) == strategy.get_placement(FOUR)
    assert strategy.resolve(FOUR, isolate_accelerator=False) == strategy.get_placement(FOUR, False)
    assert dataclasses.asdict(strategy) == before  # type: ignore[call-overload]
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.node_group = ("x",)  # type: ignore[misc]  # that it can't is the point


def test_without_isolation_a_worker_sees_its_node_s_list() -> None:
    placed = PackedPlacementStrategy(0, 3).resolve(nodes("12", "45"), isolate_accelerator=False)
    assert [one.visible_accelerators for one in placed] == [("1", "2"), ("1", "2"), ("4", "5"), ("4", "5")]
    assert [one.local_accelerator_rank for one in placed] == [0, 1, 0, 1]


class TestArguments:
    """What callers give from Python, where no reader checked it."""

    @pytest.mark.parametrize("arguments", [("0", 3), (0, 3.0), (0, None), (False, True), (0, 3, "2"), (0, 3, 1, 2.0)])
    def test_ranks_of_a_range_are_whole_numbers(self, arguments: Any) -> None:
        with pytest.raises(InvalidInput, match="is not a whole number"):
            PackedPlacementStrategy(*arguments)

    @pytest.mark.parametrize("ranks", [0, "01", None, [0.5], ["0"]])
    def test_nodes_are_a_list_of_whole_numbers(self, ranks: Any) -> None:
        with pytest.raises(InvalidInput, match="node_ranks"):
            NodePlacementStrategy(ranks)

    def test_numbers_of_other_libraries_are_numbers(self) -> None:
        class Three:
            def __index__(self) -> int:
                return 3

        assert PackedPlacementStrategy(0, Three()) == PackedPlacementStrategy(0, 3)  # type: ignore[arg-type]

    def test_a_label_may_be_a_number(self) -> None:
        assert NodePlacementStrategy([0], 4090).node_group == ("4090",)  # type: ignore[arg-type]

    @pytest.mark.parametrize("group", [True, 1.5, [1], {"a": 1}])
    def test_a_label_is_a_text_or_a_list_of_texts(self, group: Any) -> None:
        with pytest.raises(InvalidInput, match="nor a list of labels"):
            NodePlacementStrategy([0], group)

    @pytest.mark.parametrize("cluster", ["2+2", 2, None])
    def test_a_cluster_is_a_cluster(self, cluster: Any) -> None:
        with pytest.raises(TypeError, match=r"is not a Cluster; write e\.g\. Cluster\.from_nodes"):
            NodePlacementStrategy([0]).resolve(cluster)

    @pytest.mark.parametrize("text", [None, 8, [8, 8]])
    def test_nodes_are_described_by_a_text(self, text: Any) -> None:
        with pytest.raises(InvalidInput, match="is not a text"):
            Cluster.from_nodes(text)
