"""Is what else sits on a GPU seen, and does a device that isn't free take no new work until it is?"""

from __future__ import annotations

import asyncio
import getpass
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import pynvml
import pytest

from callboard.agents.options import AgentOptions
from callboard.agents.system import device_watch
from callboard.agents.system.device_watch import DeviceWatch
from callboard.agents.system.gpu_faults import XIDS_OF_NO_FAULT, XIDS_OF_PROGRAMS, XidWatch
from callboard.agents.system.processes import Processes
from callboard.security.processes import ProcessId
from callboard.v1 import common_pb2
from tests.support.nvml_library import GIB, Gpu, Library, install

NOBODY = 4_190_000
"""A pid that this machine has none of."""


class Own:
    """Knows which processes are ours."""

    def __init__(self) -> None:
        self.pids: set[int] = set()

    async def ours(self) -> frozenset[ProcessId]:
        return frozenset(ProcessId(pid, 1) for pid in self.pids)


class Watched:
    """One GPU that is watched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, options: AgentOptions) -> None:
        self.gpu = Gpu("GPU-a")
        self.library = Library([self.gpu])
        install(monkeypatch, self.library)
        self.own = Own()
        self.held: dict[str, str] = {}
        self.changes = 0
        self.watch = DeviceWatch(
            [common_pb2.Device(index=0, id="3", uuid="GPU-a"), common_pb2.Device(index=1, id="9")],
            options,
            cast("Processes", self.own),
            holders=lambda: self.held,
            on_change=self._changed,
        )

    def _changed(self) -> None:
        self.changes += 1

    async def state(self) -> common_pb2.DeviceState:
        """What is seen now."""
        await self.watch.look()
        (state,) = self.watch.states
        return state


@pytest.fixture
def other() -> Iterator[int]:
    """A process that isn't ours."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def zombie() -> Iterator[int]:
    """A process that is over, and that nobody has reaped."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        yield process.pid


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Watched]:
    monkeypatch.setattr(device_watch, "_AGAIN_S", 0.0)
    return lambda **rule: Watched(monkeypatch, AgentOptions(node_id="n0", **rule))


class TestAnothersProcess:
    async def test_closes_the_device_with_who_and_how_much_and_opens_it_when_it_is_gone(
        self, watching: Callable[..., Watched], other: int
    ) -> None:
        watched = watching()
        assert not (await watched.state()).closed
        watched.gpu.processes[other] = 70 * GIB
        state = await watched.state()
        (seen,) = state.foreign
        assert (seen.pid, seen.user, seen.memory_bytes) == (other, getpass.getuser(), 70 * GIB)
        who = f"{seen.command} of {seen.user} (pid {other})"
        assert state.closed == (
            f"{who}, which is not this cluster's, holds 70.0 GiB of its memory; end it if nobody needs it "
            f"(`kill {other}`), or start the agent with --foreign-gpu-use warn to place work beside it"
        )
        assert state.used_memory_bytes == 70 * GIB
        del watched.gpu.processes[other]
        assert not (await watched.state()).closed
        assert watched.changes == 2

    async def test_with_little_memory_is_told_and_harms_nothing(
        self, watching: Callable[..., Watched], other: int
    ) -> None:
        watched = watching()
        watched.gpu.processes[other] = GIB // 2
        state = await watched.state()
        assert (state.closed, [each.pid for each in state.foreign]) == ("", [other])
        assert (await self._limited(watching, other)).closed

    @staticmethod
    async def _limited(watching: Callable[..., Watched], other: int) -> common_pb2.DeviceState:
        watched = watching(foreign_gpu_bytes=GIB // 4)
        watched.gpu.processes[other] = GIB // 2
        return await watched.state()

    async def test_whose_memory_the_driver_does_not_tell_counts(
        self, watching: Callable[..., Watched], other: int
    ) -> None:
        watched = watching()
        watched.gpu.processes[other] = None
        assert "the driver does not say how much" in (await watched.state()).closed

    @pytest.mark.parametrize(("use", "warned"), [("warn", True), ("ignore", False)])
    async def test_leaves_the_device_open_where_the_node_says_so(
        self, watching: Callable[..., Watched], other: int, use: str, warned: bool
    ) -> None:
        watched = watching(foreign_gpu_use=use)
        watched.gpu.processes[other] = 70 * GIB
        state = await watched.state()
        assert not state.closed
        assert bool(state.warning) is warned

    async def test_that_is_ours_counts_as_ours(self, watching: Callable[..., Watched], other: int) -> None:
        watched = watching()
        watched.gpu.processes[other] = 70 * GIB
        watched.own.pids.add(other)
        watched.held["3"] = "job-1/w/0/g1"
        state = await watched.state()
        assert (state.closed, list(state.foreign)) == ("", [])

    async def test_of_another_pid_namespace_may_be_the_worker_that_holds_the_device(
        self, watching: Callable[..., Watched]
    ) -> None:
        watched = watching()
        watched.gpu.processes[NOBODY] = 70 * GIB
        watched.held["3"] = "job-1/w/0/g1"
        assert not (await watched.state()).closed
        watched.held.clear()
        assert f"pid {NOBODY}" in (await watched.state()).closed

    async def test_beside_a_worker_of_ours_closes_the_device_too(
        self, watching: Callable[..., Watched], other: int
    ) -> None:
        watched = watching()
        watched.held["3"] = "job-1/w/0/g1"
        watched.gpu.processes |= {other: 8 * GIB, NOBODY: 60 * GIB}
        state = await watched.state()
        assert "holds 8.0 GiB" in state.closed

    async def test_that_is_over_and_not_reaped_is_none(self, watching: Callable[..., Watched], zombie: int) -> None:
        watched = watching()
        watched.gpu.processes[zombie] = 70 * GIB
        watched.held["3"] = "job-1/w/0/g1"
        assert not (await watched.state()).closed

    async def test_that_ends_between_two_looks_is_none(
        self, watching: Callable[..., Watched], other: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        watched = watching()
        watched.gpu.processes[other] = 70 * GIB
        asleep = asyncio.sleep

        async def ends(seconds: float) -> None:
            watched.gpu.processes.clear()
            await asleep(seconds)

        monkeypatch.setattr(asyncio, "sleep", ends)
        assert not (await watched.state()).closed
        assert watched.changes == 0

    async def test_many_are_bounded_and_those_with_most_come_first(self, watching: Callable[..., Watched]) -> None:
        watched = watching()
        watched.gpu.processes |= {NOBODY + place: (place + 1) * GIB for place in range(20)}
        state = await watched.state()
        assert [each.memory_bytes // GIB for each in state.foreign] == list(range(20, 12, -1))
        assert "and 19 more" in state.closed


class TestMemoryThatIsNotBack:
    async def test_after_the_last_worker_is_gone_closes_the_device(self, watching: Callable[..., Watched]) -> None:
        watched = watching()
        watched.held["3"] = "job-1/w/0/g1"
        watched.gpu.unnamed_bytes = 58 * GIB
        assert not (await watched.state()).closed, "it is the worker's"
        watched.held.clear()
        assert (await watched.state()).closed == (
            "56.4 GiB of its memory are in use, by no process that the driver names; end what runs there, or start the "
            "agent with --foreign-gpu-use warn to place work beside it"
        )
        watched.gpu.unnamed_bytes = GIB
        assert not (await watched.state()).closed, "a driver keeps some for itself"


class TestAFault:
    @pytest.mark.parametrize(
        ("code", "says"),
        [
            (pynvml.NVML_ERROR_GPU_IS_LOST, "GPU is lost"),
            (pynvml.NVML_ERROR_RESET_REQUIRED, "GPU requires restart"),
            (pynvml.NVML_ERROR_UNKNOWN, "Unknown Error"),
        ],
    )
    async def test_of_the_driver_closes_the_device_alone(
        self, watching: Callable[..., Watched], code: int, says: str
    ) -> None:
        watched = watching()
        watched.gpu.fails[""] = code
        state = await watched.state()
        assert state.closed.startswith(f"its driver has lost it: {says}")
        watched.gpu.fails.clear()
        assert not (await watched.state()).closed

    async def test_of_its_memory_closes_it_from_then_on(self, watching: Callable[..., Watched]) -> None:
        watched = watching()
        watched.gpu.uncorrected = 2
        state = await watched.state()
        assert (state.closed, state.warning) == ("", "ECC found 2 uncorrectable errors since its driver was loaded")
        watched.gpu.uncorrected = 3
        assert "ECC found 1 errors of its memory that it could not correct" in (await watched.state()).closed

    @pytest.mark.parametrize(("rows", "says"), [((1, 0), "by its next reset"), ((0, 1), "can't be replaced any more")])
    async def test_that_needs_a_reset_closes_it(
        self, watching: Callable[..., Watched], rows: tuple[int, int], says: str
    ) -> None:
        watched = watching()
        watched.gpu.remapped = rows
        assert says in (await watched.state()).closed

    async def test_whose_recovery_the_driver_names_closes_it_until_it_is_done(
        self, watching: Callable[..., Watched]
    ) -> None:
        watched = watching()
        watched.gpu.recovery = pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET
        assert "its driver says that it must be reset" in (await watched.state()).closed
        watched.gpu.recovery = 0
        assert not (await watched.state()).closed

    @pytest.mark.parametrize("xid", sorted(XIDS_OF_PROGRAMS | XIDS_OF_NO_FAULT))
    async def test_of_a_program_is_none_of_the_device(self, watching: Callable[..., Watched], xid: int) -> None:
        watched = watching()
        await watched.watch.look()
        watched.gpu.xids.append(xid)
        assert not (await watched.state()).closed
        assert watched.gpu.xids == [], "it was read"

    @pytest.mark.parametrize(("xid", "says"), [(48, "ECC could not correct"), (74, "NVLink failed"), (999, "catalog")])
    async def test_that_an_xid_tells_of_closes_it_until_it_was_reset(
        self, watching: Callable[..., Watched], xid: int, says: str
    ) -> None:
        watched = watching()
        await watched.watch.look()
        watched.gpu.xids += [31, xid, 43]
        state = await watched.state()
        assert f"its driver reported Xid {xid}" in state.closed
        assert says in state.closed
        assert (await watched.state()).closed == state.closed, "nobody says that it is over"
        watched.gpu.fails[""] = pynvml.NVML_ERROR_RESET_REQUIRED
        assert f"has lost it: GPU requires restart, after Xid {xid}" in (await watched.state()).closed
        watched.gpu.fails.clear()
        assert not (await watched.state()).closed

    async def test_of_a_partitioned_gpu_closes_its_parts_and_no_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        parts, whole = [Gpu("MIG-1"), Gpu("MIG-2")], Gpu("GPU-whole")
        split = Gpu("GPU-split", parts=parts)
        library = Library([whole, split])
        install(monkeypatch, library)
        uuids = ["GPU-whole", "MIG-1", "MIG-2"]
        xids = XidWatch([common_pb2.Device(index=i, uuid=uuid) for i, uuid in enumerate(uuids)])
        assert not xids.poll()
        split.xids.append(95)
        assert dict(xids.poll()) == {1: 95, 2: 95}
        xids.close()
        assert (library.open, library.heard) == (0, None)

    async def test_is_listened_for_again_when_the_driver_was_loaded_anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = Gpu("GPU-a")
        library = Library([gpu], init=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        install(monkeypatch, library)
        xids = XidWatch([common_pb2.Device(index=0, uuid="GPU-a")])
        assert not xids.poll()
        library.init = 0
        assert not xids.poll()
        library.heard = None  # what was registered is gone with the driver
        assert not xids.poll()
        gpu.xids.append(79)
        assert xids.poll() == {0: 79}
        xids.close()
        assert library.open == 0

    async def test_of_the_whole_driver_closes_all_devices(self, watching: Callable[..., Watched]) -> None:
        watched = watching()
        watched.library.init = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
        assert "driver does not answer" in (await watched.state()).closed


async def test_a_node_without_devices_that_can_be_asked_waits_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: Any) -> Any:
        raise AssertionError("nothing is to be asked")

    watch = DeviceWatch(
        [common_pb2.Device(index=0, id="0")],
        AgentOptions(node_id="n0"),
        cast("Processes", Own()),
        holders=dict,
        on_change=lambda: None,
        look=never,
    )
    running = asyncio.create_task(watch.run())
    await asyncio.sleep(0)
    watch.look_soon()
    await asyncio.sleep(0)
    assert not running.done()
    running.cancel()
