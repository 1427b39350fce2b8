"""Are the GPUs of a worker, and of a job's workers on one node, those that are connected best?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest

from callboard.model.quantities import Number, Resources
from callboard.model.specs import NO_PG_POOL, ComponentSpec, JobSpec, Strategy
from callboard.scheduler.plan.nearness import nearest
from callboard.scheduler.records.node_record import DeviceInfo
from tests.scheduler.world import World, pool_spec

SAME, NVLINK, SWITCH, SYSTEM = 1, 2, 3, 7


def machine(groups: Sequence[Sequence[int]], inside: int = NVLINK, outside: int = SYSTEM) -> tuple[DeviceInfo, ...]:
    """GPUs that are near to those of their group."""
    group_of = {index: n for n, group in enumerate(groups) for index in group}
    count = len(group_of)

    def between(i: int, j: int) -> int:
        return SAME if i == j else inside if group_of[i] == group_of[j] else outside

    return tuple(
        DeviceInfo(
            id=str(i), model="NVIDIA A100", memory_bytes=80 << 30, distances=tuple(between(i, j) for j in range(count))
        )
        for i in range(count)
    )


PAIRS = machine([[0, 4], [1, 5], [2, 6], [3, 7]])
SOCKETS = machine([[0, 2, 4, 6], [1, 3, 5, 7]])


def world_on(devices: tuple[DeviceInfo, ...]) -> World:
    world = World()
    count = len(devices)
    capacity: dict[str, Number] = {"cpu": 64, "memory": "64GiB", "gpu": count, "gpu_memory": f"{80 * count}GiB"}
    world.join("n0", capacity, devices=devices)
    world.pool(pool_spec("p", pg_pool=NO_PG_POOL))
    return world


def asking(
    name: str, gpu: float, workers: int = 1, placement: Strategy = Strategy.PACK, ask: Resources | None = None
) -> JobSpec:
    resources = ask or Resources.parse({"gpu": gpu})
    component = ComponentSpec(name="w", actor="m:A", min_workers=workers, max_workers=workers, resources=resources)
    return JobSpec(name=name, pool="p", components=(component,), placement=placement)


class TestAWorkerOfSeveral:
    def test_has_those_that_are_connected(self) -> None:
        world = world_on(PAIRS)
        world.submit(asking("a", 2))
        assert world.devices("a") == ["n0:0,4"]
        world.submit(asking("b", 4))
        assert world.devices("b") == ["n0:1,2,5,6"]

    def test_has_those_of_one_socket_where_they_are_free(self) -> None:
        world = world_on(SOCKETS)
        world.submit(asking("one", 1))
        world.submit(asking("four", 4))
        assert (world.devices("one"), world.devices("four")) == (["n0:0"], ["n0:1,3,5,7"])

    def test_leaves_pairs_whole_when_it_needs_but_one(self) -> None:
        world = world_on(PAIRS)
        for name in ("a", "b"):
            world.submit(asking(name, 1))
        assert (world.devices("a"), world.devices("b")) == (["n0:0"], ["n0:4"])

    def test_goes_where_there_is_room_all_the_same(self) -> None:
        world = world_on(SOCKETS)
        world.submit(asking("five", 5))
        world.submit(asking("three", 3))
        assert world.devices("three") == ["n0:3,5,7"]
        world.cancel("five")
        world.submit(asking("all", 5))
        assert len(world.devices("all")[0].split(",")) == 5

    @pytest.mark.parametrize(
        "ask", [Resources(gpu_milli=2000, gpu_memory_bytes=100 << 30), Resources(gpu_milli=2000, gpu_model="A100")]
    )
    def test_has_them_also_when_it_asks_for_certain_ones(self, ask: Resources) -> None:
        world = world_on(PAIRS)
        world.submit(asking("a", 2, ask=ask))
        assert world.devices("a") == ["n0:0,4"]


class TestWorkersOfOneJob:
    def test_on_one_node_are_near_each_other(self) -> None:
        world = world_on(SOCKETS)
        world.submit(asking("one", 1))
        world.submit(asking("gang", 1, workers=4))
        assert world.devices("gang") == ["n0:1", "n0:3", "n0:5", "n0:7"], "in the order of their ranks"

    def test_of_two_each_have_a_pair(self) -> None:
        world = world_on(PAIRS)
        world.submit(asking("gang", 2, workers=2))
        assert world.devices("gang") == ["n0:0,4", "n0:1,5"]

    def test_that_spread_have_the_lowest(self) -> None:
        world = world_on(PAIRS)
        world.submit(asking("a", 2, placement=Strategy.SPREAD))
        assert world.devices("a") == ["n0:0,1"]


def test_without_distances_the_lowest_are_taken() -> None:
    world = world_on(tuple(replace(device, distances=()) for device in PAIRS))
    world.submit(asking("a", 2))
    assert world.devices("a") == ["n0:0,1"]


@pytest.mark.parametrize("seed", range(60))
def test_no_set_is_nearer_where_groups_are_connected_alike(seed: int) -> None:
    chance = random.Random(seed)
    indexes = list(range(8))
    chance.shuffle(indexes)
    size = chance.choice([2, 4])
    devices = machine([indexes[i : i + size] for i in range(0, 8, size)], chance.choice([NVLINK, SWITCH]))
    free = sorted(chance.sample(range(8), chance.randint(2, 8)))
    count = chance.randint(1, len(free))

    def far(chosen: Sequence[int]) -> int:
        return sum(devices[i].distances[j] for i, j in combinations(chosen, 2))

    found = nearest(devices, free, count)
    assert sorted(found) == free
    assert far(found[:count]) == min(far(chosen) for chosen in combinations(free, count))
