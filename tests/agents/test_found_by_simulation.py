"""What `callboard simulate` found in agents, as small histories on virtual time; each fails without what mends it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from random import Random
from typing import cast
from unittest.mock import AsyncMock, Mock

import pytest

from callboard.agents.host.framing import Json, PeerGone
from callboard.agents.options import AgentOptions
from callboard.agents.ray.ray_driver_client import Connection, DriverClient
from callboard.agents.ray.ray_membership import RayMembership, Tenants
from callboard.agents.ray.ray_plan import RayPlan
from callboard.agents.runtime import Hosted, Launch, Runtime
from callboard.agents.system.processes import Processes
from callboard.agents.worker.spares import Spare, Spares
from callboard.security.processes import ProcessId
from callboard.simulation.world.agent_machine import SimulatedRunDir
from callboard.simulation.world.machines import Machine
from callboard.simulation.world.virtual_time import Process, Timeline

GONE = ProcessId(7, 70)


class Table:
    """A table of processes that end when they are killed."""

    def __init__(self, *gone: ProcessId) -> None:
        self._ended: dict[ProcessId, asyncio.Event] = {}
        for process in gone:
            self.send_signal(process)

    async def exited(self, process: ProcessId) -> int | None:
        """Return when it has ended."""
        await self._ended.setdefault(process, asyncio.Event()).wait()
        return -9

    def send_signal(self, process: ProcessId, number: int = 9) -> bool:
        """End it."""
        self._ended.setdefault(process, asyncio.Event()).set()
        return number == 9


def run_dir() -> SimulatedRunDir:
    return SimulatedRunDir(Machine("n0", gpus=0, cpu_milli=1, memory_bytes=1, labels={}))


def passes(timeline: Timeline, seconds: float) -> None:
    until_ms = timeline.now_ms + round(seconds * 1_000)
    while timeline.step(until_ms):
        pass


class Unkillable(Table):
    """A table of processes that wait for a disk."""

    def send_signal(self, process: ProcessId, number: int = 9) -> bool:
        """Nothing comes of it."""
        return bool(process.pid and number)


class StubHosted:
    """A spare whose agent died, and then it."""

    process = GONE
    released = False

    def release(self) -> None:
        """Let go of it."""
        self.released = True


def adopts_a_dead_one(order: Random | None) -> None:
    """An agent adopts a spare that has just died; its tasks go on in the usual order, or in one that is drawn."""
    timeline, hosted, records = Timeline(order), StubHosted(), run_dir()

    async def adopts() -> None:
        processes = cast("Processes", Table(GONE))
        spares = Spares(cast("Runtime", None), records, processes, prefix="spare", variables={})
        spares.adopt(Launch("spare-1", "python", {}), cast("Hosted", hosted))
        await asyncio.sleep(1)
        assert spares.take() == (None, "")

    # An error that nobody looks at ends a simulation, and so this test.
    adopting = Process("agent").start(timeline, adopts())
    try:
        passes(timeline, 2)
        adopting.result()
        assert hosted.released
    finally:
        timeline.close_down()


@pytest.mark.parametrize("seed", range(8))
def test_a_spare_that_died_before_it_was_adopted_is_forgotten_whoever_goes_on_first(seed: int) -> None:
    adopts_a_dead_one(Random(seed))


def test_a_race_between_two_tasks_of_one_agent_shows_in_other_orders_than_the_usual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def adopt(self: Spares, launch: Launch, hosted: Hosted) -> None:
        """As it was: what is known is kept in a task that has yet to run."""

        async def there() -> Hosted:
            return hosted

        spare = Spare(launch, asyncio.create_task(there()))
        self._spares.append(spare)
        self._watch(spare, hosted.process)

    monkeypatch.setattr(Spares, "adopt", adopt)
    adopts_a_dead_one(None)
    found = 0
    for seed in range(8):
        try:
            adopts_a_dead_one(Random(seed))
        except asyncio.InvalidStateError:
            found += 1
    assert 0 < found < 8


class SilentDriver:
    """A driver that answers nothing but that it is connected."""

    def __init__(self, pid: int) -> None:
        self.process = ProcessId(pid, pid)
        self.pinged = asyncio.Event()
        self._closed = asyncio.Event()

    async def ask(self, method: str, argument: Json = None) -> Json:
        """One request."""
        if method == "connect":
            return dict.fromkeys(("ray_node_id", "gcs_address", "session", "node_ip"), "x")
        self.pinged.set()
        await self._closed.wait()
        raise PeerGone("the other end closed the socket")

    @property
    def closed(self) -> bool:
        """Whether nobody talks to it any more."""
        return self._closed.is_set()

    def close(self) -> None:
        """Hang up."""
        self._closed.set()

    def reap(self) -> None:
        """Its process is gone."""


@pytest.mark.parametrize("replaced", [0, 1])
def test_how_a_ping_ended_that_was_under_way_when_its_driver_was_given_up_is_nobodys_error(replaced: int) -> None:
    drivers = [SilentDriver(10 + number) for number in range(replaced + 1)]
    timeline, next_driver = Timeline(), iter(drivers)

    async def starts(_environment: Mapping[str, str]) -> SilentDriver:
        return next(next_driver)

    async def leaves() -> None:
        client = DriverClient(run_dir(), cast("Processes", Table()), starts)
        await client.connect("head:1", "n0", {})
        for driver in drivers:  # each that is stuck is replaced by the next
            await driver.pinged.wait()
        await client.disconnect()

    leaving = Process("agent").start(timeline, leaves())
    passes(timeline, 120)
    leaving.result()
    passes(timeline, 1)
    timeline.close_down()


@pytest.mark.parametrize("after_s", [0, 1])
@pytest.mark.parametrize("table", [Table, Unkillable])
def test_a_node_parts_from_ray_whatever_becomes_of_its_driver(table: type[Table], after_s: int) -> None:
    """At once (it was the wrong cluster), or later; also where the driver can't be killed."""
    timeline, driver, records = Timeline(), SilentDriver(10), run_dir()

    async def starts(_environment: Mapping[str, str]) -> SilentDriver:
        return driver

    async def leaves() -> None:
        client = DriverClient(records, cast("Processes", table()), starts)
        await client.connect("head:1", "n0", {})
        if after_s:
            await asyncio.sleep(after_s)
        await client.disconnect()

    leaving = Process("agent").start(timeline, leaves())
    passes(timeline, 60)
    leaving.result()
    assert driver.closed
    assert [each.role for each in records.recorded()] == (["driver"] if table is Unkillable else [])
    timeline.close_down()


