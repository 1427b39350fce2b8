"""What becomes of deadlines when what is due can't be handled? Nothing is lost, nobody waits for the one that fails.

I6: every stop ends by its deadline; a defect in the handling of one deadline must not take away another's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from callboard.model.specs import PgPoolSpec
from callboard.scheduler.handlers import workers
from callboard.scheduler.handlers.workers import overdue
from callboard.scheduler.records import commands as cmd
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.job_records import WorkerRecord
from callboard.scheduler.records.states import JobState, StopOutcome, WorkerState
from callboard.scheduler.state.transaction import RETRY_MS, Transaction
from tests.scheduler.histories import TwinWorld
from tests.scheduler.twin import Twin
from tests.scheduler.world import World, job_spec, pool_spec


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


# ---- deadlines that hang on more than one record ----


@pytest.mark.parametrize(("ttl_ms", "gone_after_ms"), [(1_000, 1_000), (90_000, 90_000), (60_000, 60_000)])
def test_an_idle_group_goes_by_the_idle_ttl_of_now_however_it_was_when_it_became_idle(
    ttl_ms: int, gone_after_ms: int
) -> None:
    world = TwinWorld({"n1": 4})
    spec = pool_spec("pool", pg_pool=PgPoolSpec(idle_ttl_ms=60_000))
    world.pool(spec)
    for name in ("a", "b"):
        world.submit(name)
        world.complete(name)
    idle_since_ms = world.now_ms
    assert len(world.state.group_index.idle) == 1, "b took that of a"
    shorter = replace(spec, pg_pool=replace(spec.pg_pool, idle_ttl_ms=ttl_ms))
    world.tick(500)
    world.send(ev.PoolUpdated(now_ms=world.now_ms, spec=shorter))
    world.tick(idle_since_ms + gone_after_ms - 1 - world.now_ms)
    assert world.state.groups
    world.tick(1)
    assert not world.state.groups


def test_an_idle_group_that_is_past_a_shortened_ttl_goes_at_once() -> None:
    world = TwinWorld({"n1": 4})
    spec = pool_spec("pool", pg_pool=PgPoolSpec(idle_ttl_ms=60_000))
    world.pool(spec)
    world.submit("a")
    world.complete("a")
    world.tick(30_000)
    world.send(ev.PoolUpdated(now_ms=world.now_ms, spec=replace(spec, pg_pool=PgPoolSpec(idle_ttl_ms=1_000))))
    assert world.scheduler.next_wake_ms() is not None
    world.tick(0)
    assert not world.state.groups


def quarantined(**fields: Any) -> TwinWorld:
    """A job that ended while its worker can't be proved gone."""
    world = TwinWorld({"n1": 2})
    world.pool()
    world.outcomes["a"] = StopOutcome.QUARANTINED
    world.submit(job_spec("a", **fields))
    world.complete("a")
    assert world.workers("a")[0].state is WorkerState.QUARANTINED
    return world


def prove_gone(world: World) -> None:
    (worker,) = world.state.workers.values()
    world.send(
        ev.WorkerStopped(
            now_ms=world.now_ms, node_id=worker.node_id, generation=worker.generation, outcome=StopOutcome.KILLED
        )
    )


@pytest.mark.parametrize("proved_first", [True, False])
def test_a_job_whose_ttl_passes_while_a_worker_is_quarantined_is_forgotten_once_that_is_proved_gone(
    proved_first: bool,
) -> None:
    world = quarantined(ttl_after_finished_ms=1_000)
    if proved_first:
        prove_gone(world)
        world.tick(999)
        assert world.state.jobs
        world.tick(1)
    else:
        world.tick(5_000)
        assert world.state.jobs, "the story of the worker is still needed"
        assert world.scheduler.next_wake_ms() is None, "nothing is due that can't be done"
        prove_gone(world)
        world.tick(0)
    assert not world.state.jobs
    assert not world.state.specs


def test_jobs_that_cannot_be_forgotten_keep_none_of_the_others_in_the_history() -> None:
    world = quarantined()
    world.scheduler = Twin(world.state, history_limit=5)
    for number in range(12):
        world.submit(f"b{number}")
        world.complete(f"b{number}")
    assert len(world.state.jobs) <= 6
    assert world.job("a").state is JobState.SUCCEEDED


def test_a_worker_that_moved_on_with_one_that_was_overdue_before_it_is_not_judged_by_the_same_tick() -> None:
    world = TwinWorld({"n1": 2})
    world.pool()
    world.hold = lambda command: isinstance(command, cmd.StartWorker | cmd.StopWorker)
    world.submit("a", workers=2)
    world.now_ms = due_at(world)
    tick(world)
    assert [worker.state for worker in world.workers("a")] == [WorkerState.STOPPING] * 2


def test_a_job_that_has_starved_is_looked_at_once_and_not_for_ever() -> None:
    world = TwinWorld({"n1": 1})
    world.pool()
    world.submit("a", priority=5)
    world.submit("b", priority=5, workers=2, starvation_after_ms=1_000, wait_for_nodes_ms=10_000_000)
    world.tick(1_000)
    wake_ms = world.scheduler.next_wake_ms()
    assert wake_ms is not None
    assert wake_ms > world.now_ms
