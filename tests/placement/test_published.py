"""Do configs as RLinf publishes them mean here what they mean there?

Each case is a form that its shipped configs use: keys of its own beside the placement, task types other than
``reasoning``, several rollouts, the policy that lends GPUs, models on robots.
"""

from __future__ import annotations

import pytest

from callboard.placement import (
    Cluster,
    ModelParallelComponentPlacement,
    PackedPlacementStrategy,
    PlacementMode,
    RolloutSyncMode,
    parse,
    plan_placement,
    render,
)
from tests.placement.support import faults, of, plan, refused, seen, warned

DYNAMIC = """
cluster:
  num_nodes: 2
  auto_scheduler : True
  assign_policy: greedy
  use_pre_process_policy : {policy}
  rollout_use_all_gpus: False
  monitor_interval: 1
  preprocess_threshold: 0.2
  migrate_out_max_bs: 100
  use_wait_before_last_iter_policy : False
  fuse_rollout_inference_only: False
  recreate_nccl_groups : False
  component_placement:
    # actor: 0-3
    actor: {actor}
    rollout: {rollout}
    inference: 14-15
    reward: all
runner: {{task_type: reasoning}}
algorithm: {{recompute_logprobs: True}}
rollout: {{tensor_parallel_size: 2}}
"""

AGENTS = """
cluster:
  num_nodes: 1
  component_placement:
    actor,reward: all
    rollout: 0-1
    rollout_judge: 2-3
runner: {task_type: reasoning}
actor: {model: {tensor_model_parallel_size: 2}}
rollout: {tensor_parallel_size: 1}
rollout_judge: {tensor_parallel_size: 1}
"""


class TestKeysBesideThePlacement:
    @pytest.mark.parametrize(
        "own",
        [
            "profiling: {backend: nsight, steps: [1, 2], worker_groups: [ActorGroup]}",
            "nsight: {enabled: true, options: {t: 'cuda,nvtx'}}",
            "net_emulation: {enabled: true, crossdc_pairs: [{src: ['Env:0'], dst: ['Actor:0'], delay_ms: 10}]}",
        ],
    )
    def test_settings_of_its_own_are_passed_over(self, own: str) -> None:
        assert plan(of("actor: all").replace("cluster:\n", f"cluster:\n  {own}\n"), "2").gpus == 2

    def test_others_are_still_refused(self) -> None:
        config = of("actor: all").replace("cluster:\n", "cluster:\n  net_emulations: {}\n  num_node: 1\n")
        first, second = (fault.message for fault in faults(config, "2"))
        assert first.startswith("unknown key 'net_emulations'; known are num_nodes")
        assert second == "unknown key 'num_node'; did you mean num_nodes?"


class TestDynamicScheduling:
    def test_the_rollout_is_lent_the_actors_gpus(self) -> None:
        """``use_pre_process_policy``: its engines begin on GPU 0, before its own."""
        found = plan(DYNAMIC.format(policy=True, actor="0-3", rollout="4-13"), "8+8")
        assert (found.mode, found.sync_mode) == (PlacementMode.AUTO, RolloutSyncMode.COLLECTIVE)
        assert found.by_name["actor"].strategy == PackedPlacementStrategy(0, 15)
        assert found.by_name["rollout"].strategy == PackedPlacementStrategy(0, 13, 2)
        assert parse(render(found)) == found

    def test_without_the_policy_it_has_its_own(self) -> None:
        found = plan(DYNAMIC.format(policy=False, actor="0-3", rollout="4-13"), "8+8")
        assert found.by_name["rollout"].strategy == PackedPlacementStrategy(4, 13, 2)
        assert parse(render(found)) == found

    def test_engines_must_divide_what_is_lent(self) -> None:
        config = DYNAMIC.format(policy=True, actor="0-4", rollout="5-14").replace("inference: 14-15", "inference: 15")
        assert "lends its 5 GPUs to rollouts of 2 GPUs each" in refused(config, "8+8")


