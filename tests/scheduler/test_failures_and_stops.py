"""What does a job fail by, when is what stops killed, and what becomes of a checkpoint that was not left?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from callboard.controller.views.jobs import job_message
from callboard.controller.views.nodes import node_message
from callboard.model.quantities import Resources
from callboard.model.specs import PROGRAM, RAY_PROGRAM, ComponentSpec, OnPreempt, RestartPolicy, StopPolicy
from callboard.scheduler import Scheduler, State
from callboard.scheduler.handlers.stopping import CAUSE_MS
from callboard.scheduler.records import commands as cmd
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.job_records import WorkerRecord
from callboard.scheduler.records.states import JobState, StopKind, StopOutcome, WorkerState
from tests.scheduler.test_elastic import elastic, scale
from tests.scheduler.world import World


def restarted(world: World) -> None:
    """A controller takes over from the records alone."""
    world.scheduler = Scheduler(State.of(world.state.records()))


def raises(world: World, worker: WorkerRecord, text: str) -> None:
    """The entry method of a worker raises."""
    traceback = f"Traceback:\n  File x\n{text}"
    world.send(
        ev.WorkerFinished(
            now_ms=world.now_ms,
            node_id=worker.node_id,
            generation=worker.generation,
            succeeded=False,
            traceback=traceback,
            stderr_tail=f"stderr of {worker.rank}",
        )
    )


def dies(world: World, worker: WorkerRecord, message: str, **fields: Any) -> None:
    """The process of a worker ends by itself."""
    world.send(
        ev.WorkerExited(
            now_ms=world.now_ms, node_id=worker.node_id, generation=worker.generation, message=message, **fields
        )
    )


def a_gang(world: World, **fields: Any) -> list[WorkerRecord]:
    """Three workers with an entry, whose stops wait."""
    world.pool()
    world.submit("j", workers=3, entry="run", **fields)
    world.hold_stops_of("j")
    return world.workers("j")


# ---- what a job fails by ----


@pytest.mark.parametrize("death_ms", [0, 50, 999])
@pytest.mark.parametrize("restart", [RestartPolicy(), RestartPolicy(max_restarts=3)])
@pytest.mark.parametrize("anew", [False, True], ids=["", "a new controller in between"])
def test_ft_a2_a_death_is_the_cause_of_exceptions_before_and_after_it(
    death_ms: int, restart: RestartPolicy, anew: bool
) -> None:
    world = World({"n1": 4})
    first, second, third = a_gang(world, restart=restart)
    raises(world, first, "ConnectionError: peer")
    assert world.status("j") is JobState.RUNNING, "a death may be on its way"
    if anew:
        restarted(world)
    world.tick(death_ms)
    dies(world, second, "exit code 139")
    assert world.status("j") is (JobState.RECOVERING if restart.max_restarts else JobState.STOPPING)
    raises(world, third, "BrokenPipeError: peer")
    world.let_stop("j")
    reason = "main/1 on n1 died: exit code 139; main/0, main/2 failed after it"
    assert [line.reason for line in world.job("j").story if line.state in ("PENDING", "FAILED")][-1] == reason
    if not restart.max_restarts:
        assert (world.status("j"), world.job("j").reason) == (JobState.FAILED, reason)
    assert (world.job("j").traceback, world.job("j").stderr_tail) == ("", "")
    shown = job_message(world.job("j"), world.state)
    assert [(each.worker, each.died, each.cause) for each in shown.failures] == [
        ("main/0", False, False),
        ("main/1", True, True),
        ("main/2", False, False),
    ]


def test_ft_a2_without_a_death_the_first_exception_is_the_cause_after_a_moment() -> None:
    world = World({"n1": 4})
    first, second, _ = a_gang(world)
    raises(world, second, "ValueError: mine")
    world.tick(20)
    raises(world, first, "ConnectionError: peer")
    world.tick(CAUSE_MS - 21)
    assert world.status("j") is JobState.RUNNING
    world.tick(1)
    assert world.status("j") is JobState.STOPPING
    assert world.job("j").reason == "the entry method of main/1 raised ValueError: mine; main/0 failed after it"
    assert world.job("j").traceback.endswith("ValueError: mine")
    assert world.job("j").stderr_tail == "stderr of 1"
    told = [reason.message for reason in world.explain("j").reasons if reason.code == "WORKER_FAILED"]
    assert told == [
        "the entry method of main/1 raised ValueError: mine",
        "the entry method of main/0 raised ConnectionError: peer",
    ]


def test_ft_a2_of_two_deaths_the_earlier_counts_whichever_is_reported_first() -> None:
    world = World({"n1": 4})
    first, second, _ = a_gang(world)
    world.tick(3_000)
    dies(world, first, "killed by signal 6 (SIGABRT)")
    dies(world, second, "killed by signal 9 (SIGKILL)", ago_ms=800)
    world.let_stop("j")
    assert world.job("j").reason == "main/1 on n1 died: killed by signal 9 (SIGKILL); main/0 failed after it"


def test_ft_a2_a_death_long_after_the_failure_is_no_cause_of_it() -> None:
    world = World({"n1": 4})
    first, second, _ = a_gang(world)
    raises(world, first, "ValueError: mine")
    world.tick(CAUSE_MS)
    world.tick(3_000)
    dies(world, second, "killed by signal 15 (SIGTERM)")
    world.let_stop("j")
    assert world.job("j").reason == "the entry method of main/0 raised ValueError: mine; main/1 failed after it"


def test_ft_a2_a_constructors_exception_follows_from_a_death() -> None:
    world = World({"n1": 4})
    world.pool()
    world.hold = lambda command: isinstance(command, cmd.StartWorker | cmd.StopWorker)
    world.submit("j", workers=2)
    first, second = world.workers("j")
    failures: list[tuple[WorkerRecord, dict[str, Any]]] = [
        (first, {"message": "RuntimeError: peer closed the connection", "user_fault": True}),
        (second, {"message": "killed by signal 9 (SIGKILL) before it was constructed", "died": True}),
    ]
    for worker, fields in failures:
        world.send(ev.WorkerStartFailed(now_ms=world.now_ms, node_id="n1", generation=worker.generation, **fields))
        world.now_ms += 30
    assert world.status("j") is JobState.FAILED
    assert world.job("j").reason == (
        "main/1 on n1: killed by signal 9 (SIGKILL) before it was constructed; main/0 failed after it"
    )


def test_gc_11_one_start_that_fails_stops_all_the_others_and_the_one_that_is_slow() -> None:
    world = World({f"n{number}": 1 for number in range(8)})
    world.pool()
    world.hold = lambda command: isinstance(command, cmd.StartWorker | cmd.StopWorker)
    world.submit("j", workers=8)
    *others, failing, slow = world.workers("j")
    for worker in others:
        world.send(ev.WorkerStarted(now_ms=world.now_ms, node_id=worker.node_id, generation=worker.generation))
    about: dict[str, Any] = {"node_id": failing.node_id, "generation": failing.generation}
    world.send(ev.WorkerStartFailed(now_ms=world.now_ms, **about, message="no such module", user_fault=True))
    world.tick(CAUSE_MS)
    stopped = [command.generation for command in world.held if isinstance(command, cmd.StopWorker)]
    assert sorted(stopped) == sorted(worker.generation for worker in (*others, slow)), "all seven, each once"
    # The slow one is ready only now: that changes nothing.
    world.send(ev.WorkerStarted(now_ms=world.now_ms, node_id=slow.node_id, generation=slow.generation))
    assert world.status("j") is JobState.STOPPING
    world.let_stop("j")
    assert (world.status("j"), world.job("j").reason) == (
        JobState.FAILED,
        f"main/6 on {failing.node_id}: no such module",
    )
    assert not world.state.workers
    assert not world.state.ledger.used_by("pool")


def test_ft_a2_one_worker_alone_is_not_waited_for() -> None:
    world = World({"n1": 1})
    world.pool()
    world.submit("j", entry="run")
    raises(world, world.workers("j")[0], "ValueError: mine")
    assert world.status("j") is JobState.FAILED


def test_ft_a2_a_job_that_failed_a_moment_ago_is_no_victim() -> None:
    world = World({"n1": 3})
    world.policy(enable_cross_pool=True)
    first, *_ = a_gang(world, priority=1)
    raises(world, first, "ValueError: mine")
    world.submit("high", priority=9, workers=3)
    assert world.preempted() == []
    world.tick(CAUSE_MS)
    world.let_stop("j")
    assert world.status("high") is JobState.RUNNING


# ---- when what stops is killed ----


def stops(world: World, name: str) -> list[cmd.StopWorker]:
    """Stops of a job's workers that agents were asked for."""
    uid = world.job(name).uid
    return [each for each in world.held if isinstance(each, cmd.StopWorker) and each.job == uid]


