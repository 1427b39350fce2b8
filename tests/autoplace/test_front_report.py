"""What is proposed to paste? Every costed component, uncosted ones where they still fit, and nothing RLinf refuses."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from callboard.autoplace.answer.report import (
    Answer,
    as_plain,
    comparison_rows,
    heading_lines,
    notes_of,
    placement_of,
    proof_of,
    table_lines,
)
from callboard.autoplace.problem.plan import Plan, Span, Spans, Status
from callboard.autoplace.rlinf.job import RLinfJob, rlinf_job

NODES = (8,)
CONFIG: dict[str, Any] = {
    "runner": {"task_type": "reasoning"},
    "algorithm": {"group_size": 16, "n_minibatches": 4},
    "data": {"rollout_batch_size": 128},
    "profile_data": {"actor_cost": 95.7, "inference_cost": 30.8, "rollout_cost": 59.9},
}


def job_of(placement: dict[str, Any] | None = None, nodes: tuple[int, ...] = NODES, **cluster: Any) -> RLinfJob:
    section = {"num_nodes": len(nodes), "component_placement": placement or {}, **cluster}
    return rlinf_job({**CONFIG, "cluster": section}, nodes=nodes)


def plan_of(job: RLinfJob, ranks: dict[str, range], seconds: float = 186.4, **fields: Any) -> Plan:
    """A plan with these ranges; who shares runs one after the other."""
    spans = tuple(
        Span(
            component=name,
            start_seconds=10.0 * place,
            end_seconds=10.0 * place + 10,
            gpu_ranks=tuple(own),
            pool=job.problem.pools[0].name,
            estimated=name == "actor",
            work_seconds=10.0,
        )
        for place, (name, own) in enumerate(ranks.items())
    )
    given = {
        "lower_bound_seconds": seconds,
        "status": Status.OPTIMAL,
        "layout": "collocated",
        "alternatives": MappingProxyType({"collocated": 186.4, "disaggregated": 205.0}),
        "solver": "exact",
    }
    return Plan(
        problem=job.problem,
        iteration_seconds=seconds,
        spans=Spans(spans),
        latency_seconds=seconds,
        checked_seconds=seconds,
        **{**given, **fields},
    )


ALL = {"rollout": range(8), "inference": range(8), "actor": range(8)}
APART = {"rollout": range(5), "inference": range(5, 6), "actor": range(6, 8)}


def pasted(placement: dict[str, Any], ranks: dict[str, range], **cluster: Any) -> dict[str, Any]:
    job = job_of(placement, **cluster)
    return placement_of(Answer(plan=plan_of(job, ranks), job=job))


class TestPlacement:
    def test_collocated_leaves_inference_inside_the_actor(self) -> None:
        assert pasted({}, ALL) == {"rollout,actor": "all"}

    def test_collocated_on_some_gpus_names_them(self) -> None:
        assert pasted({}, dict.fromkeys(ALL, range(4))) == {"rollout,actor": "0-3"}

    def test_disaggregated_names_every_component(self) -> None:
        assert pasted({}, APART) == {"rollout": "0-4", "inference": "5-5", "actor": "6-7"}

    def test_the_reward_keeps_its_ranks_where_they_lie_inside_the_rollouts(self) -> None:
        assert pasted({"actor,rollout": "all", "reward": "0-3"}, APART)["reward"] == "0-3"
        assert pasted({"actor,rollout": "all", "reward": 2}, APART)["reward"] == 2

    @pytest.mark.parametrize("old", ["all", "4-7", "0-3,7"])
    def test_else_it_gets_the_rollouts(self, old: str) -> None:
        assert pasted({"actor,rollout": "all", "reward": old}, APART)["reward"] == "0-4"

    def test_a_reward_that_shared_a_key_with_costed_ones_gets_one_of_its_own(self) -> None:
        assert pasted({"actor,rollout,reward": "all"}, APART)["reward"] == "0-4"
        assert pasted({"actor,rollout,reward": "all"}, ALL) == {"rollout,actor": "all", "reward": "all"}

    def test_components_of_other_node_groups_are_left_alone(self) -> None:
        agent = {"node_group": "node", "placement": "0:0-199"}
        assert pasted({"actor,rollout": "all", "agent": agent}, APART)["agent"] == agent

    def test_a_node_group_of_the_costed_components_is_kept(self) -> None:
        groups = [{"label": "a800", "node_ranks": "1"}]
        placement = {"actor,rollout": {"node_group": "a800", "placement": "all"}, "reward": "0-1"}
        job = job_of(placement, nodes=(4, 8), node_groups=groups)
        ranks = {"rollout": range(4, 9), "inference": range(9, 10), "actor": range(10, 12)}
        found = placement_of(Answer(plan=plan_of(job, ranks), job=job))
        assert found == {
            "rollout": {"node_group": "a800", "placement": "0-4"},
            "inference": {"node_group": "a800", "placement": "5-5"},
            "actor": {"node_group": "a800", "placement": "6-7"},
            "reward": "0-1",
        }


class TestText:
    def test_the_heading_is_rlinfs_own(self) -> None:
        job = job_of()
        assert heading_lines(Answer(plan=plan_of(job, ALL), job=job)) == [
            "Best placement for this task is:",
            "",
            "cluster:",
            "  num_nodes: 1",
            "  component_placement:",
            "    rollout,actor: all",
        ]

    def test_each_alternative_says_how_much_slower_it_is(self) -> None:
        job = job_of()
        plan = plan_of(job, ALL)
        free = plan_of(job, APART, seconds=180.0, layout="hybrid")
        rows = comparison_rows(Answer(plan=plan, job=job, unrestricted=free))
        assert rows[0] == ("collocated (chosen)", "186.4", "proved: no plan is faster")
        assert rows[1] == ("disaggregated", "205", "+10.0%")
        assert rows[2][:2] == ("any layout", "180")
        assert rows[2][2].startswith("-3.4%, with rollout 0-4, inference 5, actor 6-7: --mixed")

    def test_a_layout_that_is_impossible_says_so(self) -> None:
        job = job_of()
        plan = plan_of(job, ALL, alternatives=MappingProxyType({"collocated": 186.4, "disaggregated": None}))
        assert comparison_rows(Answer(plan=plan, job=job))[1] == ("disaggregated", "impossible", "")

    def test_a_search_that_was_cut_says_what_could_still_be_gained(self) -> None:
        plan = plan_of(job_of(), ALL, seconds=200.0, lower_bound_seconds=180.0, status=Status.TIME_LIMIT)
        assert proof_of(plan) == "at most 10.0% above the best possible (180 s); the time limit was reached"

    def test_estimated_sizes_are_named(self) -> None:
        job = job_of()
        notes = notes_of(Answer(plan=plan_of(job, APART), job=job))
        assert any("Not measured but estimated" in note and "actor" in note for note in notes)

    def test_notes_are_said_once(self) -> None:
        job = job_of()
        plan = plan_of(job, ALL, notes=("8 GPUs are x", *job.problem.notes, "8 GPUs are x"))
        notes = notes_of(Answer(plan=plan, job=job))
        assert len(notes) == len(set(notes))

    def test_programs_get_plain_values(self) -> None:
        job = job_of({"reward": "all"})
        found = as_plain(Answer(plan=plan_of(job, APART), job=job))
        assert found["cluster"] == {
            "num_nodes": 1,
            "component_placement": {"rollout": "0-4", "inference": "5-5", "actor": "6-7", "reward": "0-4"},
        }
        assert found["spans"][2]["gpu_ranks"] == [6, 7]
        assert found["spans"][2]["estimated"] is True

    def test_columns_line_up(self) -> None:
        lines = table_lines([("a", "bbb"), ("cccc", "d")], headings=("x", "y"))
        assert lines == ["x     y", "a     bbb", "cccc  d"]
