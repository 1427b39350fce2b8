"""Does ``explain`` name what really keeps others from making room, each obstacle by a reason of its own?

For each obstacle there is a world in which it alone stands in the way. Its code is named, and once exactly that is
taken away the job starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from callboard.model.policy import Aggressiveness
from callboard.model.quantities import MILLI, Resources
from callboard.model.specs import (
    NO_PG_POOL,
    ComponentSpec,
    JobSpec,
    PgPoolSpec,
    RestartPolicy,
    RestartScope,
    StopPolicy,
    Strategy,
    WorkerPlace,
)
from callboard.scheduler.plan.grouping import choose_groups
from callboard.scheduler.plan.planning import Plan, best_case, plan
from callboard.scheduler.plan.view import View
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.asks import asks_of
from callboard.scheduler.records.job_records import Put, evolve
from callboard.scheduler.records.states import JobState, NodeState
from tests.scheduler.histories import History
from tests.scheduler.test_remedies import Operator
from tests.scheduler.world import World, job_spec, pool_spec

Change = Callable[[], object]


def codes(world: World, spec: JobSpec | str) -> dict[str, str]:
    """Reason codes about other jobs → what they say, for a job that was submitted or one that was not."""
    uid_or_spec = world.job(spec).uid if isinstance(spec, str) else spec
    if isinstance(uid_or_spec, str):
        found = world.scheduler.explain(uid_or_spec, world.now_ms)
    else:
        found = world.what_if(uid_or_spec)
    return {reason.code: reason.message for reason in found.reasons if reason.subject.startswith("jobs/")}


def test_ft_c2_a_wait_for_the_preemption_delay_says_so_and_who_yields_then() -> None:
    world = World({"n1": 8})
    world.pool()
    world.policy(preemption_delay_ms=60_000)
    world.submit("low", priority=1, ask={"gpu": 8})
    world.submit("h", priority=9, ask={"gpu": 6})
    found = world.explain("h")
    assert found.summary == "h waits 1 min (preemption_delay), then low yields"
    assert found.unblock == ("wait 1 min",)
    assert [victim.victim_name for victim in found.victims] == ["low"]
    assert "NOT_ENOUGH" not in {reason.code for reason in found.reasons}
    world.tick(30_000)
    assert world.explain("h").summary == "h waits 30 s (preemption_delay), then low yields"
    world.tick(30_000)
    assert world.preempted() == [("low", "h")]


def test_ft_c2_a_delay_is_not_blamed_where_nobody_would_yield_after_it() -> None:
    world = World({"n1": 1})
    world.pool()
    world.policy(preemption_delay_ms=60_000)
    world.submit("kept", priority=1, preemptible=False)
    world.submit("h", priority=9)
    found = world.explain("h")
    assert "PREEMPTION_DELAY" not in {reason.code for reason in found.reasons}
    assert "NOT_PREEMPTIBLE" in codes(world, "h")


def test_ft_c2_of_several_times_the_one_counts_after_which_enough_yield() -> None:
    world = World({"n1": 2})
    world.pool()
    world.submit("short", priority=1, min_runtime_ms=20_000)
    world.submit("long", priority=1, min_runtime_ms=50_000)
    world.submit("h", priority=9, ask={"gpu": 2})
    found = world.explain("h")
    assert "min_runtime of long" in found.summary
    assert {victim.victim_name for victim in found.victims} == {"short", "long"}
    world.tick(49_000)
    assert world.preempted() == []
    world.tick(1_000)
    assert sorted(victim for victim, _ in world.preempted()) == ["long", "short"]


def test_ft_c3_a_held_pool_and_a_closed_node_are_the_reason() -> None:
    world = World({"n1": 1, "n2": 1})
    world.pool(pool_spec("p"))
    world.pool(pool_spec("q"))
    world.submit("next", pool="p", priority=1, node_selector=(("node", "n1"),))
    world.submit("kept", pool="p", priority=1, preemptible=False)
    world.send(ev.NodeCordoned(now_ms=world.now_ms, node_id="n1", cordoned=True))
    spec = job_spec("h", pool="p", priority=9)
    assert codes(world, spec)["CORDONED"] == (
        "next would yield (the same pool and priority gap 8 ≥ 1), but n1 is cordoned: room there would not help"
    )
    world.send(ev.NodeDrained(now_ms=world.now_ms, node_id="n2"))
    world.send(ev.NodeCordoned(now_ms=world.now_ms, node_id="n1", cordoned=False))
    hold(world, "p", StopPolicy.HOLD)
    assert "pool p admits nothing (stop policy HOLD)" in codes(world, spec)["POOL_HELD"]
    found = world.what_if(spec)
    assert "set the stop_policy of pool p to none" in found.unblock
    hold(world, "p", StopPolicy.NONE)
    assert isinstance(plan(world.state, "", spec, world.now_ms, world.now_ms), Plan)


def hold(world: World, pool: str, policy: StopPolicy) -> None:
    spec = replace(world.state.pools[pool].spec, stop_policy=policy)
    world.send(ev.PoolUpdated(now_ms=world.now_ms, spec=spec))


# ---- one world for each obstacle: the world, the job, and what takes the obstacle away ----


def _full(**fields: object) -> World:
    """One GPU, held by ``low`` (priority 1)."""
    world = World({"n1": 1})
    world.pool(pool_spec("p"))
    world.submit("low", pool="p", priority=1, **fields)
    return world


def _policy(**fields: object) -> tuple[World, JobSpec, Change]:
    world = _full()
    world.policy({"role": {"train": ["rollout"]}}, **fields)
    return world, job_spec("h", pool="p", priority=9), lambda: world.policy({})


def _gap() -> tuple[World, JobSpec, Change]:
    world = _full()
    world.policy(aggressiveness=Aggressiveness.LOW)
    return world, job_spec("h", pool="p", priority=3), lambda: world.policy(aggressiveness=Aggressiveness.HIGH)


def _shield() -> tuple[World, JobSpec, Change]:
    world = _full(labels={"role": "train"})
    world.policy({"role": {"train": ["rollout"]}})
    return world, job_spec("h", pool="p", priority=9, labels={"role": "rollout"}), lambda: world.policy({})


def _cross(**fields: object) -> tuple[World, JobSpec, Change]:
    world = _full()
    world.pool(pool_spec("q"))
    world.policy(**fields)  # type: ignore[arg-type]
    return world, job_spec("h", pool="q", priority=9), lambda: world.policy(cross_pool_threshold_milli=5000)


def _protected() -> tuple[World, JobSpec, Change]:
    world = _full()
    world.pool(pool_spec("q"))
    spec = world.state.pools["p"].spec
    world.send(ev.PoolUpdated(now_ms=world.now_ms, spec=replace(spec, protected=True)))
    return (
        world,
        job_spec("h", pool="q", priority=9),
        lambda: world.send(ev.PoolUpdated(now_ms=world.now_ms, spec=spec)),
    )


def _not_preemptible() -> tuple[World, JobSpec, Change]:
    world = _full(preemptible=False)
    return world, job_spec("h", pool="p", priority=9), lambda: world.complete("low")


def _min_runtime() -> tuple[World, JobSpec, Change]:
    world = _full(min_runtime_ms=10_000)
    return world, job_spec("h", pool="p", priority=9), lambda: world.tick(10_000)


def _limit() -> tuple[World, JobSpec, Change]:
    world = _full()
    world.policy(max_preemptions_per_job=1)
    world.submit("first", pool="p", priority=9)
    world.complete("first")
    world.tick(120_000)
    assert world.status("low") is JobState.RUNNING
    return world, job_spec("h", pool="p", priority=9), world.policy


def _victims() -> tuple[World, JobSpec, Change]:
    world = World({"n1": 2})
    world.pool(pool_spec("p"))
    for n in range(2):
        world.submit(f"low{n}", pool="p", priority=1)
    world.policy(max_victims_per_round=1)
    return world, job_spec("h", pool="p", priority=9, ask={"gpu": 2}), lambda: world.policy(max_victims_per_round=2)


def _cordoned() -> tuple[World, JobSpec, Change]:
    world = _full()
    world.send(ev.NodeCordoned(now_ms=world.now_ms, node_id="n1", cordoned=True))
    back = ev.NodeCordoned(now_ms=world.now_ms, node_id="n1", cordoned=False)
    return world, job_spec("h", pool="p", priority=9), lambda: world.send(back)


def _draining() -> tuple[World, JobSpec, Change]:
    """A job that comes back from its drain elsewhere would be no victim: this one's agent is slow to be asked."""
    world = _full()
    node = world.state.nodes["n1"]
    world.state.apply(Put(evolve(node, state=NodeState.DRAINING, cordoned=True)))
    back = ev.NodeCordoned(now_ms=world.now_ms, node_id="n1", cordoned=False)
    return world, job_spec("h", pool="p", priority=9), lambda: world.send(back)


