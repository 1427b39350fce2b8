"""Elastic components, drains and lent groups: what comes and goes while a job runs."""

from __future__ import annotations

import pytest

from callboard.model.quantities import Resources
from callboard.model.specs import (
    RAY_PROGRAM,
    ComponentSpec,
    Fencing,
    JobSpec,
    PgPoolSpec,
    RestartPolicy,
    RestartScope,
    Strategy,
)
from callboard.scheduler import Refusal
from callboard.scheduler.account.demand import demand
from callboard.scheduler.account.stats import group_stats
from callboard.scheduler.records import commands as cmd
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.job_records import Put, evolve
from callboard.scheduler.records.states import JobState, NodeState, Rule, StopOutcome, WorkerState
from callboard.scheduler.state.invariants import check_invariants
from tests.scheduler.world import World, job_spec, pool_spec


def elastic(name: str, low: int, high: int, **fields: object) -> JobSpec:
    main = ComponentSpec(
        name="main", actor="a:B", min_workers=low, max_workers=high, resources=Resources.parse({"gpu": 1})
    )
    return job_spec(name, components=[main], **fields)  # type: ignore[arg-type]


def scale(world: World, name: str, workers: int) -> None:
    world.send(ev.JobScaled(now_ms=world.now_ms, uid=world.job(name).uid, component="main", workers=workers))


def test_a_job_starts_with_its_fewest_and_grows_as_nodes_join() -> None:
    world = World({"n1": 1})
    world.pool()
    world.submit(elastic("e", 1, 3))
    assert world.devices("e") == ["n1:0"]
    world.join("n2", 1)
    world.join("n3", 1)
    world.join("n4", 1)
    assert world.devices("e") == ["n1:0", "n2:0", "n3:0"]
    assert world.status("e") is JobState.RUNNING
    assert [worker.rank for worker in world.workers("e")] == [0, 1, 2]
    assert any(event.type == "job.rank_map" for event in world.log)


def test_extra_workers_yield_one_by_one_and_the_job_goes_on() -> None:
    world = World({"n1": 3})
    world.pool()
    world.submit(elastic("e", 1, 3, priority=1))
    world.submit("high", priority=9)
    assert world.status("e") is JobState.RUNNING
    assert [worker.rank for worker in world.workers("e")] == [0, 1]
    world.submit("higher", priority=9.5, workers=2)
    assert world.status("high") is JobState.RUNNING
    assert world.status("higher") is JobState.RUNNING
    assert world.status("e") is JobState.PENDING
    world.complete("higher")
    assert len(world.workers("e")) == 2
    assert world.job("e").attempt == 2


def test_nobody_yields_to_an_extra_worker() -> None:
    world = World({"n1": 2})
    world.pool()
    world.submit("low", priority=1)
    world.submit(elastic("e", 1, 2, priority=9))
    assert world.preempted() == []
    assert len(world.workers("e")) == 1


def test_scaling_keeps_ranks_dense_and_the_highest_leave_first() -> None:
    world = World({"n1": 4})
    world.pool()
    world.submit(elastic("e", 1, 4))
    assert len(world.workers("e")) == 4
    scale(world, "e", 2)
    assert [worker.rank for worker in world.workers("e")] == [0, 1]
    scale(world, "e", 3)
    assert [worker.rank for worker in world.workers("e")] == [0, 1, 2]
    with pytest.raises(Refusal, match="may have 1 to 4 workers, not 5"):
        scale(world, "e", 5)
    world.submit(elastic("fixed", 2, 2))
    with pytest.raises(Refusal, match="always has 2 workers; a job makes it elastic by min_workers and max_workers"):
        scale(world, "fixed", 3)
    with pytest.raises(Refusal, match="has no component other"):
        world.send(ev.JobScaled(now_ms=1, uid=world.job("e").uid, component="other", workers=1))


