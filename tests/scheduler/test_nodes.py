"""Nodes that join, fall silent, die and come back; restarts of the controller (NJ-…, QL-…)."""

from __future__ import annotations

from typing import Any

import pytest

from callboard.model.quantities import Resources
from callboard.model.specs import ComponentSpec, RestartPolicy
from callboard.scheduler import Refusal, Scheduler, State, check_invariants
from callboard.scheduler.account.stats import pool_use
from callboard.scheduler.records import commands as cmd
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.node_record import DeviceInfo, RayInfo
from callboard.scheduler.records.states import JobState, NodeState, StopOutcome, WorkerState
from tests.scheduler.world import World, job_spec, pool_spec


def reports(world: World, *names: str) -> tuple[ev.RunningWorker, ...]:
    return tuple(
        ev.RunningWorker(
            generation=worker.generation,
            job=worker.job,
            component=worker.component,
            rank=worker.rank,
            state=WorkerState.READY,
        )
        for name in names
        for worker in world.workers(name)
    )


def test_nj01_the_same_devices_cannot_join_twice() -> None:
    world = World()
    devices = (DeviceInfo(id="0", uuid="GPU-1"), DeviceInfo(id="1", uuid="GPU-2"))
    event: dict[str, Any] = {
        "capacity": Resources.parse({"cpu": 4, "gpu": 2}),
        "devices": devices,
        "runtime": "process",
    }
    world.send(ev.NodeJoined(now_ms=1, node_id="n1", instance="a", **event))
    with pytest.raises(Refusal, match="GPU-1"):
        world.send(ev.NodeJoined(now_ms=2, node_id="n2", instance="b", **event))
    with pytest.raises(Refusal, match="a live agent has the node id n1"):
        world.send(ev.NodeJoined(now_ms=3, node_id="n1", instance="c", previous_alive=True, **event))
    # The same program that reconnects is welcome, also while its old stream seems alive.
    again = world.send(ev.NodeJoined(now_ms=4, node_id="n1", instance="a", previous_alive=True, **event))
    assert again.result.epoch == 2


def test_nj02_a_fenced_node_ends_its_workers_before_it_takes_work_again() -> None:
    world = World({"n1": 1, "n2": 1})
    world.pool()
    world.submit("j")
    old = reports(world, "j")
    world.lose("n1")
    assert world.status("j") is JobState.RUNNING
    assert world.devices("j") == ["n2:0"]
    world.hold = lambda command: command.command_id.startswith("reap-")
    admission = world.join("n1", 1, running=old)
    assert admission.keep == ()
    # What an old generation reports changes nothing.
    world.send(ev.WorkerExited(now_ms=world.now_ms, node_id="n1", generation=old[0].generation + 100, message="late"))
    world.submit("k")
    assert world.status("k") is JobState.PENDING
    assert any(reason.code == "NODE_STATE" for reason in world.explain("k").reasons)
    world.hold = lambda command: False
    world.answer()
    assert world.status("k") is JobState.RUNNING
    assert world.devices("k") == ["n1:0"]


def test_nj07_a_second_node_that_dies_during_recovery_does_not_leave_it_half_placed() -> None:
    world = World({f"n{n}": 1 for n in range(5)})
    world.pool()
    world.submit("j", workers=3)
    world.auto = False
    first, second, *_ = [worker.node_id for worker in world.workers("j")]
    world.lose(first)
    world.lose(second)
    world.auto = True
    world.answer()
    assert world.status("j") is JobState.RUNNING
    assert len(world.workers("j")) == 3
    assert world.job("j").restarts == 1


def test_nj08_two_half_lost_gangs_do_not_wait_for_each_other() -> None:
    world = World({f"n{n}": 1 for n in range(4)})
    world.pool()
    world.submit("a", workers=2)
    world.submit("b", workers=2)
    world.auto = False
    world.lose(world.workers("a")[0].node_id)
    world.lose(world.workers("b")[0].node_id)
    world.auto = True
    world.answer()
    states = sorted([world.status("a"), world.status("b")])
    assert states == [JobState.PENDING, JobState.RUNNING]
    waiting = "a" if world.status("a") is JobState.PENDING else "b"
    assert not world.state.jobs_holding.get(world.job(waiting).uid)