def a_slow_stop(world: World) -> None:
    """A job that was preempted and has 480 s for its hooks."""
    world.policy(cancel_timeout_ms=480_000)
    world.pool()
    world.submit("j", workers=2)
    world.hold_stops_of("j")
    world.send(ev.JobPreempted(now_ms=world.now_ms, uid=world.job("j").uid))
    assert [stop.cancel_timeout_ms for stop in stops(world, "j")] == [480_000, 480_000]


def drain(world: World, within_ms: int = 5_000) -> None:
    """A second stop: the node is drained."""
    world.send(ev.NodeDrained(now_ms=world.now_ms, node_id="n1", deadline_ms=world.now_ms + within_ms, reason="repair"))


def second_cancel(world: World) -> None:
    """A second stop: by hand, with a shorter grace than the first."""
    world.cancel("j", within_ms=400_000)
    world.cancel("j", within_ms=5_000, reason="now")


def hold_and_drain(world: World) -> None:
    """A second stop: the pool holds and drains, with a shorter time for hooks."""
    old = world.state.pools["pool"].spec
    preemption = replace(old.preemption, cancel_timeout_ms=5_000)
    spec = replace(old, stop_policy=StopPolicy.HOLD_AND_DRAIN, preemption=preemption)
    world.send(ev.PoolUpdated(now_ms=world.now_ms, spec=spec))


