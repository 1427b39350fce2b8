"""The inventory of a node: what it has to give."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from callboard.agents.options import MIN_OBJECT_STORE_BYTES, AgentOptions
from callboard.agents.system.cgroups import Cgroups
from callboard.agents.system.devices import DeviceFacts, NodeDevices
from callboard.v1 import agent_pb2, common_pb2

_OWN = Cgroups()

_SHARED = Path("/dev/shm")  # noqa: S108 - where Ray keeps its object store
_STORE_PERCENT, _STORE_MOST_BYTES = 30, 200 * 10**9
"""Of the memory, for the object store: Ray's own rule."""

_LARGE_BYTES = 16 << 30

_NUMA = Path("/sys/devices/system/node")
"""Where the kernel lists NUMA nodes."""


def inventory(options: AgentOptions, devices: NodeDevices) -> agent_pb2.Inventory:
    """What Hello says the node has."""
    cpu_milli = options.cpu_milli
    capacity = common_pb2.Resources(
        cpu_milli=machine_cpus() * 1000 if cpu_milli is None else cpu_milli,
        gpu_milli=len(devices.devices) * 1000,
        memory_bytes=offered_memory_bytes(options),
        custom_milli=options.custom_milli,
    )
    return agent_pb2.Inventory(
        capacity=capacity,
        devices=[
            common_pb2.Device(
                index=index,
                id=facts.id,
                uuid=facts.uuid,
                bus_id=facts.bus_id,
                model=facts.model,
                memory_bytes=facts.memory_bytes,
                numa_node=facts.numa_node,
                distances=_distances(facts, devices.devices),
            )
            for index, facts in enumerate(devices.devices)
        ],
        simulated=devices.simulated,
        visibility_variable=devices.vendor.variables[0],
        interpreters=[sys.executable, *options.interpreters],
    )


MAX_CONNECTED = 64
"""Most devices of a node of which it is told how far they are from each other: no machine has more, and it is told of
each pair."""


def _distances(device: DeviceFacts, all_devices: Sequence[DeviceFacts]) -> list[Any]:
    """How far each device that is offered is from one of them; empty: of none it is known, or there is one only."""
    known = dict(device.distances)
    if not known or not 1 < len(all_devices) <= MAX_CONNECTED:
        return []
    same = common_pb2.DEVICE_DISTANCE_SAME
    return [same if other is device else known.get(other.uuid, 0) for other in all_devices]


def machine_cpus(cgroups: Cgroups = _OWN) -> int:
    """CPUs that this process may use: those it may run on, or whole ones of the tightest quota around it if that is
    less."""
    counts = [len(os.sched_getaffinity(0))]
    lists = _texts(cgroups, "cpuset", "cpuset.cpus.effective", "cpuset.cpus")
    counts += [len(cpus) for cpus in map(_cpus, lists) if cpus]
    counts += [quota_us // period_us for quota_us, period_us in _quotas(cgroups)]
    return max(1, min(counts))


def machine_memory_bytes(cgroups: Cgroups = _OWN) -> int:
    """Memory of the machine, or the tightest limit around this process if that is less."""
    limits = _texts(cgroups, "memory", "memory.max", "memory.limit_in_bytes")
    total: int = psutil.virtual_memory().total
    # "max" is no limit, and neither is the huge number of version 1.
    return min([total, *(int(text) for text in limits if text.isdigit() and int(text) > 0)])


def object_store_bytes(options: AgentOptions, cgroups: Cgroups = _OWN, shared: Path = _SHARED) -> int | None:
    """Size of Ray's object store: as stated, Ray's own choice where the memory to offer is stated, else a part of what
    this process may use. Ray itself would take that part of the whole machine's, whatever group is around it."""
    if options.object_store_bytes is not None or options.memory_bytes is not None or options.runtime != "ray":
        return options.object_store_bytes
    wanted = machine_memory_bytes(cgroups) * _STORE_PERCENT // 100
    fits = [shutil.disk_usage(shared).total * 95 // 100] if shared.is_dir() else []
    return max(MIN_OBJECT_STORE_BYTES, _rounded(min([wanted, _STORE_MOST_BYTES, *fits])))


def offered_memory_bytes(options: AgentOptions, cgroups: Cgroups = _OWN) -> int:
    """Memory for workers: as stated, else what this process may use without Ray's object store."""
    if options.memory_bytes is not None:
        return options.memory_bytes
    kept = object_store_bytes(options, cgroups) or 0
    return max(0, _rounded(machine_memory_bytes(cgroups) - kept))


def _rounded(amount_bytes: int) -> int:
    """Down to an amount that people would write: whole GiB of a large one, whole MiB of a small one."""
    step = 1 << 30 if amount_bytes >= _LARGE_BYTES else 1 << 20
    return amount_bytes // step * step


def _quotas(cgroups: Cgroups) -> Iterator[tuple[int, int]]:
    """CPU time in each period, in microseconds, wherever it is limited."""
    for file in cgroups.files("cpu", "cpu.max", "cpu.cfs_quota_us"):
        words = _text(file).split()
        if file.name == "cpu.cfs_quota_us":
            words.append(_text(file.with_name("cpu.cfs_period_us")))
        # "max", or -1 in version 1: no limit.
        if len(words) == 2 and all(word.isdigit() and int(word) > 0 for word in words):
            yield int(words[0]), int(words[1])


def _texts(cgroups: Cgroups, controller: str, unified: str, legacy: str) -> Iterator[str]:
    return map(_text, cgroups.files(controller, unified, legacy))


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # Its group ended, or it is closed to us.
        return ""


def cpus_near(devices: NodeDevices, numa: Path = _NUMA) -> dict[str, tuple[int, ...]]:
    """Id of each device → CPUs of its NUMA node that this process may use, where that is known."""
    own = os.sched_getaffinity(0)
    found = {}
    for device in devices.devices:
        cpus = _cpus(_text(numa / f"node{device.numa_node}" / "cpulist")) & own
        if cpus and device.numa_node >= 0:
            found[device.id] = tuple(sorted(cpus))
    return found


def _cpus(cpus: str) -> set[int]:
    """The numbers in "0-3,8"; none: no list."""
    found: set[int] = set()
    for part in cpus.split(","):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (not last or last.isdigit())):
            return set()
        found.update(range(int(first), int(last or first) + 1))
    return found
