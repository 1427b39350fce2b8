"""A question changes nothing, and its answer is what happens when somebody does what was asked about."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from callboard.model.quantities import Resources
from callboard.model.specs import JobSpec, PgPoolSpec, StopPolicy
from callboard.scheduler import Outcome, Refusal, Scheduler
from callboard.scheduler.account.explain import Explanation
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.commands import StopWorker
from callboard.scheduler.records.events import Event
from callboard.scheduler.records.refusals import RefusalCode
from callboard.scheduler.records.states import JobState
from callboard.scheduler.state.invariants import whole
from tests.scheduler.histories import History, TwinWorld, run
from tests.scheduler.test_remedies import Operator
from tests.scheduler.world import World, job_spec, pool_spec


class Curious(Scheduler):
    """Is asked all there is to ask before every event."""

    def handle(self, event: Event) -> Outcome:
        """Answers, then decides."""
        now_ms, state = event.now_ms, self.state
        before = whole(state)
        questions: list[Event] = [ev.JobCancelled(now_ms=now_ms, uid=uid) for uid in state.jobs]
        questions += [ev.NodeDrained(now_ms=now_ms, node_id=node_id) for node_id in state.nodes]
        questions.append(ev.Tick(now_ms=now_ms + 10_000))
        for pool in state.pools.values():
            held = replace(pool.spec, stop_policy=StopPolicy.HOLD_AND_DRAIN)
            questions.append(ev.PoolUpdated(now_ms=now_ms, spec=held))
            questions.append(ev.PoolDeleted(now_ms=now_ms, name=pool.spec.name, force=True))
        for question in questions:
            try:
                self.rehearse(question)
            except Refusal:
                continue
        for name, pool_name in product(("what", "j1"), state.pools):
            try:
                self.what_if(ev.JobSubmitted(now_ms=now_ms, uid="?", spec=job_spec(name, pool=pool_name, priority=9)))
            except Refusal:
                continue
        for uid in state.jobs:
            assert self.explain(uid, now_ms).summary
        assert whole(state) == before
        return super().handle(event)


class CuriousWorld(World):
    """A world whose scheduler is asked all the time."""

    make_scheduler = Curious


class Asked(History):
    """A history in such a world."""

    world_type = CuriousWorld


@pytest.mark.parametrize("seed", [1, 9])
def test_whatever_is_asked_in_between_the_history_goes_on_as_if_nobody_had(seed: int) -> None:
    asked, left_alone = run(seed, kind=Asked), run(seed)
    assert asked.world.log == left_alone.world.log
    assert list(asked.world.state.records()) == list(left_alone.world.state.records())


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