@pytest.mark.parametrize("again", [drain, second_cancel, hold_and_drain], ids=lambda each: each.__name__)
@pytest.mark.parametrize("anew", [False, True], ids=["", "a new controller in between"])
def test_ft_d2_the_earliest_deadline_holds(again: Any, anew: bool) -> None:
    world = World({"n1": 2})
    a_slow_stop(world)
    world.tick(10_000)
    if anew:
        restarted(world)
    world.held.clear()
    again(world)
    asked = stops(world, "j")[-2:]
    assert [stop.cancel_timeout_ms for stop in asked] == [5_000, 5_000]
    assert len({stop.command_id for stop in asked}) == 2
    assert not {stop.command_id for stop in asked} & {f"stop-g{each.generation}" for each in asked}
    assert {worker.kill_ms for worker in world.workers("j")} == {world.now_ms + 5_000}
    story = world.job("j").story
    world.held.clear()
    drain(world, 200_000)
    assert stops(world, "j") == [], "a later one never lengthens it"
    assert world.job("j").story == story
    owed = [each for each in world.scheduler.owed_commands("n1") if isinstance(each, cmd.StopWorker)]
    assert [stop.command_id for stop in owed] == [stop.command_id for stop in asked]
    worst_ms = 5_000 + max(worker.kill_timeout_ms for worker in world.workers("j")) + 60_000
    world.tick(worst_ms)
    assert {worker.state for worker in world.state.workers.values()} == {WorkerState.QUARANTINED}, "not after 480 s"


def test_ft_d2_a_stop_that_is_sent_again_carries_the_time_that_is_left() -> None:
    world = World({"n1": 2})
    a_slow_stop(world)
    world.tick(100_000)
    restarted(world)
    world.held.clear()
    world.join(
        "n1",
        2,
        running=[
            ev.RunningWorker(
                generation=each.generation,
                job=each.job,
                component=each.component,
                rank=each.rank,
                state=WorkerState.READY,
            )
            for each in world.workers("j")
        ],
    )
    assert [stop.cancel_timeout_ms for stop in stops(world, "j")] == [380_000, 380_000]


def test_ft_d2_an_extra_worker_that_is_being_stopped_is_hastened_by_a_drain() -> None:
    world = World({"n1": 2})
    world.policy(cancel_timeout_ms=480_000)
    world.pool()
    world.submit(elastic("j", 1, 2))
    world.hold_stops_of("j")
    (extra,) = [worker for worker in world.workers("j") if worker.extra]
    scale(world, "j", 1)
    assert world.state.workers[extra.generation].state is WorkerState.STOPPING
    drain(world)
    assert world.state.workers[extra.generation].kill_ms == world.now_ms + 5_000


def test_ft_d2_an_agent_that_leaves_hastens_what_is_being_stopped_there() -> None:
    world = World({"n1": 2})
    a_slow_stop(world)
    world.held.clear()
    node = world.state.nodes["n1"]
    leaves = ev.NodeSuspected(now_ms=world.now_ms, node_id="n1", epoch=node.epoch, leaving=True, kill_within_ms=2_000)
    world.send(leaves)
    assert {worker.kill_ms for worker in world.workers("j")} == {world.now_ms + 2_000}
    assert stops(world, "j") == [], "it knows"
    told = [event.reason for event in world.log if event.type == "worker.hastened"]
    assert told == ["its agent leaves; killed at the latest in 2 s instead of 8 min"] * 2


# ---- what is said of it ----