def test_a_lost_worker_is_replaced_without_stopping_the_job() -> None:
    world = World({"n1": 1, "n2": 1, "n3": 1})
    world.pool()
    world.submit(elastic("e", 2, 3))
    world.lose("n1")
    assert world.status("e") is JobState.RUNNING
    assert [worker.rank for worker in world.workers("e")] == [1, 2]
    assert world.job("e").attempt == 1
    world.join("n4", 1)
    assert [worker.rank for worker in world.workers("e")] == [0, 1, 2]
    world.lose("n2")
    world.lose("n3")
    assert world.status("e") is JobState.PENDING


def test_an_extra_worker_that_keeps_dying_is_added_again_with_backoff() -> None:
    world = World({"n1": 2})
    world.pool()
    world.submit(elastic("e", 1, 2))
    world.exit("e", rank=1)
    assert len(world.workers("e")) == 1
    world.tick(999)
    assert len(world.workers("e")) == 1
    world.tick(1)
    assert len(world.workers("e")) == 2
    world.exit("e", rank=1)
    world.tick(1999)
    assert len(world.workers("e")) == 1
    world.tick(1)
    assert len(world.workers("e")) == 2
    assert world.job("e").restarts == 0


def test_cancelling_an_elastic_job_ends_all_its_workers() -> None:
    world = World({"n1": 3})
    world.pool(pool_spec(pg_pool=PgPoolSpec()))
    world.submit(elastic("e", 1, 3))
    world.cancel("e")
    assert world.status("e") is JobState.CANCELLED
    assert not world.state.workers
    assert group_stats(world.state, "pool").dynamic_idle == 3


def test_nj10_a_drained_node_is_emptied_with_notice_and_takes_nothing_new() -> None:
    world = World({"n1": 2, "n2": 2})
    world.pool(pool_spec(pg_pool=PgPoolSpec(reserved=(Resources.parse({"gpu": 1}),))))
    world.submit("fixed", preemptible=False, node_selector=(("node", "n1"),), node_selector_soft=True)
    world.auto = False
    world.send(ev.NodeDrained(now_ms=world.now_ms, node_id="n1", deadline_ms=world.now_ms + 700))
    stops = [command for command in world.held if isinstance(command, cmd.StopWorker)]
    assert [command.cancel_timeout_ms for command in stops] == [700]
    world.submit("late")
    assert all(worker.node_id == "n2" for worker in world.workers("late"))
    world.auto = True
    world.answer()
    assert world.status("fixed") is JobState.RUNNING
    assert world.workers("fixed")[0].node_id == "n2"
    assert world.state.nodes["n1"].state is NodeState.DRAINING
    assert not world.state.workers_on("n1")
    assert not world.state.group_index.on_node.get("n1")
    world.send(ev.NodeCordoned(now_ms=world.now_ms, node_id="n1", cordoned=False))
    assert world.state.nodes["n1"].usable


def test_a_lent_reserved_group_goes_back_to_a_job_it_was_meant_for() -> None:
    world = World({"n1": 1})
    shape = Resources.parse({"gpu": 1})
    world.pool(pool_spec(pg_pool=PgPoolSpec(reserved=(shape,), reserved_lendable=True)))
    world.submit("borrower", priority=7.9)
    assert world.status("borrower") is JobState.RUNNING
    world.submit("owner", priority=8.0)
    assert world.preempted() == [("borrower", "owner")]
    (record,) = world.state.preemptions.values()
    assert record.rule is Rule.RESERVED
    assert world.status("owner") is JobState.RUNNING


def test_a_starving_job_is_passed_only_by_one_that_is_over_before_it_can_start() -> None:
    world = World({"n1": 2})
    world.pool()
    world.submit("long", estimated_duration_ms=600_000)
    world.submit("short", estimated_duration_ms=1_000)
    world.submit("wide", workers=2, starvation_after_ms=60_000)
    world.tick(60_000)
    assert world.job("wide").patient
    world.complete("short")
    world.submit("unknown")
    world.submit("too-long", estimated_duration_ms=599_000)
    world.submit("fits", estimated_duration_ms=100_000)
    states = [world.status(name) for name in ("unknown", "too-long", "fits")]
    assert states == [JobState.PENDING, JobState.PENDING, JobState.RUNNING]
    world.complete("fits")
    world.complete("long")
    assert world.status("wide") is JobState.RUNNING


