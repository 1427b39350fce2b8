"""Is what is proposed for a reasoning job what RLinf's placement accepts, and is nothing that it accepts faster?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callboard.autoplace import Problem, Status, search
from callboard.autoplace.answer.report import answer_for_job, placement_of
from callboard.autoplace.problem.problem import Mode, ModelParallel, NoPlan
from callboard.autoplace.rlinf.job import RLinfJob, rlinf_job
from callboard.autoplace.solve.uniform import Uniform, best_collocated, best_disaggregated, pipeline_seconds
from callboard.model.cluster_text import NodeText, format_cluster
from callboard.model.faults import InvalidInput
from callboard.placement import Cluster, ModelParallelComponentPlacement, PlacementMode


def config_of(
    nodes: tuple[int, ...], sizes: Mapping[str, int], costs: Mapping[str, float], batch: int = 24, **cluster: Any
) -> dict[str, Any]:
    return {
        "runner": {"task_type": "reasoning"},
        "cluster": {"num_nodes": len(nodes), **cluster},
        "algorithm": {"group_size": 2, "n_minibatches": 1, "recompute_logprobs": "inference" in costs},
        "data": {"rollout_batch_size": batch},
        "rollout": {"tensor_parallel_size": sizes["rollout"], "max_running_requests": 8},
        "actor": {"model": {"tensor_model_parallel_size": sizes["actor"]}},
        "inference": {"model": {"tensor_model_parallel_size": sizes.get("inference", 1)}},
        "profile_data": {f"{name}_cost": cost for name, cost in costs.items()},
    }


def mode_of(config: Mapping[str, Any], nodes: tuple[int, ...], placement: Mapping[str, Any]) -> PlacementMode | None:
    """The mode that RLinf's placement finds; None: it refuses."""
    cluster = Cluster.from_nodes(format_cluster(NodeText(gpus=gpus) for gpus in nodes))
    try:
        placed = ModelParallelComponentPlacement(
            {**config, "cluster": {**config["cluster"], "component_placement": placement}}, cluster
        )
    except InvalidInput:
        return None
    return placed.plan.mode


def collocated_text(uniform: Uniform) -> dict[str, str]:
    first, gpus = uniform.starts["actor"], uniform.modes["actor"].gpus
    return {"rollout,actor": f"{first}-{first + gpus - 1}"}


def apart_text(uniform: Uniform) -> dict[str, str]:
    return {
        name: f"{uniform.starts[name]}-{uniform.starts[name] + mode.gpus - 1}" for name, mode in uniform.modes.items()
    }


def layouts(job: RLinfJob) -> Iterator[tuple[float, dict[str, str]]]:
    """Every collocated and every disaggregated layout, with its time."""
    components = job.problem.components
    total = job.problem.gpus
    by_gpus = [{mode.gpus: mode for mode in component.modes} for component in components]
    for gpus in set.intersection(*(set(modes) for modes in by_gpus)):
        for first in range(total - gpus + 1):
            yield sum(modes[gpus].seconds for modes in by_gpus), {"rollout,actor": f"{first}-{first + gpus - 1}"}
    for modes in product(*(component.modes for component in components)):
        if sum(mode.gpus for mode in modes) <= total:
            yield from apart(job, modes, total)


def apart(job: RLinfJob, modes: tuple[Mode, ...], total: int) -> Iterator[tuple[float, dict[str, str]]]:
    seconds = pipeline_seconds(modes, job.problem.chunks)
    for starts in product(*(range(total - mode.gpus + 1) for mode in modes)):
        ranks = [set(range(start, start + mode.gpus)) for start, mode in zip(starts, modes, strict=True)]
        if sum(len(each) for each in ranks) == len(set().union(*ranks)):
            yield (
                seconds,
                {
                    component.name: f"{start}-{start + mode.gpus - 1}"
                    for component, start, mode in zip(job.problem.components, starts, modes, strict=True)
                },
            )