class SlowNode:
    """A Ray node that ends by itself, of which something is left that takes long to end."""

    process = ProcessId(5, 50)
    vital: Mapping[ProcessId, str] = {}

    def __init__(self) -> None:
        self.ending = asyncio.Event()
        self.ended = False

    async def wait_lost(self) -> str:
        """At once."""
        return "raylet ended"

    async def stop(self) -> None:
        """End what is left."""
        self.ending.set()
        await asyncio.sleep(5)
        self.ended = True


def test_an_agent_that_is_told_to_leave_while_its_ray_node_ends_waits_for_that() -> None:
    timeline, node, records = Timeline(), SlowNode(), run_dir()
    plan, tenants = Mock(RayPlan), Mock(Tenants)
    plan.options, plan.run_dir, plan.node_ip = AgentOptions(node_id="n0", ray_address="head:1"), records, "n0"
    driver = Mock(DriverClient)
    driver.connect.return_value = Connection(ray_node_id="x", gcs_address="head:1", session="s", node_ip="n0")

    async def leaves() -> None:
        membership = RayMembership(
            plan,
            processes=cast("Processes", Table()),
            driver=driver,
            start_node=AsyncMock(return_value=node),
            token_hex=lambda length: "0" * length,
            tenants=tenants,
            on_change=lambda: None,
            on_exit=lambda _: None,
        )
        plan.spec.return_value.node_ip = "n0"
        membership.belong("")
        belongs = asyncio.create_task(membership.run())
        await node.ending.wait()
        assert [each.role for each in records.recorded()] == ["ray"]
        belongs.cancel()
        await asyncio.wait([belongs])
        await membership.stop()

    leaving = Process("agent").start(timeline, leaves())
    passes(timeline, 60)
    leaving.result()
    assert node.ended
    assert records.recorded() == []
    timeline.close_down()
