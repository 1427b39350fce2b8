"""Which mode does a reasoning job have, and where do its models lie?"""

from __future__ import annotations

import pytest

from callboard.placement import (
    Cluster,
    ComponentPlacement,
    HybridComponentPlacement,
    ModelParallelComponentPlacement,
    PackedPlacementStrategy,
    PlacementMode,
    RolloutSyncMode,
    component_placement_for,
    parse,
    render,
)
from tests.placement.support import charged, faults, of, plan, refused, seen


def reasoning(text: str, *, actor: int = 1, rollout: int = 1, more: str = "", auto: bool = False) -> str:
    """A reasoning config with these tensor parallel sizes."""
    config = of(
        text,
        more=(
            "runner: {task_type: reasoning}\n"
            f"actor: {{model: {{tensor_model_parallel_size: {actor}}}}}\n"
            f"rollout: {{tensor_parallel_size: {rollout}}}\n{more}"
        ),
    )
    return config.replace("cluster:\n", "cluster:\n  auto_scheduler: true\n") if auto else config


class TestByHand:
    """A class that a caller chose counts for more than what the config says of its task."""

    @pytest.mark.parametrize("task", ["", "runner: {task_type: embodied}\n", "runner: {task_type: reasoning}\n"])
    def test_model_parallelism_reads_its_sizes(self, task: str) -> None:
        config = reasoning('"actor,rollout": all', actor=4, rollout=2).replace("runner: {task_type: reasoning}\n", task)
        found = ModelParallelComponentPlacement(config, Cluster.from_nodes("8"))
        assert found.get_strategy("rollout") == PackedPlacementStrategy(0, 7, 2, 2)
        assert (found.actor_tp_size, found.rollout_tp_size, found.mode) == (4, 2, PlacementMode.COLLOCATED)
        assert parse(render(found.plan)) == found.plan

    @pytest.mark.parametrize("kind", [ComponentPlacement, HybridComponentPlacement])
    def test_others_place_as_the_texts_say(self, kind: type[ComponentPlacement]) -> None:
        found = kind(reasoning('"actor,rollout": all', actor=4, rollout=2), Cluster.from_nodes("8"))
        assert (found.get_world_size("rollout"), found.placement_mode) == (8, PlacementMode.HYBRID)
        assert parse(render(found.plan)) == found.plan
        again = kind(found.plan.config, Cluster.from_nodes("8"))
        assert again.plan == found.plan


class TestCollocated:
    """Actor and rollout share their GPUs."""

    def test_the_same_ranks_are_the_shared_mode(self) -> None:
        found = plan(reasoning('"actor,rollout,reward": 0-3'), "4")
        assert (found.mode, found.sync_mode) == (PlacementMode.COLLOCATED, RolloutSyncMode.IPC)
        assert charged(found, "actor") == [[(i, 334)] for i in range(4)]
        assert charged(found, "reward") == [[(i, 333)] for i in range(4)]

    def test_equal_sets_in_other_words_are_the_same(self) -> None:
        assert plan(reasoning("actor: 0-3, rollout: all"), "4").mode is PlacementMode.COLLOCATED

    def test_the_same_gpus_in_another_order_are_not_shared(self) -> None:
        groups = "node_groups: [{label: a, node_ranks: 0}, {label: b, node_ranks: 1}]"
        text = "actor: {node_group: [a, b], placement: all}, rollout: {node_group: [%s], placement: all}"
        for order, fine in (("a, b", True), ("b, a", False)):
            config = reasoning(text % order).replace("cluster:\n", f"cluster:\n  {groups}\n")
            if fine:
                assert plan(config, "2+2").mode is PlacementMode.COLLOCATED
            else:
                assert "the same GPUs in another order" in refused(config, "2+2")

    def test_a_larger_actor_makes_the_rollout_stride(self) -> None:
        found = plan(reasoning('"actor,rollout": all', actor=4, rollout=2), "8")
        assert found.by_name["rollout"].strategy == PackedPlacementStrategy(0, 7, 2, 2)
        assert seen(found, "rollout") == [(0, ("0", "2")), (0, ("1", "3")), (0, ("4", "6")), (0, ("5", "7"))]

    def test_a_larger_rollout_is_packed(self) -> None:
        found = plan(reasoning('"actor,rollout": all', actor=2, rollout=4), "8")
        assert seen(found, "rollout") == [(0, ("0", "1", "2", "3")), (0, ("4", "5", "6", "7"))]

    def test_pipeline_stages_are_in_the_process_too(self) -> None:
        config = reasoning('"actor,rollout": all', rollout=2).replace("size: 2}", "size: 2, pipeline_parallel_size: 2}")
        assert seen(plan(config, "4"), "rollout") == [(0, ("0", "1", "2", "3"))]

    @pytest.mark.parametrize("name", ["inference", "actor_inference", "critic_inference"])
    def test_inference_must_not_be_given(self, name: str) -> None:
        assert f"{name} runs inside the actor" in refused(reasoning(f'"actor,rollout,{name}": all'), "4")

    def test_sizes_that_are_no_multiples_are_refused(self) -> None:
        message = refused(reasoning('"actor,rollout": all', actor=4, rollout=3), "12")
        assert "no multiple" in message

    def test_blocks_that_do_not_divide_are_refused(self) -> None:
        message = refused(reasoning('"actor,rollout": all', actor=4, rollout=2), "6")
        assert "do not divide into blocks of 2 per process × stride 2" in message

    def test_a_block_over_two_nodes_is_refused(self) -> None:
        message = refused(reasoning('"actor,rollout": 0-7', actor=4, rollout=2), "6+6")
        assert "processes 2 to 3 would span nodes 0,1" in message