def _elsewhere() -> tuple[World, JobSpec, Change]:
    world = World({"n1": 1, "n2": 1})
    world.pool(pool_spec("p"))
    world.submit("low", pool="p", priority=1, node_selector=(("node", "n1"),))
    world.submit("kept", pool="p", priority=1, preemptible=False)
    spec = job_spec("h", pool="p", priority=9, node_selector=(("node", "n2"),))
    return world, spec, lambda: world.complete("kept")


def _small_node() -> tuple[World, JobSpec, Change]:
    world = World({"n1": 1, "n2": 2})
    world.pool(pool_spec("p"))
    world.submit("low", pool="p", priority=1, node_selector=(("node", "n1"),))
    world.submit("kept", pool="p", priority=1, ask={"gpu": 2}, preemptible=False)
    return world, job_spec("h", pool="p", priority=9, ask={"gpu": 2}), lambda: world.complete("kept")


def _other_resource() -> tuple[World, JobSpec, Change]:
    world = World({"n1": {"cpu": 8, "gpu": 1}})
    world.pool(pool_spec("p"))
    world.submit("low", pool="p", priority=1, ask={"cpu": 1})
    world.submit("kept", pool="p", priority=1, preemptible=False)
    return world, job_spec("h", pool="p", priority=9), lambda: world.complete("kept")


