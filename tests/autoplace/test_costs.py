"""What does a component cost where it wasn't measured?"""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard.autoplace.problem.costs import (
    Cost,
    CostError,
    Scaling,
    costs_at,
    interpolated,
    law_of,
    nonnegative_least_squares,
)


def test_measured_points_are_verbatim_and_the_rest_is_marked() -> None:
    costs = costs_at(range(9), {2: 40.0, 8: 10.0}, None)
    assert sorted(costs) == [2, 3, 4, 5, 6, 7, 8]
    assert (costs[2].seconds, costs[2].estimated) == (40.0, False)
    assert costs[4].seconds == pytest.approx(20.0)
    assert costs[4].estimated


def test_nothing_is_known_outside_the_measured_range_unless_a_law_is_named() -> None:
    assert interpolated({2: 1.0, 4: 1.0}, 1) is None
    assert interpolated({2: 1.0, 4: 1.0}, 5) is None
    assert sorted(costs_at(range(1, 17), {4: 8.0}, None)) == [4]
    assert sorted(costs_at(range(1, 5), {4: 8.0}, Scaling("amdahl", {"serial_fraction": 0.5}))) == [1, 2, 3, 4]


def test_amdahl_is_recovered_from_its_own_points() -> None:
    law = law_of(Scaling("amdahl"), {g: 3 + 40 / g for g in (1, 2, 8, 16)})
    assert law(64) == pytest.approx(3 + 40 / 64)


def test_amdahl_from_one_point_needs_the_serial_fraction() -> None:
    law = law_of(Scaling("amdahl", {"serial_fraction": 0.25}), {4: 7.0})
    assert law(4) == pytest.approx(7.0)
    assert law(1) == pytest.approx(7.0 / (0.25 + 0.75 / 4))
    with pytest.raises(CostError, match="two measured counts"):
        law_of(Scaling("amdahl"), {4: 7.0})


def test_usl_is_recovered_with_its_retrograde_scaling() -> None:
    def truth(g: int) -> float:
        return 50.0 * (1 + 0.05 * (g - 1) + 0.002 * g * (g - 1)) / g

    law = law_of(Scaling("usl"), {g: truth(g) for g in (1, 2, 4, 8, 16)})
    assert law(64) == pytest.approx(truth(64), rel=1e-6)
    assert law(64) > truth(16)  # type: ignore[operator]


def test_a_fit_never_has_negative_terms() -> None:
    # Superlinear points would need a negative serial part; the best law without one is b/g.
    law = law_of(Scaling("amdahl"), {1: 100.0, 2: 40.0, 4: 15.0})
    assert law(1) == pytest.approx(2 * law(2))  # type: ignore[operator]


@given(
    rows=st.lists(st.tuples(*[st.floats(0.1, 10)] * 3), min_size=3, max_size=8),
    targets=st.lists(st.floats(0.1, 10), min_size=8, max_size=8),
)
def test_non_negative_least_squares_holds_the_optimality_conditions(
    rows: list[tuple[float, float, float]], targets: list[float]
) -> None:
    weights = nonnegative_least_squares(rows, targets[: len(rows)])
    residual = [
        sum(w * x for w, x in zip(weights, row, strict=True)) - t for row, t in zip(rows, targets, strict=False)
    ]
    gradient = [sum(row[k] * r for row, r in zip(rows, residual, strict=True)) for k in range(3)]
    scale = 1e-4 * (1 + sum(t * t for t in targets))
    for weight, slope in zip(weights, gradient, strict=True):
        assert weight >= 0
        assert slope >= -scale  # more of it would not help
        assert weight == 0 or abs(slope) <= scale  # nor less


def test_rlinf_laws_are_offered_by_name_and_never_beyond_the_measured_size() -> None:
    megatron = law_of(Scaling("megatron"), {8: 95.7})
    assert megatron(4) == pytest.approx(95.7 * 2 / 1.2)
    assert megatron(16) is None
    rollout = law_of(Scaling("rollout", {"requests": 512, "max_running_requests": 64}), {8: 59.9})
    assert rollout(4) == pytest.approx(119.8)
    flat = law_of(Scaling("rollout", {"requests": 128, "max_running_requests": 64}), {8: 59.9})
    assert flat(4) == 59.9
    with pytest.raises(CostError, match="max_running_requests"):
        law_of(Scaling("rollout", {"requests": 1}), {8: 1.0})


def test_real_data_need_not_be_monotone() -> None:
    costs = costs_at(range(1, 5), {1: 4.0, 2: 5.0, 4: 3.0}, None)
    assert costs[2].seconds == 5.0
    assert costs[3].seconds == pytest.approx(math.exp(math.log(5) + math.log(3 / 5) * math.log(1.5) / math.log(2)))


@given(
    st.dictionaries(st.integers(1, 64), st.floats(1.0, 1e4), min_size=2, max_size=6),
    st.sampled_from(["linear", "amdahl", "usl"]),
)
def test_ft_h4_a_law_goes_on_where_the_measured_points_end(points: dict[int, float], model: str) -> None:
    """Points that don't follow their law give no jump that a search could exploit."""
    low, high = min(points), max(points)
    costs = costs_at(range(1, 200), points, Scaling(model))
    for gpus, seconds in points.items():
        assert costs[gpus] == Cost(seconds, estimated=False)
    ups, downs = range(high, 200), range(low, 0, -1)
    for counts in (ups, downs):
        for here, there in itertools.pairwise(counts):
            fewer, more = sorted((here, there))
            if fewer not in costs or more not in costs:
                continue
            one, two = costs[fewer].seconds, costs[more].seconds
            assert two * more >= one * fewer * (1 - 1e-9), "no step is worth more than its GPUs, the first included"
            if model != "usl":  # whose curve may turn up, as it is meant to
                assert two <= one * (1 + 1e-9), "nor does a step cost anything"
    assert set(ups) <= costs.keys()
    assert set(downs) - {1} <= costs.keys(), "a fit may say nothing of one GPU"


def test_ft_h4_the_last_measured_count_is_no_seam() -> None:
    costs = costs_at(range(1, 33), {4: 100.0, 8: 90.0}, Scaling("linear"))
    assert costs[16].seconds == pytest.approx(45.0)
    assert costs[2].seconds == pytest.approx(200.0)
    one = costs_at(range(1, 17), {8: 100.0}, Scaling("megatron"))
    assert one[4].seconds == pytest.approx(100 * 2 / (1 + 0.2)), "RLinf's own law is RLinf's"
    two = costs_at(range(1, 17), {8: 100.0, 4: 150.0}, Scaling("megatron"))
    assert two[2].seconds == pytest.approx(150 * 2 * 1.2 / 1.4)