class TestDisaggregated:
    """GPUs of its own for each."""

    TEXT = "actor: 0-1, rollout: 2-5, inference: 6-7, reward: 2-5"

    def test_disjoint_sets_are_the_split_mode(self) -> None:
        found = plan(reasoning(self.TEXT, rollout=2), "8")
        assert (found.mode, found.sync_mode) == (PlacementMode.DISAGGREGATED, RolloutSyncMode.COLLECTIVE)
        assert seen(found, "rollout") == [(0, ("2", "3")), (0, ("4", "5"))]
        assert len(seen(found, "reward")) == 4

    def test_the_reward_is_optional_and_may_lie_anywhere(self) -> None:
        assert plan(reasoning("actor: 0-1, rollout: 2-3"), "4").mode is PlacementMode.DISAGGREGATED
        assert plan(reasoning("actor: 0-1, rollout: 2-3, reward: 1-2"), "4").mode is PlacementMode.DISAGGREGATED

    def test_other_components_are_placed_as_written(self) -> None:
        found = plan(reasoning("actor: 0-1, rollout: 2-3, env: '0-3:0-7'"), "4")
        assert len(seen(found, "env")) == 8

    def test_too_large_an_inference_is_refused(self) -> None:
        config = reasoning(self.TEXT, more="inference: {model: {tensor_model_parallel_size: 4}}\n")
        (fault,) = faults(config, "8")
        assert "its tensor parallel size is 4, but the component has 2 GPUs" in fault.message
        assert fault.line == 6  # where the size is written

    def test_inference_takes_the_actor_s_size_unless_it_has_its_own(self) -> None:
        text = "actor: 0-3, rollout: 4-5, inference: 6-7"
        assert "tensor parallel size is 4" in refused(reasoning(text, actor=4), "8")

    def test_inference_without_work_is_refused(self) -> None:
        config = reasoning(self.TEXT, more="algorithm: {recompute_logprobs: false}\n")
        assert "algorithm.recompute_logprobs is false" in refused(config, "8")

    @pytest.mark.parametrize(
        ("text", "both"),
        [
            ("actor: 0-3, rollout: 2-5", "actor is on 0-3 and rollout on 2-5"),
            ("actor: 0-1, rollout: 2-5, inference: 5-6", "rollout is on 2-5 and inference on 5-6"),
            ("actor: 0-1, rollout: 2-5, critic: 0-1", "actor is on 0-1 and critic on 0-1"),
        ],
    )
    def test_anything_else_is_refused_with_both_sets(self, text: str, both: str) -> None:
        assert both in refused(reasoning(text), "8")


