"""Placement groups: scenarios from public reports (PG-…, GV-…) and the rules of the pool."""

from __future__ import annotations

import pytest

from callboard.model.quantities import Resources
from callboard.model.specs import ComponentSpec, PgPoolSpec, Strategy
from callboard.scheduler import Refusal
from callboard.scheduler.account.stats import group_stats, pool_use
from callboard.scheduler.records import commands as cmd
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.node_record import DeviceShare
from callboard.scheduler.records.pool_records import BundleRecord
from callboard.scheduler.records.states import GroupState, JobState
from callboard.scheduler.state.invariants import check_invariants
from tests.scheduler.world import World, job_spec, pool_spec

ONE_GPU = Resources.parse({"cpu": 1, "gpu": 1})


def pooled(world: World, **pg_pool: object) -> None:
    world.pool(pool_spec(pg_pool=PgPoolSpec(**pg_pool)))  # type: ignore[arg-type]


def test_pg01_ranks_follow_node_and_device_whatever_the_order_of_bundles() -> None:
    world = World({"a": 4, "b": 4})
    pooled(world)
    world.submit("first", workers=8)
    assert world.devices("first") == [f"a:{i}" for i in range(4)] + [f"b:{i}" for i in range(4)]
    # A kept group whose bundles came in another order: its next user gets the same ranks.
    group_id = next(iter(world.state.groups))
    world.complete("first")
    group = world.state.groups[group_id]
    order = [0, 4, 5, 6, 7, 1, 2, 3]
    shuffled = tuple(group.bundles[i] for i in order)
    from dataclasses import replace

    from callboard.scheduler.records.job_records import Put

    world.state.apply(Put(replace(group, bundles=shuffled)))
    world.submit("second", workers=8)
    assert world.workers("second")[0].group_id == group_id
    assert world.devices("second") == [f"a:{i}" for i in range(4)] + [f"b:{i}" for i in range(4)]


def test_pg02_six_requests_for_two_places_all_start_in_submit_order() -> None:
    world = World({"n1": {"cpu": 4}})
    world.pool()
    for n in range(6):
        world.submit(f"j{n}", ask={"cpu": 2})
    for n in range(6):
        running = [m for m in range(6) if world.status(f"j{m}") is JobState.RUNNING]
        assert running[0] == n
        world.complete(f"j{n}")


def test_pg07_what_a_job_held_is_free_when_it_is_gone_and_a_group_can_be_removed_by_id() -> None:
    world = World({"n1": 1})
    pooled(world)
    world.submit("a")
    group_id = world.workers("a")[0].group_id
    world.exit("a")
    assert world.status("a") is JobState.FAILED
    assert not world.state.workers_in(group_id)
    for _ in range(3):
        world.send(ev.GroupDeleted(now_ms=world.now_ms, group_id=group_id))
    assert group_id not in world.state.groups
    assert world.state.node_use("n1").free.gpu_milli == 1000
    for never in ("pg-2000", "pg-0", "pg-01", "pg--1", "pg-²", "pool"):
        with pytest.raises(Refusal, match=f"there is no placement group {never}"):
            world.send(ev.GroupDeleted(now_ms=world.now_ms, group_id=never))


def test_ft_c5_a_used_group_is_removed_once_its_job_has_left_it() -> None:
    world = World({"n1": 2})
    pooled(world)
    world.submit("a")
    group_id = world.workers("a")[0].group_id
    with pytest.raises(Refusal, match="is used by job a"):
        world.send(ev.GroupDeleted(now_ms=world.now_ms, group_id=group_id))
    world.send(ev.GroupDeleted(now_ms=world.now_ms, group_id=group_id, when_free=True))
    assert world.status("a") is JobState.RUNNING
    assert group_id in world.state.groups
    world.send(ev.JobPreempted(now_ms=world.now_ms, uid=world.job("a").uid))
    assert world.status("a") is JobState.RUNNING
    assert world.workers("a")[0].group_id != group_id
    assert group_id not in world.state.groups


