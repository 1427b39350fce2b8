"""A question changes nothing, and its answer is what happens when somebody does what was asked about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

import pytest

from callboard.controller.views.jobs import job_message
from callboard.controller.views.nodes import NodeMessages, node_message
from callboard.controller.views.pools import group_message, pool_message
from callboard.controller.views.stats import demand_messages, stats_message
from callboard.model.quantities import Resources
from callboard.model.specs import JobSpec, PgPoolSpec, StopPolicy
from callboard.scheduler import ImpossibleTransition, Outcome, Refusal, Scheduler, State
from callboard.scheduler.account.explain import Explanation
from callboard.scheduler.machine import HANDLERS
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.commands import StopWorker
from callboard.scheduler.records.events import Event
from callboard.scheduler.records.refusals import RefusalCode
from callboard.scheduler.records.states import JobState, StopOutcome
from callboard.scheduler.state.invariants import whole
from tests.scheduler.histories import History, TwinWorld, run
from tests.scheduler.test_remedies import Operator
from tests.scheduler.world import World, job_spec, pool_spec

MOST_HISTORIES = 8


class Curious(Scheduler):
    """Is asked all there is to ask before every event."""

    asked: ClassVar[Counter[type[Event]]] = Counter()
    """Questions by what they were about that weren't refused."""

    turn = 0
    kept: NodeMessages | None = None

    def handle(self, event: Event) -> Outcome:
        """Answers, then decides."""
        self.turn += 1
        now_ms, state = event.now_ms, self.state
        before = whole(state)
        # A tenth with each event, in turn.
        for question in list(every_question(state, now_ms))[self.turn % 10 :: 10]:
            try:
                self.rehearse(question)
            except (Refusal, ImpossibleTransition):
                continue
            self.asked[type(question)] += 1
        for name, pool_name in product(("what", "j1"), state.pools):
            spec = job_spec(name, pool=pool_name, priority=9)
            try:
                self.what_if(ev.JobSubmitted(now_ms=now_ms, uid="?", spec=spec))
                self.considered(ev.JobSubmitted(now_ms=now_ms, uid="?", spec=spec))
            except Refusal:
                continue
        for uid in state.jobs:
            assert self.explain(uid, now_ms).summary
        for node_id in state.nodes:
            self.owed_commands(node_id)
        for read in (demand_messages, stats_message, read_views):
            read(state)
        # What is kept of a node's message is what would be made of it now, whatever happened or was rehearsed.
        self.kept = self.kept or NodeMessages()
        for node in state.nodes.values():
            assert self.kept.of(node, state) == self.kept.of(node, state) == node_message(node, state)
        assert whole(state) == before
        return super().handle(event)


def read_views(state: State) -> None:
    """All that lists show."""
    for job in state.jobs.values():
        job_message(job, state)
    for node in state.nodes.values():
        node_message(node, state)
    for pool in state.pools.values():
        pool_message(pool, state)
    for group in state.groups.values():
        group_message(group, state)


def every_question(state: State, now_ms: int) -> Iterator[Event]:
    """One of every kind about whatever there is."""
    for uid, job in state.jobs.items():
        yield ev.JobCancelled(now_ms=now_ms, uid=uid, destroy_groups=True)
        yield ev.JobCompleted(now_ms=now_ms, uid=uid)
        yield ev.JobPreempted(now_ms=now_ms, uid=uid)
        yield ev.JobsRenewed(now_ms=now_ms, uids=(uid,))
        yield ev.SignalsReported(now_ms=now_ms, uid=uid, gauges=(("backlog", 9_000),))
        spec = state.specs[uid].spec
        yield ev.JobScaled(now_ms=now_ms, uid=uid, component=spec.components[0].name, workers=2)
        yield ev.PlacementResolved(now_ms=now_ms, uid=uid, spec=spec)
        yield ev.JobSubmitted(now_ms=now_ms, uid="?", spec=replace(spec, name=f"{job.name}-again"))
    for node in state.nodes.values():
        about: dict[str, Any] = {"now_ms": now_ms, "node_id": node.node_id}
        yield ev.NodeDrained(**about)
        yield ev.NodeCordoned(**about, cordoned=not node.cordoned)
        yield ev.NodeRemoved(**about)
        about["epoch"] = node.epoch
        yield ev.NodeSuspected(**about)
        yield ev.NodeLost(**about, reason="what if")
        yield ev.NodeLeft(**about)
        yield ev.NodeRayChanged(**about, ray=None)
        yield ev.NodeObserved(**about, closed=((0, "somebody's"),))
        if node.ray is not None:
            yield ev.RaySessionLost(now_ms=now_ms, session=node.ray.session)
    for group in state.groups.values():
        yield ev.GroupDeleted(now_ms=now_ms, group_id=group.group_id, when_free=True)
        yield ev.GroupReady(now_ms=now_ms, group_id=group.group_id, attempt=group.attempt, ray_id="r")
        yield ev.GroupFailed(now_ms=now_ms, group_id=group.group_id, attempt=group.attempt, message="what if")
        yield ev.GroupRemoved(now_ms=now_ms, group_id=group.group_id)
    for worker in state.workers.values():
        told: dict[str, Any] = {"now_ms": now_ms, "node_id": worker.node_id, "generation": worker.generation}
        yield ev.PortReserved(**told, port=20_000)
        yield ev.WorkerStarted(**told)
        yield ev.WorkerProgressed(**told, message="what if")
        yield ev.WorkerStartFailed(**told, message="what if")
        yield ev.WorkerStopped(**told, outcome=StopOutcome.KILLED)
        yield ev.WorkerExited(**told, message="what if")
        yield ev.WorkerFinished(**told, succeeded=True)
    for pool in state.pools.values():
        yield ev.PoolUpdated(now_ms=now_ms, spec=replace(pool.spec, stop_policy=StopPolicy.HOLD_AND_DRAIN))
        yield ev.PoolUpdated(now_ms=now_ms, spec=replace(pool.spec, stop_policy=StopPolicy.HOLD))
        yield ev.PoolDeleted(now_ms=now_ms, name=pool.spec.name, force=True)
        yield ev.PoolCreated(now_ms=now_ms, spec=replace(pool.spec, name="new"))
    yield ev.NodeJoined(now_ms=now_ms, node_id="new", instance="i", capacity=Resources.parse({"cpu": 4, "gpu": 2}))
    yield ev.GroupFound(now_ms=now_ms, group_id="nobody's", ray_id="r")
    yield ev.PolicySet(now_ms=now_ms, policy=replace(state.meta.policy, min_runtime_ms=5_000))
    yield ev.ControllerStarted(now_ms=now_ms, grace_ms=1_000)
    yield ev.Tick(now_ms=now_ms + 10_000)


