"""What becomes of deadlines when what is due can't be handled? Nothing is lost, nobody waits for the one that fails.

I6: every stop ends by its deadline; a defect in the handling of one deadline must not take away another's.
"""

from __future__ import annotations

import pytest

from callboard.scheduler import commands as cmd
from callboard.scheduler import events as ev
from callboard.scheduler import workers
from callboard.scheduler.records import WorkerRecord
from callboard.scheduler.states import JobState
from callboard.scheduler.transaction import RETRY_MS, Transaction
from callboard.scheduler.workers import overdue
from tests.scheduler.world import World


class Defect(Exception):
    """What a broken handler raises."""


class Broken:
    """Handles overdue workers, but those of some jobs it changes first and then raises."""

    def __init__(self, *jobs: str) -> None:
        self.jobs = set(jobs)
        self.tried: list[str] = []

    def __call__(self, tx: Transaction, worker: WorkerRecord) -> None:
        name = tx.state.jobs[worker.job].name
        self.tried.append(name)
        overdue(tx, worker)
        if name in self.jobs:
            raise Defect(name)


@pytest.fixture
def world() -> World:
    """Three jobs whose agents never answer their starts: all are overdue at the same moment."""
    world = World({"n1": 3})
    world.pool()
    world.hold = lambda command: isinstance(command, cmd.StartWorker)
    for name in "abc":
        world.submit(name)
    return world


def break_for(monkeypatch: pytest.MonkeyPatch, *jobs: str) -> Broken:
    broken = Broken(*jobs)
    monkeypatch.setattr(workers, "overdue", broken)
    return broken


def due_at(world: World) -> int:
    """When the last of the starts is overdue."""
    return max(worker.deadline_ms for worker in world.state.workers.values())


def tick(world: World) -> None:
    world.send(ev.Tick(now_ms=world.now_ms))


def test_i6_a_tick_that_raises_loses_no_deadline(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = break_for(monkeypatch, "b")
    before = list(world.state.records())
    world.now_ms = due_at(world)
    with pytest.raises(Defect):
        tick(world)
    assert list(world.state.records()) == before
    broken.jobs.clear()
    world.tick(2 * RETRY_MS)
    assert [world.status(name) for name in "abc"] == [world.status("a")] * 3
    assert world.status("a") is not JobState.STARTING


def test_the_one_that_fails_holds_up_nobody_else(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = break_for(monkeypatch, "b")
    world.now_ms = due_at(world)
    with pytest.raises(Defect):
        tick(world)
    world.now_ms += RETRY_MS
    raised = 0
    while (wake_ms := world.scheduler.next_wake_ms()) is not None and wake_ms <= world.now_ms:
        try:
            tick(world)
        except Defect:
            raised += 1
    assert raised == 1, "it comes alone, and once each time"
    assert world.status("b") is JobState.STARTING
    assert JobState.STARTING not in {world.status("a"), world.status("c")}
    assert broken.tried.count("b") == 2


def test_it_is_tried_again_after_a_pause_and_not_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    break_for(monkeypatch, "a", "b", "c")
    world.now_ms = due_at(world)
    with pytest.raises(Defect):
        tick(world)
    assert world.scheduler.next_wake_ms() == world.now_ms + RETRY_MS
    tick(world)  # Nothing is due now, so nothing raises.
