"""What silence means, and when: the inequalities of the lease (R5)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from callboard.controller.loop.liveness import Liveness


class FakeLoop:
    """The part of an event loop that timers use, with a time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[FakeTimer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer(when, callback)
        self.timers.append(timer)
        return timer

    def move(self, to: float) -> None:
        """Moves the time, running what is due on the way."""
        while True:
            due = [timer for timer in self.timers if not timer.is_over and timer.when() <= to]
            if not due:
                break
            first = min(due, key=FakeTimer.when)
            first.is_over = True
            self.now = max(self.now, first.when())
            first.callback()
        self.now = to

    def hold_up(self, to: float) -> None:
        """Moves the time while nothing runs; what was due is run at the end."""
        self.now = to
        self.move(to)


class FakeTimer:
    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self._when = when
        self.callback = callback
        self.is_over = False

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        self.is_over = True

    def cancelled(self) -> bool:
        return self.is_over


class Verdicts:
    def __init__(self, loop: FakeLoop) -> None:
        self.loop = loop
        self.said: list[tuple[float, str]] = []

    def suspected(self, node_id: str, epoch: int, *, suspected: bool) -> None:
        self.said.append((round(self.loop.now - 100, 3), f"{node_id} {'suspect' if suspected else 'heard'}"))

    def lost(self, node_id: str, epoch: int, silent_ms: int) -> None:
        self.said.append((round(self.loop.now - 100, 3), f"{node_id} lost"))


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> FakeLoop:
    fake = FakeLoop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: fake)
    return fake


@pytest.fixture
def verdicts(loop: FakeLoop) -> Verdicts:
    return Verdicts(loop)


@pytest.fixture
def liveness(verdicts: Verdicts) -> Liveness:
    return Liveness(verdicts, heartbeat_ms=5_000, lease_ms=15_000, kill_timeout_ms=lambda: 10_000)


def test_two_late_heartbeats_are_no_suspicion_and_three_missing_are_within_the_lease(
    loop: FakeLoop, liveness: Liveness, verdicts: Verdicts
) -> None:
    liveness.watch("n", 1)
    for at in (105.5, 111.0, 116.5):  # each late by a tenth
        loop.move(at)
        liveness.heard("n", 1)
    loop.move(128.9)
    assert not verdicts.said
    loop.move(129.1)
    assert verdicts.said == [(29.0, "n suspect")]
    assert 29.0 - 16.5 < 15.0


def test_a_node_is_given_up_only_when_its_strict_workers_are_gone(
    loop: FakeLoop, liveness: Liveness, verdicts: Verdicts
) -> None:
    liveness.watch("n", 1)
    loop.move(200)
    assert verdicts.said == [(12.5, "n suspect"), (27.0, "n lost")]
    lease_and_kill_s = 15 + 10
    assert lease_and_kill_s < 27.0


def test_one_that_is_heard_of_again_is_told_of_once_and_watched_on(
    loop: FakeLoop, liveness: Liveness, verdicts: Verdicts
) -> None:
    liveness.watch("n", 1)
    loop.move(120)
    liveness.heard("n", 1)
    liveness.heard("n", 1)
    loop.move(132)
    assert verdicts.said == [(12.5, "n suspect"), (20.0, "n heard")]
    loop.move(200)
    assert verdicts.said[2:] == [(32.5, "n suspect"), (47.0, "n lost")]


@pytest.mark.parametrize("seconds", [14.0, 60.0, 3600.0])
def test_nobody_is_given_up_for_a_time_in_which_nobody_listened(
    loop: FakeLoop, liveness: Liveness, verdicts: Verdicts, seconds: float
) -> None:
    for number in range(3):
        liveness.watch(f"n{number}", 1)
    loop.move(105)
    loop.hold_up(105 + seconds)
    loop.move(loop.now + 0.5)  # what two of them sent meanwhile is read
    liveness.heard("n0", 1)
    liveness.heard("n1", 1)
    loop.move(loop.now + 8)
    assert [what for _, what in verdicts.said] == ["n2 suspect"], "of the third nothing has come"
    liveness.heard("n0", 1)
    liveness.heard("n1", 1)
    silent_from = 12.5 - 5  # of its patience this was left when the loop was held up
    loop.move(105 + seconds + silent_from + 27)
    assert "n2 lost" in [what for _, what in verdicts.said]