def test_a_group_that_comes_too_late_belongs_to_the_pool_it_was_made_for() -> None:
    world = World({"n1": 1})
    world.hold = lambda command: isinstance(command, cmd.CreateGroup | cmd.RemoveGroup)
    shape = Resources.parse({"cpu": 1, "gpu": 1})
    world.pool(pool_spec(pg_pool=PgPoolSpec(reserved=(shape,))))
    (group_id,) = world.state.groups
    world.send(ev.GroupFailed(now_ms=world.now_ms, group_id=group_id, attempt=1, message="Ray is slow"))
    world.tick(60_000)
    assert world.state.groups[group_id].attempt == 2
    world.send(ev.GroupReady(now_ms=world.now_ms, group_id=group_id, attempt=1, ray_id="late", ray_session="s"))
    (stray,) = [group for group in world.state.groups.values() if group.group_id != group_id]
    assert (stray.state, stray.pool, stray.ray_id) == (GroupState.REMOVING, "pool", "late")


def test_pg07_a_group_in_ray_that_no_record_names_is_shown_and_removed() -> None:
    world = World({"n1": 1})
    pooled(world)
    world.hold = lambda command: isinstance(command, cmd.RemoveGroup)
    for _ in range(2):  # Whoever tells of it, and however often.
        world.send(ev.GroupFound(now_ms=world.now_ms, group_id="pg-77", ray_id="feed", ray_session="s"))
    (stray,) = world.state.groups.values()
    assert stray.state is GroupState.REMOVING
    assert "found in Ray as pg-77" in stray.reason
    assert [command.ray_id for command in world.held if isinstance(command, cmd.RemoveGroup)] == ["feed"]
    world.hold = lambda _: False
    world.answer()
    assert world.state.groups == {}
    assert world.state.node_use("n1").free.gpu_milli == 1000


def test_pg07_a_group_in_ray_that_a_record_names_is_kept() -> None:
    world = World({"n1": 1})
    pooled(world)
    world.submit("a")
    group = next(iter(world.state.groups.values()))
    before = list(world.state.records())
    world.send(ev.GroupFound(now_ms=world.now_ms, group_id=group.group_id, ray_id=group.ray_id, ray_session="s"))
    assert list(world.state.records()) == before


def test_pg07_a_group_that_is_being_made_is_judged_by_its_creation() -> None:
    world = World({"n1": 1})
    pooled(world)
    world.hold = lambda command: isinstance(command, cmd.CreateGroup)
    world.submit("a")
    group = next(iter(world.state.groups.values()))
    assert group.state is GroupState.CREATING
    world.send(ev.GroupFound(now_ms=world.now_ms, group_id=group.group_id, ray_id="feed", ray_session="s"))
    assert list(world.state.groups) == [group.group_id]
    world.hold = lambda _: False
    world.answer()
    assert world.status("a") is JobState.RUNNING


def test_pg08_a_request_no_node_could_hold_is_refused_at_once_and_says_why() -> None:
    world = World({"n1": 1, "n2": 1})
    world.pool()
    two = world.refused("two", ask={"gpu": 2})
    assert two.code == "UNSCHEDULABLE"
    assert "the largest node has 1" in two.message
    many = world.refused("many", ask={"gpu": 999})
    assert "the largest node has 1" in many.message
    spread = world.refused("spread", workers=3, placement=Strategy.STRICT_SPREAD)
    assert spread.code == "UNSCHEDULABLE"
    assert {reason.subject for reason in spread.reasons} >= {"nodes/n1", "nodes/n2"}


def test_pg08_bundles_count_one_by_one_and_not_their_sum() -> None:
    world = World({"n1": {"cpu": 1}, "n2": {"cpu": 1}})
    world.pool()
    assert world.refused("j", ask={"cpu": 2}).code == "UNSCHEDULABLE"