def test_nj10_a_cordoned_node_takes_nothing_new() -> None:
    world = World({"n1": 2})
    world.pool()
    world.submit("a")
    world.send(ev.NodeCordoned(now_ms=world.now_ms, node_id="n1", cordoned=True))
    world.submit("b")
    assert world.status("a") is JobState.RUNNING
    assert world.status("b") is JobState.PENDING
    assert "uncordon n1" in world.explain("b").unblock
    world.send(ev.NodeCordoned(now_ms=world.now_ms, node_id="n1", cordoned=False))
    assert world.status("b") is JobState.RUNNING


@pytest.mark.parametrize(
    ("own", "lasts"),
    [
        ("", False),  # only the notice
        ("cordon first", True),
        ("cordon later", True),
        ("drain later", True),
    ],
)
def test_a_drain_for_a_notice_ends_with_the_agent_that_had_it_and_somebodys_own_lasts(own: str, lasts: bool) -> None:
    world = World({"n1": 1})
    world.pool()
    cordon = ev.NodeCordoned(now_ms=world.now_ms, node_id="n1", cordoned=True)
    if own == "cordon first":
        world.send(cordon)
    world.send(ev.NodeDrained(now_ms=world.now_ms, node_id="n1", reason="spot", until_rejoin=True))
    if own == "cordon later":
        world.send(cordon)
    if own == "drain later":
        world.send(ev.NodeDrained(now_ms=world.now_ms, node_id="n1"))
    world.submit("j")
    world.join("n1", 1)  # The same program's new session: the notice stands.
    assert world.status("j") is JobState.PENDING
    world.lose("n1")
    world.join("n1", 1, instance="another machine")
    assert world.status("j") is (JobState.PENDING if lasts else JobState.RUNNING)
    world.send(ev.NodeCordoned(now_ms=world.now_ms, node_id="n1", cordoned=False))
    assert world.status("j") is JobState.RUNNING


def test_nj11_history_is_capped() -> None:
    world = World({"n1": 1})
    world.scheduler = Scheduler(world.state, history_limit=50)
    world.pool()
    for n in range(300):
        world.submit(f"j{n}")
        world.complete(f"j{n}")
    assert len(world.state.jobs) <= 51
    assert len(world.state.specs) == len(world.state.jobs)
    assert not world.state.workers


def test_nj13_ranks_are_unique_the_lowest_free_and_kept() -> None:
    world = World()
    assert world.join("a", 1, rank=0).rank == 0
    with pytest.raises(Refusal, match="rank 0 belongs to node a"):
        world.join("b", 1, rank=0)
    assert world.join("b", 1).rank == 1
    assert world.join("c", 1, rank=5).rank == 5
    assert world.join("d", 1).rank == 2
    world.lose("b")
    assert world.join("b", 1).rank == 1


def test_nj14_after_a_restart_both_jobs_can_be_stopped() -> None:
    world = World({"n1": 2})
    world.pool()
    world.submit("a")
    world.submit("b")
    running = reports(world, "a", "b")
    world.scheduler = Scheduler(State.of(list(world.state.records())))
    world.send(ev.ControllerStarted(now_ms=world.now_ms, grace_ms=5000))
    assert world.join("n1", 2, running=running).keep == tuple(worker.generation for worker in running)
    world.cancel("a")
    world.cancel("b")
    assert world.status("a") is JobState.CANCELLED
    assert world.status("b") is JobState.CANCELLED
    assert not world.state.jobs_holding


def test_ql03_nothing_is_admitted_before_running_work_is_counted() -> None:
    world = World({"n1": 1, "n2": 1})
    world.pool(pool_spec(gpu=2))
    world.submit("a")
    world.submit("b")
    for n in range(3):
        world.submit(f"p{n}")
    on_n1 = [name for name in ("a", "b") if world.workers(name)[0].node_id == "n1"]
    on_n2 = [name for name in ("a", "b") if world.workers(name)[0].node_id == "n2"]
    first, second = reports(world, *on_n1), reports(world, *on_n2)
    world.scheduler = Scheduler(State.of(list(world.state.records())))
    world.send(ev.ControllerStarted(now_ms=world.now_ms, grace_ms=10_000))
    world.complete(on_n1[0])
    world.join("n1", 1, running=first)
    assert all(world.status(f"p{n}") is JobState.PENDING for n in range(3))
    assert world.explain("p0").reasons[0].code == "RECONCILING"
    world.tick(2000)
    world.join("n2", 1, running=second)
    used = pool_use(world.state, "pool").used.gpu_milli
    assert used == 2000
    assert world.status("p0") is JobState.RUNNING
    assert [world.status(f"p{n}") for n in (1, 2)] == [JobState.PENDING, JobState.PENDING]


