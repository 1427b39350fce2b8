"""Does an agent tell what the driver of its GPUs says? With a stand-in for NVML's library: no test has a GPU."""

from __future__ import annotations

import sys
from typing import Any

import pynvml
import pytest

from callboard.agents.inspection import Inspector
from callboard.agents.system.gpu_users import DeviceLoad, DeviceUse, seen_devices
from callboard.agents.system.nvml import NoDriver
from callboard.v1 import agent_pb2, common_pb2, inspection_pb2
from tests.support.nvml_library import GIB, Gpu, Library, install

DEVICES = [
    common_pb2.Device(index=0, id="3", uuid="GPU-a"),
    common_pb2.Device(index=1, id="MIG-b", uuid="MIG-b"),
    common_pb2.Device(index=2, id="9"),  # Its driver is another.
]
LOADS = [DeviceLoad(0, 87, 3 * GIB, 80 * GIB), DeviceLoad(1, None, 5 * GIB, 10 * GIB)]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """One GPU, and one that is partitioned."""
    part = Gpu("MIG-b", memory_bytes=10 * GIB, processes={8: 5 * GIB})
    whole = Gpu("GPU-a", busy_percent=87, processes={7: 3 * GIB, 9: None})
    made = Library([whole, Gpu("GPU-b", parts=[part])])
    install(monkeypatch, made)
    return made


class TestAsking:
    def test_users_and_loads_are_by_the_place_in_the_visible_list(self, library: Library) -> None:
        seen = seen_devices(DEVICES)
        assert seen.users == (DeviceUse(0, 7, 3 * GIB), DeviceUse(0, 9, 0), DeviceUse(1, 8, 5 * GIB))
        assert list(seen.loads) == LOADS
        assert seen.silent == ()
        assert library.open == 0

    def test_a_device_that_fails_does_not_hide_the_others(self, library: Library) -> None:
        gone = common_pb2.Device(index=3, id="4", uuid="GPU-gone")
        seen = seen_devices([gone, *DEVICES])
        assert list(seen.loads) == LOADS
        assert seen.silent == ("GPU 4 can't be asked: Not Found",)
        assert library.open == 0

    def test_a_driver_that_is_not_there_is_said(self, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
        library.init = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
        with pytest.raises(NoDriver, match="Driver Not Loaded"):
            seen_devices(DEVICES)
        monkeypatch.setitem(sys.modules, "pynvml", None)
        with pytest.raises(NoDriver, match="nvidia-ml-py is missing"):
            seen_devices(DEVICES)


class NoWorkers:
    """The table of an agent that hosts nothing."""

    @staticmethod
    def all() -> list[Any]:
        return []


async def inspected(devices: list[common_pb2.Device], *, simulated: bool = False) -> inspection_pb2.NodeInspection:
    unused: Any = None
    workers: Any = NoWorkers()
    inventory = agent_pb2.Inventory(devices=devices, simulated=simulated)
    inspector = Inspector(workers, runtime=unused, processes=unused, inventory=inventory)
    return await inspector.inspect(inspection_pb2.InspectionAsk())


class TestAnInspection:
    async def test_carries_loads_and_leaves_out_what_the_driver_does_not_say(self, library: Library) -> None:
        seen = await inspected(DEVICES)
        assert [(load.index, load.used_memory_bytes, load.memory_bytes) for load in seen.device_loads] == [
            (0, 3 * GIB, 80 * GIB),
            (1, 5 * GIB, 10 * GIB),
        ]
        assert seen.device_loads[0].utilization_percent == 87
        assert not seen.device_loads[1].HasField("utilization_percent")
        assert [user.pid for user in seen.device_users] == [7, 9, 8]
        assert not seen.unknown

    async def test_says_once_which_device_it_knows_nothing_of(self, library: Library) -> None:
        library.gpus[0].fails[""] = pynvml.NVML_ERROR_GPU_IS_LOST
        seen = await inspected(DEVICES)
        assert list(seen.unknown) == ["GPU 3 can't be asked: GPU is lost"]
        assert [load.index for load in seen.device_loads] == [1]

    async def test_of_simulated_devices_asks_no_driver(self, library: Library) -> None:
        library.init = pynvml.NVML_ERROR_UNKNOWN
        assert await inspected(DEVICES, simulated=True) == inspection_pb2.NodeInspection()

    async def test_says_why_it_knows_nothing(self, library: Library) -> None:
        library.init = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
        seen = await inspected(DEVICES)
        assert list(seen.unknown) == ["the use of the devices can't be asked: Driver Not Loaded"]
        assert not seen.device_loads
