"""What do recorded timings average to? Warm-up left out, the slowest rank counts, sizes kept apart."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard.autoplace import Problem
from callboard.autoplace.problem.profile import components, measured, profile_data, read_timings
from callboard.model.faults import InvalidInput


def lines(*records: dict[str, Any]) -> list[str]:
    return [json.dumps(record) for record in records]


def rollout(seconds: float, **more: Any) -> dict[str, Any]:
    return {"component": "rollout", "seconds": seconds, **more}


class TestAverages:
    def test_the_first_iteration_is_warm_up(self) -> None:
        (found,) = measured(read_timings(lines(rollout(90), rollout(59), rollout(61)), "t"), warmup=1)
        assert (found.seconds, found.iterations, found.dropped, found.spread_seconds) == (60.0, 2, 1, 1.0)
        assert found.median_seconds == 60.0

    def test_an_iteration_takes_as_long_as_its_slowest_rank(self) -> None:
        records = [rollout(1 + 10 * n + rank, rank=rank) for n in range(3) for rank in range(4)]
        (found,) = measured(read_timings(lines(*records), "t"), warmup=1)
        assert found.seconds == pytest.approx((14 + 24) / 2)

    def test_iterations_that_not_every_rank_has_ended_don_t_count(self) -> None:
        records = [rollout(5, rank=0), rollout(6, rank=1), rollout(7, rank=0)]
        (found,) = measured(read_timings(lines(*records), "t"), warmup=0)
        assert (found.seconds, found.iterations) == (6, 1)

    def test_numbers_of_iterations_win_over_the_order_of_lines(self) -> None:
        records = [rollout(5, iteration=1), rollout(90, iteration=0), rollout(7, iteration=2)]
        (found,) = measured(read_timings(lines(*records), "t"), warmup=1)
        assert found.seconds == 6

    def test_pieces_of_one_iteration_add_up(self) -> None:
        records = [rollout(1 + n, iteration=n, rank=rank) for n in range(3) for rank in range(2) for _ in range(4)]
        (found,) = measured(read_timings(lines(*records), "t"), warmup=1)
        assert (found.seconds, found.iterations) == (4 * (2 + 3) / 2, 2)

    def test_a_new_start_has_a_warm_up_of_its_own(self) -> None:
        records = [rollout(s, attempt=g) for g in (1, 2) for s in (90, 60)]
        (found,) = measured(read_timings(lines(*records), "t"), warmup=1)
        assert (found.seconds, found.dropped) == (60, 2)

    def test_devices_of_all_ranks_are_counted_once(self) -> None:
        records = [rollout(5, rank=rank, devices=[f"0/{rank // 2}"]) for rank in range(8)]
        (found,) = measured(read_timings(lines(*records), "t"), warmup=0)
        assert found.gpus == 4

    def test_a_stated_number_of_gpus_wins_over_devices(self) -> None:
        (found,) = measured(read_timings(lines(rollout(5, gpus=8, devices=["0/0"])), "t"), warmup=0)
        assert found.gpus == 8

    @given(st.lists(st.floats(0.001, 1e6), min_size=2, max_size=30), st.integers(0, 5))
    def test_the_mean_lies_between_the_shortest_and_the_longest(self, seconds: list[float], warmup: int) -> None:
        timings = read_timings(lines(*(rollout(s) for s in seconds)), "t")
        if len(seconds) <= warmup:
            with pytest.raises(InvalidInput, match="warm-up"):
                measured(timings, warmup=warmup)
            return
        (found,) = measured(timings, warmup=warmup)
        kept = seconds[warmup:]
        assert min(kept) * (1 - 1e-9) <= found.seconds <= max(kept) * (1 + 1e-9)
        assert found.iterations + found.dropped == len(seconds)


class TestForms:
    def test_one_size_becomes_rlinfs_number_per_component(self) -> None:
        records = [
            {"component": name, "seconds": seconds, "gpus": 8}
            for name, seconds in (("rollout", 59.9), ("inference", 30.8), ("actor", 95.7))
        ]
        found = measured(read_timings(lines(*records), "t"), warmup=0)
        assert profile_data(found) == {"rollout_cost": 59.9, "inference_cost": 30.8, "actor_cost": 95.7}

    def test_several_sizes_become_a_table(self) -> None:
        found = measured(read_timings(lines(rollout(60, gpus=8), rollout(115, gpus=4)), "t"), warmup=0)
        assert profile_data(found) == {"rollout_cost": {4: 115, 8: 60}}
        assert components(found) == {"rollout": {"seconds_by_gpus": {4: 115, 8: 60}}}

    def test_environments_become_rlinfs_tables(self) -> None:
        records = [
            {"component": name, "seconds": seconds, "envs_per_instance": envs}
            for name, envs, seconds in (("env", 8, 30.3), ("env", 4, 25.8), ("rollout", 4, 26.0))
        ]
        found = measured(read_timings(lines(*records), "t"), warmup=0)
        assert profile_data(found) == {
            "env_profile_data": {4: 25.8, 8: 30.3},
            "rollout_profile_data": {4: 26.0},
        }

    def test_a_cost_table_needs_to_know_the_gpus(self) -> None:
        found = measured(read_timings(lines(rollout(60)), "t"), warmup=0)
        with pytest.raises(InvalidInput, match="on how many GPUs"):
            components(found)

    def test_what_comes_out_can_be_searched(self) -> None:
        records = [
            {"component": name, "seconds": seconds, "gpus": 8}
            for name, seconds in (("rollout", 59.9), ("inference", 30.8), ("actor", 95.7))
        ]
        config = {
            "runner": {"task_type": "reasoning"},
            "cluster": {"num_nodes": 1, "num_gpus_per_node": 8},
            "algorithm": {"group_size": 16, "n_minibatches": 4},
            "data": {"rollout_batch_size": 128},
            "profile_data": profile_data(measured(read_timings(lines(*records), "t"), warmup=0)),
        }
        assert Problem.from_config(config).component("rollout").modes[-1].seconds == 59.9


class TestBadLines:
    @pytest.mark.parametrize(
        "line",
        [
            "{",
            "[1]",
            '{"seconds": 1}',
            '{"component": "a b", "seconds": 1}',
            '{"component": "a", "seconds": 0}',
            '{"component": "a", "seconds": NaN}',
            '{"component": "a", "seconds": 1e999}',
            '{"component": "a", "seconds": true}',
            '{"component": "a", "seconds": 1, "gpus": "8"}',
            '{"component": "a", "seconds": 1, "gpus": -1}',
            '{"component": "a", "seconds": 1, "devices": "0"}',
            "[" * 100_000,
        ],
        ids=lambda line: line[:60],
    )
    def test_a_bad_line_is_named(self, line: str) -> None:
        with pytest.raises(InvalidInput) as caught:
            read_timings(['{"component": "a", "seconds": 1}', "", line], "runs.jsonl")
        assert [(fault.field, fault.line) for fault in caught.value.faults] == [("runs.jsonl", 3)]

    def test_all_bad_lines_are_told_at_once(self) -> None:
        with pytest.raises(InvalidInput) as caught:
            read_timings(["{", "", "["], "runs.jsonl")
        assert [fault.line for fault in caught.value.faults] == [1, 3]

    def test_every_fault_of_a_line_is_told(self) -> None:
        with pytest.raises(InvalidInput) as caught:
            read_timings(['{"component": 3, "seconds": "x", "gpu": 8, "rank": -1}'], "t")
        assert [fault.message.split(":")[0] for fault in caught.value.faults] == [
            "unknown key 'gpu'; did you mean gpus?",
            "component",
            "seconds",
            "rank",
        ]

    def test_a_missing_key_is_told_as_missing_and_a_misspelt_one_once(self) -> None:
        with pytest.raises(InvalidInput) as caught:
            read_timings(['{"gpus": 8}', '{"component": "a", "secnds": 1}'], "t")
        assert [fault.message.partition(":")[0] for fault in caught.value.faults] == [
            "component is required",
            "seconds is required",
            "unknown key 'secnds'; did you mean seconds?",
        ]

    @pytest.mark.parametrize("seconds", ["1" + "0" * 400, "1e10", "1e400"])
    def test_no_number_is_too_large_to_be_refused(self, seconds: str) -> None:
        with pytest.raises(InvalidInput, match="is not a measured time"):
            read_timings([f'{{"component": "a", "seconds": {seconds}}}'], "t")

    def test_other_keys_and_a_byte_order_mark_do_no_harm(self) -> None:
        (found,) = read_timings(['\ufeff{"component": "a", "seconds": 1, "host": "n1"}\r\n', "\r\n"], "t")
        assert (found.component, found.seconds) == ("a", 1.0)

    def test_known_and_unknown_sizes_are_no_table(self) -> None:
        found = measured(read_timings(lines(rollout(5), rollout(6, gpus=8)), "t"), warmup=0)
        with pytest.raises(InvalidInput, match='record "gpus" in all of them'):
            profile_data(found)

    def test_nothing_at_all_is_told(self) -> None:
        with pytest.raises(InvalidInput, match="no timings"):
            measured([], warmup=0)