def test_ql03_the_grace_ends_the_wait_for_a_node_that_never_comes() -> None:
    world = World({"n1": 1, "n2": 1})
    world.pool()
    world.scheduler = Scheduler(State.of(list(world.state.records())))
    world.send(ev.ControllerStarted(now_ms=world.now_ms, grace_ms=10_000))
    world.join("n1", 1)
    world.submit("a")
    assert world.status("a") is JobState.PENDING
    world.tick(10_000)
    assert world.status("a") is JobState.RUNNING


def test_ql11_reports_twice_late_and_swapped_move_no_counter() -> None:
    world = World({"n1": 1})
    world.pool()
    world.auto = False
    world.submit("a")
    world.answer(lambda command: isinstance(command, cmd.CreateGroup))
    (worker,) = world.workers("a")
    started = ev.WorkerStarted(now_ms=world.now_ms, node_id="n1", generation=worker.generation)
    stopped = ev.WorkerStopped(
        now_ms=world.now_ms, node_id="n1", generation=worker.generation, outcome=StopOutcome.KILLED
    )
    world.send(started)
    before = list(world.state.records())[1:]
    world.send(started)
    assert list(world.state.records())[1:] == before
    world.cancel("a")
    world.send(stopped)
    before = list(world.state.records())[1:]
    for late in (started, stopped, stopped, started):
        world.send(late)
        assert list(world.state.records())[1:] == before
    assert not pool_use(world.state, "pool").used


def test_ql04_a_quota_lowered_under_use_shows_over_and_admits_nothing() -> None:
    world = World({"n1": 4})
    world.pool(pool_spec(gpu=4))
    for n in range(3):
        world.submit(f"j{n}")
    for limit, over in ((1, 2), (0, 3)):
        world.send(ev.PoolUpdated(now_ms=world.now_ms, spec=pool_spec(gpu=limit)))
        use = pool_use(world.state, "pool")
        assert (use.used.gpu_milli, use.over.gpu_milli, use.available.gpu_milli) == (3000, over * 1000, 0)
    world.send(ev.PoolUpdated(now_ms=world.now_ms, spec=pool_spec(gpu=3)))
    world.submit("more")
    assert world.status("more") is JobState.PENDING
    world.send(ev.PoolUpdated(now_ms=world.now_ms, spec=pool_spec()))
    assert world.status("more") is JobState.RUNNING


def test_ql02_a_restarted_gang_is_charged_whole_before_its_ranks_start() -> None:
    world = World({"n1": 4})
    world.pool(pool_spec(gpu=3))
    world.submit("gang", workers=3, entry="main", restart=RestartPolicy(max_restarts=1, backoff_base_ms=1))
    for rank in (0, 1):
        worker = world.workers("gang")[rank]
        world.send(ev.WorkerFinished(now_ms=world.now_ms, node_id="n1", generation=worker.generation, succeeded=True))
    world.submit("other", workers=2)
    world.exit("gang", rank=2)
    world.tick(1)
    assert world.status("gang") is JobState.RUNNING
    assert pool_use(world.state, "pool").used.gpu_milli == 3000
    assert world.status("other") is JobState.PENDING


def test_a_job_fails_when_its_restart_budget_is_spent_and_backs_off_before() -> None:
    world = World({"n1": 1})
    world.pool()
    world.submit("j", restart=RestartPolicy(max_restarts=2, backoff_base_ms=1000))
    for wait_ms in (1000, 2000):
        world.exit("j")
        assert world.status("j") is JobState.PENDING
        world.tick(wait_ms - 1)
        assert world.status("j") is JobState.PENDING
        world.tick(1)
        assert world.status("j") is JobState.RUNNING
    world.exit("j")
    assert world.status("j") is JobState.FAILED
    assert "killed by signal 9" in world.job("j").reason


def test_losing_a_node_does_not_count_against_the_restart_budget() -> None:
    world = World({"n1": 1, "n2": 1})
    world.pool()
    world.submit("j")
    for node_id in ("n1", "n2"):
        world.lose(node_id)
        world.join(node_id, 1)
    assert world.status("j") is JobState.RUNNING
    assert world.job("j").failures == ()


def fail_constructor(world: World) -> None:
    """The constructor of the first worker that is being started raises."""
    first = [c for c in world.held if isinstance(c, cmd.StartWorker)][-1]
    world.held.clear()
    world.send(
        ev.WorkerStartFailed(
            now_ms=world.now_ms,
            node_id="n1",
            generation=first.worker.generation,
            message="ValueError: no",
            traceback="Traceback …",
            user_fault=True,
        )
    )