def test_pg10_a_cpu_shortage_is_named_and_not_a_timeout() -> None:
    world = World({"n1": {"cpu": 4, "gpu": 4}, "n2": {"cpu": 8}})
    world.pool()
    world.submit("cpu", ask={"cpu": 3}, node_selector=(("node", "n1"),), preemptible=False)
    world.submit("j", workers=4, ask={"gpu": 1, "cpu": 1})
    account = world.explain("j")
    assert account.verdict == "WAIT"
    assert "n1 lacks 3 CPU" in account.summary
    world.complete("cpu")
    assert world.status("j") is JobState.RUNNING


def test_pg17_a_job_waits_for_nodes_as_long_as_it_said() -> None:
    world = World({"n1": 1})
    world.pool()
    world.submit("two", workers=2, wait_for_nodes_ms=3000)
    assert world.status("two") is JobState.PENDING
    world.tick(2000)
    world.join("n2", 1)
    assert world.status("two") is JobState.RUNNING
    world.complete("two")
    world.submit("three", workers=3, wait_for_nodes_ms=3000)
    world.tick(3000)
    assert world.status("three") is JobState.FAILED
    world.tick(1000)
    world.join("n3", 1)
    assert world.state.node_use("n3").free.gpu_milli == 1000


def test_pg20_a_group_is_used_again_only_when_every_process_in_it_is_proved_gone() -> None:
    world = World({"n1": 1})
    pooled(world)
    world.submit("a")
    group_id = world.workers("a")[0].group_id
    world.hold_stops_of("a")
    world.cancel("a")
    world.submit("b")
    assert world.status("b") is JobState.PENDING
    world.let_stop("a")
    assert world.status("b") is JobState.RUNNING
    assert world.workers("b")[0].group_id == group_id
    assert world.state.pools["pool"].counts.reuses == 1


def test_gv04_the_only_device_is_given_again_only_after_its_process_is_reaped_200_times() -> None:
    world = World({"n1": 1})
    pooled(world)
    for n in range(200):
        world.hold_stops_of(f"j{n - 1}")
        world.submit(f"j{n}")
        if n:
            assert world.status(f"j{n}") is JobState.PENDING
            world.let_stop(f"j{n - 1}")
        assert world.status(f"j{n}") is JobState.RUNNING
        assert world.devices(f"j{n}") == ["n1:0"]
        world.hold_stops_of(f"j{n}")
        world.complete(f"j{n}")


def test_gv05_shares_never_straddle_devices_and_each_worker_gets_its_own() -> None:
    world = World({"n1": 2})
    world.pool()
    for n in range(3):
        world.submit(f"s{n}", ask={"gpu": 0.4})
    where = sorted(device for n in range(3) for device in world.devices(f"s{n}"))
    assert where == ["n1:0", "n1:0", "n1:1"]
    world.submit("whole", ask={"gpu": 1}, wait_for_nodes_ms=1)
    assert world.status("whole") is JobState.PENDING


def test_gv13_device_ids_are_those_of_the_workers_own_node() -> None:
    world = World({"n0": 1, "n1": 4})
    world.pool()
    world.submit("actor", workers=5)
    assert world.devices("actor") == ["n0:0", "n1:0", "n1:1", "n1:2", "n1:3"]


def test_gv11_a_worker_without_gpu_gets_no_device() -> None:
    world = World({"n1": 2})
    world.pool()
    world.submit("cpu", ask={"cpu": 1})
    assert world.devices("cpu") == ["n1:"]


def test_reserved_groups_are_made_with_the_pool_and_used_first_by_high_priorities() -> None:
    world = World({"n1": 4})
    pooled(world, reserved=(ONE_GPU, ONE_GPU), max_dynamic=2)
    assert group_stats(world.state, "pool").reserved_idle == 2
    world.submit("low", priority=3, ask={"cpu": 1, "gpu": 1})
    assert group_stats(world.state, "pool").reserved_idle == 2
    world.submit("high", priority=8, ask={"cpu": 1, "gpu": 1})
    assert group_stats(world.state, "pool").reserved_idle == 1


