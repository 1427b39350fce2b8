"""Do reported signals scale an elastic component as its rules say?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from callboard.model.quantities import Number, Resources
from callboard.model.roles import fused
from callboard.model.specs import ComponentSpec, JobSpec, ScalingAction, ScalingRule, Strategy
from callboard.scheduler import Refusal
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.states import JobState
from tests.scheduler.histories import History, run
from tests.scheduler.world import World, job_spec

FULL = ScalingRule(signal="queue_depth", above_milli=100_000, action=ScalingAction.DOWN, cooldown_ms=30_000)
PENDING = ScalingRule(signal="pending_items", above_milli=0, action=ScalingAction.UP, step=2)
IDLE = ScalingRule(signal="busy", below_milli=500, action=ScalingAction.DOWN, step=5, cooldown_ms=0)


def elastic(*rules: ScalingRule, low: int = 1, high: int = 6, name: str = "main", **fields: Any) -> ComponentSpec:
    gpu = Resources(gpu_milli=1000)
    return ComponentSpec(
        name=name, actor="a:B", min_workers=low, max_workers=high, resources=gpu, scaling=rules, **fields
    )


def running(*rules: ScalingRule, gpus: int = 6, low: int = 1) -> World:
    world = World({"n1": gpus})
    world.pool()
    world.submit(job_spec("e", components=[elastic(*rules, low=low)]))
    assert world.status("e") is JobState.RUNNING
    return world


def report(world: World, **gauges: float) -> object:
    pairs = tuple((name, round(value * 1000)) for name, value in gauges.items())
    uid = world.job("e").uid
    return world.send(ev.SignalsReported(now_ms=world.now_ms, uid=uid, gauges=pairs)).result


def ranks(world: World) -> list[int]:
    return sorted(worker.rank for worker in world.workers("e"))


class TestRules:
    def test_pending_items_scale_up_by_their_step(self) -> None:
        world = running(FULL, PENDING)
        assert ranks(world) == [0], "it starts with its fewest: what makes it grow are signals"
        assert report(world, pending_items=3) == (("main", 3),)
        assert ranks(world) == [0, 1, 2]

    def test_the_first_that_matches_wins(self) -> None:
        world = running(FULL, PENDING)
        report(world, pending_items=9)
        assert report(world, queue_depth=120, pending_items=9) == (("main", 2),)
        assert ranks(world) == [0, 1], "the highest rank leaves first"

    def test_a_threshold_itself_does_not_match(self) -> None:
        world = running(PENDING)
        assert report(world, pending_items=0) == ()
        assert report(world, queue_depth=1e6) == (), "no rule is about it"

    def test_below_is_the_other_side(self) -> None:
        world = running(IDLE, low=2)
        assert ranks(world) == [0, 1, 2, 3, 4, 5]
        assert report(world, busy=0.5) == ()
        assert report(world, busy=0.4) == (("main", 2),)
        assert ranks(world) == [0, 1], "never below its fewest"
        assert report(world, busy=0.1) == ()

    def test_a_rule_cools_down_and_keeps_those_after_it_out(self) -> None:
        world = running(FULL, PENDING)
        report(world, pending_items=1)
        world.tick(60_000)
        report(world, pending_items=1)
        assert len(ranks(world)) == 5
        assert report(world, queue_depth=101, pending_items=1) == (("main", 4),)
        assert report(world, queue_depth=101, pending_items=1) == (), "it cools, and still decides"
        world.tick(29_999)
        assert report(world, queue_depth=101) == ()
        world.tick(1)
        assert report(world, queue_depth=101) == (("main", 3),)

    def test_it_never_grows_beyond_its_most(self) -> None:
        world = running(PENDING)
        for _ in range(5):
            report(world, pending_items=1)
            world.tick(30_000)
        assert ranks(world) == [0, 1, 2, 3, 4, 5]
        assert report(world, pending_items=1) == ()

    def test_what_was_asked_for_in_vain_does_not_add_up(self) -> None:
        world = running(PENDING, gpus=1)
        for _ in range(3):
            report(world, pending_items=1)
            world.tick(30_000)
        world.join("n2", 6)
        assert ranks(world) == [0, 1, 2]

    def test_each_change_is_told_with_its_reason(self) -> None:
        world = running(PENDING)
        report(world, pending_items=2.5)
        told = [event for event in world.log if event.type == "job.scaled"]
        assert [event.reason for event in told] == ["main should have 3 workers: pending_items is 2.5, above 0"]
        assert any(event.type == "job.rank_map" for event in world.log)

    def test_a_report_that_changes_nothing_leaves_no_trace(self) -> None:
        world = running(FULL, PENDING)
        uid = world.job("e").uid
        outcome = world.send(ev.SignalsReported(now_ms=world.now_ms, uid=uid, gauges=(("queue_depth", 5),)))
        assert outcome.changes == ()
        assert outcome.events == ()


class TestJobs:
    def test_one_that_is_not_running_is_left_alone(self) -> None:
        world = World({"n1": 1})
        world.pool()
        world.submit(job_spec("x", workers=1))
        world.submit(job_spec("e", components=[elastic(PENDING)]))
        assert world.status("e") is JobState.PENDING
        assert report(world, pending_items=1) == ()

    def test_one_that_ended_is_an_error(self) -> None:
        world = running(PENDING)
        world.complete("e")
        with pytest.raises(Refusal, match="has ended"):
            report(world, pending_items=1)

    def test_an_unknown_one_is_an_error(self) -> None:
        world = running(PENDING)
        with pytest.raises(Refusal, match="there is no job"):
            world.send(ev.SignalsReported(now_ms=world.now_ms, uid="nobody", gauges=()))

    def test_a_group_scales_by_the_rules_of_its_members(self) -> None:
        world = World({"n1": 6})
        world.pool()
        members = [
            elastic(name="trainer", colocation_group="g"),
            elastic(PENDING, name="loader", colocation_group="g"),
        ]
        world.submit(fused(JobSpec(name="e", pool="pool", components=tuple(members))))
        assert report(world, pending_items=1) == (("g", 3),)
        assert len(world.workers("e")) == 3
        world.send(ev.JobScaled(now_ms=world.now_ms, uid=world.job("e").uid, component="trainer", workers=1))
        assert len(world.workers("e")) == 1


class TestSelectorsOfComponents:
    def world(self) -> World:
        world = World()
        world.join("g0", {"cpu": 8, "gpu": 2}, node_group="gpu")
        world.join("g1", {"cpu": 8, "gpu": 2}, node_group="gpu")
        world.join("c0", {"cpu": 8}, labels=(("disk", "fast"),), node_group="cpu")
        world.join("c1", {"cpu": 8}, node_group="cpu")
        world.pool()
        return world

    def part(self, name: str, workers: int, cpus: int, *labels: tuple[str, str]) -> ComponentSpec:
        return ComponentSpec(
            name=name,
            actor="a:B",
            min_workers=workers,
            max_workers=workers,
            resources=Resources(cpu_milli=cpus * 1000),
            node_selector=labels,
        )

    def where(self, world: World, name: str) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for worker in world.workers(name):
            found.setdefault(worker.component, []).append(worker.node_id)
        return {component: sorted(nodes) for component, nodes in found.items()}

    def test_each_component_runs_where_its_labels_are(self) -> None:
        world = self.world()
        parts = [
            self.part("any", 2, 4),
            self.part("rollout", 3, 4, ("node_group", "cpu")),
            self.part("loader", 1, 4, ("disk", "fast"), ("node_group", "cpu")),
        ]
        world.submit(job_spec("j", components=parts))
        assert world.status("j") is JobState.RUNNING
        found = self.where(world, "j")
        assert found["loader"] == ["c0"]
        assert found["rollout"] == ["c0", "c1", "c1"]
        assert set(found["any"]) <= {"g0", "g1"}

    def test_room_is_shared_between_them(self) -> None:
        world = self.world()
        parts = [self.part("any", 5, 4), self.part("rollout", 4, 4, ("node_group", "cpu"))]
        account = world.what_if(job_spec("j", components=parts))
        assert account.verdict == "UNSCHEDULABLE"

    def test_a_node_is_a_label_too(self) -> None:
        world = self.world()
        world.submit(job_spec("j", components=[self.part("a", 2, 1, ("node", "g1"))]))
        assert self.where(world, "j") == {"a": ["g1", "g1"]}

    @pytest.mark.parametrize("strategy", ["STRICT_PACK", "STRICT_SPREAD"])
    def test_a_strict_strategy_holds_across_them(self, strategy: str) -> None:
        world = self.world()
        parts = [self.part("a", 1, 1, ("node_group", "gpu")), self.part("b", 1, 1)]
        world.submit(job_spec("j", components=parts, placement=Strategy(strategy)))
        nodes = self.where(world, "j")
        assert nodes["a"][0] in ("g0", "g1")
        assert (nodes["a"] == nodes["b"]) is (strategy == "STRICT_PACK")

    def preferring(self, name: str, workers: int, cpus: int, *labels: tuple[str, str]) -> ComponentSpec:
        return replace(self.part(name, workers, cpus, *labels), node_selector_soft=True)

    @pytest.mark.parametrize(("workers", "there"), [(1, ["c0"]), (2, ["c0", "c0"])])
    def test_soft_ones_are_kept_where_there_is_room(self, workers: int, there: list[str]) -> None:
        world = self.world()
        world.submit(job_spec("j", components=[self.preferring("a", workers, 4, ("disk", "fast"))]))
        assert self.where(world, "j") == {"a": there}

    def test_soft_ones_are_kept_by_as_many_as_find_room_and_stop_nobody(self) -> None:
        world = self.world()
        parts = [self.preferring("a", 5, 3, ("disk", "fast")), self.part("b", 1, 1, ("node", "c0"))]
        world.submit(job_spec("j", components=parts))
        assert world.status("j") is JobState.RUNNING
        found = self.where(world, "j")
        assert found["b"] == ["c0"]
        assert found["a"].count("c0") == 2

    def test_soft_ones_that_no_node_has_are_nobodys_reason(self) -> None:
        world = self.world()
        world.submit(job_spec("j", components=[self.preferring("a", 2, 1, ("zone", "moon"))]))
        assert world.status("j") is JobState.RUNNING

    def test_soft_ones_of_one_component_leave_the_hard_ones_of_another(self) -> None:
        world = self.world()
        parts = [self.preferring("a", 2, 8, ("node_group", "cpu")), self.part("b", 1, 8, ("node", "c1"))]
        world.submit(job_spec("j", components=parts))
        found = self.where(world, "j")
        assert found["b"] == ["c1"]
        assert "c0" in found["a"]

    @pytest.mark.parametrize("strategy", ["STRICT_PACK", "STRICT_SPREAD"])
    def test_soft_ones_yield_to_a_strict_strategy(self, strategy: str) -> None:
        world = self.world()
        parts = [self.preferring("a", 2, 1, ("node", "c0")), self.part("b", 1, 1, ("node_group", "gpu"))]
        world.submit(job_spec("j", components=parts, placement=Strategy(strategy)))
        assert world.status("j") is JobState.RUNNING
        found = self.where(world, "j")
        if strategy == "STRICT_PACK":
            assert {*found["a"], *found["b"]} <= {"g0", "g1"}
        else:
            assert found["a"].count("c0") == 1

    def test_labels_that_no_node_has_are_the_reason(self) -> None:
        world = self.world()
        spec = job_spec("j", components=[self.part("a", 1, 1, ("zone", "moon"))])
        account = world.what_if(spec)
        assert account.verdict == "UNSCHEDULABLE"
        assert any("no node has zone=moon, which a asks for" in reason.message for reason in account.reasons)


def group_of(node_id: str) -> str:
    return "x" if node_id < "n1" else "y"


class SignalledHistory(History):
    """A random history of jobs that scale by signals, of groups, and of components with labels of their own."""

    def join(self, node_id: str, running: tuple[ev.RunningWorker, ...] = ()) -> None:
        amounts: dict[str, Number] = {"cpu": 4, "memory": "8GiB", "gpu": 2}
        self.world.join(node_id, amounts, running=running, node_group=group_of(node_id))

    def step(self) -> None:
        super().step()
        self.scale()
        for worker in self.world.state.workers.values():
            spec = self.world.state.specs.get(worker.job)
            parts = {part.name: part for part in spec.spec.components} if spec is not None else {}
            if worker.component in parts and worker.state.value not in ("STOPPED", "LOST"):
                own = {"node": worker.node_id, "node_group": group_of(worker.node_id)}
                assert all(own[key] == value for key, value in parts[worker.component].node_selector)

    def submit(self) -> None:
        choose = self.random.choice
        self.names += 1
        rules = (
            ScalingRule(signal="full", above_milli=500, action=ScalingAction.DOWN, cooldown_ms=choose([0, 500])),
            ScalingRule(signal="pending", above_milli=0, action=ScalingAction.UP, step=choose([1, 3])),
        )
        selectors = [(), (("node_group", "x"),), (("node_group", "y"),), (("node", "n0"),)]
        low = choose([1, 2])
        parts = [
            ComponentSpec(
                name=name,
                actor="a:B",
                min_workers=low,
                max_workers=low + choose([0, 3]) if name == "a" or group else low,
                resources=Resources.parse({"gpu": choose([0, 0.5, 1]), "cpu": choose([0, 1])}),
                node_selector=() if group else choose(selectors),
                colocation_group=group,
            )
            for group in (choose(["", "g"]),)
            for name in choose([("a",), ("a", "b")])
        ]
        if len({part.max_workers for part in parts}) > 1 and parts[0].colocation_group:
            parts = [replace(part, max_workers=low + 3) for part in parts]
        parts = [replace(part, scaling=rules) if part.elastic else part for part in parts]
        spec = job_spec(
            f"j{self.names}",
            pool=choose(["a", "b", "c"]),
            priority=choose([1, 5, 9]),
            components=parts,
            placement=choose(list(Strategy)),
            wait_for_nodes_ms=choose([None, 5000]),
        )
        try:
            self.world.submit(fused(spec))
        except Refusal as refusal:
            self.story.append(str(refusal))

    def scale(self) -> None:
        """Whoever runs elastically reports often: that is what these histories are about."""
        for uid in list(self.world.state.elastic) if self.random.random() < 0.3 else ():
            gauges = (("full", self.random.choice([0, 900])), ("pending", self.random.choice([0, 5000])))
            self.send(ev.SignalsReported(now_ms=self.world.now_ms, uid=uid, gauges=gauges))


@pytest.mark.parametrize("block", range(2))
def test_whatever_is_reported_the_invariants_hold_and_selectors_are_kept(block: int) -> None:
    scaled = 0
    for seed in range(block * 6, block * 6 + 6):
        history = run(seed, 250, kind=SignalledHistory)
        scaled += sum(1 for event in history.world.log if event.type == "job.scaled")
    assert scaled
