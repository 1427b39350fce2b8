"""What does this node have to give?"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from callboard.agents.devices import NodeDevices, Probe, find_devices
from callboard.agents.nvidia import probe_nvml
from callboard.agents.options import AgentOptions
from callboard.v1 import agent_pb2, common_pb2

_CGROUPS = Path("/sys/fs/cgroup")
"""Where a container sees its own group, in both versions."""

_MEMORY_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")


def node_devices(options: AgentOptions, environment: Mapping[str, str], probe: Probe = probe_nvml) -> NodeDevices:
    """The accelerators of this node.

    Raises:
        DeviceError: they can't be offered as asked (GV-10).
    """
    return find_devices(environment, count=options.gpus, simulate=options.simulate_gpus, probe=probe)


def inventory(options: AgentOptions, devices: NodeDevices) -> agent_pb2.Inventory:
    """What Hello says the node has."""
    cpu_milli = options.cpu_milli
    memory_bytes = options.memory_bytes
    capacity = common_pb2.Resources(
        cpu_milli=machine_cpus() * 1000 if cpu_milli is None else cpu_milli,
        gpu_milli=len(devices.devices) * 1000,
        memory_bytes=machine_memory_bytes() if memory_bytes is None else memory_bytes,
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
            )
            for index, facts in enumerate(devices.devices)
        ],
        simulated=devices.simulated,
        visibility_variable=devices.vendor.variables[0],
        interpreters=[sys.executable, *options.interpreters],
    )


def machine_cpus(cgroups: Path = _CGROUPS) -> int:
    """CPUs that this process may use, or whole ones of the quota of the container around the agent if that is less."""
    cpus = len(os.sched_getaffinity(0))
    quota_us, period_us = _cpu_quota(cgroups)
    return max(1, min(cpus, quota_us // period_us)) if quota_us > 0 and period_us > 0 else cpus


def _cpu_quota(cgroups: Path) -> tuple[int, int]:
    """CPU time in each period, in microseconds; (0, 0): no limit is said."""
    unified, legacy = cgroups / "cpu.max", cgroups / "cpu" / "cpu.cfs_quota_us"
    if unified.exists():
        words = unified.read_text().split()
    elif legacy.exists():
        words = [legacy.read_text().strip(), legacy.with_name("cpu.cfs_period_us").read_text().strip()]
    else:
        words = []
    # "max", or -1 in version 1.
    return (int(words[0]), int(words[1])) if len(words) == 2 and words[0].isdigit() else (0, 0)


def machine_memory_bytes(cgroups: Path = _CGROUPS) -> int:
    """Memory of the machine, or of the container around the agent if that has less."""
    total: int = psutil.virtual_memory().total
    for name in _MEMORY_LIMITS:
        path = cgroups / name
        if path.exists() and (text := path.read_text().strip()).isdigit():
            return min(total, int(text))
    return total
