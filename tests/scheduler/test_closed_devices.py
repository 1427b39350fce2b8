"""Does a device that isn't free by itself take no new work until it is, and does everybody say why?"""

from __future__ import annotations

import pytest

from callboard.controller.views.nodes import node_message
from callboard.model.quantities import Resources
from callboard.model.specs import NO_PG_POOL, ComponentSpec, JobSpec, PgPoolSpec
from callboard.scheduler import Refusal
from callboard.scheduler.handlers.orders import must_have_its_devices
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.states import JobState
from tests.scheduler.world import World, pool_spec

WHY = "python of alice (pid 4711), which is not this cluster's, holds 70.0 GiB of its memory"


def close(world: World, *indexes: int, node_id: str = "n0") -> None:
    """The agent says that exactly these devices take no work."""
    epoch = world.state.nodes[node_id].epoch
    closed = tuple((index, WHY) for index in indexes)
    world.send(ev.NodeObserved(now_ms=world.now_ms, node_id=node_id, epoch=epoch, closed=closed))


def open_by_hand(world: World, *indexes: int) -> None:
    world.send(ev.NodeCordoned(now_ms=world.now_ms, node_id="n0", cordoned=False, devices=indexes))


def running(world: World, name: str) -> tuple[ev.RunningWorker, ...]:
    return tuple(
        ev.RunningWorker(
            generation=each.generation, job=each.job, component=each.component, rank=each.rank, state=each.state
        )
        for each in world.workers(name)
    )


def gpus(name: str, count: float = 1, **fields: object) -> JobSpec:
    component = ComponentSpec(name="w", actor="m:A", resources=Resources.parse({"cpu": 1, "gpu": count}))
    return JobSpec(name=name, pool="p", components=(component,), **fields)  # type: ignore[arg-type]


def small(pool: PgPoolSpec = NO_PG_POOL) -> World:
    """One node with two GPUs, and a pool for all of it."""
    world = World({"n0": 2})
    world.pool(pool_spec("p", gpu=8, pg_pool=pool))
    return world


