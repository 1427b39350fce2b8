"""Which processes use the node's devices? As their driver says (NVML), ours and foreign ones alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from callboard.v1 import common_pb2


class NoDriver(Exception):
    """The driver of the devices can't be asked."""


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


def device_users(devices: Iterable[common_pb2.Device]) -> list[DeviceUse]:
    """Every process on these devices.

    Raises:
        NoDriver: it isn't there, or doesn't know one of the devices.
    """
    try:
        import pynvml  # noqa: PLC0415 - see callboard.agents.devices.probe_nvml
    except ImportError as error:
        raise NoDriver("the package nvidia-ml-py is missing") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoDriver(str(error)) from error
    try:
        return [
            DeviceUse(device.index, process.pid, int(process.usedGpuMemory or 0))
            for device in devices
            if device.uuid
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(
                pynvml.nvmlDeviceGetHandleByUUID(device.uuid.encode())
            )
        ]
    except pynvml.NVMLError as error:
        raise NoDriver(str(error)) from error
    finally:
        pynvml.nvmlShutdown()