def test_ft_c10_whoever_asks_is_told_when_it_is_killed() -> None:
    world = World({"n1": 2, "n2": 0})
    a_slow_stop(world)
    drain(world, 12_000)
    at_s = (world.now_ms + 12_000) // 1000
    shown = job_message(world.job("j"), world.state)
    assert shown.kill_time.seconds == at_s
    assert [worker.kill_time.seconds for worker in shown.workers] == [at_s, at_s]
    assert node_message(world.state.nodes["n1"], world.state).kill_time.seconds == at_s
    assert not node_message(world.state.nodes["n2"], world.state).HasField("kill_time")
    assert "killed at the latest in 12 s" in world.explain("j").summary
    assert all("killed at the latest in 12 s" in reason.message for reason in world.explain("j").reasons)
    told = [event.reason for event in world.log if event.type == "worker.hastened"]
    assert told[0] == "n1 is drained: repair; killed at the latest in 12 s instead of 8 min"
    world.let_stop("j")
    assert not job_message(world.job("j"), world.state).HasField("kill_time")


@pytest.mark.parametrize(
    ("stop", "kind", "line"),
    [
        (drain, StopKind.DRAIN, "preempted to drain: repair"),
        (
            lambda world: world.send(
                ev.JobPreempted(now_ms=world.now_ms, uid=world.job("j").uid, reason="for the demo")
            ),
            StopKind.PREEMPT,
            "preempted by hand: for the demo",
        ),
        (lambda world: world.cancel("j", reason="wrong data"), StopKind.CANCEL, "wrong data"),
        (lambda world: world.complete("j"), StopKind.COMPLETE, "completed"),
        (lambda world: world.exit("j", 0), StopKind.FAILURE, "main/0 on n1 died: killed by signal 9"),
    ],
    ids=["drain", "preempt", "cancel", "complete", "failure"],
)
def test_ft_a5_the_reason_is_in_the_history_and_in_the_order(stop: Any, kind: StopKind, line: str) -> None:
    world = World({"n1": 2})
    world.pool()
    world.submit("j", workers=2)
    world.hold_stops_of("j")
    stop(world)
    assert line in [each.reason for each in world.job("j").story]
    assert {(each.stop_kind, each.reason) for each in stops(world, "j")} == {(kind, line)}


# ---- checkpoints ----


def stopped(world: World, worker: WorkerRecord, **fields: Any) -> None:
    """The agent answers the stop of a worker."""
    world.send(
        ev.WorkerStopped(
            now_ms=world.now_ms,
            node_id=worker.node_id,
            generation=worker.generation,
            **{"outcome": StopOutcome.KILLED, **fields},
        )
    )


def a_victim(world: World, **fields: Any) -> list[WorkerRecord]:
    """A job of two workers that is asked to yield to another."""
    world.pool()
    world.submit("low", workers=2, priority=1, **fields)
    world.tick(60_000)
    world.hold_stops_of("low")
    world.submit("high", priority=9, workers=2)
    return world.workers("low")


LOST = "main/1: checkpoint() returned dict, not bytes or a URI"


def test_ft_a4_a_lost_checkpoint_is_said_wherever_the_job_is_shown() -> None:
    world = World({"n1": 2})
    first, second = a_victim(world)
    stopped(world, first, checkpoint_uri="s3://kept", outcome=StopOutcome.COOPERATIVE)
    stopped(world, second, checkpoint_lost="checkpoint() returned dict, not bytes or a URI")
    assert world.status("low") is JobState.PENDING
    assert world.job("low").story[-1].reason == f"preempted by high; checkpoint lost: {LOST}"
    shown = job_message(world.job("low"), world.state)
    assert shown.checkpoint_lost == LOST
    (victim,) = job_message(world.job("high"), world.state).victims
    assert (victim.outcome, victim.checkpoint_lost) == (f"KILLED; checkpoint lost: {LOST}", LOST)
    assert f"checkpoint lost: {LOST}" in [reason.message for reason in world.explain("low").reasons]
    assert any(f"checkpoint lost: {LOST}" in event.reason for event in world.log if event.type == "preemption.done")
    assert "checkpoint_lost" in str(MessageToDict(shown, preserving_proto_field_name=True))


def test_ft_a4_what_was_lost_is_forgotten_once_a_checkpoint_is_left() -> None:
    world = World({"n1": 2})
    for worker in a_victim(world):
        stopped(world, worker, checkpoint_lost="checkpoint() raised OSError")
    world.complete("high")
    world.let_stop("high")
    assert world.status("low") is JobState.RUNNING
    assert world.job("low").checkpoint_lost
    world.send(ev.JobPreempted(now_ms=world.now_ms, uid=world.job("low").uid))
    assert world.job("low").checkpoint_lost == ""