def test_a_reserved_shape_that_does_not_fit_says_why_and_the_others_stay_usable() -> None:
    world = World({"n1": 1})
    pooled(world, reserved=(Resources.parse({"gpu": 8}), ONE_GPU))
    states = {group.reserved_index: group for group in world.state.groups.values()}
    assert states[0].state is GroupState.BACKOFF
    assert "no node has room for gpu 8" in states[0].reason
    assert states[1].state is GroupState.READY
    world.join("n2", 8)
    assert world.state.groups[states[0].group_id].state is GroupState.READY


def test_a_reserved_group_comes_back_after_its_node_died() -> None:
    world = World({"n1": 1, "n2": 1})
    pooled(world, reserved=(ONE_GPU,))
    (group,) = world.state.groups.values()
    assert group.bundles[0].node_id == "n1"
    world.lose("n1")
    (group,) = world.state.groups.values()
    assert (group.state, group.bundles[0].node_id) == (GroupState.READY, "n2")


def test_a_reserved_group_removed_on_purpose_stays_away_until_the_pool_is_updated() -> None:
    world = World({"n1": 2})
    pooled(world, reserved=(ONE_GPU,))
    (group_id,) = world.state.groups
    world.send(ev.GroupDeleted(now_ms=world.now_ms, group_id=group_id))
    world.tick(100_000)
    world.submit("j", ask={"cpu": 1})
    world.complete("j")
    assert group_stats(world.state, "pool").reserved == 0
    spec = world.state.pools["pool"].spec
    world.send(ev.PoolUpdated(now_ms=world.now_ms, spec=spec))
    assert group_stats(world.state, "pool").reserved == 1


def test_at_max_dynamic_an_idle_group_of_the_wrong_shape_is_trimmed_before_anyone_yields() -> None:
    world = World({"n1": 4})
    pooled(world, max_dynamic=2)
    world.submit("runs", priority=1)
    world.submit("short", priority=1)
    world.complete("short")
    assert group_stats(world.state, "pool").dynamic_idle == 1
    world.submit("wide", priority=9, ask={"gpu": 2})
    assert world.preempted() == []
    assert world.status("wide") is JobState.RUNNING
    assert dict(world.state.pools["pool"].counts.removals) == {"TRIMMED": 1}


def test_an_idle_group_goes_after_its_time() -> None:
    world = World({"n1": 1})
    pooled(world, idle_ttl_ms=5000)
    world.submit("a")
    world.complete("a")
    world.tick(4999)
    assert group_stats(world.state, "pool").dynamic_idle == 1
    world.tick(2)
    assert not world.state.groups


def test_an_idle_group_of_another_pool_makes_room() -> None:
    world = World({"n1": 1})
    pooled(world)
    world.pool(pool_spec("other"))
    world.submit("a")
    world.complete("a")
    world.submit("b", pool="other")
    assert world.status("b") is JobState.RUNNING


def test_a_much_larger_group_is_not_spent_on_a_small_job() -> None:
    world = World({"n1": 4})
    pooled(world)
    world.submit("big", ask={"gpu": 3})
    world.complete("big")
    world.submit("small", ask={"gpu": 1})
    assert world.state.pools["pool"].counts.reuses == 0
    assert world.status("small") is JobState.RUNNING


def test_a_creation_that_fails_is_tried_again_with_backoff_and_the_job_says_why() -> None:
    world = World({"n1": 1})
    world.pool()
    world.auto = False
    world.submit("a")
    for expected_ms in (1000, 2000):
        (command,) = [c for c in world.held if isinstance(c, cmd.CreateGroup)]
        world.held.remove(command)
        world.send(
            ev.GroupFailed(now_ms=world.now_ms, group_id=command.group_id, attempt=command.attempt, message="timed out")
        )
        assert world.status("a") is JobState.PENDING
        assert "timed out" in world.explain("a").summary
        world.tick(expected_ms - 1)
        assert not world.held
        world.tick(1)
    world.auto = True
    world.answer()
    assert world.status("a") is JobState.RUNNING


