"""Which problem is an RLinf config? Its costs, its legal counts, its cluster; and every fault by name."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import pytest

from callboard.autoplace import search
from callboard.autoplace.problem.problem import EdgeKind, Layout, NoPlan, Problem
from callboard.autoplace.rlinf.config import ProfileMissing
from callboard.autoplace.rlinf.job import rlinf_job
from callboard.model.faults import InvalidInput
from callboard.model.inputs import read_yaml

REASONING: dict[str, Any] = {
    "runner": {"task_type": "reasoning"},
    "cluster": {"num_nodes": 1, "num_gpus_per_node": 8, "component_placement": {"actor,rollout": "all"}},
    "algorithm": {"group_size": 16, "n_minibatches": 4, "recompute_logprobs": True},
    "data": {"rollout_batch_size": 128},
    "rollout": {"max_running_requests": 64, "tensor_parallel_size": 2, "pipeline_parallel_size": 1},
    "actor": {"model": {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 1}},
    "profile_data": {"actor_cost": 95.7, "inference_cost": 30.8, "rollout_cost": 59.9},
}
EMBODIED: dict[str, Any] = {
    "runner": {"task_type": "embodied"},
    "cluster": {"num_nodes": 1, "num_gpus_per_node": 4, "component_placement": {"actor,env,rollout": "all"}},
    "data": {"env_num": 16},
    "rollout": {"pipeline_stage_num": 2},
    "profile_data": {
        "actor_cost": 70.3,
        "env_profile_data": {4: 25.8, 8: 30.3, 16: 36.5},
        "rollout_profile_data": {4: 26.0, 8: 30.7, 16: 37.2},
    },
}


def changed(base: Mapping[str, Any], **paths: Any) -> dict[str, Any]:
    """The config with other values: ``data__rollout_batch_size=64``; None takes a key away."""
    config: dict[str, Any] = copy.deepcopy(dict(base))
    for path, value in paths.items():
        *sections, key = path.split("__")
        section = config
        for name in sections:
            section = section.setdefault(name, {})
        if value is None:
            section.pop(key, None)
        else:
            section[key] = value
    return config


def seconds(problem: Problem, component: str) -> dict[int, float]:
    return {mode.gpus: round(mode.seconds, 6) for mode in problem.component(component).modes}


def estimated(problem: Problem, component: str) -> list[int]:
    return [mode.gpus for mode in problem.component(component).modes if mode.estimated]


def faults_of(config: Mapping[str, Any], **options: Any) -> dict[str, str]:
    with pytest.raises(InvalidInput) as caught:
        rlinf_job(config, **options)
    return {fault.field: fault.message for fault in caught.value.faults}


class TestReasoning:
    def test_the_seeds_three_costs_make_a_pipeline_of_three(self) -> None:
        problem = Problem.from_config(REASONING)
        assert [component.name for component in problem.components] == ["rollout", "inference", "actor"]
        assert [(edge.source, edge.target, edge.kind) for edge in problem.edges] == [
            ("rollout", "inference", EdgeKind.STREAM),
            ("inference", "actor", EdgeKind.STREAM),
        ]
        assert (problem.chunks, problem.gpus, problem.layout) == (128, 8, Layout.UNIFORM)

    def test_the_measured_size_is_verbatim_and_the_rest_follows_rlinfs_laws(self) -> None:
        """Numbers as RLinf's tool has them for its documented example on 8 GPUs."""
        problem = Problem.from_config(REASONING)
        assert seconds(problem, "rollout") == {2: 239.6, 4: 119.8, 6: 79.866667, 8: 59.9}
        assert seconds(problem, "actor") == {4: 159.5, 8: 95.7}
        assert seconds(problem, "inference") == {4: 51.333333, 8: 30.8}
        assert estimated(problem, "rollout") == [2, 4, 6]
        assert estimated(problem, "actor") == [4]

    def test_rollout_is_flat_while_its_engines_take_every_request(self) -> None:
        # 4 engines of ceil(0.9 · 600) = 540 hold the 128 · 16 = 2048 sequences, 3 don't.
        problem = Problem.from_config(changed(REASONING, rollout__max_running_requests=600))
        assert seconds(problem, "rollout") == {2: 239.6, 4: 119.8, 6: 79.866667, 8: 59.9}
        problem = Problem.from_config(changed(REASONING, rollout__max_running_requests=760))
        assert seconds(problem, "rollout") == {2: 239.6, 4: 119.8, 6: 59.9, 8: 59.9}

    def test_data_parallel_ranks_take_whole_groups_and_the_full_size_is_no_exception(self) -> None:
        # 24 groups in 4 minibatches: 6 per minibatch, so 1, 2, 3 or 6 ranks; of 8 GPUs never 8.
        config = changed(REASONING, data__rollout_batch_size=24, actor__model__tensor_model_parallel_size=1)
        problem = Problem.from_config(config)
        assert sorted(seconds(problem, "actor")) == [1, 2, 3, 6]
        assert sorted(seconds(problem, "rollout")) == [2, 4, 6, 8]
        assert "actor is not placed on the 8 GPUs that it was measured on" in " ".join(problem.notes)

    def test_without_recomputed_log_probabilities_there_is_no_inference(self) -> None:
        config = changed(REASONING, algorithm__recompute_logprobs=False, profile_data__inference_cost=None)
        problem = Problem.from_config(config)
        assert [component.name for component in problem.components] == ["rollout", "actor"]
        assert [(edge.source, edge.target) for edge in problem.edges] == [("rollout", "actor")]

    def test_inference_is_parallel_as_the_actor_unless_it_says_otherwise(self) -> None:
        own = changed(REASONING, inference__model={"tensor_model_parallel_size": 2})
        assert sorted(seconds(Problem.from_config(own), "inference")) == [2, 4, 8]
        assert sorted(seconds(Problem.from_config(REASONING), "inference")) == [4, 8]

    def test_mixed_lifts_the_restriction_to_what_rlinf_accepts(self) -> None:
        assert Problem.from_config(REASONING, mixed=True).layout is Layout.ANY

    @pytest.mark.parametrize("nodes", [(4,), (16,), (8, 8)])
    def test_figures_were_measured_on_the_gpus_that_the_config_states_whatever_the_cluster(
        self, nodes: tuple[int, ...]
    ) -> None:
        config = changed(REASONING, cluster__num_nodes=1, cluster__num_gpus_per_node=8)
        problem = Problem.from_config(config, nodes=nodes)
        assert seconds(problem, "rollout")[4] == pytest.approx(2 * 59.9)
        assert any("measured on the 1 × 8 = 8 GPUs" in note for note in problem.notes)

    def test_nodes_of_another_size_with_as_many_gpus_change_nothing(self) -> None:
        config = changed(REASONING, cluster__num_nodes=1, cluster__num_gpus_per_node=8)
        problem = Problem.from_config(config, nodes=(4, 4))
        assert seconds(problem, "rollout") == seconds(Problem.from_config(config), "rollout")
        assert not any("measured on" in note for note in problem.notes)

    def test_a_cost_that_nobody_uses_is_told(self) -> None:
        problem = Problem.from_config(changed(REASONING, profile_data__critic_cost=3.0))
        assert any("profile_data.critic_cost is not used" in note for note in problem.notes)


