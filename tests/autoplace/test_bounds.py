"""Is no plan below the bounds, and are they any good?"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from callboard.autoplace import Problem, search
from callboard.autoplace.exact.bounds import bounds_of, corners, destructive
from callboard.autoplace.exact.branch_and_bound import combinations_in_order
from callboard.autoplace.instance.instances import instance_of
from tests.autoplace.instances import plain, recorded, workflows


@given(workflow=workflows(most=4, gpus=4))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_plan_is_below_a_bound(workflow: dict[str, Any]) -> None:
    problem = Problem.from_mapping(workflow)
    instance = instance_of(problem)
    best = search(problem, time_limit=None).iteration_seconds / instance.unit_seconds
    found = bounds_of(instance)
    assert found.dual >= max(found.area, found.path)
    assert found.best <= best * (1 + 1e-9)
    least = min(destructive(search_of, bound, instance.horizon) for bound, search_of in combinations_in_order(instance))
    assert least <= best * (1 + 1e-9)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=30))
def test_corners_are_enough_for_every_weighing(points: list[tuple[int, int]]) -> None:
    found = corners(points)
    assert set(found) <= set(points)
    for weight in range(101):
        assert min(weight * a + (100 - weight) * b for a, b in found) == min(
            weight * a + (100 - weight) * b for a, b in points
        )
    # Nothing more than enough: each is the least one for some weighing, strictly, but the ends.
    assert found == sorted(found)
    assert [b for _, b in found] == sorted((b for _, b in found), reverse=True)


def test_both_at_once_is_more_than_either() -> None:
    # A chain that is fast only when it is wasteful, and fillers that need the GPUs it would waste.
    slow_or_wasteful = {"seconds_by_gpus": {1: 10.0, 4: 4.0}}
    fillers = {name: {"seconds_by_gpus": {1: 6.0}} for name in ("c", "d", "e", "f")}
    problem = Problem.from_mapping(
        {
            "gpus": 4,
            "components": {"a": slow_or_wasteful, "b": slow_or_wasteful, **fillers},
            "edges": [["a", "b", "barrier"]],
        }
    )
    instance = instance_of(problem)
    found = bounds_of(instance)
    area, path, dual = (value * instance.unit_seconds for value in (found.area, found.path, found.dual))
    assert area == pytest.approx((2 * 10 + 4 * 6) / 4, rel=1e-6)
    assert path == pytest.approx(8.0, rel=1e-6)
    assert dual == pytest.approx(12.8, abs=0.15)  # at a fifth of the path and four fifths of the area
    assert dual <= search(problem, time_limit=None).iteration_seconds


@pytest.mark.parametrize("row", recorded("dag"), ids=lambda row: str(row["name"]))
def test_bounds_hold_on_recorded_instances(row: dict[str, Any]) -> None:
    instance = instance_of(Problem.from_mapping(plain(row)))
    best = row["best_seconds"] / instance.unit_seconds
    assert 0.5 * best <= bounds_of(instance).best <= best * (1 + 1e-6)