class TestSeveralRollouts:
    """Jobs of several agents: each engine has a part of the actor's GPUs."""

    def test_they_divide_the_actors_gpus(self) -> None:
        found = plan(AGENTS, "4")
        assert (found.mode, found.sync_mode) == (PlacementMode.COLLOCATED, RolloutSyncMode.COLLECTIVE)
        assert seen(found, "actor") == seen(found, "reward") == [(0, (str(gpu),)) for gpu in range(4)]
        assert seen(found, "rollout_judge") == [(0, ("2",)), (0, ("3",))]
        assert parse(render(found)) == found

    def test_each_has_engines_of_its_own_size(self) -> None:
        config = AGENTS.replace("rollout_judge: {tensor_parallel_size: 1}", "rollout_judge: {tensor_parallel_size: 2}")
        config = config.replace("{model: {tensor_model_parallel_size: 2}}", "{}")
        assert seen(plan(config, "4"), "rollout_judge") == [(0, ("2", "3"))]
        assert parse(render(plan(config, "4"))) == plan(config, "4")
        without = config.replace("rollout_judge: {tensor_parallel_size: 2}", "")
        assert len(seen(plan(without, "4"), "rollout_judge")) == 2  # as the rollout's

    def test_on_all_gpus_it_is_the_shared_mode(self) -> None:
        found = plan(AGENTS.replace("rollout: 0-1", "rollout: all").replace("2-3", "0-1"), "4")
        assert (found.mode, found.sync_mode) == (PlacementMode.COLLOCATED, RolloutSyncMode.IPC)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (("actor,reward: all", "actor: all\n    reward: 0-1"), "both have the same GPUs"),
            (("actor,reward: all", "actor,reward: 0-2"), "further rollouts have a part of the actor's GPUs"),
            (("rollout_judge: 2-3", "rollout_judge: 2-3\n    rollout_x: 3"), "share no GPU with each other"),
            (("rollout_judge: 2-3", "rollout_judge: 2-3\n    inference: 2-3"), "runs inside the actor"),
            (("rollout_judge: 2-3", "judge: 2-3"), "neither the same GPUs"),
        ],
    )
    def test_what_they_may_not(self, change: tuple[str, str], said: str) -> None:
        assert said in refused(AGENTS.replace(*change), "4")


class TestTaskTypes:
    def test_the_first_releases_called_it_math(self) -> None:
        config = of('"actor,rollout": all', more="runner: {task_type: math}\nrollout: {tensor_parallel_size: 2}\n")
        found = plan(config, "4")
        assert (found.mode, found.config.task_type) == (PlacementMode.COLLOCATED, "reasoning")
        assert len(seen(found, "rollout")) == 2

    def test_coding_is_placed_by_model_parallelism_and_shares_nothing(self) -> None:
        more = "runner: {task_type: coding_online_rl}\nrollout: {tensor_parallel_size: 2}\n"
        found = plan(of("rollout: 0-3, inference: 4-5, actor: 6-7, reward: 0-3", more=more), "8")
        assert found.mode is PlacementMode.DISAGGREGATED
        assert seen(found, "rollout") == [(0, ("0", "1")), (0, ("2", "3"))]
        assert parse(render(found)) == found
        assert "serves while it trains" in refused(of('"actor,rollout": all', more=more), "8")

    def test_an_evaluation_packs_its_engines_and_needs_no_actor(self) -> None:
        more = "runner: {task_type: reasoning_eval}\nrollout: {tensor_parallel_size: 2}\n"
        found = plan(of('rollout: all, reward: all, "agent": 0-1', more=more), "4")
        assert (found.mode, found.sync_mode) == (PlacementMode.COLLOCATED, None)
        assert seen(found, "rollout") == [(0, ("0", "1")), (0, ("2", "3"))]
        assert len(seen(found, "reward")) == 4
        assert parse(render(found)) == found
        assert "needs the component rollout" in refused(of("actor: all", more=more), "4")
        assert "does not divide its 3 GPUs" in refused(of("rollout: 0-2", more=more), "4")

    def test_who_chose_the_class_keeps_the_kind(self) -> None:
        more = "runner: {task_type: reasoning_eval}\nrollout: {tensor_parallel_size: 2}\n"
        found = ModelParallelComponentPlacement(of("rollout: all", more=more), Cluster.from_nodes("4"))
        assert found.world_size("rollout") == 2
        assert ModelParallelComponentPlacement(found.plan.config, Cluster.from_nodes("4")).plan == found.plan

    @pytest.mark.parametrize("read", ["Reasoning", "reasonning", "reasoning-eval", "Embodied"])
    def test_a_misspelt_one_is_told(self, read: str) -> None:
        message = refused(of('"actor,rollout": all', more=f"runner: {{task_type: {read}}}\n"), "4")
        assert message.startswith(f"unknown task type '{read}'; did you mean ")

    def test_one_that_is_no_text_is_told(self) -> None:
        assert "a list is not a task type" in refused(of("actor: all", more="runner: {task_type: [reasoning]}\n"), "4")

    @pytest.mark.parametrize("read", ["my_task", "sft", "offline", "embodied_eval"])
    def test_others_are_placed_as_their_texts_say(self, read: str) -> None:
        assert plan(of("actor: all", more=f"runner: {{task_type: {read}}}\n"), "4").mode is PlacementMode.HYBRID