class TestMeasuredTables:
    def test_ap_11_measured_sizes_win_over_the_law_and_what_is_assumed_is_marked(self) -> None:
        table = {1: 10.0, 2: 6.0, 4: 5.0}
        base = changed(
            REASONING,
            cluster__num_gpus_per_node=4,
            actor__model__tensor_model_parallel_size=1,
            rollout__tensor_parallel_size=1,
        )
        measured = Problem.from_config(changed(base, profile_data__actor_cost=table))
        assert seconds(measured, "actor") == table
        assert estimated(measured, "actor") == []
        from_one = Problem.from_config(changed(base, profile_data__actor_cost=5.0))
        assert seconds(from_one, "actor") == {1: round(20 / 1.4, 6), 2: round(10 / 1.2, 6), 4: 5.0}
        assert estimated(from_one, "actor") == [1, 2]

    def test_between_measured_sizes_is_an_estimate_and_outside_is_nothing(self) -> None:
        problem = Problem.from_config(changed(REASONING, profile_data__rollout_cost={4: 120.0, 8: 60.0}))
        assert seconds(problem, "rollout") == {4: 120.0, 6: 80.0, 8: 60.0}
        assert estimated(problem, "rollout") == [6]

    def test_ap_05_keys_that_are_text_are_converted(self) -> None:
        text = Problem.from_config(changed(REASONING, profile_data__rollout_cost={"4": 120.0, "8": 60.0}))
        number = Problem.from_config(changed(REASONING, profile_data__rollout_cost={4: 120.0, 8: 60.0}))
        assert text == number

    def test_ap_02_one_point_is_used_for_its_size_alone(self) -> None:
        problem = Problem.from_config(changed(REASONING, profile_data__rollout_cost={8: 60.0}))
        assert seconds(problem, "rollout") == {8: 60.0}

    def test_ap_04_flat_costs_are_constant(self) -> None:
        problem = Problem.from_config(changed(REASONING, profile_data__rollout_cost={4: 0.8, 8: 0.8}))
        assert seconds(problem, "rollout") == {4: 0.8, 6: 0.8, 8: 0.8}

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 0, "fast", True, [1.0]])
    def test_ap_04_a_bad_sample_is_refused_by_its_name(self, bad: Any) -> None:
        assert list(faults_of(changed(REASONING, profile_data__rollout_cost=bad))) == ["profile_data.rollout_cost"]
        found = faults_of(changed(REASONING, profile_data__rollout_cost={8: 60.0, 4: bad}))
        assert list(found) == ['profile_data.rollout_cost["4"]']

    @pytest.mark.parametrize("key", [0, -4, "four", "4.0", True, 1 << 40])
    def test_ap_05_a_size_that_is_none_is_refused_by_its_name(self, key: Any) -> None:
        found = faults_of(changed(REASONING, profile_data__rollout_cost={key: 60.0}))
        assert len(found) == 1
        assert "is not a number of GPUs" in next(iter(found.values()))


