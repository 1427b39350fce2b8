"""The virtual world's own laws."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import closing
from functools import partial
from random import Random

import pytest

from callboard.controller.journal.store import Store
from callboard.model.specs import PoolSpec
from callboard.scheduler.records.job_records import Change, MetaRecord, Put
from callboard.scheduler.records.pool_records import PoolRecord
from callboard.simulation import Fault, SimulationOptions, parse_faults
from callboard.simulation.options import ALL_FAULTS, NO_FAULTS, UnknownFault, faults_text
from callboard.simulation.world.agent_machine import SimulatedRunDir
from callboard.simulation.world.disk import Disk
from callboard.simulation.world.machines import Machine, Machines, Tree
from callboard.simulation.world.network import Message, Network, Stream
from callboard.simulation.world.rayworld import RayWorld
from callboard.simulation.world.rules import RuleBroken
from callboard.simulation.world.virtual_time import Process, Timeline


class End:
    def __init__(self) -> None:
        self.got: list[str] = []
        self.why = ""

    def receive(self, stream: Stream, message: Message) -> None:
        self.got.append(message[1])

    def broken(self, stream: Stream, why: str) -> None:
        self.why = why


def passes(timeline: Timeline, ms: int) -> None:
    until_ms = timeline.now_ms + ms
    while timeline.step(until_ms):
        pass


def machine(node_id: str = "n0") -> Machine:
    return Machine(node_id, gpus=2, cpu_milli=1_000, memory_bytes=1, labels={})


def starts(world: Machines, place: Machine, generation: int, milli: int = 1_000) -> Tree:
    """A worker's process that begins and uses a part of a device."""
    tree = Tree(world.begin(place, "worker", None), generation)
    world.launch(place, tree)
    world.use(place, tree, ("j", "main", 0), generation, [(0, milli)])
    return tree


def test_things_due_at_one_time_happen_in_the_order_they_were_asked_for() -> None:
    timeline, done = Timeline(), []
    timeline.after(5, lambda: done.append("b"))
    timeline.after(5, lambda: done.append("c"))
    timeline.after(1, lambda: done.append("a"))
    timeline.after(2, lambda: done.append("never")).cancel()
    passes(timeline, 10)
    assert done == ["a", "b", "c"]
    assert timeline.now_ms == 10


def test_a_device_share_is_never_used_twice() -> None:
    place = machine()
    world = Machines(Timeline(), [place])
    starts(world, place, 1, 600)
    starts(world, place, 2, 400)
    with pytest.raises(RuleBroken, match="R2/I1"):
        starts(world, place, 3, 1)
    world.power_off(place)
    assert world.living() == []


def test_a_generation_is_never_started_twice() -> None:
    first, second = machine(), machine("n1")
    world = Machines(Timeline(), [first, second])
    starts(world, first, 1)
    with pytest.raises(RuleBroken, match="R6/I9"):
        starts(world, second, 1)


def test_a_strict_copy_may_start_only_after_the_other_ended() -> None:
    timeline, first, second, third = Timeline(), machine(), machine("n1"), machine("n2")
    world = Machines(timeline, [first, second, third])
    world.strict = dict.fromkeys((1, 2, 3))
    old = starts(world, first, 1)
    with pytest.raises(RuleBroken, match="R5"):
        starts(world, second, 2)
    world.kill(first, old.leader)
    passes(timeline, 10)
    starts(world, third, 3)


def test_a_stream_keeps_its_order_and_a_cut_ends_it() -> None:
    timeline, agent, controller = Timeline(), End(), End()
    network = Network(timeline, Random(1), NO_FAULTS, Counter())
    stream = network.open("n0", agent, controller)
    for number in range(20):
        network.send(stream, "up", ("report", str(number)))
    passes(timeline, 100)
    assert controller.got == [str(number) for number in range(20)]
    network.partition("n0", ("up",))
    network.send(stream, "up", ("report", "lost"))
    passes(timeline, 20_000)
    assert len(controller.got) == 20
    assert agent.why
    assert controller.why


def submitted(number: int) -> list[Change]:
    pool = PoolRecord(spec=PoolSpec(name=f"pool-{number}", nominal=()))
    return [Put(pool), *(Put(MetaRecord(revision=100 * number + place)) for place in range(90))]


def lives_through(seed: int, *, syncs: bool) -> tuple[bool, list[int]]:
    """Three batches, the power lost during the last: whether it is said to be there, and the numbers of what is."""
    disk, told, there = Disk(), list[str](), False
    with closing(Store.of(disk.directory, events_kept=10)) as store:
        disk.lose_power(3, lambda: told.append("the power is lost"))
        for now_ms in (1, 2, 3):
            there = disk.write(partial(store.commit, submitted(now_ms), []), lambda: syncs, now_ms, Random(seed))
            assert bool(told) is (now_ms == 3)
        disk.crashed()
    with closing(Store.of(disk.directory, events_kept=10)) as store:
        state = store.load()
    disk.close()
    found = [int(name.removeprefix("pool-")) for name in state.pools]
    # Each batch is there as a whole: SQLite lets nothing of a torn one in.
    assert state.meta.revision == (100 * found[-1] + 89 if found else 0)
    return there, found


