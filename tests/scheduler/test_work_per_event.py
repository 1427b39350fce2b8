"""What one event costs is bounded, however many nodes, workers and waiting jobs there are.

Counted are calls of functions, which no other load of the machine changes.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from callboard.model.quantities import Number, Resources
from callboard.model.specs import ComponentSpec, JobSpec, PoolSpec, Strategy
from callboard.scheduler import Outcome, Refusal, Scheduler, State
from callboard.scheduler.handlers import passes
from callboard.scheduler.plan import grouping, planning
from callboard.scheduler.plan.grouping import choose_groups
from callboard.scheduler.plan.planning import could_ever_fit
from callboard.scheduler.plan.view import Assumption, View
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.asks import asks_of
from callboard.scheduler.records.node_record import DeviceInfo
from callboard.scheduler.records.states import JobState
from callboard.scheduler.state.invariants import whole
from tests.scheduler.histories import TwinWorld
from tests.scheduler.world import World, job_spec, pool_spec

GPUS = 4


def calls_of(work: Callable[[], object]) -> int:
    """How many functions are called."""
    count = 0

    def called(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def cluster(nodes: int, labels: Callable[[int], tuple[tuple[str, str], ...]] = lambda _: ()) -> Scheduler:
    scheduler = Scheduler()
    capacity = Resources.parse({"cpu": 64, "memory": "512GiB", "gpu": GPUS})
    for number in range(nodes):
        scheduler.handle(
            ev.NodeJoined(
                now_ms=1,
                node_id=f"n{number:05}",
                instance="i",
                capacity=capacity,
                devices=tuple(DeviceInfo(id=str(index)) for index in range(GPUS)),
                simulated=True,
                runtime="process",
                labels=labels(number),
            )
        )
    scheduler.handle(ev.PoolCreated(now_ms=1, spec=PoolSpec(name="pool")))
    return scheduler


def spec_of(name: str, workers: int, ask: dict[str, int], **fields: Any) -> JobSpec:
    part = {key: fields.pop(key) for key in ("node_selector", "node_selector_soft") if key in fields}
    component = ComponentSpec(
        name="main",
        actor="a:B",
        min_workers=workers,
        max_workers=workers,
        resources=Resources.parse({"cpu": 1, **ask}),
        **part,
    )
    return JobSpec(name=name, pool="pool", components=(component,), **fields)


def submitted(name: str, workers: int, ask: dict[str, int], **fields: Any) -> ev.JobSubmitted:
    return ev.JobSubmitted(now_ms=2, uid=name, spec=spec_of(name, workers, ask, **fields))


def decide(scheduler: Scheduler, event: ev.Event) -> Outcome | None:
    try:
        return scheduler.handle(event)
    except Refusal:
        return None


SIZES = (64, 512)


@pytest.mark.parametrize(
    ("ask", "fields"),
    [
        ({"gpu": 1}, {}),
        ({"cpu": 40}, {}),
        ({"gpu": 1}, {"placement": Strategy.SPREAD}),
        ({"gpu": 3}, {"placement": Strategy.STRICT_SPREAD}),
        ({"gpu": 1}, {"placement": Strategy.STRICT_PACK}),
        ({"gpu": 1}, {"node_selector": (("zone", "z0"),)}),
        ({"gpu": 1}, {"node_selector": (("zone", "nowhere"),)}),
    ],
    ids=["gpus", "cpus", "spread", "strictly spread", "on one node", "by a label", "by a label of no node"],
)
def test_a_request_that_nothing_there_could_hold_costs_the_same_whatever_it_asks_of_how_many_nodes(
    ask: dict[str, int], fields: dict[str, Any]
) -> None:
    counts = []
    for nodes in SIZES:
        scheduler = cluster(nodes, lambda number: (("zone", f"z{number % 4}"),))
        decide(scheduler, submitted("first", 2, {"gpu": GPUS + 1}))  # whoever asks first follows the last nodes
        refused = submitted("many", GPUS * nodes * 20, ask, **fields)
        counts.append(calls_of(lambda event=refused, of=scheduler: decide(of, event)))  # type: ignore[misc]
        assert "many" not in scheduler.state.jobs
    assert counts[1] <= counts[0] + 20
    assert max(counts) < 600


def test_one_that_must_wait_is_decided_about_by_sums_too() -> None:
    counts = []
    for nodes in SIZES:
        scheduler = cluster(nodes)
        scheduler.handle(submitted("runs", GPUS * nodes - 1, {"gpu": 1}))
        decide(scheduler, submitted("first", 1, {"gpu": 1}, never_preempts=True))
        waits = submitted("waits", GPUS * nodes, {"gpu": 1}, never_preempts=True)
        counts.append(calls_of(lambda event=waits, of=scheduler: decide(of, event)))  # type: ignore[misc]
        assert scheduler.state.jobs["waits"].state is JobState.PENDING
    assert counts[1] <= counts[0] + 20


def test_a_join_costs_the_same_however_many_are_there_and_wait() -> None:
    def late(scheduler: Scheduler, number: int) -> ev.NodeJoined:
        known = scheduler.state.nodes["n00000"]
        return ev.NodeJoined(
            now_ms=3, node_id=f"late{number}", instance="i", capacity=known.capacity, simulated=True, runtime="process"
        )

    counts = []
    for nodes in SIZES:
        scheduler = cluster(nodes)
        scheduler.handle(submitted("runs", GPUS * nodes, {"gpu": 1}))
        for number in range(nodes):
            decide(scheduler, submitted(f"waits{number}", GPUS * nodes, {"gpu": 1}))
        events = [late(scheduler, each) for each in range(200)]
        counts.append(max(calls_of(lambda event=each, of=scheduler: decide(of, event)) for each in events))  # type: ignore[misc]
    assert counts[1] <= counts[0] + 50


def many_that_wait(world: World, shapes: int) -> None:
    """A full cluster, and jobs behind it of which no two are alike."""
    world.pool(pool_spec("pool"))
    world.submit("runs", ask={"gpu": 1, "cpu": 1}, priority=9)
    for number in range(shapes):
        world.submit(f"j{number}", ask={"gpu": 1, "memory": f"{number + 1}MiB"}, priority=5)


def test_an_event_that_frees_something_looks_at_a_bounded_part_of_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = 0
    real = planning.plan

    def counted(*args: Any) -> Any:
        nonlocal plans
        plans += 1
        return real(*args)

    monkeypatch.setattr(passes, "plan", counted)
    world = World({"n1": 1})
    many_that_wait(world, passes.MOST_PLANS * 3)
    waiting = len(world.state.waiting)
    plans = 0
    world.join("n2", {"cpu": 64})  # no help to anybody
    assert plans == passes.MOST_PLANS
    ticks = 0
    while world.state.meta.look_on is not None:
        plans = 0
        wake_ms = world.scheduler.next_wake_ms()
        assert wake_ms == world.state.meta.now_ms + 1, "it goes on at once"
        world.now_ms = wake_ms
        world.send(ev.Tick(now_ms=wake_ms))
        ticks += 1
        assert 0 < plans <= passes.MOST_PLANS
    assert ticks == waiting // passes.MOST_PLANS - (waiting % passes.MOST_PLANS == 0)
    assert world.scheduler.next_wake_ms() is None


def settle(world: World) -> None:
    """Lets a scheduler go on until everything was looked at."""
    while world.state.meta.look_on is not None:
        world.now_ms = max(world.now_ms, world.state.meta.now_ms + 1)
        world.send(ev.Tick(now_ms=world.now_ms))


def acts(seed: int, shared: bool) -> Iterator[tuple[str, Any]]:
    chance = random.Random(seed)
    for number in range(12):
        yield (
            "submit",
            job_spec(
                f"j{number}",
                pool="lent" if shared and chance.random() < 0.5 else "pool",
                ask={"gpu": chance.choice([1, 1, 2]), "cpu": chance.randrange(1, 9)},
                priority=chance.randrange(1, 6),
                workers=chance.choice([1, 1, 2]),
            ),
        )
        if chance.random() < 0.5:
            yield "complete", None


@pytest.mark.parametrize("shared", [False, True], ids=["one pool", "pools that lend"])
@pytest.mark.parametrize("seed", range(12))
def test_what_is_looked_at_in_many_events_comes_to_what_it_comes_to_in_one(
    seed: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome(most: int) -> list[Any]:
        monkeypatch.setattr(passes, "MOST_PLANS", most)
        world = TwinWorld({"n1": 4, "n2": 2})
        for name in ("pool", "lent") if shared else ("pool",):
            world.pool(replace(pool_spec(name, gpu=3), cohort="c") if shared else pool_spec(name))
        found: list[Any] = []
        for what, spec in acts(seed, shared):
            world.now_ms = 1_000 * (len(found) + 1)  # what went on in between took no time that counts
            if what == "submit":
                world.submit(spec)
            else:
                running = [job.name for job in world.state.jobs.values() if job.state is JobState.RUNNING]
                if running:
                    world.complete(running[0])
            settle(world)
            found.append(
                [
                    (job.name, job.state, sorted(worker.node_id for worker in world.workers(job.name)))
                    for job in world.state.jobs.values()
                ]
            )
        return found

    assert outcome(1) == outcome(2) == outcome(1_000)


def test_the_last_are_not_passed_over_though_something_is_freed_before_each_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passes, "MOST_PLANS", 1)
    world = World({"n1": 1})
    many_that_wait(world, 40)
    settle(world)
    events = 0
    world.join("tiny", {"cpu": 1})
    while world.state.meta.look_on is not None:
        events += 1
        world.join(f"tiny{events}", {"cpu": 1})
        assert events < 10, "each time it may make twice as many plans"


@pytest.mark.parametrize("seed", range(60))
def test_what_sums_say_of_what_could_ever_fit_is_what_a_plan_says(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    world = World()
    for number in range(chance.randrange(1, 9)):
        size: dict[str, Number] = {"cpu": chance.randrange(1, 6), "memory": "8GiB", "gpu": chance.randrange(4)}
        labels = (("zone", chance.choice("ab")),) if chance.random() < 0.5 else ()
        world.join(f"n{number}", size, labels=labels)
    for node_id in chance.sample(sorted(world.state.nodes), k=len(world.state.nodes) // 3):
        world.send(ev.NodeCordoned(now_ms=world.now_ms, node_id=node_id, cordoned=True))
    world.pool(pool_spec("pool"))
    for _ in range(20):
        spec = spec_of(
            "j",
            chance.randrange(1, 12),
            {"gpu": chance.choice([0, 1, 1, 2]), "cpu": chance.randrange(1, 4)},
            placement=chance.choice(list(Strategy)),
            **({"node_selector": (("zone", chance.choice("abc")),)} if chance.random() < 0.3 else {}),
        )
        said = could_ever_fit(world.state, spec)
        with monkeypatch.context() as patch:
            patch.setattr(grouping, "may_hold", lambda *_: True)
            view = View(world.state, Assumption(empty=True))
            assert (choose_groups(world.state, view, spec, asks_of(spec)) is not None) is said, str(spec)


@pytest.mark.parametrize("seed", range(3))
def test_the_kinds_of_nodes_follow_whatever_becomes_of_the_nodes(seed: int) -> None:
    world = TwinWorld()
    chance = random.Random(seed)
    for step in range(120):
        node_id = f"n{chance.randrange(6)}"
        there = node_id in world.state.nodes and world.state.nodes[node_id].state.value not in ("LOST", "LEFT")
        if there and chance.random() < 0.4:
            world.lose(node_id)
        else:
            world.join(node_id, chance.randrange(3), labels=(("zone", chance.choice("ab")),), instance=f"i{step}")
        assert whole(world.state) == whole(State.of(world.state.records()))
        found = {place for places in world.state.node_kinds.of(()).values() for place in places}
        assert {name for _, name in found} == {
            node.node_id for node in world.state.nodes.values() if node.state.value not in ("LOST", "LEFT")
        }