def test_being_held_up_once_is_taken_off_once_whoever_is_heard_first(
    loop: FakeLoop, liveness: Liveness, verdicts: Verdicts
) -> None:
    for number in range(3):
        liveness.watch(f"n{number}", 1)
    loop.move(113)  # all are suspected, and would be given up at 127
    loop.hold_up(200)
    liveness.heard("n0", 1)
    liveness.heard("n1", 1)
    loop.move(210)
    liveness.heard("n0", 1)
    liveness.heard("n1", 1)
    loop.move(214.6)  # of its patience 14 s were left, and the timer had been set half a second before
    assert [each for each in verdicts.said if each[0] > 99] == [
        (100, "n0 heard"),
        (100, "n1 heard"),
        (114.5, "n2 lost"),
    ]


@pytest.mark.parametrize("before_s", [0.0, 0.4, 3.0, 11.0, 13.0, 20.0, 26.9])
def test_all_of_a_hold_up_is_taken_off_and_little_more_whenever_it_comes(
    loop: FakeLoop, liveness: Liveness, verdicts: Verdicts, before_s: float
) -> None:
    """Found by simulation (seed 920013): what was taken off began when the next node was to be judged."""
    liveness.watch("n", 1)
    loop.move(100 + before_s)
    loop.hold_up(loop.now + 60)
    loop.move(300)
    lost_s = {what: at for at, what in verdicts.said}["n lost"]
    assert 60 + 27 <= lost_s <= 60 + 27 + 1


def test_one_that_is_dead_is_given_up_also_by_a_loop_that_is_held_up_again_and_again(
    loop: FakeLoop, liveness: Liveness, verdicts: Verdicts
) -> None:
    liveness.watch("n", 1)
    for _ in range(40):
        loop.hold_up(loop.now + 3)
        loop.move(loop.now + 2)
    assert [what for _, what in verdicts.said] == ["n suspect", "n lost"]


def test_a_session_that_is_over_says_nothing(loop: FakeLoop, liveness: Liveness, verdicts: Verdicts) -> None:
    liveness.watch("n", 1)
    liveness.watch("n", 2)
    loop.move(110)
    liveness.heard("n", 1)  # the old session's voice
    loop.move(113)
    assert verdicts.said == [(12.5, "n suspect")]
    liveness.forget("n", 1)
    loop.move(130)
    assert verdicts.said[-1] == (27.0, "n lost")
    liveness.watch("n", 3)
    liveness.forget("n", 3)
    loop.move(300)
    assert verdicts.said[-1] == (27.0, "n lost")


def test_many_nodes_share_one_timer_and_heartbeats_cost_no_entry(
    loop: FakeLoop, liveness: Liveness, verdicts: Verdicts
) -> None:
    for number in range(100):
        liveness.watch(f"n{number}", 1)
    for step in range(1, 200):
        loop.move(100 + step)
        for number in range(99):
            liveness.heard(f"n{number}", 1)
    pending: list[Any] = [timer for timer in loop.timers if not timer.is_over]
    assert len(pending) == 1
    assert len(liveness._heap) <= 100
    assert verdicts.said == [(12.5, "n99 suspect"), (27.0, "n99 lost")]


@pytest.mark.timeout(20)
def test_a_deadline_that_rounding_puts_before_its_silence_is_looked_at_once(
    loop: FakeLoop, liveness: Liveness, verdicts: Verdicts
) -> None:
    """Found by simulation: such a node was looked at again and again in the same instant, for ever."""
    heard_s, suspect_s = 32756.445238821198, 12.5
    due_s = heard_s + suspect_s
    assert due_s - heard_s < suspect_s, "a time at which the difference is rounded below its terms"
    loop.now = heard_s
    liveness.watch("n", 1)
    loop.move(due_s)
    assert [what for _, what in verdicts.said] == ["n suspect"]