class CuriousWorld(World):
    """A world whose scheduler is asked all the time."""

    make_scheduler = Curious


class Asked(History):
    """A history in such a world."""

    world_type = CuriousWorld


def test_whatever_is_asked_in_between_the_history_goes_on_as_if_nobody_had() -> None:
    """Over as many histories as it takes until there was something to ask about each kind of event."""
    Curious.asked.clear()
    never: set[type[Event]] = set(HANDLERS)
    for seed in range(2, 2 + MOST_HISTORIES):
        asked, left_alone = run(seed, kind=Asked), run(seed)
        assert asked.world.log == left_alone.world.log
        assert list(asked.world.state.records()) == list(left_alone.world.state.records())
        never = set(HANDLERS) - set(Curious.asked)
        if not never and seed > 2:
            return
    names = ", ".join(sorted(kind.__name__ for kind in never))
    raise AssertionError(f"in {MOST_HISTORIES} histories nobody could ask about {names}")


def submitted(world: World, spec: JobSpec) -> JobState | Refusal:
    try:
        uid = world.submit(spec)
    except Refusal as refusal:
        return refusal
    return world.state.jobs[uid].state


def expected(world: World, spec: JobSpec) -> Explanation | Refusal:
    """What a question says of a submission that comes next."""
    try:
        return world.scheduler.what_if(ev.JobSubmitted(now_ms=world.now_ms + 1, uid="?", spec=spec))
    except Refusal as refusal:
        return refusal


@pytest.mark.parametrize("block", range(4))
def test_what_would_become_of_a_job_is_what_becomes_of_it(block: int) -> None:
    verdicts = set()
    for seed in range(block * 25, block * 25 + 25):
        operator = Operator(seed)
        world = operator.world
        world.auto = False
        spec = operator.spec("j0" if seed % 5 == 0 else "what")
        if seed % 3 == 0:
            spec = replace(spec, wait_for_nodes_ms=1_000)
        account = expected(world, spec)
        if isinstance(account, Refusal):
            verdicts.add(account.code.value)
            met = submitted(world, spec)
            assert isinstance(met, Refusal), f"seed {seed}"
            assert (met.code, met.message, met.reasons) == (account.code, account.message, account.reasons)
            continue
        verdicts.add(account.verdict)
        state = submitted(world, spec)
        assert not isinstance(state, Refusal), f"seed {seed}: {state}"
        assert (state is JobState.STARTING) is (account.verdict == "START"), f"seed {seed}: {account}"
        job = world.job(spec.name)
        assert job.nominated is (account.verdict != "START" and bool(account.workers)), f"seed {seed}: {account}"
        if account.verdict == "START":
            places = [(worker.component, worker.rank, worker.node_id, worker.devices) for worker in account.workers]
            assert sorted(places) == sorted(
                (worker.component, worker.rank, worker.node_id, worker.devices) for worker in world.workers(spec.name)
            )
    assert {"START", "WAIT"} <= verdicts
    assert len(verdicts) >= 4, verdicts


def test_a_name_that_is_taken_is_refused_by_a_question_too() -> None:
    world = TwinWorld({"n1": 2})
    world.pool()
    world.submit("a")
    with pytest.raises(Refusal) as refused:
        world.scheduler.what_if(ev.JobSubmitted(now_ms=world.now_ms, uid="?", spec=job_spec("a")))
    assert refused.value.code is RefusalCode.ALREADY_EXISTS


@pytest.mark.parametrize(
    ("dynamic", "charged", "lendable", "reserved", "quota"),
    list(product([False, True], [False, True], [False, True], [0, 1, 2], [None, 1, 2])),
)
def test_whatever_groups_a_pool_keeps_a_job_that_would_start_starts(
    dynamic: bool, charged: bool, lendable: bool, reserved: int, quota: int | None
) -> None:
    world = TwinWorld({"n1": 4})
    world.hold = lambda command: isinstance(command, StopWorker)
    kept = PgPoolSpec(
        dynamic=dynamic,
        charge_reserved=charged,
        reserved_lendable=lendable,
        reserved=(Resources.parse({"gpu": 1, "cpu": 1}),) * reserved,
    )
    world.pool(pool_spec("pool", pg_pool=kept) if quota is None else pool_spec("pool", pg_pool=kept, gpu=quota))
    for number, priority in enumerate((9, 1, 9)):
        spec = job_spec(f"j{number}", priority=priority, ask={"gpu": 1})
        account = expected(world, spec)
        if isinstance(account, Refusal):
            assert world.refused(spec).message == account.message
        else:
            world.submit(spec)
            started = world.status(spec.name) is JobState.RUNNING
            assert started is (account.verdict == "START")
