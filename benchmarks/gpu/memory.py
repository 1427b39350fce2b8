"""Do workers share a real card by memory, and keep to what they asked for?

    python -m benchmarks.gpu.memory

Needs real GPUs, torch and nvidia-ml-py; about two minutes. Three workers ask for 0.3 of a card's memory each; a fourth
waits for one of them; one asks for more than there is. Compares what the node reports with what the driver says.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pynvml

from benchmarks.local import Local, local_cluster
from callboard.cli.local.machine_gpus import machine_gpus
from callboard.client.jobs import JobHandle
from callboard.wire.refusals import Unschedulable

WAIT_S = 180.0
SHARERS = 3


def _spec(name: str, gpu_memory: int) -> dict[str, Any]:
    component = {
        "name": "card",
        "actor": "benchmarks.gpu.workers:Card",
        "kwargs": {"share": 0},
        "entry": "run",
        "limit_gpu_memory": True,
        "resources": {"cpu": 1, "gpu": 0.05, "gpu_memory": gpu_memory},
    }
    return {"name": name, "pool": "default", "components": [component]}


def _say(what: str, right: bool, seen: object) -> bool:
    print(f"{'right' if right else 'WRONG'}: {what}: {seen}", flush=True)
    return right


async def _facts(local: Local) -> tuple[bool, int]:
    """Whether the node reports what the driver says; and the memory of the smallest card."""
    (node,) = await local.client.list_nodes()
    pynvml.nvmlInit()
    handles = {use.device.id: pynvml.nvmlDeviceGetHandleByUUID(use.device.uuid.encode()) for use in node.devices}
    known = {name: int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for name, handle in handles.items()}
    models = {name: str(pynvml.nvmlDeviceGetName(handle)) for name, handle in handles.items()}
    told = {use.device.id: use.device.memory_bytes for use in node.devices}
    fine = _say("memory of each card as the driver says", told == known, told)
    fine &= _say("their sum is the node's", node.capacity.gpu_memory_bytes == sum(known.values()), sum(known.values()))
    named = {use.device.id: use.device.model for use in node.devices}
    return fine & _say("models as the driver says", named == models, named), min(known.values())


async def _limits(job: JobHandle, amount: int) -> bool:
    """Whether its worker was told the amount, can have nearly all of it, and nothing beyond."""
    (worker,) = job.workers("card")
    told, within, beyond = await worker.method("limit").remote()
    right = told == amount and within and not beyond
    return _say(f"{job.name} has {told} bytes", right, f"took 0.9 of it: {within}, 1.1 of it: {beyond}")


async def main() -> bool:
    """Tries it and prints; whether all of it is right."""
    found = machine_gpus("auto")
    if not found.real:
        sys.exit("this machine has no GPU that the driver knows; see `nvidia-smi -L`")
    cards = len(found.ids)
    async with local_cluster(machine_gpus=found.ids, cpus="64", warm_spares=SHARERS * cards) as local:
        await local.client.ensure_pool("default")
        fine, smallest = await _facts(local)
        amount = smallest * 3 // 10
        jobs = [await local.client.submit(_spec(f"share-{n}", amount)) for n in range(SHARERS * cards)]
        for job in jobs:
            await job.running(timeout=WAIT_S)
        (node,) = await local.client.list_nodes()
        asked = {use.device.id: use.promised_memory_bytes for use in node.devices}
        fine &= _say("all cards are shared alike", set(asked.values()) == {SHARERS * amount}, asked)
        for job in jobs:
            fine &= await _limits(job, amount)
        waits = await local.client.submit(_spec("waits", amount))
        reasons = [reason.message for reason in (await waits.explain()).reasons]
        fine &= _say("the next one waits for memory", any("gpu_memory" in reason for reason in reasons), reasons)
        await jobs[0].cancel()
        await waits.running(timeout=WAIT_S)
        fine &= await _limits(waits, amount)
        try:
            await local.client.submit(_spec("large", 2 * smallest))
            fine &= _say("more than a card has is refused", False, "it was not")
        except Unschedulable as refusal:
            fine &= _say("more than a card has is refused", "gpu_memory" in str(refusal), refusal)
        for job in [*jobs[1:], waits]:
            await job.cancel()
            await job.finished(timeout=WAIT_S)
    return fine


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main()) else 1)