def rules(job: RLinfJob) -> ModelParallel:
    assert job.problem.model_parallel is not None
    return job.problem.model_parallel


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[str, Any], tuple[int, ...]]:
    nodes = draw(st.sampled_from([(2,), (4,), (6,), (2, 2), (4, 2), (2, 4), (3, 3)]))
    names = ("rollout", "inference", "actor") if draw(st.booleans()) else ("rollout", "actor")
    sizes = {name: draw(st.sampled_from([1, 1, 2])) for name in names}
    costs = {name: draw(st.floats(1.0, 100.0)) for name in names}
    batch = draw(st.sampled_from([4, 6, 24]))
    return config_of(nodes, sizes, costs, batch, auto_scheduler=draw(st.booleans())), nodes


class TestBestOfAll:
    @settings(max_examples=60, deadline=None)
    @given(jobs())
    def test_no_layout_that_rlinf_accepts_is_faster(self, case: tuple[dict[str, Any], tuple[int, ...]]) -> None:
        config, nodes = case
        try:
            job = rlinf_job(config, nodes=nodes)
        except NoPlan:
            return
        found = [best_collocated(job.problem, rules(job)), best_disaggregated(job.problem, rules(job))]
        best = min((uniform.seconds for uniform in found if uniform is not None), default=float("inf"))
        faster = sorted(
            ((seconds, text) for seconds, text in layouts(job) if seconds < best * (1 - 1e-9)), key=lambda each: each[0]
        )
        accepted = [(seconds, text) for seconds, text in faster if mode_of(config, nodes, text) is not None]
        assert accepted == []

    @settings(max_examples=60, deadline=None)
    @given(jobs())
    def test_what_is_proposed_is_accepted_in_the_mode_that_it_claims(
        self, case: tuple[dict[str, Any], tuple[int, ...]]
    ) -> None:
        config, nodes = case
        try:
            job = rlinf_job(config, nodes=nodes)
        except NoPlan:
            return
        collocated, disaggregated = (
            best_collocated(job.problem, rules(job)),
            best_disaggregated(job.problem, rules(job)),
        )
        if collocated is not None:
            assert mode_of(config, nodes, collocated_text(collocated)) is PlacementMode.COLLOCATED
        if disaggregated is not None:
            auto = config["cluster"]["auto_scheduler"]
            meant = PlacementMode.AUTO if auto else PlacementMode.DISAGGREGATED
            assert mode_of(config, nodes, apart_text(disaggregated)) is meant


class TestAnswer:
    @settings(max_examples=40, deadline=None)
    @given(jobs(), st.sampled_from(["all", "0-1", "1", None]))
    def test_the_section_to_paste_is_accepted_and_no_layout_at_all_is_faster_than_the_one_beside_it(
        self, case: tuple[dict[str, Any], tuple[int, ...]], reward: str | None
    ) -> None:
        config, nodes = case
        if reward is not None:
            config["cluster"]["component_placement"] = {"reward": reward}
        try:
            job = rlinf_job(config, nodes=nodes)
            answer = answer_for_job(job, search)
        except NoPlan:
            return
        placement = placement_of(answer)
        assert mode_of(config, nodes, placement) is not None
        assert ("reward" in placement) == (reward is not None)
        assert answer.unrestricted is not None
        assert answer.unrestricted.iteration_seconds <= answer.plan.iteration_seconds * (1 + 1e-5)
        assert answer.plan.status is Status.OPTIMAL
        assert answer.plan.gap == 0

    @settings(max_examples=40, deadline=None)
    @given(jobs())
    def test_the_python_interface_proposes_what_the_command_does(
        self, case: tuple[dict[str, Any], tuple[int, ...]]
    ) -> None:
        config, nodes = case
        try:
            problem = Problem.from_config(config, nodes=nodes)
            plan = search(problem)
        except NoPlan:
            return
        assert plan == answer_for_job(rlinf_job(config, nodes=nodes), search).plan
        assert mode_of(config, nodes, plan.component_placement()) is not None
        if plan.layout == "collocated":
            assert len({span.gpu_ranks for span in plan.spans}) == 1
        assert plan.status is Status.OPTIMAL
        assert plan.alternatives[plan.layout] == pytest.approx(plan.iteration_seconds, rel=1e-6)

    def test_progress_is_told_of_what_needs_no_search(self) -> None:
        told: list[tuple[float, float]] = []
        costs = {"rollout": 59.9, "actor": 95.7}
        problem = Problem.from_config(config_of((4,), dict.fromkeys(costs, 1), costs), nodes=(4,))
        plan = search(problem, on_progress=lambda incumbent, bound: told.append((incumbent, bound)))
        assert told == [(plan.iteration_seconds, plan.iteration_seconds)]