def test_ft_g1_a_constructor_that_raises_is_tried_again_as_the_job_allows() -> None:
    world = World({"n1": 2})
    world.pool()
    world.hold = lambda command: isinstance(command, cmd.StartWorker)
    world.submit("j", workers=2, restart=RestartPolicy(max_restarts=2, backoff_base_ms=1_000))
    for restart, backoff_ms in ((1, 1_000), (2, 2_000)):
        fail_constructor(world)
        assert world.status("j") is JobState.PENDING
        assert (world.job("j").restarts, len(world.job("j").failures)) == (restart, restart)
        assert world.job("j").traceback == "Traceback …"
        world.tick(backoff_ms - 1)
        assert world.status("j") is JobState.PENDING
        world.tick(1)
        assert world.status("j") is JobState.STARTING
    fail_constructor(world)
    assert world.status("j") is JobState.FAILED
    assert "ValueError: no" in world.job("j").reason


def test_a_constructor_that_raises_fails_the_job_with_its_traceback() -> None:
    world = World({"n1": 2})
    world.pool()
    world.hold = lambda command: isinstance(command, cmd.StartWorker)
    world.submit("j", workers=2)
    fail_constructor(world)
    assert world.status("j") is JobState.FAILED
    assert world.job("j").traceback == "Traceback …"
    assert not world.state.workers


def test_a_raylet_that_ends_takes_its_groups_and_the_job_starts_elsewhere() -> None:
    world = World({"n1": 1, "n2": 1})
    world.pool()
    world.auto = False
    world.submit("j")
    epoch = world.state.nodes["n1"].epoch
    world.send(ev.NodeRayChanged(now_ms=world.now_ms, node_id="n1", epoch=epoch, ray=None))
    assert world.state.nodes["n1"].state is NodeState.JOINING
    world.auto = True
    world.answer()
    assert world.devices("j") == ["n2:0"]
    ray = RayInfo(gcs_address="h:1", session="s", ray_node_id="ray-new")
    world.send(ev.NodeRayChanged(now_ms=world.now_ms, node_id="n1", epoch=epoch, ray=ray))
    assert world.state.nodes["n1"].usable


def test_rays_head_dies_and_every_group_is_void() -> None:
    from callboard.model.specs import PgPoolSpec

    world = World({"n1": 2})
    shape = Resources.parse({"cpu": 1, "gpu": 1})
    world.pool(pool_spec(pg_pool=PgPoolSpec(reserved=(shape,))))
    world.submit("j", restart=RestartPolicy(max_restarts=1, backoff_base_ms=1))
    world.hold = lambda command: True
    world.send(ev.RaySessionLost(now_ms=world.now_ms, session="s"))
    world.exit("j")
    world.hold = lambda command: False
    world.answer()
    world.tick(10)
    assert world.status("j") is JobState.RUNNING
    check_invariants(world.state)


def test_warm_and_cold_starts_are_counted_once_each() -> None:
    world = World({"n1": 2})
    world.pool()
    world.hold = lambda command: isinstance(command, cmd.StartWorker)
    for name, warm in (("warm", True), ("cold", False)):
        world.submit(name)
        (worker,) = world.workers(name)
        started = ev.WorkerStarted(now_ms=world.now_ms, node_id="n1", generation=worker.generation, warm=warm)
        world.send(started)
        world.send(started)
    assert (world.state.meta.warm_starts, world.state.meta.cold_starts) == (1, 1)


def test_a_session_job_ends_when_its_client_is_not_heard_of_for_its_lease() -> None:
    world = World({"n1": 2})
    world.pool()
    world.submit("owned", session_lease_ms=10_000)
    world.submit("detached")
    uid = world.job("owned").uid
    for _ in range(5):
        world.tick(8_000)
        result = world.send(ev.JobsRenewed(now_ms=world.now_ms, uids=(uid, uid, "gone"))).result
        assert result == 10_000
    assert world.status("owned") is JobState.RUNNING
    world.tick(9_999)
    assert world.status("owned") is JobState.RUNNING
    world.tick(1)
    assert world.status("owned") is JobState.CANCELLED
    assert "client" in world.job("owned").reason
    assert world.status("detached") is JobState.RUNNING
    assert world.send(ev.JobsRenewed(now_ms=world.now_ms, uids=(uid,))).result == 0