class TestEmbodied:
    def test_environments_and_rollout_take_turns_before_the_actor(self) -> None:
        problem = Problem.from_config(EMBODIED)
        assert [(edge.source, edge.target, edge.kind) for edge in problem.edges] == [
            ("env", "rollout", EdgeKind.STREAM),
            ("rollout", "env", EdgeKind.STREAM),
            ("rollout", "actor", EdgeKind.BARRIER),
        ]
        assert (problem.chunks, problem.layout) == (2, Layout.ANY)

    def test_costs_follow_the_environments_of_the_fullest_instance(self) -> None:
        problem = Problem.from_config(EMBODIED)
        # 16, 8, 6 and 4 environments on each of 1, 2, 3 and 4 GPUs; 6 was not measured.
        between = 25.8 * (30.3 / 25.8) ** math.log2(6 / 4)
        assert seconds(problem, "env") == {1: 36.5, 2: 30.3, 3: round(between, 6), 4: 25.8}
        assert estimated(problem, "env") == [3]
        assert sorted(seconds(problem, "rollout")) == [1, 2, 3, 4]

    def test_ap_10_work_per_instance_is_rounded_up_and_no_instance_is_empty(self) -> None:
        table = {envs: float(envs) for envs in (1, 2, 4, 13, 14, 20, 40)}
        config = changed(
            EMBODIED, cluster__num_gpus_per_node=64, data__env_num=40, profile_data__env_profile_data=table
        )
        found = seconds(Problem.from_config(changed(config, profile_data__rollout_profile_data=table)), "env")
        assert found[3] == 14
        assert found[39] == 2
        assert found[40] == 1
        assert max(found) == 40

    def test_an_instance_of_several_gpus_counts_once(self) -> None:
        problem = Problem.from_config(changed(EMBODIED, rollout__tensor_parallel_size=2))
        assert seconds(problem, "rollout") == {2: 37.2, 4: 30.7}

    def test_environments_beyond_what_was_measured_have_no_cost(self) -> None:
        with pytest.raises(NoPlan) as caught:
            Problem.from_config(changed(EMBODIED, data__env_num=1024))
        assert [cause.component for cause in caught.value.causes] == ["env", "rollout"]
        assert "256 to 1024 environments" in str(caught.value.causes[0])
        assert "4, 8, 16 were measured" in str(caught.value.causes[0])

    def test_stages_that_nobody_states_are_told(self) -> None:
        problem = Problem.from_config(changed(EMBODIED, rollout__pipeline_stage_num=None))
        assert problem.chunks == 2
        assert any("rollout.pipeline_stage_num" in note for note in problem.notes)


