"""The six named acts of the RLHF demonstration, in the core alone."""

from __future__ import annotations

from callboard.model.policy import Aggressiveness
from callboard.model.quantities import Number, Resources
from callboard.model.specs import PgPoolSpec
from callboard.scheduler.account.stats import group_stats
from callboard.scheduler.records.states import JobState, StopOutcome
from tests.scheduler.world import World, pool_spec

BIG: dict[str, Number] = {"cpu": 2, "memory": "2GiB", "gpu": 1}
SMALL: dict[str, Number] = {"cpu": 1.5, "memory": "1GiB", "gpu": 1}


def rlhf() -> World:
    node: dict[str, Number] = {"cpu": 3, "memory": "4GiB", "gpu": 2}
    world = World({"n0": node, "n1": node, "n2": node})
    world.policy(
        {"role": {"train": ["reward", "rollout"], "reward": ["rollout"]}},
        aggressiveness=Aggressiveness.MEDIUM,
        enable_cross_pool=False,
        cancel_timeout_ms=500,
    )
    shape = Resources.parse(BIG)
    pg_pool = PgPoolSpec(reserved=(shape, shape), max_dynamic=2)
    world.pool(pool_spec("rlhf", pg_pool=pg_pool, cpu=6, memory="8GiB", gpu=6))
    return world


def start(world: World, name: str, role: str, priority: float, ask: dict[str, Number]) -> None:
    world.submit(name, pool="rlhf", priority=priority, labels={"role": role}, ask=ask)


def test_the_six_acts() -> None:
    world = rlhf()
    state = world.state

    # 1: two rollouts on dynamic groups
    start(world, "rollout-00", "rollout", 3.0, SMALL)
    world.tick(1000)
    start(world, "rollout-01", "rollout", 3.0, SMALL)
    stats = group_stats(state, "rlhf")
    assert (stats.total, stats.reserved_idle) == (4, 2)
    assert state.meta.total_preemptions == 0

    # 2: a reward on a reserved group
    start(world, "reward-00", "reward", 8.5, BIG)
    assert group_stats(state, "rlhf").reserved_idle == 1
    assert state.meta.total_preemptions == 0

    # 3: a train; quota is one CPU short, so the youngest rollout yields
    start(world, "train-00", "train", 9.0, BIG)
    assert world.preempted() == [("rollout-01", "train-00")]
    assert world.status("train-00") is JobState.RUNNING
    assert group_stats(state, "rlhf").reserved_idle == 0
    assert world.status("rollout-01") is JobState.PENDING
    assert "pool rlhf: 5.5 of 6 cpu used, asks 1.5" in world.explain("rollout-01").summary

    # 4: an extra rollout takes the other one's place, on the group that is idle since act 3
    before = state.pools["rlhf"].counts
    start(world, "rollout-extra", "rollout", 4.5, SMALL)
    assert world.preempted()[1:] == [("rollout-00", "rollout-extra")]
    after = state.pools["rlhf"].counts
    assert (after.reuses - before.reuses, after.creations - before.creations) == (1, 0)
    assert world.status("rollout-extra") is JobState.RUNNING

    # 5: a victim whose cancel() hangs
    for name in ("rollout-00", "rollout-01", "rollout-extra"):
        world.cancel(name)
    start(world, "rollout-slow", "rollout", 3.0, SMALL)
    world.hold_stops_of("rollout-slow")
    start(world, "rollout-urgent", "rollout", 6.0, SMALL)
    assert world.status("rollout-urgent") is JobState.PENDING
    assert "victim rollout-slow" in world.explain("rollout-urgent").summary
    world.now_ms += 600
    world.outcomes["rollout-slow"] = StopOutcome.KILLED
    world.let_stop("rollout-slow")
    assert world.status("rollout-urgent") is JobState.RUNNING
    assert world.state.meta.total_preemptions == 3

    # 6: nothing is left
    world.hold = lambda command: False
    world.cancel("rollout-slow")
    for name in ("rollout-urgent", "reward-00", "train-00"):
        world.complete(name)
    from callboard.scheduler.records import events as ev

    world.send(ev.PoolDeleted(now_ms=world.now_ms, name="rlhf"))
    assert not state.groups
    assert not state.workers
    assert not state.pools
    for node in state.nodes:
        assert state.node_use(node).free == state.nodes[node].capacity
