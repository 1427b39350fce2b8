"""Does what ``explain`` says would help really help, and does whoever waits always say for what?"""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from callboard.model.quantities import MILLI, Resources, parse_milli
from callboard.model.specs import NO_PG_POOL, ComponentSpec, JobSpec, PgPoolSpec, StopPolicy, Strategy, WorkerPlace
from callboard.scheduler import Refusal
from callboard.scheduler.plan.planning import Plan, could_ever_fit, plan
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.node_record import DeviceInfo, RayInfo
from callboard.scheduler.records.states import JobState, WorkerState
from tests.scheduler.histories import History
from tests.scheduler.world import World, pool_spec

BLOCKED = ("WAIT", "UNSCHEDULABLE")
_ADDED = re.compile(r"add (a|\d+) nodes?((?: with the label [^, ]+)*), (?:each )?with (.+) free")


_MS = {"ms": 1, "s": 1_000, "min": 60_000, "h": 3_600_000}


class Operator:
    """Somebody who does what would help, in a small world made by a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = World()
        choose = self.random.choice
        for n in range(self.random.randint(1, 4)):
            labels = (("zone", choose("ab")),)
            self.world.join(
                f"n{n}", {"cpu": choose([2, 4, 8]), "memory": "8GiB", "gpu": choose([0, 1, 2, 4])}, labels=labels
            )
        cohort = choose(["", "", "team"])
        for name in ("p", "q"):
            quotas = {resource: choose([1, 2, 4]) for resource in ("cpu", "gpu") if choose([True, False])}
            groups = PgPoolSpec(max_dynamic=choose([0, 1, 3]), dynamic=choose([True, True, False]))
            spec = pool_spec(name, pg_pool=choose([NO_PG_POOL, NO_PG_POOL, groups]), **quotas)
            limits = (("gpu", choose([0, 1000])),)
            self.world.pool(
                replace(spec, cohort=cohort, borrow_limit=choose([(), limits]), lend_limit=choose([(), limits]))
            )
        self.world.policy({}, max_victims_per_round=choose([0, 0, 1]), cross_pool_threshold_milli=choose([2000, 5000]))
        for n in range(self.random.randint(0, 8)):
            try:
                self.world.submit(self.spec(f"j{n}"))
            except Refusal:
                continue
        self.trouble()
        for job in list(self.world.state.jobs.values()):
            if job.state is JobState.PENDING:
                self.world.cancel(job.name)
        for node_id in list(self.world.state.nodes):
            if self.random.random() < 0.15:
                self.world.send(ev.NodeCordoned(now_ms=self.world.now_ms, node_id=node_id, cordoned=True))
        if choose([True, False, False]):
            pool = self.world.state.pools["p"].spec
            lowered = tuple((resource, 0) for resource, _ in pool.nominal)
            self.change("p", nominal=lowered, stop_policy=choose([StopPolicy.NONE, StopPolicy.HOLD]))

    def trouble(self) -> None:
        """Some nodes fall silent, are lost, leave, drain or are not ready yet."""
        world = self.world
        for node in list(world.state.nodes.values()):
            now_ms, node_id, epoch = world.now_ms, node.node_id, node.epoch
            match self.random.choice([*[""] * 12, "suspected", "lost", "left", "drained", "joining"]):
                case "suspected":
                    world.send(ev.NodeSuspected(now_ms=now_ms, node_id=node_id, epoch=epoch, suspected=True))
                case "lost":
                    world.lose(node_id)
                case "left":
                    world.send(ev.NodeLeft(now_ms=now_ms, node_id=node_id, epoch=epoch, reason="stopped"))
                case "drained":
                    world.send(ev.NodeDrained(now_ms=now_ms, node_id=node_id))
                case "joining":
                    world.join(f"late-{node_id}", dict(node.capacity.items()), ray=None, labels=node.labels)
                case _:
                    continue

    def spec(self, name: str) -> JobSpec:
        choose = self.random.choice
        components = []
        for part in range(choose([1, 1, 2])):
            workers = choose([1, 1, 2, 3, 4])
            ask = {"cpu": choose([0.5, 1, 2]), "gpu": choose([0, 0.4, 0.5, 1, 1, 2, 3])}
            components.append(
                ComponentSpec(
                    name=f"c{part}",
                    actor="tests:Actor",
                    min_workers=workers,
                    max_workers=workers,
                    resources=Resources.parse(ask),
                    pool=choose(["", "", "p", "q"]),
                    node_selector=choose([(), (), (), (("zone", "a"),)]),
                )
            )
        return JobSpec(
            name=name,
            pool=choose("pq"),
            components=tuple(components),
            priority_milli=choose([1000, 5000, 9000]),
            placement=choose([Strategy.PACK, *Strategy]),
            preemptible=choose([True, True, False]),
            node_selector=choose([(), (), (), (("zone", "b"),)]),
        )

    def change(self, name: str, **fields: object) -> None:
        spec = replace(self.world.state.pools[name].spec, **fields)  # type: ignore[arg-type]
        self.world.send(ev.PoolUpdated(now_ms=self.world.now_ms, spec=spec))

    def do(self, change: str) -> None:
        """Carries out one change that would help."""
        world, now_ms = self.world, self.world.now_ms
        if found := re.fullmatch(r"raise pool (\S+) max_dynamic by (\d+)", change):
            kept = world.state.pools[found[1]].spec.pg_pool
            self.change(found[1], pg_pool=replace(kept, max_dynamic=kept.max_dynamic + int(found[2])))
        elif found := re.fullmatch(r"raise pool (\S+) (\S+) by (\S+)", change):
            nominal = dict(world.state.pools[found[1]].spec.nominal)
            nominal[found[2]] += parse_milli(found[3])
            self.change(found[1], nominal=tuple(sorted(nominal.items())))
        elif found := re.fullmatch(r"(\S+) more (\S+) on (\S+)", change):
            self.grow(found[3], found[2].lower(), parse_milli(found[1]))
        elif found := re.fullmatch(r"uncordon (\S+)", change):
            world.send(ev.NodeCordoned(now_ms=now_ms, node_id=found[1], cordoned=False))
        elif found := re.fullmatch(r"(?:bring|wait until) (\S+) (?:back|has joined)", change):
            self.grow(found[1], "gpu", 0)
        elif found := re.fullmatch(r"wait until (\S+) has ended unwanted workers", change):
            world.answer()
            assert not world.state.nodes[found[1]].ghosts
        elif found := re.fullmatch(r"wait (.+)", change):
            world.tick(sum(int(n) * _MS[unit] for n, unit in re.findall(r"(\d+) (ms|s|min|h)", found[1])))
        elif found := _ADDED.fullmatch(change):
            labels = tuple(tuple(pair.split("=")) for pair in re.findall(r"label ([^, ]+)", found[2]))
            amounts = {name.lower(): amount for amount, name in (each.split(" ") for each in found[3].split(", "))}
            amounts["gpu"] = str(-(-parse_milli(amounts.get("gpu", "0")) // MILLI))
            for _ in range(1 if found[1] == "a" else int(found[1])):
                world.join(f"new{len(world.state.nodes)}", amounts, labels=labels)
        elif found := re.fullmatch(r"set the stop_policy of pool (\S+) to none", change):
            self.change(found[1], stop_policy=StopPolicy.NONE)
        elif found := re.fullmatch(r"let pool (\S+) make groups on demand \(pg_pool.dynamic\)", change):
            self.change(found[1], pg_pool=replace(world.state.pools[found[1]].spec.pg_pool, dynamic=True))
        else:
            found = re.fullmatch(r"raise max_victims_per_round to (\d+)", change)
            assert found, f"nobody knows how to {change}"
            policy = replace(world.state.meta.policy, max_victims_per_round=int(found[1]))
            world.send(ev.PolicySet(now_ms=now_ms, policy=policy))

    def grow(self, node_id: str, resource: str, amount: int) -> None:
        """A node comes back with more than it had; what runs there runs on."""
        node = self.world.state.nodes[node_id]
        if resource == "gpu":
            amount = -(-amount // MILLI) * MILLI
        capacity = dict(node.capacity.items())
        capacity[resource] = capacity.get(resource, 0) + amount
        devices = tuple(DeviceInfo(id=str(i)) for i in range(capacity.get("gpu", 0) // MILLI))
        running = tuple(
            ev.RunningWorker(
                generation=worker.generation,
                job=worker.job,
                component=worker.component,
                rank=worker.rank,
                state=worker.state,
            )
            for worker in self.world.state.workers_on(node_id)
            if worker.state is WorkerState.READY
        )
        self.world.send(
            ev.NodeJoined(
                now_ms=self.world.now_ms,
                node_id=node_id,
                instance=node.instance,
                capacity=Resources.from_items(capacity.items()),
                devices=devices,
                simulated=True,
                ray=node.ray or RayInfo(gcs_address="h:1", session="s", ray_node_id=f"ray-{node_id}"),
                labels=node.labels,
                running=running,
            )
        )


@pytest.mark.parametrize("seed", range(0, 100, 20))
def test_what_would_help_is_enough(seed: int) -> None:
    helped = 0
    for one in range(seed, seed + 20):
        operator = Operator(one)
        spec, state = operator.spec("what"), operator.world.state
        found = operator.world.what_if(spec)
        if found.verdict not in BLOCKED or found.workers:
            continue
        assert found.unblock, f"seed {one}: {found}"
        if any(change.startswith("ask for one of") for change in found.unblock):
            continue  # two labels that exclude each other: the request itself must change
        for change in found.unblock:
            operator.do(change)
        now_ms = operator.world.now_ms
        possible = could_ever_fit(state, spec) if found.verdict == "UNSCHEDULABLE" else None
        starts = possible or isinstance(plan(state, "", spec, now_ms, now_ms), Plan)
        assert starts, f"seed {one}: {found.summary}; {found.unblock} is not enough"
        helped += 1
    assert helped > 5


@pytest.mark.parametrize("seed", range(2, 6))
def test_whoever_waits_says_for_what_and_could_not_start_now(seed: int) -> None:
    history = History(seed, placed=seed % 3 == 0)
    looked_at = 0
    for _ in range(150):
        history.step()
        world = history.world
        for job in world.state.jobs.values():
            if job.state is not JobState.PENDING:
                continue
            looked_at += 1
            found = world.scheduler.explain(job.uid, world.now_ms)
            assert found.reasons, f"{job.name}, {found}, after {history.story[-3:]}"
            assert found.verdict != "START" or job.eligible_ms > world.now_ms, found
    assert looked_at


@pytest.mark.parametrize("placed", [False, True])
def test_ft_c3_a_node_that_is_closed_for_two_reasons_names_both_and_both_remedies(placed: bool) -> None:
    world = World({"n1": 1})
    world.pool(pool_spec("p"))
    world.send(ev.NodeCordoned(now_ms=world.now_ms, node_id="n1", cordoned=True))
    world.send(ev.NodeSuspected(now_ms=world.now_ms, node_id="n1", epoch=world.state.nodes["n1"].epoch))
    places = (WorkerPlace(node_id="n1", devices=((0, MILLI),)),) if placed else ()
    component = ComponentSpec(name="c", actor="a:B", resources=Resources.parse({"gpu": 1}), places=places)
    spec = JobSpec(name="what", pool="p", components=(component,))
    found = world.what_if(spec)
    assert [reason.code for reason in found.reasons] == ["CORDONED", "NODE_STATE"]
    assert found.unblock == ("uncordon n1", "bring n1 back")


def test_ft_c7_a_fraction_that_no_single_gpu_has_says_need_and_free() -> None:
    world = World({"n1": 2})
    world.pool(pool_spec("p"))
    for n in range(2):
        world.submit(f"half{n}", pool="p", ask={"gpu": 0.58})
    world.submit("third", pool="p", ask={"gpu": 0.5})
    message = "n1 lacks 0.08 GPU on one GPU (needs 0.5; the emptiest has 0.42 free, all together 0.84)"
    assert world.explain("third").reasons[0].message == message
    world.submit("whole", pool="p", ask={"gpu": 1})
    message = "n1 lacks 1 GPU (needs 1; 0 whole free and 0.84 in parts)"
    assert world.explain("whole").reasons[0].message == message


def test_ft_c8_what_several_workers_ask_is_named_each_and_together() -> None:
    world = World({"n1": {"cpu": 4}})
    world.pool(pool_spec("p", cpu=4))
    world.submit("two", pool="p", ask={"cpu": 2})
    world.submit("three", pool="p", ask={"cpu": 1}, workers=3, placement=Strategy.STRICT_PACK)
    assert [reason.message for reason in world.explain("three").reasons][:3] == [
        "pool p: 2 of 4 cpu used, asks for 3 workers of 1 CPU each, 3 CPU together",
        "room for 2 of 3 workers",
        "n1 lacks 1 CPU for 3 workers of 1 CPU each (2 free)",
    ]
    unlike = [
        ComponentSpec(name=name, actor="a:B", min_workers=2, max_workers=2, resources=Resources.parse({"cpu": cpu}))
        for name, cpu in (("a", 0.5), ("b", 1))
    ]
    world.submit("unlike", pool="p", components=unlike)
    message = "pool p: 2 of 4 cpu used, asks for 4 workers of 0.5 to 1 CPU each, 3 CPU together"
    assert world.explain("unlike").reasons[0].message == message
    refusal = world.refused("six", pool="p", ask={"cpu": 1}, workers=6)
    assert refusal.message.startswith("six asks for 6 workers of 1 CPU each, 6 CPU together, but pool p can have 4")