class TestMissingProfile:
    def test_without_any_profile_every_needed_cost_is_named(self) -> None:
        with pytest.raises(ProfileMissing, match="profile data not provided") as caught:
            Problem.from_config(changed(REASONING, profile_data=None))
        assert caught.value.keys == (
            "profile_data.rollout_cost",
            "profile_data.inference_cost",
            "profile_data.actor_cost",
        )

    @pytest.mark.parametrize("key", ["rollout_cost", "inference_cost", "actor_cost"])
    def test_the_missing_cost_is_named(self, key: str) -> None:
        with pytest.raises(ProfileMissing) as caught:
            Problem.from_config(changed(REASONING, **{f"profile_data__{key}": None}))
        assert caught.value.keys == (f"profile_data.{key}",)

    @pytest.mark.parametrize("key", ["env_profile_data", "rollout_profile_data", "actor_cost"])
    def test_the_missing_table_of_an_embodied_job_is_named(self, key: str) -> None:
        with pytest.raises(ProfileMissing) as caught:
            Problem.from_config(changed(EMBODIED, **{f"profile_data__{key}": None}))
        assert caught.value.keys == (f"profile_data.{key}",)

    def test_a_key_that_was_probably_meant_is_suggested(self) -> None:
        config = changed(REASONING, profile_data__inference_cost=None, profile_data__infer_cost=30.8)
        with pytest.raises(ProfileMissing, match="is infer_cost meant"):
            Problem.from_config(config)


class TestFaults:
    def test_all_faults_are_told_at_once_with_their_places(self) -> None:
        config = changed(
            REASONING,
            data__rollout_batch_size="many",
            algorithm__group_size=0,
            rollout__tensor_parallel_size=1.5,
            profile_data__actor_cost=-3,
        )
        assert set(faults_of(config)) == {
            "data.rollout_batch_size",
            "algorithm.group_size",
            "rollout.tensor_parallel_size",
            "profile_data.actor_cost",
        }

    @pytest.mark.parametrize(
        ("path", "meant"),
        [
            ("profile_data.inferense_cost", "inference_cost"),
            ("profile_dta", "profile_data"),
            ("algorithm.n_minibatchs", "n_minibatches"),
            ("algorithm.recompute_logprob", "recompute_logprobs"),
            ("algorithm.group_siz", "group_size"),
            ("rollout.max_runing_requests", "max_running_requests"),
            ("runner.task_typ", "task_type"),
            ("cluster.num_gpus_per_nodes", "num_gpus_per_node"),
        ],
    )
    def test_a_misspelt_key_is_told_once_and_never_passed_over(self, path: str, meant: str) -> None:
        """Also one with a default: else the answer would be that of another config."""
        section, _, key = path.rpartition(".")
        config: dict[str, Any] = copy.deepcopy(dict(REASONING))
        place = config.setdefault(section, {}) if section else config
        place[key] = place.pop(meant, 3)
        assert faults_of(config) == {path: f"unknown key '{key}'; did you mean {meant}?"}

    def test_a_power_of_ten_is_the_number_that_hydra_reads(self) -> None:
        assert read_yaml("a: 1e2\nb: -1.5E+3\nc: '1e2'\nd: 1e\n", ours=False) == {
            "a": 100.0,
            "b": -1500.0,
            "c": "1e2",
            "d": "1e",
        }
        assert read_yaml("a: 1e2\n") == {"a": "1e2"}

    def test_sizes_that_fit_nowhere_say_what_was_asked_for(self) -> None:
        with pytest.raises(NoPlan, match="asked for are multiples of 16"):
            Problem.from_config(changed(REASONING, rollout__tensor_parallel_size=16))

    def test_a_file_has_lines(self) -> None:
        text = "runner:\n  task_type: reasoning\ndata:\n  rollout_batch_size: many\nalgorithm:\n  group_size: 16\n"
        with pytest.raises(InvalidInput) as caught:
            rlinf_job(read_yaml(text))
        assert (4, 3) in {(fault.line, fault.column) for fault in caught.value.faults}

    def test_ap_14_another_kind_of_task_is_told_which_there_are(self) -> None:
        found = faults_of(changed(REASONING, runner__task_type="coding"))
        assert found["runner.task_type"] == "'coding' is unknown; use reasoning or embodied"

    def test_minibatches_must_be_of_whole_groups(self) -> None:
        assert "algorithm.n_minibatches" in faults_of(changed(REASONING, algorithm__n_minibatches=3))

    def test_ap_13_a_cluster_smaller_than_every_legal_count_names_the_component(self) -> None:
        with pytest.raises(NoPlan) as caught:
            Problem.from_config(changed(REASONING, cluster={"num_nodes": 1, "num_gpus_per_node": 3}))
        assert [cause.component for cause in caught.value.causes] == ["inference", "actor"]


