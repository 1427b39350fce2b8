"""Is what Ray will choose foreseen, and is it led to the devices that a group must have? (The rule itself is checked on
real Ray in test_ray_bookings.)"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard.agents.ray.ray_choice import DeviceTaken, NoOrder, Shares, amount, chosen, fillers, in_order

WHOLE = 1000


def given_by_ray(free: list[int], bundles: list[Shares]) -> list[tuple[int, ...]]:
    """What Ray gives a group after the fillers are made, and those that pass are gone."""
    left = list(free)
    steps = fillers(free, bundles)
    for step in steps:
        assert chosen(left, step.milli) == (step.index,), steps
        left[step.index] -= step.milli
    for step in steps:
        if step.passing:
            left[step.index] += step.milli
    got = []
    for shares in bundles:
        got.append(chosen(left, amount(shares)))
        for index in got[-1]:
            left[index] -= min(amount(shares), WHOLE)
    return got


class TestRule:
    @pytest.mark.parametrize(
        ("free", "milli", "indexes"),
        [
            ([1000, 1000, 1000], 1000, (0,)),
            ([999, 1000, 500, 1000], 2000, (1, 3)),
            ([1000, 700, 600], 600, (2,)),
            ([1000, 700, 700], 300, (1,)),
            ([1000, 0, 200], 300, (0,)),
            ([400, 200], 500, ()),
            ([1000, 500], 2000, ()),
        ],
    )
    def test_whole_ones_are_the_lowest_and_parts_go_where_least_is_left(
        self, free: list[int], milli: int, indexes: tuple[int, ...]
    ) -> None:
        assert chosen(free, milli) == indexes


class TestFillers:
    def test_none_where_ray_chooses_the_same(self) -> None:
        assert fillers([1000, 1000, 400], [((0, WHOLE),), ((2, 300),)]) == []

    def test_ft_b1_the_upper_one_of_two_free_devices(self) -> None:
        assert given_by_ray([1000, 1000], [((1, WHOLE),)]) == [(1,)]

    def test_ft_b2_a_part_of_an_untouched_device_beside_one_that_is_shared(self) -> None:
        assert given_by_ray([700, 1000], [((1, 300),)]) == [(1,)]

    def test_devices_with_others_between_them(self) -> None:
        assert given_by_ray([1000] * 5, [((1, WHOLE), (4, WHOLE))]) == [(1, 4)]

    def test_a_part_that_another_bundle_of_the_group_leaves_no_choice(self) -> None:
        assert given_by_ray([900, 600], [((0, 300),), ((1, 300),)]) == [(0,), (1,)]

    def test_a_device_that_is_not_free_is_named(self) -> None:
        with pytest.raises(DeviceTaken) as taken:
            fillers([1000, 999], [((1, WHOLE),)])
        assert taken.value.index == 1
        with pytest.raises(DeviceTaken):
            fillers([1000], [((3, 100),)])

    def test_crossing_devices_have_no_order(self) -> None:
        bundles = [((0, WHOLE), (3, WHOLE)), ((1, WHOLE), (2, WHOLE))]
        assert not in_order(bundles)
        with pytest.raises(NoOrder):
            fillers([1000] * 4, bundles)

    @given(st.data())
    def test_every_group_gets_its_devices_whatever_else_is_there(self, data: st.DataObject) -> None:
        free = data.draw(st.lists(st.sampled_from([0, 100, 300, 500, 700, 999, 1000]), min_size=1, max_size=8))
        whole = [index for index, left in enumerate(free) if left == WHOLE and data.draw(st.booleans())]
        cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)))) | {0, len(whole)})
        bundles: list[Shares] = [
            tuple((index, WHOLE) for index in whole[start:end]) for start, end in itertools.pairwise(cuts)
        ]
        parts = [index for index, left in enumerate(free) if left and index not in whole and data.draw(st.booleans())]
        bundles += [((index, data.draw(st.integers(1, free[index]))),) for index in parts]
        bundles = sorted(shares for shares in bundles if shares)
        assert given_by_ray(free, bundles) == [tuple(index for index, _ in shares) for shares in bundles]
