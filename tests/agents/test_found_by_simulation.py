"""What `callboard simulate` found in agents, as small histories on virtual time; each fails without what mends it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from random import Random
from typing import cast

import pytest

from callboard.agents.host.framing import Json, PeerGone
from callboard.agents.ray.driver_client import DriverClient
from callboard.agents.runtime import Hosted, Launch, Runtime
from callboard.agents.system.process_tree import ProcessId
from callboard.agents.system.processes import Processes
from callboard.agents.worker.spares import Spare, Spares
from callboard.simulation.world.ground import GroundRunDir
from callboard.simulation.world.machines import Machine
from callboard.simulation.world.timeline import Process, Timeline

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


def run_dir() -> GroundRunDir:
    return GroundRunDir(Machine("n0", gpus=0, cpu_milli=1, memory_bytes=1, labels={}))


def passes(timeline: Timeline, seconds: float) -> None:
    until_ms = timeline.now_ms + round(seconds * 1_000)
    while timeline.step(until_ms):
        pass


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
        assert spares.take() is None

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
