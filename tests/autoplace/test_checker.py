"""Does the checker find what is wrong with a plan? A check that agrees with everything checks nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from callboard.autoplace import NoPlan, Plan, Problem, predict, search
from callboard.autoplace.problem.plan import Spans
from callboard.autoplace.solve.checker import CheckFailed, check_plan
from tests.autoplace.instances import workflows


def plan() -> Plan:
    """Two stages that stream on a half of the GPUs each, then a third on all of them."""
    return search(
        Problem.from_mapping(
            {
                "workflow": {
                    "chunks": 10,
                    "components": {
                        "a": {"seconds_by_gpus": {2: 10.0}, "memory_gib": 20},
                        "b": {"seconds_by_gpus": {2: 10.0}, "memory_gib": 20},
                        "c": {"seconds_by_gpus": {4: 5.0}, "memory_gib": 40},
                    },
                    "edges": [["a", "b", "stream"], ["b", "c", "barrier"]],
                },
                "cluster": {"nodes": [{"gpus": 4, "memory_gib": 80}]},
            }
        )
    )


def changed(original: Plan, component: str, **fields: Any) -> Plan:
    """The plan with one span changed."""
    spans = tuple(replace(s, **fields) if s.component == component else s for s in original.spans)
    return replace(original, spans=Spans(spans))


def test_a_good_plan_passes() -> None:
    good = plan()
    assert good.iteration_seconds == pytest.approx(16.0)
    assert check_plan(good).checked_seconds == pytest.approx(16.0)


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_a_wrong_time_is_found(factor: float) -> None:
    good = plan()
    with pytest.raises(CheckFailed, match="its simulation"):
        check_plan(replace(good, iteration_seconds=good.iteration_seconds * factor, lower_bound_seconds=0))


def test_stages_on_the_same_gpus_are_found_not_to_overlap() -> None:
    good = plan()
    with pytest.raises(CheckFailed, match="its simulation"):
        check_plan(changed(good, "b", gpu_ranks=good.span("a").gpu_ranks))


def test_a_range_with_a_hole_is_found() -> None:
    with pytest.raises(CheckFailed, match="no range"):
        check_plan(changed(plan(), "a", gpu_ranks=(0, 2)))


def test_a_count_without_a_cost_is_found() -> None:
    with pytest.raises(CheckFailed, match="no mode"):
        check_plan(changed(plan(), "a", gpu_ranks=(0, 1, 2)))


def test_full_memory_is_found() -> None:
    good = plan()
    tight = replace(good.problem, pools=(replace(good.problem.pools[0], memory_gib=50.0),))
    with pytest.raises(CheckFailed, match="GiB"):
        check_plan(replace(good, problem=tight))


def test_a_bound_above_the_plan_is_found() -> None:
    with pytest.raises(CheckFailed, match="bound"):
        check_plan(replace(plan(), lower_bound_seconds=17.0))


def test_a_batch_of_one_piece_lets_others_start_before_it_is_handed_on() -> None:
    # c switches on the GPU that a left while b still works on the piece that both wait for.
    shared = {"seconds_by_gpus": {1: 0.25}, "switch_seconds": 1}
    found = search(
        Problem.from_mapping(
            {
                "workflow": {
                    "chunks": 1,
                    "components": {"a": shared, "b": {"seconds_by_gpus": {0: 0.25}}, "c": shared},
                    "edges": [["a", "b", "stream"], ["a", "c", "stream"], ["b", "c", "stream"]],
                },
                "cluster": {"nodes": [{"gpus": 1}]},
            }
        )
    )
    assert found.checked_seconds == found.iteration_seconds == 2.5


@given(workflow=workflows(most=4, gpus=4, plain_form=False))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_simulation_agrees_with_every_plan(workflow: dict[str, Any]) -> None:
    try:
        found = search(Problem.from_mapping(workflow), time_limit=None)
    except NoPlan:
        return
    assert found.checked_seconds == pytest.approx(found.iteration_seconds, rel=1e-3)


def test_a_million_pieces_are_played_through_in_coarser_ones() -> None:
    table = {"seconds_by_gpus": {1: 8.0}}
    found = search(
        Problem.from_mapping(
            {"gpus": 2, "chunks": 1_000_000, "components": {"a": table, "b": table}, "edges": [["a", "b", "stream"]]}
        )
    )
    assert found.iteration_seconds == pytest.approx(8.0, rel=1e-4)
    assert found.checked_seconds == pytest.approx(8.0, rel=1e-3)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workflow=workflows())
def test_what_is_predicted_of_a_layout_is_never_less_than_the_best_and_right_for_split_ones(
    workflow: dict[str, Any],
) -> None:
    problem = Problem.from_mapping(workflow)
    plan = search(problem)
    placement = {span.component: span.gpu_ranks for span in plan.spans}
    predicted = predict(problem, placement)
    assert predicted >= plan.iteration_seconds * (1 - 1e-3)
    apart = len({rank for ranks in placement.values() for rank in ranks}) == sum(map(len, placement.values()))
    if apart:
        assert predicted == pytest.approx(plan.iteration_seconds, rel=1e-3)


def test_a_layout_is_predicted_with_its_turns_switches_and_weight_sync() -> None:
    problem = Problem.from_mapping(
        {
            "workflow": {
                "chunks": 8,
                "components": {
                    "rollout": {"seconds_by_gpus": {1: 24.0, 2: 12.0}, "switch_seconds": 3.0},
                    "actor": {"seconds_by_gpus": {1: 18.0, 2: 9.0}, "switch_seconds": 2.0},
                },
                "edges": [["rollout", "actor", "stream"]],
            },
            "cluster": {"nodes": [{"gpus": 2}]},
            "weight_sync_seconds": 1.5,
        }
    )
    assert predict(problem, {"rollout": [0, 1], "actor": [0, 1]}) == pytest.approx(12 + 3 + 9 + 2 + 1.5)
    assert predict(problem, {"rollout": [0], "actor": [1]}) == pytest.approx(24 + 18 / 8 + 1.5)
    with pytest.raises(NoPlan, match="actor: it has no cost on 0 GPUs; measure it there"):
        predict(problem, {"rollout": [0], "actor": []})
