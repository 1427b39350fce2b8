"""The users of the node's devices, and how busy these are, as the driver says (NVML), whoever uses them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from callboard.agents.system.nvml import failures, opened
from callboard.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One process on one device.

    Attributes:
        index: of the device in the node's visible list.
        pid: process id, as this process's own pid namespace has it.
        memory_bytes: device memory it holds; 0 where the driver doesn't say.
    """

    index: int
    pid: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """How busy one device is.

    Attributes:
        index: of the device in the node's visible list.
        utilization_percent: part of the driver's last sampling period (0.2 to 1 s) in which something ran on it; None:
            the driver doesn't say, as for a part of a partitioned device.
        used_memory_bytes: memory of the device that is in use.
        memory_bytes: memory of the device.
    """

    index: int
    utilization_percent: int | None
    used_memory_bytes: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class DevicesSeen:
    """What the driver says of the node's devices now.

    Attributes:
        users: every process on them.
        loads: how busy each is.
        silent: what it doesn't say, one sentence each: a device that fell off the bus must not hide the others.
    """

    users: tuple[DeviceUse, ...]
    loads: tuple[DeviceLoad, ...]
    silent: tuple[str, ...]


def seen_devices(devices: Iterable[common_pb2.Device]) -> DevicesSeen:
    """Who uses these devices, and how busy they are. One without a uuid has another driver, and is left out.

    Raises:
        NoDriver: there is none that answers.
    """
    users: list[DeviceUse] = []
    loads: list[DeviceLoad] = []
    silent: list[str] = []
    with opened() as nvml:
        for device in devices:
            if not device.uuid:
                continue
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(device.uuid.encode())
                users += [
                    DeviceUse(device.index, process.pid, int(process.usedGpuMemory or 0))
                    for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
                ]
                loads.append(_load(nvml, device.index, handle))
            except failures(nvml) as error:
                silent.append(f"GPU {device.id} can't be asked: {error}")
    return DevicesSeen(tuple(users), tuple(loads), tuple(silent))


def _load(nvml: Any, index: int, handle: Any) -> DeviceLoad:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        busy = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument, nvml.NVMLError_FunctionNotFound):
        busy = None
    return DeviceLoad(index, busy, int(memory.used), int(memory.total))
