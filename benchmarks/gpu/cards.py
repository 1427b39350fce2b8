"""Are real cards chosen by model, size and connection, and closed by their own faults only?

    python -m benchmarks.gpu.cards

Needs real GPUs and nvidia-ml-py, no torch; about two minutes. One program writes to memory that isn't its own: the
driver raises an Xid, which must not close the card. With two cards and more, what `nvidia-smi topo -m` says is printed
beside what the node reports.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pynvml

from benchmarks.gpu.memory import WAIT_S, _say
from benchmarks.local import Local, local_cluster
from callboard.agents.system.gpu_faults import health_of, is_a_fault
from callboard.cli.local.machine_gpus import machine_gpus
from callboard.wire.refusals import Unschedulable

EVENT_MS = 5_000
"""How long to wait for an Xid."""


def _spec(name: str, **fields: Any) -> dict[str, Any]:
    resources = {"cpu": 1, "gpu": 1} | fields.pop("resources", {})
    component = {"name": "card", "actor": "benchmarks.gpu.workers:Card", "kwargs": {"share": 0}, "entry": "run"}
    return {"name": name, "pool": "default", "components": [component | {"resources": resources} | fields]}


class Xids:
    """Listens beside the agent."""

    def __init__(self) -> None:
        self._set = pynvml.nvmlEventSetCreate()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._set)

    def heard(self) -> list[int]:
        """What comes within some seconds."""
        found: list[int] = []
        while True:
            try:
                found.append(int(pynvml.nvmlEventSetWait_v2(self._set, EVENT_MS).eventData))
            except pynvml.NVMLError_Timeout:
                return found


def _print_driver() -> None:
    """What the driver says of itself and of the cards, for whoever reads the run."""
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        print(f"card {index}: {pynvml.nvmlDeviceGetName(handle)}, {health_of(pynvml, handle)}")
        (asked,) = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        print(f"  recovery action: return {asked.nvmlReturn}, value {asked.value.uiVal}")
    held = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    print(f"driver {pynvml.nvmlSystemGetDriverVersion()}; held open while listening: ", end="")
    print(sorted(name for name in held if "nvidia" in name))


async def _choosing(local: Local, model: str, memory_bytes: int) -> bool:
    word = model.rsplit(maxsplit=1)[-1].split("-", maxsplit=1)[0]
    fine = True
    asks = [
        {"gpu_model": word, "gpu_memory_min": memory_bytes},
        {"gpu_model": model.lower()},
        {"gpu_memory_min": "1GiB"},
    ]
    for n, ask in enumerate(asks):
        job = await local.client.submit(_spec(f"fits-{n}", resources=ask))
        await job.running(timeout=WAIT_S)
        (worker,) = job.workers("card")
        fine &= _say(f"{ask} has a card", True, (await worker.method("where").remote())["devices"])
        await job.cancel()
        await job.finished(timeout=WAIT_S)
    for n, ask in enumerate(({"gpu_model": "K80"}, {"gpu_memory_min": 2 * memory_bytes}, {"gpu_model": word[:-1]})):
        try:
            await local.client.submit(_spec(f"never-{n}", resources=ask))
            fine &= _say(f"{ask} is refused", False, "it was not")
        except Unschedulable as refusal:
            fine &= _say(f"{ask} is refused", model in str(refusal), refusal)
    return fine


async def _near_cpus(local: Local) -> bool:
    (node,) = await local.client.list_nodes()
    numa = {use.device.id: use.device.numa_node for use in node.devices}
    job = await local.client.submit(_spec("near", cpu_affinity=True))
    await job.running(timeout=WAIT_S)
    (worker,) = job.workers("card")
    where = await worker.method("where").remote()
    await job.cancel()
    await job.finished(timeout=WAIT_S)
    told = [int(cpu) for cpu in where["affinity"].split(",") if cpu]
    known = all(each >= 0 for each in numa.values())
    right = (told == where["cpus"]) if told else not known
    return _say("it runs on the CPUs near its card", right, f"NUMA nodes {numa}, told {told}, runs on {where['cpus']}")


async def _faults(local: Local, xids: Xids) -> bool:
    job = await local.client.submit(_spec("faulty"))
    await job.running(timeout=WAIT_S)
    (worker,) = job.workers("card")
    status = await worker.method("fault").remote()
    heard = await asyncio.to_thread(xids.heard)
    await job.cancel()
    await job.finished(timeout=WAIT_S)
    fine = _say("an illegal access fails in the program", status != 0, f"CUDA error {status}, Xids {heard}")
    fine &= _say("its Xid is the program's own", bool(heard) and not any(map(is_a_fault, heard)), heard)
    after = await local.client.submit(_spec("after"))
    await after.running(timeout=WAIT_S)
    (node,) = await local.client.list_nodes()
    closed = [use.state.closed for use in node.devices if use.state.closed]
    await after.cancel()
    await after.finished(timeout=WAIT_S)
    return fine & _say("the card is open, and the next one runs", not closed, closed)


async def _connected(local: Local) -> bool:
    (node,) = await local.client.list_nodes()
    if len(node.devices) < 2:
        return _say("one card has no distances", not node.devices[0].device.distances, "")
    for use in node.devices:
        print(f"GPU {use.device.id}: {list(use.device.distances)}")
    shown = await asyncio.create_subprocess_exec("nvidia-smi", "topo", "-m")
    await shown.wait()
    told = all(len(use.device.distances) == len(node.devices) for use in node.devices)
    return _say("each card tells how far the others are", told, "as above")


async def main() -> bool:
    """Tries it and prints; whether all of it is right."""
    found = machine_gpus("auto")
    if not found.real:
        sys.exit("this machine has no GPU that the driver knows; see `nvidia-smi -L`")
    pynvml.nvmlInit()
    xids = Xids()
    _print_driver()
    async with local_cluster(machine_gpus=found.ids, cpus="16", warm_spares=1) as local:
        await local.client.ensure_pool("default")
        (node,) = await local.client.list_nodes()
        card = node.devices[0].device
        fine = await _choosing(local, card.model, card.memory_bytes)
        fine &= await _near_cpus(local)
        fine &= await _connected(local)
        fine &= await _faults(local, xids)
    return fine


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main()) else 1)