def _other_quota() -> tuple[World, JobSpec, Change]:
    world = World({"n1": 4})
    world.pool(pool_spec("p", gpu=1))
    world.pool(pool_spec("q"))
    world.submit("kept", pool="p", priority=1, preemptible=False)
    world.submit("low", pool="q", priority=1)
    return world, job_spec("h", pool="p", priority=9), lambda: world.complete("kept")


def _other_groups() -> tuple[World, JobSpec, Change]:
    world = World({"n1": 4})
    world.pool(pool_spec("p", pg_pool=PgPoolSpec(max_dynamic=1)))
    world.pool(pool_spec("q"))
    world.submit("kept", pool="p", priority=1, preemptible=False)
    world.submit("low", pool="q", priority=1)
    return world, job_spec("h", pool="p", priority=9), lambda: world.complete("kept")


def _too_little() -> tuple[World, JobSpec, Change]:
    world = World({"n1": 2})
    world.pool(pool_spec("p"))
    world.submit("low", pool="p", priority=1)
    world.submit("kept", pool="p", priority=1, preemptible=False)
    return world, job_spec("h", pool="p", priority=9, ask={"gpu": 2}), lambda: world.complete("kept")


def _owners() -> tuple[World, JobSpec, Change]:
    world = World({"n1": 1})
    for name in ("p", "q"):
        world.pool(replace(pool_spec(name, gpu=1), cohort="team"))
    world.submit("low", pool="p", priority=1)
    spec = job_spec("h", pool="q", priority=9, workers=2)
    world.join("n2", 1)
    return world, spec, lambda: world.complete("low")


def _never() -> tuple[World, JobSpec, Change]:
    world = _full()
    return world, job_spec("h", pool="p", priority=9, never_preempts=True), lambda: world.complete("low")


def _held_for() -> tuple[World, JobSpec, Change]:
    world = _full()
    world.hold_stops_of("low")
    world.submit("first", pool="p", priority=9)
    return world, job_spec("h", pool="p", priority=9), lambda: world.cancel("first")


