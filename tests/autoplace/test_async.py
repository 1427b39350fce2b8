"""Is the period the shortest one, and what does each step of staleness buy?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]

from callboard.autoplace import Layout, NoPlan, Plan, Problem, Status, search, staleness_table
from callboard.autoplace.problem.problem import EdgeKind
from callboard.autoplace.solve.batches import Rule, least_period
from callboard.autoplace.solve.splits import partitions_of
from tests.autoplace.instances import workflows


def problem_of(staleness: float, **changes: Any) -> Problem:
    """A rollout with a long tail and a trainer on 32 GPUs."""
    return Problem.from_mapping(
        {
            "workflow": {
                "components": {
                    "rollout": {
                        "seconds_by_gpus": {16: 60.0, 32: 32.0},
                        "work_gpu_seconds": 800.0,
                        "tail_seconds": 10.0,
                    },
                    "actor": {"seconds_by_gpus": {16: 52.0, 32: 30.0}},
                },
                "edges": [["rollout", "actor", "barrier"]],
            },
            "cluster": {"nodes": [{"gpus": 8, "count": 4}]},
            "objective": {"async": {"staleness": staleness}},
            **changes,
        }
    )


def test_the_tail_hides_under_the_next_batch() -> None:
    plan = search(problem_of(2))
    assert plan.status is Status.OPTIMAL
    assert plan.iteration_seconds == 52.0  # the trainer's; the rollout holds its 16 GPUs for 800 / 16 = 50 s
    assert plan.layout == "disaggregated"
    assert plan.span("rollout").tail_seconds == 10.0
    assert plan.span("actor").start_seconds == 60.0
    assert plan.latency_seconds == 112.0


def test_less_staleness_takes_longer_and_none_is_synchronous() -> None:
    table = staleness_table(problem_of(0), [0, 0.5, 1, 2, 10])
    periods = [plan.iteration_seconds for plan in table.values()]
    assert periods == sorted(periods, reverse=True)
    assert table[0].iteration_seconds == 62.0  # in turn on all GPUs: what a synchronous iteration takes
    assert table[1].iteration_seconds == 56.0  # 112 s within two periods
    assert table[2].iteration_seconds == table[10].iteration_seconds == 52.0
    for staleness, plan in table.items():
        assert plan.latency_seconds <= (staleness + 1) * plan.iteration_seconds + 1e-6


def test_weight_sync_is_overlapped_unless_everything_shares_the_gpus() -> None:
    plan = search(problem_of(2, weight_sync_seconds=3.0))
    assert plan.iteration_seconds == 52.0
    assert plan.latency_seconds == 115.0
    assert plan.alternatives["collocated"] == 65.0
    assert search(problem_of(2, weight_sync_seconds=3.0, objective="sync")).iteration_seconds == 65.0


def test_a_split_that_is_no_plan_is_refused_by_layout() -> None:
    mapping = {
        "gpus": 1,
        "components": {"a": {"seconds_by_gpus": {1: 1}}, "b": {"seconds_by_gpus": {1: 1}}},
        "objective": "async",
        "layout": "disaggregated",
    }
    with pytest.raises(NoPlan):
        search(Problem.from_mapping(mapping))
    assert search(Problem.from_mapping({**mapping, "layout": Layout.ANY.value})).iteration_seconds == 2


def test_a_stop_at_once_returns_the_incumbent() -> None:
    told: list[float] = []
    mapping = {
        "gpus": 8,
        "components": {
            f"c{i}": {"seconds_by_gpus": {g: (i + 3) / g + 0.1 * i for g in (1, 2, 4, 8)}} for i in range(6)
        },
        "edges": [[f"c{i}", f"c{i + 1}", "stream"] for i in range(5)],
        "objective": "async",
    }
    plan = search(Problem.from_mapping(mapping), on_progress=lambda best, _: told.append(best), stop=lambda: bool(told))
    best = search(Problem.from_mapping(mapping), time_limit=None)
    assert plan.status is Status.FEASIBLE
    assert best.status is Status.OPTIMAL
    assert plan.lower_bound_seconds <= best.iteration_seconds <= plan.iteration_seconds


def test_a_period_that_no_cycle_forbids_is_the_least() -> None:
    rules = [Rule(0, 1, 0.0, 0.0), Rule(1, 2, 7.0, 0.0), Rule(2, 1, 0.0, 2.0), Rule(2, 0, 0.0, 1.5)]
    steady = least_period(3, rules, 1.0, math.inf)
    assert steady is not None
    assert steady.period == pytest.approx(7 / 1.5, abs=1e-2)
    assert least_period(3, rules, 1.0, 4.0) is None
    assert least_period(3, [*rules, Rule(2, 1, 0.0, 0.0)], 1.0, math.inf) is None


@given(workflow=workflows(most=3, gpus=3), staleness=st.sampled_from([0, 0.5, 1, 2]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_period_is_what_linear_programs_over_all_splits_and_turns_say(
    workflow: dict[str, Any], staleness: float
) -> None:
    problem = Problem.from_mapping({**workflow, "objective": {"async": {"staleness": staleness}}})
    best = min(periods(problem, staleness), default=None)
    assert best is not None
    plan = search(problem, time_limit=None)
    assert plan.status is Status.OPTIMAL
    assert plan.iteration_seconds == pytest.approx(best, rel=1e-5)


def periods(problem: Problem, staleness: float) -> Iterator[float]:
    """The least period of every split into groups, choice of modes and order of turns, each by a linear program."""
    size = len(problem.components)
    for split in partitions_of(tuple(range(size)), frozenset()):
        for modes in product(*(component.modes for component in problem.components)):
            if sum(max(modes[i].gpus for i in group) for group in split) > problem.gpus:
                continue
            pairs = [(i, j) for group in split for i in group for j in group if i < j]
            yield from _programs(problem, staleness, [mode.seconds for mode in modes], pairs)


def _programs(
    problem: Problem, staleness: float, seconds: list[float], pairs: list[tuple[int, int]]
) -> Iterator[float]:
    solver = pywraplp.Solver.CreateSolver("GLOP")
    names = [component.name for component in problem.components]
    period = solver.NumVar(0, solver.infinity(), "period")
    starts = [solver.NumVar(0, solver.infinity(), "") for _ in names]
    ends = [solver.NumVar(0, solver.infinity(), "") for _ in names]
    for component, start, end, work in zip(problem.components, starts, ends, seconds, strict=True):
        solver.Add(end >= start + work + component.switch_seconds)
        solver.Add(end <= start + period)
        solver.Add(end <= (staleness + 1) * period)
    for edge in problem.edges:
        i, j = names.index(edge.source), names.index(edge.target)
        if edge.kind is EdgeKind.BARRIER:
            solver.Add(starts[j] >= ends[i])
        else:
            solver.Add(starts[j] >= starts[i] + seconds[i] / problem.chunks)
            solver.Add(ends[j] >= ends[i] + seconds[j] / problem.chunks)
    turns = [(solver.Add(ends[i] <= starts[j] + period), solver.Add(ends[j] <= starts[i] + period)) for i, j in pairs]
    solver.Minimize(period)
    for shifts in product(range(-3, 5), repeat=len(pairs)):
        for (first, second), shift in zip(turns, shifts, strict=True):
            first.SetCoefficient(period, -shift)
            second.SetCoefficient(period, shift - 1)
        if solver.Solve() == pywraplp.Solver.OPTIMAL:
            yield float(period.solution_value())


def test_every_plan_of_the_table_is_proved() -> None:
    plans: list[Plan] = list(staleness_table(problem_of(0), [0, 1]).values())
    assert [plan.status for plan in plans] == [Status.OPTIMAL] * 2
    assert all(better.iteration_seconds <= worse.iteration_seconds for worse, better in pairwise(plans))