class TestPartsOfConfigs:
    """Most of RLinf's configs are composed by Hydra; one file of them is read here."""

    def test_a_base_may_say_the_task(self) -> None:
        found = plan_placement("defaults: [base_train, env/x@env.train]\n" + of("actor: all"), Cluster.from_nodes("2"))
        assert [warning.line for warning in found.warnings] == [1]
        assert "'base_train' may say runner.task_type" in warned(found)

    @pytest.mark.parametrize(
        "defaults", ["[override hydra/job_logging: stdout, _self_]", "[env/x@env.train, model/pi0@actor.model]"]
    )
    def test_what_adds_only_settings_is_no_matter(self, defaults: str) -> None:
        assert not warned(plan(f"defaults: {defaults}\n" + of("actor: all"), "2"))

    def test_a_stated_task_is_enough(self) -> None:
        config = "defaults: [base_train]\nrunner: {task_type: embodied}\n" + of("actor: all")
        assert not warned(plan(config, "2"))

    def test_a_file_without_placements_may_have_them_elsewhere(self) -> None:
        assert "the files that its defaults name are not read" in refused("defaults: [base]\nrunner: {}\n", "2")

    @pytest.mark.parametrize("task", ["reasoning", "reasoning_eval"])
    def test_where_nothing_is_placed_nothing_else_is_missed(self, task: str) -> None:
        assert "no component has a placement" in refused(f"runner: {{task_type: {task}}}\n", "2")

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("cluster: {num_nodes: '${oc.env:N}', component_placement: {actor: all}}", "nobody resolved"),
            ("cluster:\n  num_nodes: ???\n  component_placement: {actor: all}", "marks a value that is still missing"),
            ("cluster: {auto_scheduler: '${x}', component_placement: {actor: all}}", "nobody resolved"),
            ("cluster: {component_placement: {actor: {node_group: '${g}', placement: all}}}", "nobody resolved"),
        ],
    )
    def test_what_is_still_open_is_told(self, text: str, said: str) -> None:
        assert said in refused(text, "2")


class TestModelsOnRobots:
    GROUPS = "[{label: franka, node_ranks: 0, hardware: {type: DualFranka, configs: [{node_rank: 0}]}}]"

    def test_who_is_placed_on_a_robot_sees_no_gpu_and_is_told(self) -> None:
        """RLinf shows every GPU of the node there, and ships a config whose policy counts on it."""
        text = "rollout: {node_group: franka, placement: 0}"
        found = plan(of(text, groups=self.GROUPS), "1")
        assert seen(found, "rollout") == [(0, ())]
        assert "sees none" not in warned(found)
        assert "its workers see none of the GPUs of node 0; visible: all shows them all" in warned(found)

    def test_it_can_be_shown_them(self) -> None:
        found = plan(of("rollout: {node_group: franka, placement: 0, visible: all}", groups=self.GROUPS), "2")
        assert seen(found, "rollout") == [(0, ("0", "1"))]
        assert not warned(found)

    def test_a_robot_without_gpus_beside_it_is_no_matter(self) -> None:
        assert not warned(plan(of("env: {node_group: franka, placement: 0}", groups=self.GROUPS), "0"))

    def test_settings_of_a_group_are_a_list(self) -> None:
        groups = "[{label: a, node_ranks: 0, env_configs: {python_interpreter_path: /opt/p}}]"
        message = refused(of("actor: {node_group: a, placement: all}", groups=groups), "1")
        assert message.startswith("a mapping is not a list of env_configs, e.g. [{node_ranks: 0-3")