def _stopping() -> tuple[World, JobSpec, Change]:
    world, spec, _ = _held_for()
    return world, spec, lambda: world.cancel("first")


OBSTACLES = {
    "GAP_TOO_SMALL": _gap,
    "LABEL_SHIELD": _shield,
    "CROSS_POOL_OFF": lambda: _cross(enable_cross_pool=False),
    "PROTECTED_POOL": _protected,
    "NOT_PREEMPTIBLE": _not_preemptible,
    "MIN_RUNTIME": _min_runtime,
    "MAX_PREEMPTIONS": _limit,
    "MAX_VICTIMS": _victims,
    "CORDONED": _cordoned,
    "DRAINING": _draining,
    "LABEL_MISMATCH": _elsewhere,
    "NODE_TOO_SMALL": _small_node,
    "HOLDS_NONE_OF_IT": _other_resource,
    "QUOTA_NOT_HELPED": _other_quota,
    "GROUP_NOT_HELPED": _other_groups,
    "STILL_SHORT": _too_little,
    "OWN_QUOTA": _owners,
    "NEVER_PREEMPTS": _never,
    "HELD_FOR": _held_for,
    "ALREADY_STOPPING": _stopping,
}


@pytest.mark.parametrize("code", OBSTACLES)
def test_ft_c2_each_obstacle_has_a_reason_of_its_own_and_is_the_real_one(code: str) -> None:
    world, spec, take_away = OBSTACLES[code]()
    assert not isinstance(plan(world.state, "", spec, world.now_ms, world.now_ms), Plan), "it must be blocked"
    found = codes(world, spec)
    assert code in found, found
    take_away()
    assert isinstance(plan(world.state, "", spec, world.now_ms, world.now_ms), Plan), found


CATCH_ALLS = ("NOT_ENOUGH", "WILL_NOT_YIELD", "LATER", "")


@pytest.mark.parametrize("seed", range(30, 36))
def test_ft_c2_whatever_happens_every_waiting_job_has_reasons_that_are_true(seed: int) -> None:
    history = History(seed)
    looked_at = 0
    for _ in range(90):
        history.step()
        world = history.world
        for job in [world.state.jobs[uid] for uid in world.state.jobs_by_state[JobState.PENDING]]:
            looked_at += 1
            found = world.scheduler.explain(job.uid, world.now_ms)
            for reason in found.reasons:
                assert reason.code not in CATCH_ALLS, reason
                if reason.code == "STILL_SHORT":
                    spec = world.state.specs[job.uid].spec
                    best = View(world.state, best_case(world.state, job.uid, spec, world.now_ms))
                    assert choose_groups(world.state, best, spec, asks_of(spec)) is None, reason
                if reason.code == "ALREADY_STOPPING":
                    name = reason.subject.removeprefix("jobs/")
                    states = {other.state for other in world.state.jobs.values() if other.name == name}
                    assert states & {JobState.STOPPING, JobState.PREEMPTING}, reason
                if reason.code == "NODE_LACKS":
                    assert reason.asked > reason.available, reason
            codes_here = {reason.code for reason in found.reasons}
            if "YIELDS_LATER" in codes_here:
                assert found.victims, found
                assert found.unblock[0].startswith("wait "), found
    assert looked_at


# ---- what is on its way, and to whom ----


def victims_named(world: World, name: str) -> set[str]:
    found = world.explain(name)
    awaited = {r.subject.removeprefix("jobs/") for r in found.reasons if r.code.startswith("WAITING_FOR")}
    return awaited | {victim.victim_name for victim in found.victims}


def test_ft_c9_of_an_overtaken_nomination_each_job_lists_its_own_victims() -> None:
    world = World({"n1": 2})
    world.pool()
    for name in ("a", "b"):
        world.submit(name, priority=1)
    world.hold_stops_of("a", "b")
    world.submit("high", priority=5, ask={"gpu": 2})
    assert victims_named(world, "high") == {"a", "b"}
    world.submit("higher", priority=9)
    assert len(victims_named(world, "higher")) == 1, "it needs one GPU"
    assert victims_named(world, "high") == set(), "its room is gone, and so are its victims"
    first = next(iter(victims_named(world, "higher")))
    world.let_stop(first)
    assert world.status("higher") is JobState.RUNNING
    world.complete("higher")
    other = ({"a", "b"} - {first}).pop()
    assert victims_named(world, "high") == {other}
    world.let_stop(other)
    assert world.status("high") is JobState.RUNNING


