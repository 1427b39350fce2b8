"""Is the plan the best one, proved, checked, the same every time, and there when the search is cut short?"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from callboard.autoplace import Layout, NoPlan, Problem, Status, search
from callboard.autoplace.exact import cpsat
from callboard.autoplace.exact.cpsat_model import Model
from callboard.autoplace.instance.instances import instance_of
from callboard.autoplace.solve import synchronous
from tests.autoplace.brute import best_seconds
from tests.autoplace.instances import plain, recorded, workflows

CHAIN3 = recorded("chain3")
DAG = recorded("dag")
TIGHT = recorded("tight")
"""Where many layouts nearly fit: what lies side by side is decided pair by pair, or nothing is proved."""

AGREES = 1e-3


@pytest.mark.parametrize("row", CHAIN3 + DAG + TIGHT, ids=lambda row: str(row["name"]))
def test_recorded_instances_are_proved_at_their_best_time(row: dict[str, Any]) -> None:
    plan = search(Problem.from_mapping(plain(row)), time_limit=None)
    assert plan.status is Status.OPTIMAL
    assert plan.iteration_seconds == pytest.approx(row["best_seconds"], rel=AGREES)
    assert plan.gap == 0
    assert plan.checked_seconds == pytest.approx(plan.iteration_seconds, rel=AGREES)
    if row.get("rlinf_seconds") is not None:
        assert plan.iteration_seconds <= row["rlinf_seconds"] + 5e-4  # its figures are whole milliseconds
    for seconds in plan.alternatives.values():
        assert seconds is None or seconds >= plan.iteration_seconds - 1e-6


@given(workflow=workflows())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_brute_force_over_all_plans_agrees(workflow: dict[str, Any]) -> None:
    problem = Problem.from_mapping(workflow)
    best = best_seconds(problem)
    assert best is not None
    assert search(problem, time_limit=None, solver=False).iteration_seconds == pytest.approx(best, rel=1e-6)


@given(workflow=workflows(most=3, gpus=6))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_brute_force_on_six_gpus_agrees(workflow: dict[str, Any]) -> None:
    problem = Problem.from_mapping(workflow)
    assert search(problem, time_limit=None).iteration_seconds == pytest.approx(best_seconds(problem), rel=1e-6)


@given(workflow=workflows(most=3, gpus=4, plain_form=False))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_brute_force_with_memory_offloading_and_switching_agrees(workflow: dict[str, Any]) -> None:
    problem = Problem.from_mapping(workflow)
    best = best_seconds(problem)
    if best is None:
        with pytest.raises(NoPlan):
            search(problem, time_limit=None)
    else:
        assert search(problem, time_limit=None).iteration_seconds == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("plain_form", [True, False])
def test_the_solver_alone_finds_what_brute_force_finds(monkeypatch: pytest.MonkeyPatch, plain_form: bool) -> None:
    monkeypatch.setattr(synchronous, "NODES_BEFORE_SOLVER", 0)
    by: set[str] = set()

    @given(workflow=workflows(most=3, gpus=4, plain_form=plain_form))
    @settings(max_examples=15, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    def agree(workflow: dict[str, Any]) -> None:
        problem = Problem.from_mapping(workflow)
        best = best_seconds(problem)
        if best is None:
            with pytest.raises(NoPlan):
                search(problem, time_limit=None, solver=True)
            return
        plan = search(problem, time_limit=None, solver=True)
        by.add(plan.solver)
        assert plan.status is Status.OPTIMAL
        assert plan.iteration_seconds == pytest.approx(best, rel=1e-6)

    agree()
    assert "cp-sat" in by


@pytest.mark.parametrize("plain_form", [True, False])
def test_deciding_late_who_offloads_and_shares_finds_what_brute_force_finds(
    monkeypatch: pytest.MonkeyPatch, plain_form: bool
) -> None:
    monkeypatch.setattr(synchronous, "FEW_COMBINATIONS", 0)
    monkeypatch.setattr(synchronous, "FEW_WITH_MEMORY", 0)

    @given(workflow=workflows(most=3, gpus=4, plain_form=plain_form))
    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    def agree(workflow: dict[str, Any]) -> None:
        problem = Problem.from_mapping(workflow)
        best = best_seconds(problem)
        if best is None:
            with pytest.raises(NoPlan):
                search(problem, time_limit=None)
            return
        plan = search(problem, time_limit=None, solver=False)
        assert plan.status is Status.OPTIMAL
        assert plan.iteration_seconds == pytest.approx(best, rel=1e-6)

    agree()


def test_the_solver_goes_on_where_branch_and_bound_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synchronous, "NODES_BEFORE_SOLVER", 5)
    row = next(row for row in DAG if row["name"] == "dag-05-7c-16g")
    plan = search(Problem.from_mapping(plain(row)), time_limit=None)
    assert (plan.status, plan.solver) == (Status.OPTIMAL, "cp-sat")
    assert plan.iteration_seconds == pytest.approx(row["best_seconds"], rel=AGREES)


def test_a_tie_break_that_is_ended_shows_the_plan_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synchronous, "NODES_BEFORE_SOLVER", 0)
    monkeypatch.setattr(synchronous, "ordered_plan", lambda instance, length, halt: None)
    row = next(row for row in DAG if row["name"] == "dag-10-4c-64g")
    plan = search(Problem.from_mapping(plain(row)), time_limit=None)
    assert (plan.status, plan.gap) == (Status.FEASIBLE, 0)
    assert any("any one may be shown" in note for note in plan.notes)


def test_the_solver_hears_a_stop_while_it_breaks_ties() -> None:
    row = next(row for row in DAG if row["name"] == "dag-08-8c-16g")
    instance = instance_of(Problem.from_mapping(plain(row)))
    length = round(row["best_seconds"] * 1.0001 / instance.unit_seconds)
    assert cpsat.ordered_plan(instance, length, lambda: True) is None


def test_the_solver_shows_the_same_plan_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synchronous, "NODES_BEFORE_SOLVER", 0)
    row = next(row for row in DAG if row["name"] == "dag-10-4c-64g")
    plans = [search(Problem.from_mapping(plain(row)), time_limit=None) for _ in range(3)]
    assert {plan.solver for plan in plans} == {"cp-sat"}
    assert plans[0] == plans[1] == plans[2]
    assert plans[0].status is Status.OPTIMAL


@pytest.mark.parametrize("mirrored", [False, True])
def test_the_solver_can_start_from_a_plan_and_from_its_mirror_image(mirrored: bool) -> None:
    components = {"a": {"seconds_by_gpus": {1: 4.0}}, "b": {"seconds_by_gpus": {3: 4.0}}}
    mapping = {"gpus": 4, "chunks": 8, "components": components, "edges": [["a", "b", "stream"]]}
    instance = instance_of(Problem.from_mapping(mapping))
    found = cpsat.ordered_plan(instance, round(4.5 / instance.unit_seconds), lambda: False)
    assert found is not None
    if mirrored:
        (capacity,) = instance.capacity
        columns = tuple(
            {pool: capacity - column - option.gpus for pool, column in of.items()}
            for of, option in zip(found.columns, found.options, strict=True)
        )
        found = replace(found, columns=columns)
    cp = cpsat.solver_module()
    model = Model(cp, instance, below=found.length + 1, bound=0)
    model.hint(found)
    solver = cp.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.fix_variables_to_their_hinted_value = True
    assert solver.solve(model.model) in (cp.OPTIMAL, cp.FEASIBLE)


def test_without_the_solver_five_components_are_still_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpsat, "find_spec", lambda name: None)
    for row in DAG:
        if len(row["components"]) <= 5:
            plan = search(Problem.from_mapping(plain(row)), time_limit=None)
            assert (plan.status, plan.solver, plan.notes) == (Status.OPTIMAL, "exact", ())
            assert plan.iteration_seconds == pytest.approx(row["best_seconds"], rel=AGREES)


def test_a_solver_that_cannot_be_imported_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise ImportError("libprotobuf is too new")

    monkeypatch.setattr(cpsat, "solver_module", broken)
    monkeypatch.setattr(synchronous, "NODES_BEFORE_SOLVER", 5)
    row = next(row for row in DAG if row["name"] == "dag-05-7c-16g")
    plan = search(Problem.from_mapping(plain(row)), time_limit=None)
    assert (plan.status, plan.solver) == (Status.OPTIMAL, "exact")
    assert plan.iteration_seconds == pytest.approx(row["best_seconds"], rel=AGREES)
    assert any("libprotobuf is too new" in note for note in plan.notes)


def test_a_solver_that_is_kept_away_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(cpsat, "find_spec", refuse)
    assert not cpsat.installed()


def test_without_the_solver_a_search_cut_short_says_what_it_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpsat, "find_spec", lambda name: None)
    row = next(row for row in DAG if row["name"] == "dag-08-8c-16g")
    polls = itertools.count()
    plan = search(Problem.from_mapping(plain(row)), time_limit=None, stop=lambda: next(polls) > 300)
    assert plan.status is Status.FEASIBLE
    assert any("OR-Tools" in note for note in plan.notes)
    assert plan.lower_bound_seconds <= row["best_seconds"] * (1 + 1e-6) <= plan.iteration_seconds * (1 + 2e-6)
    assert 0 < plan.gap < 0.2


def test_a_stop_at_once_returns_the_incumbent_with_a_bound() -> None:
    row = next(row for row in DAG if row["name"] == "dag-14-8c-32g")
    told: list[tuple[float, float]] = []
    plan = search(
        Problem.from_mapping(plain(row)),
        time_limit=None,
        on_progress=lambda incumbent, bound: told.append((incumbent, bound)),
        stop=lambda: bool(told),
    )
    assert plan.status is Status.FEASIBLE
    assert plan.iteration_seconds <= told[0][0]
    assert plan.lower_bound_seconds <= row["best_seconds"] * (1 + 1e-6)


class Alarm:
    """A timer that goes off when the test says so."""

    def __init__(self, seconds: float, ring: Callable[[], None]) -> None:
        self.seconds = seconds
        self.ring = ring
        self.daemon = False
        alarms.append(self)

    def start(self) -> None:
        """Nothing runs."""

    def cancel(self) -> None:
        """Nothing runs."""


alarms: list[Alarm] = []


@pytest.mark.parametrize("objective", ["sync", "async"])
@pytest.mark.parametrize("row", [CHAIN3[3], DAG[8], TIGHT[0]], ids=lambda row: str(row["name"]))
def test_a_search_without_any_time_still_has_a_plan(row: dict[str, Any], objective: str) -> None:
    plan = search(Problem.from_mapping({**plain(row), "objective": objective}), time_limit=None, stop=lambda: True)
    assert plan.status is Status.FEASIBLE
    assert plan.lower_bound_seconds <= plan.iteration_seconds
    pure = [plan.alternatives[kind] for kind in ("collocated", "disaggregated")]
    assert plan.iteration_seconds == min(seconds for seconds in pure if seconds is not None)


@pytest.mark.parametrize("polls_before", [0, 400])
def test_an_alarm_ends_the_search_as_a_time_limit(monkeypatch: pytest.MonkeyPatch, polls_before: int) -> None:
    monkeypatch.setattr("callboard.autoplace.instance.stopping.threading.Timer", Alarm)
    polls = itertools.count()

    def stop() -> bool:
        if next(polls) >= polls_before:
            alarms[-1].ring()
        return False

    row = next(row for row in DAG if row["name"] == "dag-08-8c-16g")
    plan = search(Problem.from_mapping(plain(row)), time_limit=7.5, stop=stop)
    assert plan.status is Status.TIME_LIMIT
    assert plan.lower_bound_seconds <= row["best_seconds"] <= plan.iteration_seconds * (1 + 1e-6)
    assert alarms[-1].seconds == 7.5


def test_ctrl_c_returns_the_incumbent() -> None:
    row = next(row for row in DAG if row["name"] == "dag-08-8c-16g")
    polls = itertools.count()

    def stop() -> bool:
        if next(polls) == 400:
            raise KeyboardInterrupt
        return False

    plan = search(Problem.from_mapping(plain(row)), time_limit=None, stop=stop)
    assert plan.status is Status.FEASIBLE
    assert plan.iteration_seconds >= row["best_seconds"] * (1 - 1e-6)


def test_ctrl_c_while_the_solver_runs_returns_the_incumbent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synchronous, "NODES_BEFORE_SOLVER", 0)
    row = next(row for row in DAG if row["name"] == "dag-08-8c-16g")

    def stop() -> bool:
        if any(thread.name.startswith("autoplace-solver") for thread in threading.enumerate()):
            raise KeyboardInterrupt
        return False

    plan = search(Problem.from_mapping(plain(row)), time_limit=None, stop=stop)
    assert (plan.status, plan.solver) == (Status.FEASIBLE, "cp-sat")
    assert plan.lower_bound_seconds <= row["best_seconds"] * (1 + 1e-6) <= plan.iteration_seconds * (1 + 2e-6)
    assert not any(thread.name.startswith("autoplace-solver") for thread in threading.enumerate())


def test_progress_never_gets_worse_and_ends_at_the_plan() -> None:
    row = next(row for row in DAG if row["name"] == "dag-05-7c-16g")
    told: list[tuple[float, float]] = []
    plan = search(Problem.from_mapping(plain(row)), on_progress=lambda a, b: told.append((a, b)), time_limit=None)
    assert told
    for (worse, lower), (better, higher) in itertools.pairwise(told):
        assert better <= worse
        assert lower <= higher
    assert told[-1][0] == pytest.approx(plan.iteration_seconds)
    assert all(bound <= incumbent for incumbent, bound in told)


def test_a_gap_that_is_good_enough_ends_the_search() -> None:
    row = next(row for row in DAG if row["name"] == "dag-08-8c-16g")
    plan = search(Problem.from_mapping(plain(row)), time_limit=None, gap=0.1)
    assert plan.status is Status.FEASIBLE
    assert plan.gap <= 0.1


def test_a_plan_is_never_worse_than_a_pure_layout() -> None:
    for row in DAG[:6]:
        problem = Problem.from_mapping(plain(row))
        free = search(problem)
        for layout in (Layout.COLLOCATED, Layout.DISAGGREGATED, Layout.UNIFORM):
            if layout is Layout.DISAGGREGATED and free.alternatives["disaggregated"] is None:
                with pytest.raises(NoPlan, match="disaggregated"):
                    search(_with_layout(plain(row), layout))
                continue
            pure = search(_with_layout(plain(row), layout))
            assert free.iteration_seconds <= pure.iteration_seconds + 1e-6
            assert pure.status is Status.OPTIMAL
            if layout is not Layout.UNIFORM:
                assert pure.iteration_seconds == pytest.approx(free.alternatives[layout.value])
                assert pure.layout == layout.value


def _with_layout(mapping: dict[str, Any], layout: Layout) -> Problem:
    return Problem.from_mapping({**mapping, "layout": layout.value})


PRINT_PLANS = """
import json, sys
from callboard.autoplace import Problem, search
for mapping in json.load(sys.stdin):
    plan = search(Problem.from_mapping(mapping), time_limit=None)
    print(plan.status, plan.iteration_seconds, plan.spans, dict(plan.alternatives), plan.component_placement())