@pytest.mark.parametrize("on_preempt", [OnPreempt.REQUEUE, OnPreempt.CANCEL])
@pytest.mark.parametrize("end", ["silence", "death", "node"])
def test_ft_a4_a_checkpoint_that_nobody_could_leave_is_lost(end: str, on_preempt: OnPreempt) -> None:
    world = World({"n1": 1, "n2": 0})
    world.pool()
    world.hold = lambda command: isinstance(command, cmd.StartWorker)
    world.submit("j", on_preempt=on_preempt)
    (worker,) = world.workers("j")
    world.send(ev.WorkerStarted(now_ms=world.now_ms, node_id="n1", generation=worker.generation, can_checkpoint=True))
    world.held.clear()
    world.auto = False
    world.send(ev.JobPreempted(now_ms=world.now_ms, uid=world.job("j").uid))
    if end == "silence":
        world.tick(600_000)
        why = "its agent on n1 did not answer in time"
    elif end == "death":
        dies(world, worker, "killed by signal 9 (SIGKILL)")
        why = "it died before it was asked: killed by signal 9 (SIGKILL)"
    else:
        world.lose("n1")
        why = "n1 fell silent"
    assert world.job("j").checkpoint_lost == f"main/0: {why}"
    assert world.job("j").reason == f"preempted by hand; checkpoint lost: main/0: {why}"
    assert world.status("j") is (JobState.PENDING if on_preempt is OnPreempt.REQUEUE else JobState.CANCELLED)


@pytest.mark.parametrize(("actor", "left"), [(RAY_PROGRAM, b"step 7"), (PROGRAM, b"step 7"), ("tests:Actor", None)])
@pytest.mark.parametrize("end", ["failure", "node"])
def test_what_a_command_wrote_counts_when_it_or_another_worker_has_failed(
    end: str, actor: str, left: bytes | None
) -> None:
    world = World({"n1": 1, "n2": 1})
    world.pool()
    main = ComponentSpec(
        name="main",
        actor=actor,
        args_json='[["train"]]',
        entry="run",
        min_workers=2,
        max_workers=2,
        resources=Resources.parse({"gpu": 1}),
    )
    world.submit("j", components=[main], restart=RestartPolicy(max_restarts=1))
    world.checkpoints["j"] = b"step 7"
    first, second = world.workers("j")
    if end == "node":
        world.lose(second.node_id)
        world.join("n3", 1)
    else:
        raises(world, first, "it ended with exit code 1")
        world.tick(60_000)
    assert world.job("j").attempt == 2
    again = [start for start in world.starts if start.worker.attempt == 2]
    assert [start.checkpoint and start.checkpoint.data for start in again] == [left, left if end == "failure" else None]


def test_ft_a4_a_job_that_requires_checkpoints_is_spared_until_it_ran_for_its_min_runtime() -> None:
    world = World({"n1": 2})
    for worker in a_victim(world, require_checkpoint=True, min_runtime_ms=30_000):
        stopped(world, worker, checkpoint_lost="checkpoint() raised OSError")
    world.hold = lambda command: isinstance(command, cmd.StartWorker) and command.job_name == "low"
    world.complete("high")
    assert world.status("low") is JobState.STARTING
    world.submit("next", priority=9, workers=2)
    why = "\n".join(reason.message for reason in world.explain("next").reasons)
    assert "low requires checkpoints (require_checkpoint) and lost its last one" in why
    assert "main/0: checkpoint() raised OSError" in why
    world.hold = lambda command: False
    world.answer()
    assert world.status("low") is JobState.RUNNING
    why = "\n".join(reason.message for reason in world.explain("next").reasons)
    assert "waits 30 s more (min_runtime since the lost checkpoint of low), then low yields" in why
    world.tick(29_000)
    assert world.preempted() == [("low", "high")]
    world.tick(2_000)
    assert world.preempted()[-1] == ("low", "next")


def test_ft_a4_without_require_checkpoint_a_job_that_lost_one_is_a_victim_as_any_other() -> None:
    world = World({"n1": 2})
    for worker in a_victim(world):
        stopped(world, worker, checkpoint_lost="checkpoint() raised OSError")
    world.hold = lambda command: isinstance(command, cmd.StartWorker) and command.job_name == "low"
    world.complete("high")
    world.submit("next", priority=9, workers=2)
    assert world.preempted()[-1] == ("low", "next")
