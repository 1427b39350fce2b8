"""Do the failures of another tool stay away? Each from a public report or its code, named by its id."""

from __future__ import annotations

import math
from typing import Any

import pytest

from callboard.autoplace import NoPlan, Plan, Problem, Status, search
from callboard.autoplace.exact.branch_and_bound import Shortest
from callboard.autoplace.exact.combination import Combination, Node, Times
from callboard.model import InvalidInput
from tests.autoplace.test_search import plans_as_text


def solved(components: dict[str, Any], edges: list[list[str]], gpus: int, chunks: int = 1) -> Plan:
    """The plan of a workflow on one pool."""
    plan = search(
        Problem.from_mapping(
            {
                "workflow": {"chunks": chunks, "components": components, "edges": edges},
                "cluster": {"nodes": [{"gpus": gpus}]},
            }
        )
    )
    assert plan.status is Status.OPTIMAL
    return plan


def test_ap_01_the_best_split_is_tried_on_two_gpus() -> None:
    components = {"rollout": {"seconds_by_gpus": {1: 8, 2: 8}}, "actor": {"seconds_by_gpus": {1: 1.67, 2: 1}}}
    plan = solved(components, [["rollout", "actor", "stream"]], gpus=2, chunks=8)
    assert plan.iteration_seconds == pytest.approx(8 + 1.67 / 8)
    assert plan.alternatives["collocated"] == 9
    assert [span.gpus for span in plan.spans] == [1, 1]


def test_ap_02_one_profile_point_is_used_for_its_size_only() -> None:
    plan = solved({"a": {"seconds_by_gpus": {1: 1.0}}}, [], gpus=4)
    assert plan.span("a").gpus == 1
    with pytest.raises(NoPlan, match="a: no cost is given"):
        solved({"a": {"seconds_by_gpus": {}}}, [], gpus=4)
    with pytest.raises(InvalidInput, match=r"a\.scaling: the law amdahl needs two measured counts"):
        solved({"a": {"seconds_by_gpus": {1: 1.0}, "scaling": "amdahl"}}, [], gpus=4)


def test_ap_04_flat_costs_are_constant_and_bad_samples_refused_by_name() -> None:
    plan = solved({"a": {"seconds_by_gpus": {4: 0.8, 8: 0.8}, "scaling": "amdahl"}}, [], gpus=16)
    assert plan.iteration_seconds == pytest.approx(0.8)
    modes = plan.problem.component("a").modes
    assert {round(mode.seconds, 9) for mode in modes} == {0.8}
    for bad in ({1: 0, 2: 0}, {1: math.nan}, {1: math.inf}, {1: -1.0}):
        with pytest.raises(InvalidInput, match=r"components\.a\.seconds_by_gpus\[1\]"):
            solved({"a": {"seconds_by_gpus": bad}}, [], gpus=4)


def test_ap_05_text_keys_are_converted() -> None:
    plan = solved({"a": {"seconds_by_gpus": {"1": 1.0, "2": 0.6}}}, [], gpus=2)
    assert plan.iteration_seconds == 0.6
    with pytest.raises(InvalidInput, match="listed twice"):
        solved({"a": {"seconds_by_gpus": {"1": 1.0, 1: 0.6}}}, [], gpus=2)


def test_ap_07_branching_graphs_lose_no_cut() -> None:
    table = {"seconds_by_gpus": {1: 4.0, 2: 3.9}}
    components = {"a": table, "b": table, "c": {"seconds_by_gpus": {1: 12.0}}, "d": table}
    edges = [["a", "b", "barrier"], ["a", "c", "barrier"], ["b", "d", "barrier"], ["c", "d", "barrier"]]
    # Only with {a, c} and {b, d} on GPUs of their own does b run beside c.
    assert solved(components, edges, gpus=2).iteration_seconds == pytest.approx(3.9 + 12 + 3.9)
    assert solved({"a": table, "b": table}, [], gpus=2).iteration_seconds == pytest.approx(4.0)
    roots = {"reward": table, "reference": table} | components
    assert solved(roots, edges, gpus=2).iteration_seconds == pytest.approx(3.9 + 12 + 3.9)


def test_ap_08_the_plan_is_the_same_bytes_on_every_run() -> None:
    table = {1: 5.0, 2: 3.0}
    mapping = {
        "gpus": 4,
        "chunks": 4,
        "components": {name: {"seconds_by_gpus": table} for name in ("reward", "env", "reference", "actor")},
        "edges": [["reward", "actor", "barrier"], ["env", "actor", "stream"], ["reference", "actor", "stream"]],
    }
    assert len({plans_as_text([mapping], seed) for seed in range(10)}) == 1


def test_ap_11_measured_sizes_win_over_laws_and_assumptions_are_marked() -> None:
    rollout = {"seconds_by_gpus": {1: 9.0, 2: 7.0, 4: 6.0}}
    edges = [["rollout", "actor", "stream"]]
    measured = solved({"rollout": rollout, "actor": {"seconds_by_gpus": {1: 10, 2: 6, 4: 5}}}, edges, 4, chunks=10)
    assumed = solved({"rollout": rollout, "actor": {"seconds_by_gpus": {4: 5}, "scaling": "linear"}}, edges, 4, 10)
    assert not measured.estimated
    assert measured.iteration_seconds == pytest.approx(7 + 6 / 10)  # two and two
    # Linear scaling takes 10 s for two GPUs, so the same split seems to lose to sharing.
    assert assumed.iteration_seconds > measured.iteration_seconds
    assert [mode.estimated for mode in assumed.problem.component("actor").modes] == [True, True, True, False]


def test_ap_11_no_state_is_visited_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, Node]] = []
    alive: list[Combination] = []  # or a later one might have the identity of an earlier one
    visit = Shortest._visit

    def counting(self: Shortest, search: Combination, node: Node, times: Times) -> None:
        alive.append(search)
        seen.append((id(search), node))
        visit(self, search, node, times)

    monkeypatch.setattr(Shortest, "_visit", counting)
    table = {1: 8.0, 2: 5.0, 4: 3.5}
    components = {name: {"seconds_by_gpus": table} for name in "abcde"}
    solved(components, [["a", "b", "stream"], ["a", "c", "barrier"], ["c", "d", "stream"]], gpus=4, chunks=4)
    assert len(seen) > 10
    assert len(set(seen)) == len(seen)


def test_ap_13_no_plan_names_component_and_sizes() -> None:
    with pytest.raises(NoPlan, match="actor: no cost is given"):
        solved({"rollout": {"seconds_by_gpus": {1: 1}}, "actor": {}}, [], gpus=2)
    with pytest.raises(NoPlan) as caught:
        solved({"actor": {"seconds_by_gpus": {3: 1.0}, "gpus": {"multiple_of": 2}}}, [], gpus=3)
    (cause,) = caught.value.causes
    assert (cause.component, cause.gpus) == ("actor", (0, 2))
    assert "the legal counts" in cause.reason
    assert "measured: 3" in cause.reason


def test_ap_14_components_of_any_name_work_from_their_tables() -> None:
    components = {
        "env": {"seconds_by_gpus": {0: 3.0}},
        "reward_server": {"seconds_by_gpus": {1: 2.0}},
        "My-own.thing_2": {"seconds_by_gpus": {1: 4.0, 2: 2.5}},
    }
    plan = solved(components, [["env", "reward_server", "stream"], ["env", "My-own.thing_2", "barrier"]], gpus=2)
    assert {span.component for span in plan.spans} == set(components)
