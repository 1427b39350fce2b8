"""Do workers with explicit places get exactly those, and is every reason told when they can't?"""

from __future__ import annotations

from typing import Any

import pytest

from callboard.model.quantities import Resources
from callboard.model.specs import ComponentSpec, PgPoolSpec, WorkerPlace
from callboard.scheduler import Refusal
from callboard.scheduler.records.node_record import DeviceInfo
from callboard.scheduler.records.states import JobState
from tests.scheduler.world import World, job_spec, pool_spec

WHOLE = 1000


def place(node_id: str, *devices: int, milli: int = WHOLE, **fields: Any) -> WorkerPlace:
    return WorkerPlace(node_id=node_id, devices=tuple((index, milli) for index in devices), **fields)


def component(name: str, *places: WorkerPlace, cpu: float = 0) -> ComponentSpec:
    return ComponentSpec(
        name=name,
        actor="tests:Actor",
        min_workers=len(places),
        max_workers=len(places),
        resources=Resources.parse({"cpu": cpu}),
        places=places,
    )


def where(world: World, name: str) -> list[tuple[str, int, str, list[tuple[int, int]]]]:
    uid = world.job(name).uid
    return [
        (worker.component, worker.rank, worker.node_id, [(share.index, share.milli) for share in worker.devices])
        for worker in sorted(world.state.workers_of(uid), key=lambda worker: (worker.component, worker.rank))
    ]


class TestPlaces:
    def test_workers_run_on_exactly_their_devices(self) -> None:
        world = World({"n0": 2, "n1": 4})
        world.pool()
        world.submit(job_spec("a", components=[component("w", place("n1", 3), place("n0", 1), place("n1", 0, 2))]))
        assert world.job("a").state is JobState.RUNNING
        assert where(world, "a") == [
            ("w", 0, "n1", [(3, 1000)]),
            ("w", 1, "n0", [(1, 1000)]),
            ("w", 2, "n1", [(0, 1000), (2, 1000)]),
        ]

    def test_components_that_share_devices_are_charged_their_shares(self) -> None:
        world = World({"n0": 2})
        world.pool(gpu=2)
        actor = component("actor", place("n0", 0, milli=500), place("n0", 1, milli=500))
        rollout = component("rollout", place("n0", 0, 1, milli=500))
        world.submit(job_spec("a", components=[actor, rollout]))
        assert world.job("a").state is JobState.RUNNING
        assert where(world, "a")[2] == ("rollout", 0, "n0", [(0, 500), (1, 500)])
        assert world.state.charged("pool").gpu_milli == 2000
        assert world.state.node_use("n0").free.gpu_milli == 0

    def test_an_observer_holds_nothing(self) -> None:
        world = World({"n0": 2})
        world.pool(gpu=0)
        world.submit(job_spec("a", components=[component("w", place("n0", observes=True))]))
        assert world.job("a").state is JobState.RUNNING
        assert world.state.charged("pool").gpu_milli == 0

    def test_it_waits_for_its_very_device_though_others_are_free(self) -> None:
        world = World({"n0": 4})
        world.pool()
        world.submit(job_spec("a", components=[component("w", place("n0", 2))]))
        world.submit(job_spec("b", components=[component("w", place("n0", 2))], preemptible=True))
        assert world.job("b").state is JobState.PENDING
        account = world.explain("b")
        [reason] = [reason for reason in account.reasons if reason.code == "DEVICE_TAKEN"]
        assert reason.subject == "nodes/n0/devices/2"
        assert "a uses it" in reason.message
        assert account.unblock == ("free 1 of device 2 on n0",)
        world.cancel("a")
        assert where(world, "b") == [("w", 0, "n0", [(2, 1000)])]

    def test_devices_are_named_by_their_ids_and_all_who_use_them_are_named(self) -> None:
        world = World()
        world.join("n0", 2, devices=(DeviceInfo(id="4"), DeviceInfo(id="GPU-7")))
        world.pool()
        for name in ("a", "b"):
            world.submit(job_spec(name, components=[component("w", place("n0", 1, milli=500))]))
        world.submit(job_spec("c", components=[component("w", place("n0", 1, milli=100))]))
        account = world.explain("c")
        [reason] = [reason for reason in account.reasons if reason.code == "DEVICE_TAKEN"]
        assert "of device GPU-7 on n0, of which 0 is free; a, b use it" in reason.message
        assert account.unblock == ("free 0.1 of device GPU-7 on n0",)

    def test_only_who_holds_its_device_yields(self) -> None:
        world = World({"n0": 2, "n1": 2})
        world.pool()
        for name, where_to in (("low-0", "n0"), ("low-1", "n1")):
            world.submit(
                job_spec(name, priority=1, components=[component("w", place(where_to, 0), place(where_to, 1))])
            )
        world.submit(job_spec("high", priority=9, components=[component("w", place("n1", 1))]))
        assert world.job("low-0").state is JobState.RUNNING
        assert world.job("high").state is JobState.RUNNING
        assert world.job("low-1").state is JobState.PENDING
        world.submit(job_spec("other", priority=1, ask={"gpu": 1}))
        assert where(world, "other")[0][2:] == ("n1", [(0, 1000)])

    @pytest.mark.parametrize(
        ("wanted", "why"),
        [
            (place("n9", 0), "its placement names n9, which has not joined"),
            (place("n0", 2), "w/0 must have device 2 of n0, which has 2"),
        ],
    )
    def test_a_place_that_does_not_exist_is_refused_by_name(self, wanted: WorkerPlace, why: str) -> None:
        world = World({"n0": 2})
        world.pool()
        with pytest.raises(Refusal) as refused:
            world.submit(job_spec("a", components=[component("w", wanted)]))
        assert why in str(refused.value)
        assert not world.state.jobs

    def test_a_lost_node_is_waited_for_and_no_other_is_taken(self) -> None:
        world = World({"n0": 1, "n1": 1})
        world.pool()
        world.submit(job_spec("a", components=[component("w", place("n1", 0))]))
        world.lose("n1")
        assert world.job("a").state in (JobState.PENDING, JobState.RECOVERING)
        assert any("n1, which is LOST" in reason.message for reason in world.explain("a").reasons)
        world.join("n1", 1, instance="again")
        world.tick(120_000)
        assert world.job("a").state is JobState.RUNNING
        assert where(world, "a") == [("w", 0, "n1", [(0, 1000)])]

    def test_a_kept_group_is_used_again_only_on_the_same_devices(self) -> None:
        world = World({"n0": 4})
        world.pool(pool_spec("pool", pg_pool=PgPoolSpec()))
        world.submit(job_spec("a", components=[component("w", place("n0", 1), place("n0", 3))]))
        world.complete("a")
        [group] = world.state.groups
        world.submit(job_spec("b", components=[component("w", place("n0", 3), place("n0", 1))]))
        assert world.job("b").groups == (group,)
        assert where(world, "b") == [("w", 0, "n0", [(3, 1000)]), ("w", 1, "n0", [(1, 1000)])]
        world.submit(job_spec("c", components=[component("w", place("n0", 0), place("n0", 2))]))
        assert world.job("c").groups != (group,)
        assert world.job("c").state is JobState.RUNNING

    def test_components_without_places_take_what_is_left(self) -> None:
        world = World({"n0": 2})
        world.pool()
        free = ComponentSpec(name="free", actor="tests:Actor", resources=Resources.parse({"gpu": 1}))
        world.submit(job_spec("a", components=[free, component("w", place("n0", 0))]))
        assert where(world, "a") == [("free", 0, "n0", [(1, 1000)]), ("w", 0, "n0", [(0, 1000)])]
