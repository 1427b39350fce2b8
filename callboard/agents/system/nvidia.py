"""NVIDIA devices that the driver knows, and which of them can be used.

One device that doesn't answer (fallen off the bus, waiting for a reset, closed to us) must not take the others with it:
it is listed with its fault. A partitioned one (MIG) can only be used by its parts, which CUDA knows by their UUIDs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from callboard.agents.system.devices import DeviceError, DeviceFacts
from callboard.agents.system.nvml import unsaid
from callboard.v1 import common_pb2

PCI = Path("/sys/bus/pci/devices")


def probe_nvml(pci: Path = PCI) -> tuple[DeviceFacts, ...]:
    """What NVIDIA's driver knows, in PCI order; nothing where there is no driver.

    Args:
        pci: where the kernel lists PCI devices (sysfs-bus-pci).

    Raises:
        DeviceError: there is a driver and it doesn't answer.
    """
    try:
        import pynvml  # noqa: PLC0415 - only agents have it, and only this question needs it
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return ()
    except pynvml.NVMLError as error:
        raise _silent(error) from error
    try:
        count = pynvml.nvmlDeviceGetCount()
        found = [facts for index in range(count) for facts in _one(pynvml, index, pci)]
        return _with_distances(pynvml, found)
    except pynvml.NVMLError as error:
        raise _silent(error) from error
    finally:
        pynvml.nvmlShutdown()


def _with_distances(nvml: Any, found: Sequence[DeviceFacts]) -> tuple[DeviceFacts, ...]:
    """Whole devices with how far they are from each other. Parts of one share what it is connected by."""
    whole = [each for each in found if not each.fault and each.uuid.startswith("GPU-")]
    if len(whole) < 2:
        return tuple(found)
    handles = {each.uuid: nvml.nvmlDeviceGetHandleByUUID(each.uuid.encode()) for each in whole}

    def distances(device: DeviceFacts) -> tuple[tuple[str, int], ...]:
        others = [other for other in whole if other is not device]
        asked = [
            (other.uuid, _distance(nvml, handles[device.uuid], handles[other.uuid]) or _by_numa(device, other))
            for other in others
        ]
        return tuple(asked) if any(distance for _, distance in asked) else ()

    return tuple(replace(each, distances=distances(each)) if each.uuid in handles else each for each in found)


def _distance(nvml: Any, one: Any, other: Any) -> int:
    """What is between two devices; 0: the driver doesn't say."""
    linked = _answer(
        nvml, lambda _: nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK), one, otherwise=None
    )
    if linked == nvml.NVML_P2P_STATUS_OK:
        return common_pb2.DEVICE_DISTANCE_NVLINK
    ancestor = _answer(nvml, lambda _: nvml.nvmlDeviceGetTopologyCommonAncestor(one, other), one, otherwise=None)
    return {
        nvml.NVML_TOPOLOGY_INTERNAL: common_pb2.DEVICE_DISTANCE_PCI_SWITCH,
        nvml.NVML_TOPOLOGY_SINGLE: common_pb2.DEVICE_DISTANCE_PCI_SWITCH,
        nvml.NVML_TOPOLOGY_MULTIPLE: common_pb2.DEVICE_DISTANCE_PCI_SWITCHES,
        nvml.NVML_TOPOLOGY_HOSTBRIDGE: common_pb2.DEVICE_DISTANCE_HOST_BRIDGE,
        nvml.NVML_TOPOLOGY_NODE: common_pb2.DEVICE_DISTANCE_NUMA_NODE,
        nvml.NVML_TOPOLOGY_SYSTEM: common_pb2.DEVICE_DISTANCE_SYSTEM,
    }.get(ancestor, 0)


def _by_numa(one: DeviceFacts, other: DeviceFacts) -> int:
    if one.numa_node < 0 or other.numa_node < 0:
        return 0
    near = one.numa_node == other.numa_node
    return common_pb2.DEVICE_DISTANCE_NUMA_NODE if near else common_pb2.DEVICE_DISTANCE_SYSTEM


def _silent(error: Exception) -> DeviceError:
    return DeviceError(
        f"NVIDIA's driver can't be asked for its GPUs: {error}; mend that (after a driver's upgrade a reboot does), or "
        "set CUDA_VISIBLE_DEVICES to an empty list to offer none"
    )


def _one(nvml: Any, index: int, pci: Path) -> list[DeviceFacts]:
    """A device, or one with its fault and then its parts."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        whole = _facts(nvml, handle, _text(nvml.nvmlDeviceGetPciInfo(handle).busId), pci)
        parts = _parts(nvml, handle, whole.bus_id, pci)
    except nvml.NVMLError as error:
        return [DeviceFacts(id=str(index), fault=str(error))]
    if parts is None:
        return [replace(whole, id=str(index))]
    names = ", ".join(part.id for part in parts) or "it has none yet"
    fault = f"it is partitioned (MIG), and only its parts can be used: {names}"
    return [replace(whole, id=str(index), fault=fault), *parts]


def _parts(nvml: Any, handle: Any, bus_id: str, pci: Path) -> list[DeviceFacts] | None:
    """The parts of a partitioned device; None: it isn't one."""
    mode, _ = _answer(nvml, nvml.nvmlDeviceGetMigMode, handle, otherwise=(nvml.NVML_DEVICE_MIG_DISABLE, 0))
    if mode != nvml.NVML_DEVICE_MIG_ENABLE:
        return None
    parts = []
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
        except (nvml.NVMLError_NotFound, nvml.NVMLError_NoPermission):
            continue  # A gap, or another container's.
        parts.append(_facts(nvml, part, bus_id, pci))
    return parts


def _facts(nvml: Any, handle: Any, bus_id: str, pci: Path) -> DeviceFacts:
    """What is said of a device or a part, by its UUID."""
    uuid = _text(nvml.nvmlDeviceGetUUID(handle))
    memory = _answer(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, otherwise=None)
    return DeviceFacts(
        id=uuid,
        uuid=uuid,
        bus_id=bus_id,
        model=_text(_answer(nvml, nvml.nvmlDeviceGetName, handle, otherwise="")),
        # A device that shares the machine's memory has none of its own to tell of.
        memory_bytes=0 if memory is None else int(memory.total),
        numa_node=_numa_node(pci, bus_id),
    )


def _numa_node(pci: Path, bus_id: str) -> int:
    """NUMA node of the CPUs that a device is near to, as the kernel says; -1: it doesn't. (NVML's own answer is about
    devices whose memory is a NUMA node.)"""
    # NVML writes the domain with eight digits, the kernel with four.
    file = pci / bus_id.lower().removeprefix("0000") / "numa_node"
    try:
        return int(file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return -1


def _answer(nvml: Any, ask: Callable[[Any], Any], handle: Any, *, otherwise: Any) -> Any:
    """An answer that some devices, and drivers that are older than the bindings, can't give."""
    try:
        return ask(handle)
    except unsaid(nvml):
        return otherwise


def _text(value: object) -> str:
    """Older bindings answer bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