def test_a_creation_nobody_answers_is_given_up_and_removed() -> None:
    world = World({"n1": 2})
    world.pool()
    world.hold = lambda command: isinstance(command, cmd.CreateGroup)
    world.submit("a")
    world.tick(66_000)
    assert any(isinstance(c, cmd.CreateGroup) for c in world.held)
    group_ids = {c.group_id for c in world.held if isinstance(c, cmd.CreateGroup)}
    assert "pg-1" in group_ids
    assert "pg-1" not in world.state.groups  # its removal was answered


def test_bundles_and_shares_are_frozen_data() -> None:
    bundle = BundleRecord(node_id="n", resources=ONE_GPU, devices=(DeviceShare(0, "0", 1000),))
    assert hash(bundle) == hash(BundleRecord(node_id="n", resources=ONE_GPU, devices=(DeviceShare(0, "0", 1000),)))


def test_two_pools_in_one_job_are_charged_each_with_a_group_of_its_own() -> None:
    from callboard.model.specs import ComponentSpec

    world = World({"n1": 2})
    world.pool(pool_spec("cpus", cpu=4))
    world.pool(pool_spec("gpus", gpu=2))
    components = [
        ComponentSpec(
            name="env", actor="a:B", pool="cpus", min_workers=4, max_workers=4, resources=Resources.parse({"cpu": 1})
        ),
        ComponentSpec(name="actor", actor="a:B", resources=Resources.parse({"gpu": 1})),
    ]
    world.submit(job_spec("j", pool="gpus", components=components))
    assert world.status("j") is JobState.RUNNING
    assert pool_use(world.state, "cpus").used == Resources.parse({"cpu": 4})
    assert pool_use(world.state, "gpus").used == Resources.parse({"gpu": 1})
    assert len({worker.group_id for worker in world.workers("j")}) == 2


def test_a_job_meant_for_a_reserved_group_waits_for_it_to_be_made() -> None:
    world = World({"n1": 1})
    world.hold = lambda command: isinstance(command, cmd.CreateGroup)
    pooled(world, reserved=(ONE_GPU,), max_dynamic=0)
    world.submit("high", priority=9, ask={"gpu": 1})
    assert world.status("high") is JobState.STARTING
    assert world.refused("low", priority=1, ask={"gpu": 1}).code == "UNSCHEDULABLE"
    world.hold = lambda command: False
    world.answer()
    assert world.status("high") is JobState.RUNNING


