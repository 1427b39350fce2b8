"""Do the worked examples come out as their comments explain?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from callboard.autoplace import Plan, Problem, Status, search, staleness_table

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "autoplace"

EXPECTED = {
    "memory": (36.0, "disaggregated", {"rollout": "0-3", "actor": "4-7"}),
    "offload": (21.5, "collocated", {"rollout,actor": "all"}),
    "pools": (
        34.125,
        "disaggregated",
        {
            "rollout": {"node_group": "l40", "placement": "0-15"},
            "actor": {"node_group": "h100", "placement": "0-7"},
        },
    ),
    "async": (56.4, "disaggregated", {"rollout": "0-15", "actor": "16-31"}),
    "switching": (27.75, "disaggregated", {"rollout": "0-3", "actor": "4-7"}),
    "long_tail": (38.0, "disaggregated", {"rollout": "0-23", "actor": "24-31"}),
    "cpu_environments": (
        43.2,
        "collocated",
        {"env,reward": {"node_group": "node", "placement": "0"}, "policy,actor": "all"},
    ),
    "cycle": (36.0, "collocated", {"simulator,policy,actor": "all"}),
    "ppo": (
        89.856,
        "hybrid",
        {
            "rollout": "all",
            "reward": "0-7",
            "reference": "8-15",
            "old_logprob": "16-27",
            "value": "28-31",
            "actor": "0-23",
            "critic": "24-31",
        },
    ),
}


def example(name: str) -> dict[str, Any]:
    """A worked example."""
    mapping: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    return mapping


def plan_of(name: str, **changes: Any) -> Plan:
    """The proved plan of an example with other top-level values."""
    plan = search(Problem.from_mapping({**example(name), **changes}), time_limit=None)
    assert plan.status is Status.OPTIMAL
    return plan


@pytest.mark.parametrize("name", EXPECTED)
def test_the_answer_is_the_one_in_the_comment(name: str) -> None:
    seconds, layout, placement = EXPECTED[name]
    plan = plan_of(name)
    assert plan.iteration_seconds == pytest.approx(seconds, abs=1e-3)
    assert plan.layout == layout
    assert plan.component_placement() == placement


def test_memory_keeps_two_models_apart_and_offloading_lets_them_share() -> None:
    assert plan_of("memory").alternatives["collocated"] is None
    plan = plan_of("offload")
    assert plan.alternatives == {"collocated": 21.5, "disaggregated": 36.0, "hybrid": None}
    assert [span.offloads for span in plan.spans] == [True, True]


def test_one_that_stays_leaves_room_for_one_that_offloads() -> None:
    mapping = example("offload")
    mapping["workflow"]["components"]["rollout"]["memory_gib"] = 20
    plan = search(Problem.from_mapping(mapping))
    assert [span.offloads for span in plan.spans] == [False, False]
    assert plan.iteration_seconds == 18.0


def test_what_stays_between_spans_may_be_less_than_the_peak() -> None:
    mapping = example("memory")
    for component in mapping["workflow"]["components"].values():
        component["resident_gib"] = 20
    assert search(Problem.from_mapping(mapping)).iteration_seconds == 18.0


def test_another_pool_is_worth_its_transfer_until_that_takes_too_long() -> None:
    assert plan_of("pools").alternatives["collocated"] == 54.0
    mapping = example("pools")
    mapping["workflow"]["edges"][0]["transfer_seconds"] = 160.0
    plan = search(Problem.from_mapping(mapping))
    assert plan.iteration_seconds == 54.0
    assert {span.pool for span in plan.spans} == {"h100"}
    # A barrier waits for the whole batch to arrive.
    mapping["workflow"]["edges"][0] |= {"transfer_seconds": 4.0, "kind": "barrier"}
    split = search(Problem.from_mapping({**mapping, "layout": "disaggregated"}))
    assert split.iteration_seconds == 32 + 4 + 30


@pytest.mark.parametrize(("staleness", "seconds"), [(0, 62.8), (0.5, 62.8), (1, 56.4), (2, 52.0), (5, 52.0)])
def test_the_table_of_staleness(staleness: float, seconds: float) -> None:
    (plan,) = staleness_table(Problem.from_mapping(example("async")), [staleness]).values()
    assert plan.status is Status.OPTIMAL
    assert plan.iteration_seconds == pytest.approx(seconds)


def test_switching_is_paid_when_shared_and_never_alone() -> None:
    plan = plan_of("switching")
    assert plan.alternatives["collocated"] == 28.5
    assert [span.overhead_seconds for span in plan.spans] == [0.0, 0.0]
    shared = plan_of("switching", layout="collocated")
    assert [span.overhead_seconds for span in shared.spans] == [3.0, 3.0]


def test_a_tail_counts_in_a_synchronous_iteration_only() -> None:
    assert plan_of("long_tail", objective="sync").iteration_seconds == 65.0
    plan = plan_of("long_tail")
    assert plan.latency_seconds == pytest.approx(640 / 24 + 25 + 38)
    assert plan.estimated


def test_a_cycle_side_by_side_is_paced_by_its_slower_member() -> None:
    mapping = example("cycle")
    mapping["workflow"]["components"]["policy"]["seconds_by_gpus"] = {4: 20.0, 8: 15.0}
    plan = search(Problem.from_mapping(mapping))
    # Now side by side, 26 + 20 / 10, beats 16 + 15 in turn.
    assert plan.iteration_seconds == pytest.approx(28 + 8)
    assert (plan.span("simulator").gpu_ranks, plan.span("policy").gpu_ranks) == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_a_cycle_may_reach_over_two_pools() -> None:
    mapping = example("cycle")
    mapping["workflow"]["components"]["simulator"] = {"seconds_by_pool": {"rtx": {4: 20.0}}}
    mapping["workflow"]["components"]["policy"] = {"seconds_by_pool": {"h100": {8: 12.0}}}
    mapping["workflow"]["components"]["actor"] = {"seconds_by_pool": {"h100": {8: 8.0}}}
    mapping["cluster"]["nodes"] = [{"gpus": 8, "group": "h100"}, {"gpus": 4, "group": "rtx"}]
    plan = search(Problem.from_mapping(mapping))
    assert plan.status is Status.OPTIMAL
    assert plan.iteration_seconds == pytest.approx(20 + 12 / 10 + 8)


def test_every_component_is_in_the_placement() -> None:
    for name in EXPECTED:
        plan = plan_of(name)
        named = [part for key in plan.component_placement() for part in key.split(",")]
        assert sorted(named) == sorted(component.name for component in plan.problem.components)
