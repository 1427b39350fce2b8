"""Cohorts: who borrows, who lends, and how exactly a lender takes back (QL-…)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from callboard.model.specs import ComponentSpec, JobSpec, PoolSpec, StopPolicy
from callboard.scheduler.account.stats import pool_use
from callboard.scheduler.plan.preemption import Claims, by_rules
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.states import JobState
from callboard.scheduler.records.wording import time_left
from tests.scheduler.world import World, job_spec, pool_spec


def cohort(gpus: int, **pools: PoolSpec) -> World:
    world = World({"n1": gpus})
    for name, spec in pools.items():
        world.pool(replace(spec, name=name, cohort="team"))
    return world


def test_a_pool_borrows_what_others_leave_and_no_more() -> None:
    world = cohort(4, p1=pool_spec(gpu=3), p2=pool_spec(gpu=1))
    for n in range(4):
        world.submit(f"b{n}", pool="p2")
    assert all(world.status(f"b{n}") is JobState.RUNNING for n in range(4))
    assert world.refused("five", pool="p2", workers=5).code == "QUOTA_EXCEEDED"


def test_borrow_and_lend_limits_are_kept() -> None:
    world = cohort(
        8,
        p1=replace(pool_spec(gpu=4), lend_limit=(("gpu", 3000),)),
        p2=replace(pool_spec(gpu=1), borrow_limit=(("gpu", 2000),)),
        p3=pool_spec(gpu=0),
    )
    for n in range(4):
        world.submit(f"b{n}", pool="p2")
    running = [n for n in range(4) if world.status(f"b{n}") is JobState.RUNNING]
    assert len(running) == 3
    summary = world.explain("b3").summary
    assert "3 gpu used (its own quota is 1, other pools lend at most 2); 0 left, asks 1" in summary
    for n in range(3):
        world.submit(f"c{n}", pool="p3")
    # p1 lends three: two to p2, one is left.
    assert [world.status(f"c{n}") for n in range(3)].count(JobState.RUNNING) == 1
    assert pool_use(world.state, "p1").available.gpu_milli == 1000


def test_ql05_a_deleted_pool_lends_nothing() -> None:
    world = cohort(4, p1=pool_spec(gpu=4), p2=pool_spec(gpu=0))
    world.submit("own", pool="p1")
    world.submit("borrower", pool="p2")
    world.send(ev.PoolDeleted(now_ms=world.now_ms, name="p1", force=True))
    assert "p1" not in world.state.pools
    assert world.refused("late", pool="p2").code == "QUOTA_EXCEEDED"
    assert pool_use(world.state, "p2").over.gpu_milli == 1000


def test_ql08_a_lender_takes_back_exactly_what_its_gang_needs() -> None:
    world = cohort(4, p1=pool_spec(gpu=4), p2=pool_spec(gpu=0))
    for n in range(4):
        world.submit(f"b{n}", pool="p2", priority=9)
    world.submit("gang", pool="p1", priority=1, workers=4)
    assert world.status("gang") is JobState.RUNNING
    assert len(world.preempted()) == 4


def test_ql08_nobody_is_evicted_when_one_cannot_be() -> None:
    world = cohort(4, p1=pool_spec(gpu=4), p2=pool_spec(gpu=0))
    for n in range(4):
        world.submit(f"b{n}", pool="p2", priority=9, preemptible=n != 2)
    world.submit("gang", pool="p1", priority=1, workers=4)
    assert world.status("gang") is JobState.PENDING
    assert world.preempted() == []


def test_a_lender_takes_back_the_lowest_and_youngest_first_and_leaves_what_is_the_borrowers_own() -> None:
    world = cohort(4, p1=pool_spec(gpu=2), p2=pool_spec(gpu=2))
    for n, priority in enumerate((3, 2, 2, 9)):
        world.submit(f"b{n}", pool="p2", priority=priority)
        world.tick(1000)
    world.submit("two", pool="p1", priority=1, workers=2)
    assert sorted(victim for victim, _ in world.preempted()) == ["b1", "b2"]
    world.submit("third", pool="p1", priority=1)
    assert world.status("third") is JobState.PENDING
    assert len(world.preempted()) == 2


def test_ql10_who_is_within_the_own_quota_goes_before_borrowers() -> None:
    world = cohort(2, p1=pool_spec(gpu=1), p2=pool_spec(gpu=1))
    world.submit("x", pool="p1", preemptible=False)
    world.submit("y", pool="p1", preemptible=False)
    world.submit("borrower", pool="p1")
    world.submit("owner", pool="p2")
    assert world.status("owner") is JobState.PENDING
    world.complete("y")
    assert world.status("owner") is JobState.RUNNING
    assert world.status("borrower") is JobState.PENDING


def test_hold_admits_nothing_and_hold_and_drain_empties_the_pool() -> None:
    world = World({"n1": 2})
    spec = pool_spec()
    world.pool(spec)
    world.submit("a")
    world.send(ev.PoolUpdated(now_ms=world.now_ms, spec=replace(spec, stop_policy=StopPolicy.HOLD)))
    world.submit("b", wait_for_nodes_ms=10**6)
    assert (world.status("a"), world.status("b")) == (JobState.RUNNING, JobState.PENDING)
    world.send(ev.PoolUpdated(now_ms=world.now_ms, spec=replace(spec, stop_policy=StopPolicy.HOLD_AND_DRAIN)))
    assert world.status("a") is JobState.PENDING
    assert "stop policy" in world.explain("a").summary
    world.send(ev.PoolUpdated(now_ms=world.now_ms, spec=spec))
    assert (world.status("a"), world.status("b")) == (JobState.RUNNING, JobState.RUNNING)


def test_a_limit_of_preemptions_makes_victims_back_off_and_then_stay() -> None:
    world = World({"n1": 1})
    world.pool()
    world.policy(max_preemptions_per_job=2)
    world.submit("low", priority=1)
    for n, wait_ms in enumerate((60_000, 120_000)):
        world.submit(f"high{n}", priority=9)
        world.complete(f"high{n}")
        assert world.status("low") is JobState.PENDING
        world.tick(wait_ms - 1)
        assert world.status("low") is JobState.PENDING
        world.tick(1)
        assert world.status("low") is JobState.RUNNING
    world.submit("high9", priority=9)
    assert world.status("low") is JobState.RUNNING
    assert "which is the limit" in world.explain("high9").reasons[-1].message


def test_where_only_the_quota_is_short_the_nodes_are_not_blamed() -> None:
    world = World({"n1": 2})
    world.pool(gpu=2)
    world.submit("running", workers=2, priority=5)
    world.submit("j", workers=2, priority=1)
    world.send(ev.PoolUpdated(now_ms=world.now_ms, spec=pool_spec(gpu=1)))
    account = world.explain("j")
    assert account.verdict == "UNSCHEDULABLE"
    assert (
        account.summary
        == "j could never start: pool pool: its quota is 1 gpu, asks for 2 workers of 1 GPU each, 2 GPU together"
    )


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        *[(0, "0 ms"), (850, "850 ms"), (8_643, "9 s"), (10_000, "10 s"), (44_999, "45 s"), (60_000, "1 min")],
        *[(1_798_634, "29 min 59 s"), (3_600_000, "1 h"), (5_000_000, "1 h 23 min")],
    ],
)
def test_time_that_is_left_is_said_as_people_say_it(ms: int, text: str) -> None:
    assert time_left(ms) == text


def test_a_job_that_waits_for_nodes_says_for_how_long() -> None:
    world = World({"n1": 1})
    world.pool()
    world.submit("j", workers=2, wait_for_nodes_ms=60_000)
    world.tick(20_000)
    account = world.explain("j")
    assert account.verdict == "WAIT"
    assert account.reasons[0].code == "WAITS_FOR_NODES"
    assert account.summary.startswith("j waits 40 s more for nodes")


def test_all_jobs_of_a_class_are_told_of_the_same_lent_pool() -> None:
    """One answer of the rules is given for a whole class, whose jobs may name their pools in any order."""
    world = World({"n1": 4})
    for name in ("owner", "b", "c"):
        world.pool(pool_spec(name))

    def of(*pools: str) -> JobSpec:
        parts = [ComponentSpec(name=f"part-{at}", actor="a:B", pool=pool) for at, pool in enumerate(pools)]
        return job_spec("v", pool="b", components=parts)

    one, other, claims = of("b", "c"), of("c", "b"), Claims(reclaimable=frozenset({"b", "c"}))
    shapes, asking = world.state.shapes, job_spec("p", pool="owner")
    assert shapes.of(one).yield_class == shapes.of(other).yield_class
    verdicts = [by_rules(world.state, spec, asking, claims) for spec in (one, other)]
    assert verdicts[0] == verdicts[1]
    assert verdicts[0].reason == "pool b uses quota borrowed from pool owner"