class TestEngines:
    def test_an_engine_never_spans_two_nodes(self) -> None:
        """One actor of 1 GPU before engines of 2 would cut one at the end of the first node of 4."""
        costs = {"rollout": 50.0, "actor": 5.0}
        config = config_of((4, 4), {"rollout": 2, "actor": 1}, costs, batch=24)
        job = rlinf_job(config, nodes=(4, 4))
        best = best_disaggregated(job.problem, rules(job))
        assert best is not None
        assert best.modes["rollout"].gpus == 6
        assert best.starts["rollout"] % 2 == 0
        assert mode_of(config, (4, 4), apart_text(best)) is PlacementMode.DISAGGREGATED

    def test_an_engine_larger_than_every_node_has_no_plan_and_says_why(self) -> None:
        config = config_of((4, 4), {"rollout": 8, "actor": 1}, {"rollout": 50.0, "actor": 5.0})
        with pytest.raises(NoPlan, match="one engine takes 8 GPUs of one node, and no node has more than 4"):
            answer_for_job(rlinf_job(config, nodes=(4, 4)), search)

    def test_sizes_that_go_nowhere_together_have_no_plan(self) -> None:
        config = config_of((6,), {"rollout": 4, "actor": 3}, {"rollout": 50.0, "actor": 5.0}, batch=1)
        with pytest.raises(NoPlan, match="--mixed") as caught:
            answer_for_job(rlinf_job(config, nodes=(6,)), search)
        assert [(cause.component, cause.gpus) for cause in caught.value.causes] == [("rollout", (4,)), ("actor", (3,))]

    def test_an_actor_whose_size_is_no_multiple_of_the_rollouts_is_never_collocated(self) -> None:
        config = config_of((6,), {"rollout": 2, "actor": 3}, {"rollout": 50.0, "actor": 50.0})
        job = rlinf_job(config, nodes=(6,))
        assert best_collocated(job.problem, rules(job)) is None
        assert mode_of(config, (6,), {"rollout,actor": "0-5"}) is None

    def test_the_auto_scheduler_gets_every_gpu_in_its_own_order(self) -> None:
        costs = {"rollout": 60.0, "inference": 10.0, "actor": 30.0}
        sizes = dict.fromkeys(costs, 1)
        config = config_of((8,), sizes, costs, auto_scheduler=True)
        job = rlinf_job(config, nodes=(8,))
        best = best_disaggregated(job.problem, rules(job))
        assert best is not None
        assert best_collocated(job.problem, rules(job)) is None
        assert sum(mode.gpus for mode in best.modes.values()) == 8
        assert best.starts["actor"] < best.starts["rollout"] < best.starts["inference"]


@pytest.mark.parametrize("chunks", [1, 2, 7, 128])
def test_a_pipeline_of_two_takes_rlinfs_own_formula(chunks: int) -> None:
    modes = [Mode(pool="gpu", gpus=1, seconds=seconds, held_seconds=seconds) for seconds in (59.9, 95.7)]
    pieces = [mode.seconds / chunks for mode in modes]
    assert pipeline_seconds(modes, chunks) == pytest.approx(sum(pieces) + max(pieces) * (chunks - 1))