def test_ft_c9_two_nominated_jobs_on_one_node_wait_each_for_its_own() -> None:
    world = World({"n1": 2})
    world.pool()
    for name in ("a", "b"):
        world.submit(name, priority=1)
    world.hold_stops_of("a", "b")
    world.submit("h1", priority=9)
    world.submit("h2", priority=9)
    assert len(victims_named(world, "h1")) == len(victims_named(world, "h2")) == 1
    assert victims_named(world, "h1") | victims_named(world, "h2") == {"a", "b"}


def test_ft_c9_a_victim_that_frees_quota_or_memory_is_awaited_wherever_it_runs() -> None:
    world = World({"n1": 1, "n2": {"gpu": 2, "memory": "8GiB"}})
    world.pool(pool_spec("p", gpu=1))
    world.submit("quota", pool="p", priority=1, node_selector=(("node", "n1"),))
    world.hold_stops_of("quota", "memory")
    world.submit("h", pool="p", priority=9, node_selector=(("node", "n2"),))
    assert victims_named(world, "h") == {"quota"}
    world = World({"n1": {"gpu": 2, "memory": "8GiB"}})
    world.pool()
    world.submit("memory", priority=1, ask={"memory": "6GiB"})
    world.hold_stops_of("memory")
    world.submit("h", priority=9, ask={"gpu": 1, "memory": "4GiB"})
    assert victims_named(world, "h") == {"memory"}


_SHORT_BY = {
    "quota": "rollout has 2 of 3 workers: pool pool: 2 of 2 gpu used, asks 1",
    "room": "rollout has 2 of 3 workers: n1 lacks 1 GPU; n2 lacks 1 GPU",
    "pack": "rollout has 2 of 3 workers: n1 lacks 1 GPU",
    "groups": "rollout has 2 of 3 workers: pool pool has 2 of 2 dynamic groups and none is free and fits",
    "spread": "rollout has 2 of 3 workers: by STRICT_SPREAD the next worker needs another node, and there is none",
    "spread full": "rollout has 2 of 3 workers: n3 lacks 1 GPU",
    "cordon": "rollout has 2 of 3 workers: n1 lacks 1 GPU; n2 is cordoned",
    "labels": "rollout has 2 of 3 workers: n1 lacks 1 GPU; n2 lacks the label zone=a",
}
_NODES_BY = {
    "pack": {"n1": 2, "n2": 1},
    "spread": {"n1": 2, "n2": 2},
    "spread full": {"n1": 2, "n2": 2, "n3": 0},
    "cordon": {"n1": 2, "n2": 1},
    "quota": {"n1": 2, "n2": 0, "n3": 4},
    "groups": {"n1": 2, "n2": 0, "n3": 4},
}


@pytest.mark.parametrize("why", _SHORT_BY)
def test_ft_c11_an_elastic_job_says_that_it_is_short_of_workers_and_why(why: str) -> None:
    world = World(_NODES_BY.get(why, {"n1": 2, "n2": 0}) if why != "labels" else {})
    if why == "labels":
        world.join("n1", 2, labels=(("zone", "a"),))
        world.join("n2", 2)
    if why == "cordon":
        world.send(ev.NodeCordoned(now_ms=world.now_ms, node_id="n2", cordoned=True))
    kept = PgPoolSpec(max_dynamic=2) if why == "groups" else NO_PG_POOL
    world.pool(pool_spec("pool", pg_pool=kept, **({"gpu": 2} if why == "quota" else {})))
    strategies = {"pack": Strategy.STRICT_PACK, "spread": Strategy.STRICT_SPREAD, "spread full": Strategy.STRICT_SPREAD}
    strategy = strategies.get(why, Strategy.PACK)
    component = ComponentSpec(
        name="rollout",
        actor="a:B",
        min_workers=1,
        max_workers=3,
        resources=Resources.parse({"gpu": 1}),
        node_selector=(("zone", "a"),) if why == "labels" else (),
    )
    nodes = (("node", "n1"),) if why == "pack" else ()
    world.submit(job_spec("j", components=[component], placement=strategy, node_selector=nodes))
    found = world.explain("j")
    short = [reason for reason in found.reasons if reason.code == "SHORT_OF_WORKERS"]
    assert [(reason.asked, reason.available) for reason in short] == [(3, 2)]
    assert short[0].message.startswith(_SHORT_BY[why])
    assert _SHORT_BY[why] in found.summary
    carried_out(world, found.unblock)
    assert len(world.workers("j")) == 3
    assert not [reason for reason in world.explain("j").reasons if reason.code == "SHORT_OF_WORKERS"]


