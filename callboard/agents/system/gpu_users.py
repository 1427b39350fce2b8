"""The users of the node's devices, and how busy these are, as the driver says (NVML), whoever uses them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any

from callboard.agents.system.gpu_faults import Health, health_of
from callboard.agents.system.nvml import failures, opened, unsaid
from callboard.model.frozen import dataclass
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
        reserved_memory_bytes: part of what is in use that the driver keeps for itself; 0: it doesn't say.
    """

    index: int
    utilization_percent: int | None
    used_memory_bytes: int
    memory_bytes: int
    reserved_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DevicesSeen:
    """What the driver says of the node's devices now.

    Attributes:
        users: every process on them.
        loads: how busy each is.
        silent: what it doesn't say, one sentence each: a device that fell off the bus must not hide the others.
        lost: what the driver says of devices that it can't reach any more, by index.
        healths: of each that it knows, by index.
    """

    users: tuple[DeviceUse, ...]
    loads: tuple[DeviceLoad, ...]
    silent: tuple[str, ...]
    lost: Mapping[int, str] = field(default_factory=dict)
    healths: Mapping[int, Health] = field(default_factory=dict)


def seen_devices(devices: Iterable[common_pb2.Device]) -> DevicesSeen:
    """Who uses these devices, and how busy they are. One without a uuid has another driver, and is left out.

    Raises:
        NoDriver: there is none that answers.
    """
    users: list[DeviceUse] = []
    loads: list[DeviceLoad] = []
    silent: list[str] = []
    lost: dict[int, str] = {}
    healths: dict[int, Health] = {}
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
                healths[device.index] = health_of(nvml, handle)
            except failures(nvml) as error:
                silent.append(f"GPU {device.id} can't be asked: {error}")
                if getattr(error, "value", None) in _lost_codes(nvml):
                    lost[device.index] = str(error)
    return DevicesSeen(tuple(users), tuple(loads), tuple(silent), lost, healths)


def _lost_codes(nvml: Any) -> tuple[int, ...]:
    """Beside those that say so: what it answers of one that it can't read any more."""
    return (
        nvml.NVML_ERROR_GPU_IS_LOST,
        nvml.NVML_ERROR_RESET_REQUIRED,
        nvml.NVML_ERROR_NOT_FOUND,
        nvml.NVML_ERROR_GPU_NOT_FOUND,
        nvml.NVML_ERROR_UNKNOWN,
    )


def _load(nvml: Any, index: int, handle: Any) -> DeviceLoad:
    reserved = 0
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        reserved = int(memory.reserved)
    except unsaid(nvml):
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        busy = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except unsaid(nvml):
        busy = None
    return DeviceLoad(index, busy, int(memory.used) + reserved, int(memory.total), reserved)