REPLACING = RestartPolicy(max_restarts=2, backoff_base_ms=1_000, scope=RestartScope.WORKER)


def generations(world: World, name: str) -> dict[int, int]:
    return {worker.rank: worker.generation for worker in world.workers(name)}


def rank_maps(world: World) -> list[dict[str, str]]:
    return [dict(event.facts) for event in world.log if event.type == "job.rank_map"]


def test_ft_e6_only_the_lost_rank_is_replaced() -> None:
    world = World({"n1": 2, "n2": 2})
    world.pool()
    world.submit("j", workers=3, restart=REPLACING)
    before = generations(world, "j")
    devices = world.devices("j")
    world.exit("j", rank=1)
    assert world.status("j") is JobState.RUNNING
    assert "main/1 is being replaced" in world.job("j").reason
    assert set(generations(world, "j")) == {0, 2}
    assert set(rank_maps(world)[-1]) == {"main/0", "main/2"}
    assert "main has 2 of 3 workers: it waits for its backoff" in world.explain("j").summary
    world.tick(1_000)
    after = generations(world, "j")
    assert {rank: after[rank] for rank in (0, 2)} == {rank: before[rank] for rank in (0, 2)}
    assert after[1] > max(before.values())
    assert world.devices("j") == devices  # where it was
    assert set(rank_maps(world)[-1]) == {"main/0", "main/1", "main/2"}
    job = world.job("j")
    assert (job.attempt, job.restarts, len(job.failures), job.deadline_ms) == (1, 1, 1, 0)
    assert not any(worker.extra for worker in world.workers("j"))
    start = [command for command in world.starts if command.worker.rank == 1][-1]
    assert (start.world_size, start.master_node_id) == (3, "n1")


def test_ft_e6_the_whole_gang_restarts_unless_it_says_otherwise() -> None:
    world = World({"n1": 2})
    world.pool()
    world.submit("j", workers=2, restart=RestartPolicy(max_restarts=2))
    before = generations(world, "j")
    world.exit("j", rank=1)
    world.tick(1_000)
    assert world.job("j").attempt == 2
    assert not set(before.values()) & set(generations(world, "j").values())


def test_ft_e6_a_worker_is_replaced_though_a_placement_group_of_its_job_is_gone() -> None:
    """A group can end with its Ray session while what used it still counts as its job's."""
    world = World({"n1": 2, "n2": 2})
    world.pool(pool_spec("pool", pg_pool=PgPoolSpec()))
    world.submit("j", workers=2, restart=REPLACING)
    job = world.job("j")
    world.state.apply(Put(evolve(job, groups=("pg-99", *job.groups))))
    world.exit("j", rank=1)
    world.tick(1_000)
    assert world.status("j") is JobState.RUNNING
    assert sorted(generations(world, "j")) == [0, 1]


def test_a_job_that_keeps_its_place_while_it_backs_off_passes_nobody() -> None:
    """It does not start now: to be over soon is no reason to be promised what is held for another (I7)."""
    world = World({"n1": 2})
    world.pool()
    world.submit("long", estimated_duration_ms=600_000)
    world.submit("short", estimated_duration_ms=1_000, restart=RestartPolicy(max_restarts=2))
    world.submit("wide", workers=2, starvation_after_ms=60_000)
    world.tick(60_000)
    assert world.job("wide").patient
    world.exit("short")
    check_invariants(world.state)
    assert not world.job("short").nominated
    world.tick(10_000)
    assert world.status("short") is JobState.RUNNING


def test_ft_e6_replacements_use_up_the_restart_budget() -> None:
    world = World({"n1": 2})
    world.pool()
    world.submit("j", workers=2, restart=REPLACING)
    for backoff_ms in (1_000, 2_000):
        world.exit("j", rank=0)
        assert world.status("j") is JobState.RUNNING
        world.tick(backoff_ms - 1)
        assert len(world.workers("j")) == 1
        world.tick(1)
        assert len(world.workers("j")) == 2
    world.exit("j", rank=1)
    assert world.status("j") is JobState.FAILED