class TestAClosedDevice:
    def test_takes_no_new_work_and_does_again_once_it_is_free(self) -> None:
        world = small()
        close(world, 0)
        world.submit(gpus("a"))
        assert world.devices("a") == ["n0:1"]
        world.submit(gpus("b"))
        assert world.status("b") is JobState.PENDING
        close(world)
        assert world.devices("b") == ["n0:0"]

    def test_says_why_in_explain_and_what_kept_whom(self) -> None:
        world = small()
        close(world, 0, 1)
        world.submit(gpus("a"))
        (reason,) = [each for each in world.explain("a").reasons if each.subject == "nodes/n0"]
        assert f"GPU 0 takes no new work: {WHY}" in reason.message
        assert world.explain("a").verdict != "UNSCHEDULABLE", "it fits once the device is free"

    def test_is_opened_by_hand_until_something_else_is_said_of_it(self) -> None:
        world = small()
        close(world, 0, 1)
        world.submit(gpus("a"))
        world.submit(gpus("b"))
        open_by_hand(world, 1)
        assert (world.devices("a"), world.status("b")) == (["n0:1"], JobState.PENDING)
        close(world, 0, 1)
        assert world.state.nodes["n0"].closed == ((0, WHY),), "the same is said again"
        world.join("n0", 2, closed=((0, WHY), (1, WHY)), instance="another", running=running(world, "a"))
        assert world.state.nodes["n0"].closed == ((0, WHY),), "to another agent, too"
        epoch = world.state.nodes["n0"].epoch
        for closed, open_then in ((((1, "Xid 79"),), ()), ((), ()), (((1, WHY),), ())):
            world.send(ev.NodeObserved(now_ms=world.now_ms, node_id="n0", epoch=epoch, closed=closed))
            assert (world.state.nodes["n0"].closed, world.state.nodes["n0"].opened) == (closed, open_then)
        told = [event.reason for event in world.log if event.type == "node.device_open"]
        assert "GPU 1 takes work again: opened by hand" in told

    def test_that_is_not_there_can_not_be_opened(self) -> None:
        world = small()
        with pytest.raises(Refusal, match="n0 has no GPU 2; it has 2, counted from 0"):
            open_by_hand(world, 2)
        open_by_hand(world, 1)
        assert not world.state.nodes["n0"].opened, "it is open"

    def test_its_opening_is_the_change_that_explain_proposes(self) -> None:
        world = small()
        world.submit(gpus("first"))
        close(world, 1)
        world.submit(gpus("a"))
        assert world.explain("a").unblock == (f"open GPU 1 of n0: {WHY}",)
        close(world)
        assert world.devices("a") == ["n0:1"]

    def test_is_not_proposed_where_its_opening_would_not_be_enough(self) -> None:
        world = small()
        world.submit(gpus("first"))
        close(world, 1)
        world.submit(gpus("a", 2))
        assert world.explain("a").unblock == ("2 more GPU on n0",)

    def test_for_a_gang_only_those_that_are_needed_are_named(self) -> None:
        world = World({"n0": 4})
        world.pool(pool_spec("p", gpu=8, pg_pool=NO_PG_POOL))
        close(world, 1, 2, 3)
        component = ComponentSpec(
            name="w", actor="m:A", min_workers=2, max_workers=2, resources=Resources.parse({"gpu": 1})
        )
        world.submit(JobSpec(name="a", pool="p", components=(component,)))
        assert world.explain("a").unblock == (f"open GPU 1 of n0: {WHY}",)

    def test_is_told_once_in_the_log(self) -> None:
        world = small()
        close(world, 0)
        close(world, 0, 1)
        close(world)
        told = [(event.type, event.reason) for event in world.log if event.type.startswith("node.device")]
        assert told == [
            ("node.device_closed", f"GPU 0 takes no new work: {WHY}"),
            ("node.device_closed", f"GPU 1 takes no new work: {WHY}"),
            ("node.device_open", "GPU 0 takes work again"),
            ("node.device_open", "GPU 1 takes work again"),
        ]

    def test_counts_as_quarantined_and_the_sums_stay_right(self) -> None:
        world = small()
        world.submit(gpus("a", 0.5))
        close(world, 0)
        use = world.state.node_use("n0")
        assert (use.free.gpu_milli, use.used.gpu_milli, use.quarantined.gpu_milli) == (1000, 500, 500)
        shown = node_message(world.state.nodes["n0"], world.state)
        assert [device.quarantined_milli for device in shown.devices] == [500, 0]

    def test_keeps_what_runs_on_it(self) -> None:
        world = small()
        world.submit(gpus("a"))
        close(world, 0)
        assert (world.status("a"), world.devices("a")) == (JobState.RUNNING, ["n0:0"])

    def test_is_no_reason_to_preempt_who_holds_it(self) -> None:
        world = small()
        world.submit(gpus("low", 2, priority_milli=1000))
        close(world, 0, 1)
        world.submit(gpus("high", 1, priority_milli=9000))
        assert world.preempted() == [], "its room would be closed all the same"
        close(world, 0)
        assert world.preempted() == [("low", "high")]
        assert world.devices("high") == ["n0:1"]

    def test_has_an_idle_group_wait_and_not_be_used(self) -> None:
        world = small(PgPoolSpec(max_dynamic=2))
        world.submit(gpus("a"))
        world.complete("a")
        close(world, 0)
        world.submit(gpus("b"))
        assert world.devices("b") == ["n0:1"]
        world.complete("b")
        close(world)
        world.submit(gpus("c", 2))
        assert len(world.devices("c")) == 1

    def test_drops_a_nomination_to_it(self) -> None:
        world = small()
        world.submit(gpus("low-0", priority_milli=1000))
        world.submit(gpus("low-1", priority_milli=1000))
        world.hold_stops_of("low-0", "low-1")
        world.submit(gpus("high", priority_milli=9000))
        ((victim, _),) = world.preempted()
        (held,) = world.devices(victim)
        close(world, int(held[-1]))
        (_, (second, _)) = world.preempted()
        (other,) = world.devices(second)
        world.let_stop(victim)
        assert world.status("high") is JobState.PENDING, "the room that it waited for is closed"
        world.let_stop(second)
        assert world.devices("high") == [other]

    def test_has_groups_ask_ray_for_the_very_devices(self) -> None:
        world = small()
        close(world, 0)
        world.submit(gpus("a"))
        (group,) = world.state.groups.values()
        assert must_have_its_devices(world.state, group), "Ray doesn't know that the other one is closed"
        close(world)
        assert not must_have_its_devices(world.state, group)

    def test_is_known_from_the_join_on(self) -> None:
        world = World({})
        world.pool(pool_spec("p", gpu=8))
        world.join("n0", 2, closed=((1, WHY),))
        world.submit(gpus("a", 2))
        assert world.status("a") is JobState.PENDING
        world.join("n0", 2, instance="run-n0")
        assert world.status("a") is JobState.RUNNING


def test_a_message_of_an_earlier_session_closes_nothing() -> None:
    world = small()
    world.send(ev.NodeObserved(now_ms=world.now_ms, node_id="n0", epoch=99, closed=((0, WHY),)))
    assert world.state.nodes["n0"].closed == ()