"""


def plans_as_text(mappings: list[dict[str, Any]], seed: int) -> str:
    """What a fresh interpreter prints for some problems."""
    import json

    return subprocess.run(
        [sys.executable, "-c", PRINT_PLANS],
        input=json.dumps(mappings),
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_the_same_input_gives_the_same_bytes_whatever_the_hash_seed() -> None:
    mappings = [plain(row) for row in (*CHAIN3[15:17], *DAG[3:8])]
    first = plans_as_text(mappings, 0)
    assert first.count("OPTIMAL") == len(mappings)
    assert all(plans_as_text(mappings, seed) == first for seed in (1, 4242))


def test_ties_go_to_fewer_gpus() -> None:
    # Beyond two GPUs nothing gets faster, so nothing else may be held.
    plan = search(
        Problem.from_mapping(
            {
                "gpus": 8,
                "chunks": 1,
                "components": {
                    "a": {"seconds_by_gpus": {1: 9, 2: 5, 4: 5, 8: 5}},
                    "b": {"seconds_by_gpus": {1: 3, 2: 2, 8: 1}},
                },
                "edges": [["a", "b", "stream"]],
            }
        )
    )
    assert plan.iteration_seconds == 6
    assert (plan.span("a").gpus, plan.span("b").gpus) == (2, 8)


def test_many_ways_to_offload_still_have_both_pure_layouts() -> None:
    components = {
        f"c{i}": {"seconds_by_gpus": {1: 4.0 + i, 8: 1.0 + i / 8}, "memory_gib": 40, "offload_seconds": 0.5}
        for i in range(13)
    }
    told: list[float] = []
    plan = search(
        Problem.from_mapping(
            {
                "workflow": {"components": components},
                "cluster": {"nodes": [{"gpus": 16, "memory_gib": 80}]},
            }
        ),
        on_progress=lambda incumbent, _: told.append(incumbent),
        stop=lambda: len(told) > 1,
        solver=False,
    )
    collocated, apart = plan.alternatives["collocated"], plan.alternatives["disaggregated"]
    assert collocated is not None
    assert apart is not None
    assert plan.iteration_seconds <= min(collocated, apart)