def test_ft_e6_a_lost_node_costs_no_budget_and_its_worker_goes_elsewhere() -> None:
    world = World({"n1": 1, "n2": 1, "n3": 1})
    world.pool()
    world.submit("j", workers=2, restart=REPLACING, placement=Strategy.STRICT_SPREAD)
    world.lose("n1")
    assert world.status("j") is JobState.RUNNING
    assert [(w.rank, w.node_id) for w in world.workers("j")] == [(0, "n3"), (1, "n2")]
    assert world.job("j").failures == ()
    assert [command.node_id for command in world.starts if command.worker.rank == 0] == ["n1", "n3"]


def test_ft_e6_a_replacement_that_finds_no_room_in_time_makes_the_job_wait_as_a_whole() -> None:
    world = World({"n1": 1, "n2": 1})
    world.pool()
    world.submit("j", workers=2, restart=REPLACING, start_timeout_ms=60_000)
    world.lose("n2")
    assert world.status("j") is JobState.RUNNING
    assert [(entry.count, entry.jobs) for entry in demand(world.state)] == [(1, ["j"])]
    reasons = {reason.code: reason.message for reason in world.explain("j").reasons}
    assert "1 min" in reasons["REPLACING"]
    assert "n1 lacks 1 GPU" in reasons["SHORT_OF_WORKERS"]
    world.tick(59_999)
    assert world.status("j") is JobState.RUNNING
    world.hold_stops_of("j")
    world.tick(1)
    assert world.status("j") is JobState.RECOVERING
    assert "main/1 could not be replaced in time: " in world.job("j").reason
    assert "n1 lacks 1 GPU" in world.job("j").reason
    world.let_stop("j")
    assert world.status("j") is JobState.PENDING
    assert world.job("j").deadline_ms == 0
    world.join("n3", 1)
    assert world.status("j") is JobState.RUNNING
    assert world.job("j").attempt == 2


def test_ft_e6_room_that_comes_in_time_is_taken() -> None:
    world = World({"n1": 1, "n2": 1})
    world.pool()
    world.submit("j", workers=2, restart=REPLACING, start_timeout_ms=60_000)
    survivor = generations(world, "j")[0]
    world.lose("n2")
    world.tick(30_000)
    world.join("n3", 1)
    assert [(w.rank, w.node_id) for w in world.workers("j")] == [(0, "n1"), (1, "n3")]
    assert generations(world, "j")[0] == survivor
    world.tick(100_000)
    assert world.job("j").attempt == 1


@pytest.mark.parametrize("fencing", [Fencing.RELAXED, Fencing.STRICT])
def test_ft_e6_beside_a_copy_that_may_live_only_a_relaxed_job_is_replaced(fencing: Fencing) -> None:
    world = World({"n1": 3})
    world.pool()
    world.submit("j", workers=2, restart=REPLACING, fencing=fencing)
    lost = world.workers("j")[1]
    world.send(
        ev.WorkerExited(
            now_ms=world.now_ms, node_id="n1", generation=lost.generation, message="killed", quarantined=True
        )
    )
    world.tick(1_000)
    there = [worker for worker in world.workers("j") if worker.state is WorkerState.READY]
    assert [worker.rank for worker in there] == ([0, 1] if fencing is Fencing.RELAXED else [0])
    stopped = ev.WorkerStopped(
        now_ms=world.now_ms, node_id="n1", generation=lost.generation, outcome=StopOutcome.KILLED
    )
    world.send(stopped)
    there = [worker for worker in world.workers("j") if worker.state is WorkerState.READY]
    assert [worker.rank for worker in there] == [0, 1]
    assert world.job("j").attempt == 1