class TestAuto:
    """GPUs move between components while the job runs."""

    def test_the_actor_may_use_every_gpu(self) -> None:
        found = plan(reasoning("actor: 0-3, rollout: 4-7, inference: 8-9, reward: 4-7", auto=True), "10")
        assert found.mode is PlacementMode.AUTO
        assert found.by_name["actor"].world_size == 10

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("actor: 4-7, rollout: 0-3", "actor should start at 0"),
            ("actor: 0-3, rollout: 5-7", "rollout should start at 4"),
            ("actor: 0-3, rollout: 4-5", "the last is 7"),
            ("actor: 0-3, rollout: 4-5, critic: 6-7", "knows no critic"),
            ('"actor,rollout": 0-7', "actor is on 0-7 and rollout on 0-7"),
        ],
    )
    def test_the_order_has_no_gap(self, text: str, said: str) -> None:
        assert any(said in fault.message for fault in faults(reasoning(text, auto=True), "8"))


class TestShape:
    """What a reasoning job needs of every component."""

    def test_actor_and_rollout_are_needed(self) -> None:
        assert "needs the component actor" in refused(reasoning('"rollout,reward": 0-3'), "4")
        assert len(faults(reasoning("reward: 0-3"), "4")) == 2

    def test_gpus_are_one_range(self) -> None:
        assert "without a gap in a reasoning job, but 3 follows 1" in refused(
            reasoning('actor: "0-1,3", rollout: 4-5'), "8"
        )

    @pytest.mark.parametrize(("sizes", "said"), [({"actor": 8}, "of actor is 8"), ({"rollout": 8}, "of rollout is 8")])
    def test_sizes_fit(self, sizes: dict[str, int], said: str) -> None:
        assert said in faults(reasoning("actor: 0-1, rollout: 2-3", **sizes), "4")[0].message  # type: ignore[arg-type]

    def test_a_rollout_that_its_size_does_not_divide_is_refused(self) -> None:
        assert "does not divide its 3 GPUs" in refused(reasoning("actor: 0-1, rollout: 2-4", rollout=2), "8")

    def test_processes_that_are_stated_are_kept_or_refused(self) -> None:
        assert plan(reasoning('actor: 0-1, rollout: "2-5:0-1"', rollout=2), "8").by_name["rollout"].world_size == 2
        message = refused(reasoning('actor: 0-1, rollout: "2-5:0-3"', rollout=2), "8")
        assert "asks for 4 processes on 4 GPUs, but with 2 GPUs per process it has 2" in message
        assert "it has 2" in refused(reasoning('actor: "0-1:0-3", rollout: 2-5'), "8")

    @pytest.mark.parametrize("size", ["0", "-1", "x", "1.5", "[2]"])
    def test_sizes_that_are_none_are_refused(self, size: str) -> None:
        config = reasoning("actor: 0-1, rollout: 2-3").replace(
            "tensor_parallel_size: 1", f"tensor_parallel_size: {size}"
        )
        assert faults(config, "4")


def test_the_class_is_chosen_by_the_task() -> None:
    config = reasoning('"actor,rollout": all', actor=2)
    placement = component_placement_for(config, Cluster.from_nodes("4"))
    assert isinstance(placement, ModelParallelComponentPlacement)
    assert (placement.is_collocated, placement.is_disaggregated, placement.is_auto, placement.is_pipeline) == (
        True,
        False,
        False,
        False,
    )
    assert (placement.actor_tp_size, placement.rollout_tp_size) == (2, 1)
    assert (placement.actor_world_size, placement.rollout_dp_size) == (4, 4)
    assert placement.rollout_sync_mode is RolloutSyncMode.IPC
    assert not placement.has_dedicated_inference
    assert type(component_placement_for(of("actor: 0"), Cluster.from_nodes("1"))).__name__ == "HybridComponentPlacement"


@pytest.mark.parametrize(
    "config",
    [
        reasoning('"actor,rollout,reward": all', actor=4, rollout=2),
        reasoning(TestDisaggregated.TEXT, rollout=2, more="algorithm: {recompute_logprobs: true}\n"),
        reasoning("actor: 0-3, rollout: 4-7", auto=True),
    ],
)
def test_a_plan_is_read_again_as_it_was_written(config: str) -> None:
    found = plan(config, "8")
    assert parse(render(found)) == found
