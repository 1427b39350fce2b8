"""Do three ways to search agree where brute force can't go: two pools, transfers, cycles, CPUs, memory?"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from callboard.autoplace import NoPlan, Plan, Problem, Status, search
from callboard.autoplace.solve import synchronous

SECONDS = st.integers(1, 60).map(lambda quarter: quarter / 4)


@st.composite
def on_two_pools(draw: st.DrawFn) -> dict[str, Any]:
    """A workflow of two to four components on pools ``p`` and ``q``; the first two may go round in a cycle."""
    size = draw(st.integers(2, 4))
    pools = {"p": draw(st.integers(1, 4)), "q": draw(st.integers(1, 4))}

    def table(gpus: int) -> dict[int, float]:
        counts = draw(st.sets(st.integers(1, gpus), min_size=1, max_size=2))
        return {count: draw(SECONDS) for count in sorted(counts)}

    components: dict[str, Any] = {}
    for i in range(size):
        kind = draw(st.sampled_from(["cpu", "any", "both", "p"]))
        component: dict[str, Any] = {
            "gpus": {"measured": True},
            "switch_seconds": draw(st.sampled_from([0, 0, 1])),
            "memory_gib": draw(st.sampled_from([0, 30, 50])),
        }
        if kind == "cpu":
            component["seconds_by_gpus"] = {0: draw(SECONDS)}
        elif kind == "any":
            component["seconds_by_gpus"] = table(min(pools.values()))
        else:
            component["seconds_by_pool"] = {pool: table(gpus) for pool, gpus in pools.items() if kind in ("both", pool)}
        if draw(st.booleans()):
            component["offload_seconds"] = 1
        components[f"c{i}"] = component
    cycle = draw(st.booleans())
    edges: list[dict[str, Any]] = [
        {
            "from": f"c{i}",
            "to": f"c{j}",
            "kind": draw(st.sampled_from(["stream", "barrier"])),
            "transfer_seconds": draw(st.sampled_from([0, 2, 5])),
        }
        for j in range(size)
        for i in range(j)
        if draw(st.booleans()) and not (cycle and j == 1)
    ]
    if cycle:
        edges += [{"from": "c0", "to": "c1"}, {"from": "c1", "to": "c0"}]
    return {
        "workflow": {"chunks": draw(st.sampled_from([1, 2, 16])), "components": components, "edges": edges},
        "cluster": {
            "nodes": [
                {"gpus": pools["p"], "group": "p", "memory_gib": 80},
                {"gpus": pools["q"], "group": "q", "memory_gib": 60},
            ]
        },
    }


def found(problem: Problem, *, solver: bool) -> Plan | None:
    """The proved plan; None: there is none."""
    try:
        plan = search(problem, time_limit=None, solver=solver)
    except NoPlan:
        return None
    assert plan.status is Status.OPTIMAL
    return plan


def agree(workflow: dict[str, Any], one: Plan | None, other: Plan | None) -> None:
    """Both are as fast, or neither is."""
    assert (one is None) == (other is None), workflow
    if one is not None and other is not None:
        assert one.iteration_seconds == pytest.approx(other.iteration_seconds, rel=1e-6)


@pytest.mark.parametrize("late", [True, False])
def test_branch_and_bound_and_the_solver_agree(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    @given(workflow=on_two_pools())
    @settings(max_examples=30, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def check(workflow: dict[str, Any]) -> None:
        try:
            problem = Problem.from_mapping(workflow)
        except NoPlan:
            return
        with monkeypatch.context() as patch:
            patch.setattr(synchronous, "FEW_COMBINATIONS", 1 << 30)
            patch.setattr(synchronous, "FEW_WITH_MEMORY", 1 << 30)
            one_by_one = found(problem, solver=False)
        with monkeypatch.context() as patch:
            if late:
                patch.setattr(synchronous, "FEW_COMBINATIONS", 0)
                patch.setattr(synchronous, "FEW_WITH_MEMORY", 0)
            else:
                patch.setattr(synchronous, "NODES_BEFORE_SOLVER", 0)
            agree(workflow, one_by_one, found(problem, solver=not late))

    check()


@given(workflow=on_two_pools(), staleness=st.sampled_from([0, 0.5, 1, 2]), sync=st.sampled_from([0, 1.5]))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_asynchronous_plans_hold_and_more_staleness_is_never_slower(
    workflow: dict[str, Any], staleness: float, sync: float
) -> None:
    def at(eta: float) -> Plan | None:
        mapping = {**workflow, "objective": {"async": {"staleness": eta}}, "weight_sync_seconds": sync}
        try:
            return found(Problem.from_mapping(mapping), solver=False)
        except NoPlan:
            return None

    less, more = at(staleness), at(staleness + 1)
    assert (less is None) == (more is None)
    if less is not None and more is not None:
        assert more.iteration_seconds <= less.iteration_seconds * (1 + 1e-6)


def test_a_cycle_that_fits_no_memory_is_named() -> None:
    component = {"seconds_by_gpus": {2: 4.0}, "memory_gib": 50}
    mapping = {
        "workflow": {
            "components": {"env": component, "policy": component},
            "edges": [["env", "policy"], ["policy", "env"]],
        },
        "cluster": {"nodes": [{"gpus": 3, "memory_gib": 80}]},
    }
    with pytest.raises(NoPlan, match="env ⇄ policy fits the GPUs"):
        search(Problem.from_mapping(mapping))
    mapping["cluster"] = {"nodes": [{"gpus": 4, "memory_gib": 80}]}
    assert search(Problem.from_mapping(mapping)).component_placement() == {"env": "0-1", "policy": "2-3"}