def carried_out(world: World, changes: Sequence[str]) -> None:
    """Somebody does all of what would help."""
    operator = Operator(0)
    operator.world = world
    assert changes
    for change in changes:
        operator.do(change)
    world.tick(1)


@pytest.mark.parametrize("why", ["room", "cordon", "place", "stopping", "starting", "two"])
def test_ft_c11_a_job_that_waits_for_a_replacement_says_why_and_what_helps(why: str) -> None:
    """Elastic or replaced: whoever runs on without a worker is short of it, and says so by the same rule."""
    world = World({"n1": 1 if why == "room" else 2, "n2": 1 if why == "room" else 2})
    world.pool()
    ask = Resources.parse({"gpu": 1})
    places = tuple(WorkerPlace(node_id=node, devices=((0, MILLI),)) for node in ("n1", "n2")) if why == "place" else ()
    parts = [
        ComponentSpec(name=name, actor="a:B", min_workers=2, max_workers=2, resources=ask, places=places)
        for name in (("a", "b") if why == "two" else ("a",))
    ]
    spec = job_spec(
        "j",
        components=parts,
        placement=Strategy.PACK if why == "two" else Strategy.SPREAD,
        restart=RestartPolicy(max_restarts=3, backoff_base_ms=1, scope=RestartScope.WORKER),
        start_timeout_ms=60_000,
    )
    world.submit(spec)
    if why in ("stopping", "starting"):
        world.hold = lambda command: True
    if why in ("room", "two"):
        world.lose("n2")
    elif why in ("cordon", "place"):
        world.submit("other", node_selector=(("node", "n1"),), preemptible=False) if why == "cordon" else None
        world.send(ev.NodeCordoned(now_ms=world.now_ms, node_id="n2", cordoned=True))
        world.exit("j", rank=1)
    elif why == "stopping":
        world.submit("other", node_selector=(("node", "n1"),), preemptible=False)
        world.send(ev.NodeDrained(now_ms=world.now_ms, node_id="n2", reason="maintenance"))
    else:
        world.exit("j", rank=1)
    world.tick(10)
    found = world.explain("j")
    assert found.summary.startswith("j is RUNNING")
    if why == "starting":
        # Its room is found and its actor is on its way: nothing is missing.
        assert "SHORT_OF_WORKERS" not in {reason.code for reason in found.reasons}
        world.tick(59_995)
        assert world.job("j").reason.endswith("could not be replaced in time: it did not start")
        return
    short = {reason.message: reason.available for reason in found.reasons if reason.code == "SHORT_OF_WORKERS"}
    expected = {
        "room": "a has 1 of 2 workers: n1 lacks 1 GPU",
        "cordon": "a has 1 of 2 workers: n1 lacks 1 GPU; n2 is cordoned",
        "place": "a has 1 of 2 workers: its placement names n2, which is cordoned",
        "stopping": "a has 1 of 2 workers: its worker 1 is still stopping",
        "two": "b has 0 of 2 workers: n1 lacks 2 GPU for 2 workers of 1 GPU each",
    }[why]
    assert any(message.startswith(expected) for message in short), found
    assert "REPLACING" in {reason.code for reason in found.reasons}
    if why == "stopping":
        return
    carried_out(world, found.unblock)
    assert not [reason for reason in world.explain("j").reasons if reason.code == "SHORT_OF_WORKERS"], found.unblock
