"""Pauses between tries."""

from __future__ import annotations

import random

from callboard.model.durations import Backoff


def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_success() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.next_s() == 0.5


def test_tries_that_go_on_for_ever_overflow_nothing() -> None:
    backoff = Backoff(0.1, 30.0)
    assert {backoff.next_s() for _ in range(5000)} >= {0.1, 30.0}
    assert backoff.next_s() == 30.0


def test_one_pause_may_have_another_bound_and_the_next_is_not_longer_than_allowed() -> None:
    backoff = Backoff(16.0, 30.0)
    assert [backoff.next_s(300.0) for _ in range(3)] == [16.0, 32.0, 64.0]
    assert [backoff.next_s() for _ in range(2)] == [30.0, 30.0]


def test_chance_shortens_pauses_by_half_at_most() -> None:
    backoff = Backoff(1.0, 1.0, uniform=random.Random(1).uniform)
    pauses = [backoff.next_s() for _ in range(200)]
    assert 0.5 <= min(pauses) < 0.6
    assert 0.9 < max(pauses) <= 1.0
