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
from callboard.model.specs import ComponentSpec, JobSpec, PoolSpec, StopPolicy, Strategy
from callboard.scheduler import Outcome, Refusal, Scheduler, State, check_invariants
from callboard.scheduler.handlers import elastic, passes
from callboard.scheduler.plan import grouping, planning
from callboard.scheduler.plan.grouping import choose_groups
from callboard.scheduler.plan.planning import could_ever_fit
from callboard.scheduler.plan.view import Assumption, View
from callboard.scheduler.records import commands as cmd
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.asks import asks_of
from callboard.scheduler.records.node_record import DeviceInfo
from callboard.scheduler.records.states import JobState, StopOutcome, WorkerState
from callboard.scheduler.state import transaction
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


@pytest.mark.parametrize("pool", [pool_spec(), pool_spec(gpu=10_000)], ids=["no quota", "quota"])
def test_what_an_event_asks_about_nominated_jobs_grows_with_their_number_and_no_faster(pool: PoolSpec) -> None:
    counts = []
    for waiting in (16, 64):
        world = World({f"n{number:03}": GPUS for number in range(waiting // GPUS)})
        world.pool(pool)
        for number in range(waiting):
            world.submit(f"victim{number}", priority=1)
        world.auto = False
        for number in range(waiting):
            world.submit(f"preemptor{number}", priority=50)
        assert len(world.state.nominated) == waiting
        victim = next(worker for worker in world.state.workers.values() if worker.state is WorkerState.STOPPING)
        stopped = ev.WorkerStopped(
            now_ms=world.state.meta.now_ms,
            node_id=victim.node_id,
            generation=victim.generation,
            outcome=StopOutcome.COOPERATIVE,
        )
        counts.append(calls_of(lambda event=stopped, of=world.scheduler: decide(of, event)))  # type: ignore[misc]
    assert counts[1] <= 5 * counts[0]  # 16 times as many if each were asked about each


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


def test_going_on_through_the_queue_asks_nothing_about_those_that_were_looked_at() -> None:
    world = World({"n1": 1})
    many_that_wait(world, passes.MOST_PLANS * 8)
    world.submit("last", ask={"gpu": 1, "memory": "1MiB"}, priority=1)  # like the first
    held = replace(world.state.pools["pool"].spec, stop_policy=StopPolicy.HOLD)
    world.send(ev.PoolUpdated(now_ms=world.now_ms, spec=held))
    settle(world)
    world.send(ev.NodeCordoned(now_ms=world.now_ms, node_id="n1", cordoned=True))
    costs = []
    while world.state.meta.look_on is not None:
        tick = ev.Tick(now_ms=world.state.meta.now_ms + 1)
        costs.append(calls_of(lambda event=tick: decide(world.scheduler, event)))  # type: ignore[misc]
    assert len(costs) == 8
    assert costs == sorted(costs, reverse=True), "each has fewer before it than the one before"


@pytest.mark.parametrize("shared", [False, True], ids=["one pool", "pools that lend"])
def test_an_event_steps_over_a_bounded_part_of_what_waits(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MOST_HEADS", 8)
    monkeypatch.setattr(passes, "MOST_STEPS", 64)
    costs = []
    for count in (150, 450):
        world = World({"n1": 1})
        world.pool(replace(pool_spec("pool", gpu=100), cohort="c") if shared else pool_spec("pool"))
        world.submit("runs", ask={"gpu": 1, "cpu": 1}, priority=9)
        for number in range(count):  # ten of them are alike, and the next ten
            world.submit(f"j{number}", ask={"gpu": 1, "memory": f"{number // 10 + 1}MiB"}, priority=5)
        settle(world)
        world.send(ev.NodeCordoned(now_ms=world.now_ms, node_id="n1", cordoned=True))
        ticks = []
        while world.state.meta.look_on is not None:
            tick = ev.Tick(now_ms=world.state.meta.now_ms + 1)
            ticks.append(calls_of(lambda event=tick, of=world: decide(of.scheduler, event)))  # type: ignore[misc]
        assert len(ticks) >= count // 64, "it goes on where it stopped"
        costs.append(max(ticks))
    assert costs[1] <= costs[0] * 1.2


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
@pytest.mark.parametrize("seed", range(5))
def test_what_is_looked_at_in_many_events_comes_to_what_it_comes_to_in_one(
    seed: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome(most: int, heads: int = 256, steps: int = 1_000) -> list[Any]:
        for name, value in (("MOST_PLANS", most), ("MOST_HEADS", heads), ("MOST_STEPS", steps)):
            monkeypatch.setattr(passes, name, value)
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
    assert outcome(1_000, heads=0) == outcome(2, heads=3) == outcome(1_000), "job by job, or shape by shape"
    # Where pools lend an answer that comes in between may find a job started that was nominated before.
    assert shared or outcome(1_000, heads=0, steps=1) == outcome(1_000)


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


def started_gang(world: World, workers: int) -> list[tuple[Any, ...]]:
    """Starts a gang whose group is there; what its agents are asked, in order."""
    world.submit("gang", workers=workers, ask={"cpu": 1})
    world.answer(lambda command: not isinstance(command, cmd.StartWorker))
    events = [len(world.held)]
    while world.state.meta.starting:
        assert world.scheduler.next_wake_ms() == world.state.meta.now_ms + 1, "it goes on at once"
        world.now_ms = world.state.meta.now_ms + 1
        events.append(len(world.send(ev.Tick(now_ms=world.now_ms)).commands))
    assert max(events) <= transaction.MOST_STARTS
    return [
        (
            command.worker.rank,
            command.node_id,
            command.world_size,
            command.local_rank,
            command.local_world_size,
            command.master_node_id,
            command.master_port,
        )
        for command in world.held
        if isinstance(command, cmd.StartWorker)
    ]


def test_a_large_gang_is_asked_for_in_several_events_and_comes_to_what_it_comes_to_in_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = {}
    for most in (1_000, 7):
        monkeypatch.setattr(transaction, "MOST_STARTS", most)
        world = TwinWorld({f"n{number}": {"cpu": 7, "memory": "8GiB"} for number in range(5)}, auto=False)
        world.pool(pool_spec("pool"))
        asked[most] = started_gang(world, 30)
        world.auto = True
        world.answer()
        assert world.job("gang").state is JobState.RUNNING
    assert asked[7] == asked[1_000]
    assert len(asked[7]) == 30


@pytest.mark.parametrize("what", ["cancel", "node", "restart", "worker"])
def test_what_happens_before_all_of_a_gang_are_asked_for_meets_the_rest_too(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "MOST_STARTS", 4)
    world = TwinWorld({f"n{number}": {"cpu": 5, "memory": "8GiB"} for number in range(4)}, auto=False)
    world.pool(pool_spec("pool"))
    world.submit("gang", workers=18, ask={"cpu": 1})
    world.answer(lambda command: not isinstance(command, cmd.StartWorker))
    assert world.state.meta.starting
    if what == "cancel":
        world.cancel("gang")
    elif what == "node":
        world.lose(world.workers("gang")[-1].node_id)
    elif what == "worker":
        command = next(command for command in world.held if isinstance(command, cmd.StartWorker))
        world.held.remove(command)
        world.send(
            ev.WorkerStartFailed(
                now_ms=world.now_ms, node_id=command.node_id, generation=command.worker.generation, message="no"
            )
        )
    else:
        world.scheduler = world.make_scheduler(State.of(list(world.state.records())))
    settle(world)
    world.auto = True
    world.answer()
    world.tick(120_000)
    assert not world.state.meta.starting
    expected = {"cancel": JobState.CANCELLED, "restart": JobState.RUNNING, "worker": JobState.FAILED}
    assert world.job("gang").state is expected.get(what, JobState.PENDING)
    assert all(worker.state is WorkerState.READY for worker in world.workers("gang")) or what != "restart"


def test_to_ask_for_the_next_workers_of_a_gang_costs_the_same_however_many_they_are() -> None:
    counts = []
    for nodes in SIZES:
        scheduler = cluster(nodes)
        world = World()
        world.scheduler, world.auto = scheduler, False
        world.submit("gang", workers=GPUS * nodes, ask={"gpu": 1})
        world.answer(lambda command: not isinstance(command, cmd.StartWorker))
        tick = ev.Tick(now_ms=scheduler.state.meta.now_ms + 1)
        counts.append(calls_of(lambda event=tick, of=scheduler: decide(of, event)))  # type: ignore[misc]
    assert counts[1] <= counts[0] + 50


def grown(most: int, monkeypatch: pytest.MonkeyPatch, shared: bool) -> list[tuple[str, int, str]]:
    """Workers of jobs that grow where room is free, then where more becomes free, and the most that an event adds."""
    monkeypatch.setattr(transaction, "MOST_GROWTH", most)
    world = TwinWorld({"n1": {"cpu": 64, "gpu": 8}, "n2": {"cpu": 64, "gpu": 8}})
    world.pool(replace(pool_spec("pool"), cohort="c") if shared else pool_spec("pool"))
    world.submit("fixed", ask={"gpu": 1}, workers=3)
    for name, priority in (("low", 2), ("high", 7), ("middle", 4)):
        component = ComponentSpec(
            name="main", actor="a:B", min_workers=1, max_workers=9, resources=Resources.parse({"gpu": 1})
        )
        world.submit(job_spec(name, components=(component,), priority=priority))
        settle(world)
    world.complete("fixed")
    settle(world)
    world.join("n3", {"cpu": 64, "gpu": 4})
    settle(world)
    return [
        (job.name, worker.rank, worker.node_id)
        for job in world.state.jobs.values()
        if job.state is JobState.RUNNING
        for worker in world.workers(job.name)
    ]


@pytest.mark.parametrize("shared", [False, True], ids=["one pool", "a pool that lends"])
def test_jobs_that_grow_in_many_events_come_to_what_they_come_to_in_one(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_at_once = grown(1_000, monkeypatch, shared)
    assert grown(2, monkeypatch, shared) == grown(5, monkeypatch, shared) == whole_at_once
    assert len(whole_at_once) == 20


@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("last_fits", [False, True])
def test_a_job_that_lacks_more_parts_than_one_event_looks_for_keeps_nobody_busy(
    most: int, last_fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many components none finds room for its next worker, but perhaps the last."""
    monkeypatch.setattr(transaction, "MOST_GROWTH", most)
    parts = most + 2
    world = TwinWorld({"n1": {"cpu": 2 * parts, "gpu": parts}})
    world.pool(pool_spec("pool"))
    asks = [{"gpu": 1}] * (parts - 1) + [{"cpu": 1} if last_fits else {"gpu": 1}]
    components = tuple(
        ComponentSpec(name=f"c{number}", actor="a:B", min_workers=1, max_workers=2, resources=Resources.parse(ask))
        for number, ask in enumerate(asks)
    )
    if last_fits:
        world.submit("taken", ask={"gpu": 1}, priority=9)
    world.submit(job_spec("grows", components=components))
    for node_id in ("tiny", "small"):
        ticks = 0
        world.join(node_id, {"memory": "1GiB"})
        while world.state.meta.look_on is not None:
            ticks += 1
            assert ticks <= 3
            world.now_ms = world.scheduler.next_wake_ms() or 0
            world.send(ev.Tick(now_ms=world.now_ms))
    assert len(world.workers("grows")) == parts + last_fits


def test_one_event_looks_for_a_bounded_number_of_places_to_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    real = choose_groups

    def counted(*args: Any) -> Any:
        nonlocal looks
        looks += 1
        return real(*args)

    monkeypatch.setattr(elastic, "choose_groups", counted)
    world = World({"n1": {"cpu": 200}}, auto=False)
    world.pool(pool_spec("pool"))
    component = ComponentSpec(
        name="main", actor="a:B", min_workers=1, max_workers=150, resources=Resources.parse({"cpu": 1})
    )
    world.submit(job_spec("grows", components=(component,)))
    events = 0
    while world.held or world.state.meta.look_on is not None:
        looks, events = 0, events + 1
        if world.held:
            world.reply(world.held.pop(0))
        else:
            world.now_ms = world.scheduler.next_wake_ms() or 0
            world.send(ev.Tick(now_ms=world.now_ms))
        assert looks <= transaction.MOST_GROWTH
    assert len(world.workers("grows")) == 150


def test_that_a_wait_for_nodes_is_over_costs_the_same_however_many_there_are() -> None:
    counts = []
    for nodes in SIZES:
        scheduler = cluster(nodes)
        decide(scheduler, submitted("first", 1, {"gpu": 1}))
        decide(scheduler, submitted("waits", GPUS * nodes * 2, {"gpu": 1}, wait_for_nodes_ms=10))
        due = ev.Tick(now_ms=scheduler.next_wake_ms() or 0)
        counts.append(calls_of(lambda event=due, of=scheduler: decide(of, event)))  # type: ignore[misc]
        ended = scheduler.state.jobs["waits"]
        assert ended.state is JobState.FAILED
        assert "nothing there could ever hold waits" in ended.reason
    assert counts[1] <= counts[0] + 20


class Large(World):
    """A world of many nodes, whose invariants take longer to check than an event to decide."""

    check_every = 16


def test_the_loss_of_a_node_costs_the_same_however_many_were_lost_before() -> None:
    """What was on them is owed to Ray until a node is back, and jobs by the thousand wait for it."""
    counts = []
    for nodes in (12, 96):
        world = Large({f"n{number:02}": {"cpu": 8, "gpu": 1} for number in range(nodes)})
        world.pool(pool_spec())
        for number in range(nodes):
            world.submit(job_spec(f"j{number}"))
        silent = [(node.node_id, node.epoch) for node in world.state.nodes.values()]
        for node_id, epoch in silent:
            world.send(ev.NodeSuspected(now_ms=world.now_ms, node_id=node_id, epoch=epoch))
        *first, last = [
            ev.NodeLost(now_ms=world.now_ms, node_id=node_id, epoch=epoch, reason="silent") for node_id, epoch in silent
        ]
        for event in first:
            world.send(event)
        assert not world.state.group_index.returning
        check_invariants(world.state)
        counts.append(calls_of(lambda event=last, of=world.scheduler: of.handle(event)))  # type: ignore[misc]
        assert len(world.state.group_index.orphans) == nodes
        assert len(world.state.jobs_by_state[JobState.PENDING]) == nodes
    assert counts[1] <= counts[0] + 30