def test_a_write_during_which_the_power_fails_is_there_as_a_whole_or_not_at_all() -> None:
    seen = {(there, *found) for there, found in (lives_through(seed, syncs=True) for seed in range(20))}
    assert seen == {(True, 1, 2, 3), (False, 1, 2)}


def test_what_was_not_synced_is_lost_with_the_power() -> None:
    seen = {len(lives_through(seed, syncs=False)[1]) for seed in range(20)}
    assert seen == {0, 1, 2, 3}


def test_seed_30_a_machine_keeps_the_token_of_its_ray_cluster_for_the_next_agent_and_not_without_power() -> None:
    place = machine()
    SimulatedRunDir(place).write_ray_token("secret")
    assert SimulatedRunDir(place).read_ray_token() == "secret"
    Machines(Timeline(), [place]).power_off(place)
    assert SimulatedRunDir(place).read_ray_token() == ""


def test_a_group_waits_in_ray_until_its_room_is_free() -> None:
    ray = RayWorld()
    ray.start_head("n0:6379")
    raylet = ray.add_raylet(1_000)
    ray.find_or_make("a", ((raylet, 1_000),))
    ray.find_or_make("b", ((raylet, 1_000),))
    assert ray.try_place("a") is not None
    assert ray.try_place("b") is None
    ray.remove("a")
    assert ray.try_place("b") is not None
    ray.start_head("n0:6379")
    assert not ray.groups


def test_faults_are_read_as_they_are_written() -> None:
    assert parse_faults("all") == ALL_FAULTS
    assert parse_faults("none") == NO_FAULTS
    assert parse_faults("drop, Clock") == {Fault.DROP, Fault.CLOCK}
    for faults in (ALL_FAULTS, NO_FAULTS, frozenset({Fault.DROP, Fault.RAY})):
        assert parse_faults(faults_text(faults)) == faults
    with pytest.raises(UnknownFault, match="'dorp' is no fault"):
        parse_faults("dorp")


def test_a_simulation_needs_an_end() -> None:
    with pytest.raises(ValueError, match="how long"):
        SimulationOptions(seed=1)


async def _log(said: list[str], name: str) -> None:
    try:
        while True:
            await asyncio.sleep(1)
            said.append(name)
    finally:
        said.append(f"{name} ended")


def test_nothing_of_a_killed_program_is_done_and_what_a_stopped_one_should_do_waits() -> None:
    timeline, said = Timeline(), list[str]()
    killed, stopped = Process("killed"), Process("stopped")
    kept = [killed.start(timeline, _log(said, "killed")), stopped.start(timeline, _log(said, "stopped"))]
    passes(timeline, 1_500)
    timeline.after(0, killed.kill)
    stopped.freeze()
    passes(timeline, 5_000)
    assert said == ["killed", "stopped", "killed ended"], "unwound at once, and heard of no more"
    stopped.thaw()
    passes(timeline, 1_200)
    assert said[3:] == ["stopped", "stopped"], "what was due is done at once, and it goes on from there"
    assert [task.done() for task in kept] == [False, False]
    timeline.close_down()


def test_an_error_that_nobody_looks_at_ends_a_simulation() -> None:
    async def fails() -> None:
        raise ValueError("nobody looks")

    async def forgets() -> None:
        await asyncio.wait([asyncio.ensure_future(fails())])
        await asyncio.sleep(1)

    timeline, program = Timeline(), Process("program")
    kept = program.start(timeline, forgets())
    with pytest.raises(ValueError, match="nobody looks"):
        passes(timeline, 10)
    timeline.close_down()
    assert not kept.done()


@pytest.mark.parametrize("seed", range(5))
def test_schedules_differ_by_their_seed_and_keep_the_order_within_a_task(seed: int) -> None:
    def order(chance: Random | None) -> list[str]:
        timeline, said = Timeline(chance), list[str]()

        async def work(name: str) -> None:
            for step in range(3):
                said.append(f"{name}{step}")
                await asyncio.sleep(0)

        program = Process("program")
        kept = [program.start(timeline, work(name)) for name in "abcd"]
        passes(timeline, 1)
        assert all(task.done() for task in kept)
        return said

    assert order(None) == [f"{name}{step}" for step in range(3) for name in "abcd"]
    drawn = order(Random(seed))
    assert drawn == order(Random(seed))
    assert drawn != order(None)
    for name in "abcd":
        assert [each for each in drawn if each[0] == name] == [f"{name}{step}" for step in range(3)]