class TestCluster:
    def test_gpus_per_node_may_be_stated(self) -> None:
        assert rlinf_job(changed(REASONING, cluster__num_nodes=2)).nodes == (8, 8)

    def test_else_they_are_taken_from_the_highest_rank_and_that_is_told(self) -> None:
        cluster = {"num_nodes": 2, "component_placement": {"actor": "0-7", "rollout": "8-13", "inference": "14,15"}}
        job = rlinf_job(changed(REASONING, cluster=cluster))
        assert job.nodes == (8, 8)
        assert any("taken from the ranks" in note for note in job.problem.notes)

    def test_else_eight_are_assumed_and_that_is_told(self) -> None:
        job = rlinf_job(changed(REASONING, cluster={"num_nodes": 2, "component_placement": {"actor,rollout": "all"}}))
        assert job.nodes == (8, 8)
        assert any("assumed" in note for note in job.problem.notes)

    def test_a_stated_cluster_wins(self) -> None:
        assert rlinf_job(REASONING, nodes=(4,)).problem.gpus == 4

    @pytest.mark.parametrize("placement", ["0-15", "0-7,12", "15", 9, "0-15:0-7", {"placement": "8-15"}])
    def test_a_current_placement_beyond_the_cluster_is_refused_with_both_numbers(self, placement: Any) -> None:
        found = faults_of(changed(REASONING, cluster__component_placement={"actor": "0-3", "rollout": placement}))
        assert list(found) == ['cluster.component_placement["rollout"]'] or len(found) == 1
        message = next(iter(found.values()))
        assert "doesn't exist" in message
        assert "8 GPUs (ranks 0 to 7)" in message

    def test_ranks_of_robots_and_of_nodes_are_not_gpus(self) -> None:
        cluster = {
            "num_nodes": 1,
            "num_gpus_per_node": 4,
            "component_placement": {
                "actor,rollout": "all",
                "env": {"node_group": "franka", "placement": "0-9"},
                "agent": {"node_group": "node", "placement": "0:0-199"},
            },
            "node_groups": [{"label": "franka", "node_ranks": 0, "hardware": {"type": "Franka", "configs": []}}],
        }
        assert rlinf_job(changed(REASONING, cluster=cluster)).problem.gpus == 4

    def test_components_in_a_node_group_are_searched_on_its_gpus(self) -> None:
        cluster = {
            "num_nodes": 3,
            "num_gpus_per_node": 4,
            "component_placement": {"actor,rollout": {"node_group": "a800", "placement": "all"}},
            "node_groups": [{"label": "a800", "node_ranks": "1-2"}, {"label": "4090", "node_ranks": 0}],
        }
        job = rlinf_job(changed(REASONING, cluster=cluster))
        assert job.group == "a800"
        assert job.problem.pools[0].gpu_ranks == tuple(range(4, 12))

    def test_costed_components_in_several_groups_are_refused_with_a_way_out(self) -> None:
        cluster = {
            "num_nodes": 2,
            "num_gpus_per_node": 8,
            "component_placement": {"actor": {"node_group": "a"}, "rollout": {"node_group": "b"}},
            "node_groups": [{"label": "a", "node_ranks": 0}, {"label": "b", "node_ranks": 1}],
        }
        assert "general form" in faults_of(changed(REASONING, cluster=cluster))["cluster.component_placement"]