def test_a_restart_of_the_controller_gives_clients_their_whole_lease_again() -> None:
    world = World({"n1": 1})
    world.pool()
    world.submit("owned", session_lease_ms=10_000)
    running = reports(world, "owned")
    world.scheduler = Scheduler(State.of(list(world.state.records())))
    world.now_ms += 60_000
    world.send(ev.ControllerStarted(now_ms=world.now_ms, grace_ms=5_000))
    world.join("n1", 1, running=running)
    world.tick(9_000)
    assert world.status("owned") is JobState.RUNNING
    world.tick(1_000)
    assert world.status("owned") is JobState.CANCELLED


def starts(world: World, name: str) -> list[cmd.StartWorker]:
    return [c for c in world.held if isinstance(c, cmd.StartWorker) and c.job_name == name]


def reservations(world: World) -> list[cmd.ReservePort]:
    return [c for c in world.held if isinstance(c, cmd.ReservePort)]


def reserved(world: World, command: cmd.ReservePort, port: int) -> None:
    world.held.remove(command)
    generation = command.worker.generation
    world.send(ev.PortReserved(now_ms=world.now_ms, node_id=command.node_id, generation=generation, port=port))


def test_ft_g1_nothing_starts_before_the_node_of_rank_0_named_a_port() -> None:
    world = World({"n1": 1, "n2": 1})
    world.pool()
    world.hold = lambda command: isinstance(command, cmd.StartWorker | cmd.ReservePort)
    world.submit("j", workers=2)
    (command,) = reservations(world)
    assert (command.node_id, command.worker.rank) == ("n1", 0)
    assert starts(world, "j") == []
    assert world.scheduler.owed_commands("n1") == [command]
    assert world.scheduler.owed_commands("n2") == []
    reserved(world, command, 20_077)
    assert {(start.worker.rank, start.master_node_id, start.master_port) for start in starts(world, "j")} == {
        (0, "n1", 20_077),
        (1, "n1", 20_077),
    }
    # Said again, and of a worker that has moved on, it changes nothing.
    world.send(ev.PortReserved(now_ms=world.now_ms, node_id="n1", generation=command.worker.generation, port=20_078))
    assert len(starts(world, "j")) == 2
    world.answer(lambda command: True)
    assert world.state.workers[command.worker.generation].master_port == 20_077


def test_ft_g1_a_node_that_can_reserve_none_holds_nobody_up() -> None:
    world = World({"n1": 2})
    world.pool()
    world.hold = lambda command: isinstance(command, cmd.StartWorker | cmd.ReservePort)
    world.submit("j", workers=2)
    reserved(world, reservations(world)[0], 0)
    assert [start.master_port for start in starts(world, "j")] == [0, 0]


def test_ft_g1_one_worker_alone_meets_nobody() -> None:
    world = World({"n1": 2})
    world.pool()
    world.hold = lambda command: isinstance(command, cmd.ReservePort)
    world.submit("j")
    assert world.status("j") is JobState.RUNNING


def test_ft_g1_a_node_lost_before_it_answered_costs_nothing_but_the_time() -> None:
    world = World({"n1": 1, "n2": 1, "n3": 1})
    world.pool()
    world.hold = lambda command: isinstance(command, cmd.ReservePort)
    world.submit("j", workers=2)
    (command,) = reservations(world)
    world.lose("n1")
    assert world.job("j").failures == ()
    (again,) = reservations(world)
    assert (again.node_id, again.worker.attempt) == ("n2", 2)
    reserved(world, again, 20_001)
    assert world.status("j") is JobState.RUNNING
    # What the lost node answers late is about nobody.
    world.send(ev.PortReserved(now_ms=world.now_ms, node_id="n1", generation=command.worker.generation, port=20_002))
    assert {worker.master_port for worker in world.workers("j")} == {0, 20_001}


def test_ft_g1_each_component_meets_at_a_port_of_its_own_and_extra_workers_at_that() -> None:
    world = World({"n1": 3, "n2": 3})
    world.pool()
    world.hold = lambda command: isinstance(command, cmd.StartWorker | cmd.ReservePort)
    parts = [
        ComponentSpec(name=name, actor="m:C", min_workers=low, max_workers=high, resources=Resources.parse({"gpu": 1}))
        for name, low, high in (("train", 2, 2), ("rollout", 1, 3))
    ]
    world.submit(job_spec("j", components=parts))
    ports = {"train": 20_001, "rollout": 20_002}
    for command in reservations(world):
        reserved(world, command, ports[command.worker.component])
    world.hold = lambda command: False
    world.answer(lambda command: True)
    assert world.status("j") is JobState.RUNNING
    assert len(world.workers("j")) == 5
    firsts = {w.component: w.master_port for w in world.workers("j") if w.rank == 0}
    assert firsts == ports