def test_ft_e6_an_entry_method_that_raises_and_a_drained_node_replace_one_worker() -> None:
    world = World({"n1": 1, "n2": 1, "n3": 1})
    world.pool()
    world.submit("j", workers=2, restart=REPLACING, entry="run")
    first, second = world.workers("j")
    world.send(ev.NodeDrained(now_ms=world.now_ms, node_id=second.node_id, reason="maintenance"))
    assert [(w.rank, w.node_id) for w in world.workers("j")] == [(0, "n1"), (1, "n3")]
    assert world.job("j").failures == ()
    world.send(
        ev.WorkerFinished(
            now_ms=world.now_ms, node_id="n1", generation=first.generation, succeeded=False, traceback="Boom"
        )
    )
    assert world.status("j") is JobState.RUNNING
    finished = ev.WorkerFinished(
        now_ms=world.now_ms, node_id="n3", generation=world.workers("j")[-1].generation, succeeded=True
    )
    world.send(finished)
    assert world.status("j") is JobState.RUNNING  # rank 0 is still to come
    world.tick(1_000)
    (again,) = [worker for worker in world.workers("j") if worker.rank == 0]
    assert again.generation > second.generation
    world.send(ev.WorkerFinished(now_ms=world.now_ms, node_id="n1", generation=again.generation, succeeded=True))
    assert world.status("j") is JobState.SUCCEEDED


def test_ft_e6_a_job_that_is_being_replaced_yields_as_a_whole() -> None:
    world = World({"n1": 1, "n2": 1})
    world.pool()
    world.submit("low", workers=2, restart=REPLACING, priority=1)
    world.lose("n2")
    world.submit("high", priority=9)
    assert world.status("high") is JobState.RUNNING
    assert world.status("low") is JobState.PENDING
    assert world.job("low").deadline_ms == 0


def test_ft_e6_when_nobody_is_left_the_whole_gang_starts_again() -> None:
    world = World({"n1": 2, "n2": 2})
    world.pool()
    world.submit("j", workers=2, restart=REPLACING)
    world.lose("n1")
    assert world.status("j") is JobState.RUNNING
    assert world.job("j").attempt == 2


def on_ray(low: int, high: int, **fields: object) -> JobSpec:
    """A command with a Ray cluster of its own."""
    component = ComponentSpec(
        name="main",
        actor=RAY_PROGRAM,
        args_json='[["train"]]',
        entry="run",
        min_workers=low,
        max_workers=high,
        resources=Resources.parse({"gpu": 1}),
    )
    return job_spec("r", components=[component], **fields)  # type: ignore[arg-type]


def finish(world: World, rank: int) -> None:
    worker = world.workers("r")[rank]
    world.send(
        ev.WorkerFinished(now_ms=world.now_ms, node_id=worker.node_id, generation=worker.generation, succeeded=True)
    )


@pytest.mark.parametrize(
    "restart", [RestartPolicy(max_restarts=2, backoff_base_ms=1_000), REPLACING], ids=["job", "worker"]
)
def test_a_ray_cluster_of_a_jobs_own_goes_on_without_others_and_never_without_its_head(restart: RestartPolicy) -> None:
    world = World({"n1": 1, "n2": 1, "n3": 1})
    world.pool()
    world.submit(on_ray(1, 3, restart=restart))
    assert [worker.rank for worker in world.workers("r")] == [0, 1, 2]
    world.exit("r", rank=1)
    assert (world.status("r"), world.job("r").attempt) == (JobState.RUNNING, 1)
    world.tick(10_000)
    assert [worker.rank for worker in world.workers("r")] == [0, 1, 2]
    world.lose(world.workers("r")[0].node_id)
    world.tick(60_000)
    assert (world.status("r"), world.job("r").attempt) == (JobState.RUNNING, 2), (
        "two are left, and none has the command"
    )
    world.send(ev.NodeDrained(now_ms=world.now_ms, node_id=world.workers("r")[0].node_id, reason="maintenance"))
    world.tick(60_000)
    assert (world.status("r"), world.job("r").attempt) == (JobState.RUNNING, 3)


def test_the_command_alone_decides_when_a_ray_cluster_of_a_jobs_own_ends() -> None:
    world = World({"n1": 3})
    world.pool()
    world.submit(on_ray(1, 3))
    finish(world, rank=1)
    assert world.status("r") is JobState.RUNNING
    finish(world, rank=0)
    assert world.status("r") is JobState.SUCCEEDED, "the third waits for a head that is gone"
