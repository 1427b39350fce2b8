"""What `callboard simulate` found, as small histories; each names the rule that was broken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from callboard.model.quantities import Resources
from callboard.model.specs import Fencing, PgPoolSpec, RestartPolicy
from callboard.scheduler import Scheduler, State
from callboard.scheduler.records import commands as cmd
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.states import GroupState, JobState, StopOutcome, WorkerState
from tests.scheduler.world import World, job_spec, pool_spec


def test_r5_a_strict_job_waits_until_its_unproved_copy_is_gone() -> None:
    world = World({"n1": 1, "n2": 1})
    world.pool(gpu=4)
    world.submit("strict", workers=1, fencing=Fencing.STRICT, restart=RestartPolicy(max_restarts=3))
    old = world.workers("strict")[0]
    world.send(
        ev.WorkerExited(
            now_ms=world.now_ms, node_id=old.node_id, generation=old.generation, message="died", quarantined=True
        )
    )
    world.tick(60_000)
    assert world.status("strict") is JobState.PENDING
    world.send(
        ev.WorkerStopped(
            now_ms=world.now_ms, node_id=old.node_id, generation=old.generation, outcome=StopOutcome.KILLED
        )
    )
    assert world.status("strict") is JobState.RUNNING


def test_r5_a_lost_node_frees_a_strict_job_too() -> None:
    world = World({"n1": 1, "n2": 1})
    world.pool(gpu=4)
    world.submit("strict", workers=1, fencing=Fencing.STRICT, restart=RestartPolicy(max_restarts=3))
    old = world.workers("strict")[0]
    world.send(
        ev.WorkerExited(
            now_ms=world.now_ms, node_id=old.node_id, generation=old.generation, message="died", quarantined=True
        )
    )
    world.lose(old.node_id)
    world.tick(60_000)
    assert world.status("strict") is JobState.RUNNING
    assert world.workers("strict")[0].node_id != old.node_id


@pytest.mark.parametrize("says", ["exited", "stopped", "start failed"])
def test_i4_a_node_takes_no_work_while_an_unwanted_worker_can_not_be_killed(says: str) -> None:
    world = World({"n1": 1, "n2": 1})
    world.pool(gpu=2)
    world.submit("old", workers=1)
    ghost = world.workers("old")[0]
    node_id, generation = ghost.node_id, ghost.generation
    world.send(
        ev.NodeLost(now_ms=world.now_ms, node_id=node_id, epoch=world.state.nodes[node_id].epoch, reason="silent")
    )
    running = ev.RunningWorker(
        generation=generation, job=ghost.job, component="main", rank=0, state=WorkerState.QUARANTINED
    )
    world.hold = lambda command: isinstance(command, cmd.StopWorker)
    world.join(node_id, 1, running=(running,))
    about: dict[str, Any] = {"now_ms": world.now_ms, "node_id": node_id, "generation": generation}
    reports: dict[str, ev.WorkerEvent] = {
        "exited": ev.WorkerExited(**about, message="the Ray session ended", quarantined=True),
        "stopped": ev.WorkerStopped(**about, outcome=StopOutcome.QUARANTINED),
        "start failed": ev.WorkerStartFailed(**about, message="stopped while starting", quarantined=True),
    }
    world.send(reports[says])
    assert world.state.nodes[node_id].ghosts == (generation,)
    world.send(ev.WorkerStopped(**about, outcome=StopOutcome.KILLED))
    assert world.state.nodes[node_id].ghosts == ()


def test_a_group_made_too_late_is_removed_from_ray() -> None:
    world = World({"n1": 1})
    world.pool(gpu=1)
    world.hold = lambda command: isinstance(command, cmd.RemoveGroup)
    late = ev.GroupReady(now_ms=world.now_ms, group_id="pg-99", attempt=1, ray_id="late", ray_session="s")
    world.send(late)
    world.send(late)
    (removal,) = world.held
    assert isinstance(removal, cmd.RemoveGroup)
    assert removal.ray_id == "late"
    assert removal in world.scheduler.owed_commands("n1")
    world.hold = lambda command: False
    world.answer()
    assert not world.state.groups


def test_a_pool_may_shrink_and_grow_its_reserved_groups_while_they_are_used() -> None:
    world = World({"n1": 4})
    shape = Resources.parse({"gpu": 1})
    spec = pool_spec("pool", gpu=4, pg_pool=PgPoolSpec(reserved=(shape, shape)))
    world.pool(spec)
    world.submit("high", priority=9, workers=1)
    world.submit("higher", priority=9.5, workers=1)
    for reserved in ((shape,), (shape, shape)):
        changed = replace(spec, pg_pool=PgPoolSpec(reserved=reserved))
        world.send(ev.PoolUpdated(now_ms=world.now_ms, spec=changed))
    world.complete("high")
    world.complete("higher")
    ready = [group for group in world.state.groups.values() if group.state is GroupState.READY]
    assert sorted(group.reserved_index for group in ready if group.reserved_index >= 0) == [0, 1]


def test_ql03_an_elastic_job_does_not_grow_before_running_work_is_counted() -> None:
    world = World({"n1": 2, "n2": 2})
    world.pool(gpu=4)
    part = job_spec("elastic", workers=1).components[0]
    spec = replace(job_spec("elastic", workers=1), components=(replace(part, max_workers=3),))
    world.hold = lambda command: isinstance(command, cmd.StartWorker)
    world.submit(spec)
    (start,) = (command for command in world.held if isinstance(command, cmd.StartWorker))
    world.scheduler = Scheduler(State.of(list(world.state.records())))
    world.held.clear()
    world.send(ev.ControllerStarted(now_ms=world.now_ms, grace_ms=2_000))
    worker = start.worker
    running = ev.RunningWorker(
        generation=worker.generation, job=worker.job, component="main", rank=0, state=WorkerState.STARTING
    )
    world.join(worker.node_id, 2, running=(running,))
    world.send(ev.WorkerStarted(now_ms=world.now_ms, node_id=worker.node_id, generation=worker.generation, pid=1))
    assert world.status("elastic") is JobState.RUNNING
    assert len(world.workers("elastic")) == 1
    world.hold = lambda command: False
    world.held.clear()
    (other,) = {"n1", "n2"} - {worker.node_id}
    world.join(other, 2)
    assert [worker.state for worker in world.workers("elastic")] == [WorkerState.READY] * 3


def test_r4_a_port_starts_who_waits_for_it_beside_one_that_was_lost_with_its_group() -> None:
    world = World({f"n{number}": 1 for number in range(1, 5)})
    world.pool(gpu=4)
    world.submit("j", workers=2, restart=RestartPolicy(max_restarts=3))
    old = next(worker for worker in world.workers("j") if worker.rank == 1)
    world.hold = lambda command: isinstance(command, cmd.ReservePort)
    world.send(
        ev.WorkerExited(
            now_ms=world.now_ms, node_id=old.node_id, generation=old.generation, message="died", quarantined=True
        )
    )
    world.tick(60_000)
    world.lose(old.node_id)
    assert world.state.workers[old.generation].state is WorkerState.LOST
    assert old.group_id not in world.state.groups
    (asked,) = (command for command in world.held if isinstance(command, cmd.ReservePort))
    world.send(
        ev.PortReserved(now_ms=world.now_ms, node_id=asked.node_id, generation=asked.worker.generation, port=20_001)
    )
    assert world.status("j") is JobState.RUNNING