class TestProfiledSize:
    def test_all_gpus_are_those_of_the_cluster(self) -> None:
        assert max(seconds(Problem.from_config(REASONING), "actor")) == 8

    def test_another_cluster_than_the_configs_own_keeps_the_size_that_was_measured(self) -> None:
        job = rlinf_job(REASONING, nodes=(8, 8))
        assert seconds(job.problem, "actor") == {4: 159.5, 8: 95.7}
        assert any("1 × 8 = 8 GPUs" in note and "larger counts have no cost" in note for note in job.problem.notes)

    def test_a_smaller_cluster_is_estimated_from_the_measured_one(self) -> None:
        job = rlinf_job(changed(REASONING, cluster={"num_nodes": 2, "num_gpus_per_node": 8}), nodes=(8,))
        assert estimated(job.problem, "actor") == [4, 8]

    def test_the_size_may_be_stated(self) -> None:
        job = rlinf_job(changed(REASONING, profile_data__num_gpus=4))
        assert seconds(job.problem, "actor") == {4: 95.7}


class TestFirstReleases:
    """What RLinf called things before."""

    def test_math_was_reasoning(self) -> None:
        old = rlinf_job(changed(REASONING, runner__task_type="math"))
        assert old.problem == rlinf_job(REASONING).problem

    def test_the_trainers_cost_is_the_actors(self) -> None:
        config = changed(REASONING, profile_data={"trainer_cost": 95.7, "inference_cost": 30.8, "rollout_cost": 59.9})
        with pytest.raises(ProfileMissing, match="is trainer_cost meant"):
            rlinf_job(config)


class TestDynamicScheduling:
    """The policy that lends the actor's GPUs to the rollout needs engines that divide them."""

    def test_the_actors_gpus_can_be_lent(self) -> None:
        cluster = {"num_nodes": 1, "num_gpus_per_node": 8, "auto_scheduler": True}
        sizes = {"rollout": {"tensor_parallel_size": 2}, "actor": {}, "inference": {}}
        costs = {"actor_cost": 40.0, "inference_cost": 1.0, "rollout_cost": 100.0}
        config = changed(REASONING, **sizes, profile_data=costs, data={"rollout_batch_size": 48})
        config["algorithm"] = {"group_size": 1, "n_minibatches": 1}
        lent = search(Problem.from_config({**config, "cluster": {**cluster, "use_pre_process_policy": True}}))
        free = search(Problem.from_config({**config, "cluster": cluster}))
        assert len(free.spans["actor"].gpu_ranks) == 1
        assert len(lent.spans["actor"].gpu_ranks) == 2


def test_what_cannot_be_resolved_is_not_called_missing_too() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create(changed(REASONING, data__rollout_batch_size="${oc.env:NOT_THERE_AT_ALL}"))
    with pytest.raises(InvalidInput) as caught:
        rlinf_job(config)
    (fault,) = caught.value.faults
    assert fault.message.startswith("can't be resolved")


def test_a_batch_of_too_many_pieces_is_refused() -> None:
    with pytest.raises(InvalidInput, match="1 to 1000000 is allowed"):
        rlinf_job(changed(REASONING, data__rollout_batch_size=20_000_000))