class TestDevicesOfRaysChoice:
    """A group that Ray gave other devices than were planned."""

    def test_ft_b1_the_ledger_follows_ray_while_nothing_runs_there(self) -> None:
        world = World({"n1": 3})
        pooled(world)
        world.hold = lambda command: isinstance(command, cmd.CreateGroup)
        world.submit("a", ask={"cpu": 1, "gpu": 2})
        world.submit("b")
        assert [devices_of(world, job) for job in ("a", "b")] == [[0, 1], [2]]
        made(world, "a", (2, 1))
        assert [devices_of(world, job) for job in ("a", "b")] == [[1, 2], [0]]
        assert world.status("a") is JobState.RUNNING
        made(world, "b")
        assert [worker.visible_devices for job in ("a", "b") for worker in world.workers(job)] == ["1,2", "0"]
        check_invariants(world.state)

    def test_ft_b1_what_is_held_for_a_job_follows_too(self) -> None:
        world = World({"n1": {"cpu": 4, "gpu": 3}})
        pooled(world)
        world.submit("low", priority=1, ask={"cpu": 3, "gpu": 1})
        world.hold_stops_of("low")
        world.submit("high", priority=5, ask={"cpu": 2, "gpu": 2})
        (held,) = [group.group_id for group in world.state.groups.values() if group.state is GroupState.NOMINATED]
        assert indexes(world, held) == [0, 1]
        world.hold = lambda command: isinstance(command, cmd.CreateGroup | cmd.StopWorker)
        world.submit("beside", ask={"gpu": 1})
        made(world, "beside", (1,))
        assert devices_of(world, "beside") == [1]
        assert indexes(world, held) == [0, 2]
        check_invariants(world.state)

    @pytest.mark.parametrize("answer", [((0,),), ((5,),), ((-1,),), ((0, 1),), ((),), ((1,), (0,))])
    def test_ft_b1_what_ray_can_not_have_given_is_removed_and_made_again(
        self, answer: tuple[tuple[int, ...], ...]
    ) -> None:
        world = World({"n1": 2})
        pooled(world)
        world.submit("runs")
        world.hold = lambda command: isinstance(command, cmd.CreateGroup)
        world.submit("a")
        made(world, "a", *answer)
        assert devices_of(world, "runs") == [0]
        assert "Ray gave it device" in world.job("a").reason
        world.hold = lambda _: False
        world.answer()
        world.tick(60_000)
        assert world.status("a") is JobState.RUNNING
        assert devices_of(world, "a") == [1]
        check_invariants(world.state)

    def test_ft_b1_parts_of_devices_and_places_are_certain_and_never_exchanged(self) -> None:
        world = World({"n1": 2})
        pooled(world)
        world.hold = lambda command: isinstance(command, cmd.CreateGroup)
        world.submit("part", ask={"cpu": 1, "gpu": 0.5})
        world.submit("whole")
        certain = {command.group_id: command.certain for command in world.held if isinstance(command, cmd.CreateGroup)}
        assert list(certain.values()) == [True, False]
        made(world, "whole", (0,))
        assert world.status("whole") is not JobState.RUNNING
        assert devices_of(world, "part") == [0]
        check_invariants(world.state)

    def test_ft_b1_who_was_promised_a_part_of_a_device_is_planned_again(self) -> None:
        """Its part can't go where Ray's choice would push it, and the rest of what it was promised must not go alone:
        a promise takes nothing from a group that is there."""
        world = World({"n1": {"cpu": 4, "gpu": 3}})
        pooled(world)
        world.pool(pool_spec("other", pg_pool=PgPoolSpec()))
        world.submit("low", priority=1, ask={"cpu": 3, "gpu": 1})
        world.hold_stops_of("low")
        parts = [
            ComponentSpec(name=pool, actor="a:B", min_workers=1, max_workers=1, pool=pool, resources=ask)
            for pool, ask in (("pool", Resources.parse({"cpu": 2, "gpu": 1})), ("other", Resources(gpu_milli=500)))
        ]
        world.submit(job_spec("high", components=parts, priority=5))
        promised = [indexes(world, group_id) for group_id in world.job("high").groups]
        assert promised == [[0], [1]]
        world.hold = lambda command: isinstance(command, cmd.CreateGroup | cmd.StopWorker)
        world.submit("beside", ask={"gpu": 1})
        assert devices_of(world, "beside") == [2]
        made(world, "beside", (1,))
        check_invariants(world.state)
        assert world.status("beside") is JobState.RUNNING
        assert world.job("high").nominated, "planned around what is so now"
        assert [1] not in [indexes(world, group_id) for group_id in world.job("high").groups]


def indexes(world: World, group_id: str) -> list[int]:
    return [share.index for bundle in world.state.groups[group_id].bundles for share in bundle.devices]


def devices_of(world: World, job: str) -> list[int]:
    return [share.index for worker in world.workers(job) for share in worker.devices]


def made(world: World, job: str, *devices: tuple[int, ...]) -> None:
    """The agent made the group of a job, and Ray gave it these devices."""
    (worker, *_) = world.workers(job)
    (command,) = [c for c in world.held if isinstance(c, cmd.CreateGroup) and c.group_id == worker.group_id]
    world.held.remove(command)
    world.send(
        ev.GroupReady(
            now_ms=world.now_ms,
            group_id=command.group_id,
            attempt=command.attempt,
            ray_id=f"ray-{command.group_id}",
            ray_session="s",
            devices=devices,
        )
    )
    world.answer()
