"""Does anything stay behind when nodes join and leave for long, under a job that grows onto each and shrinks again?

Each cycle adds a node as `callboard add-worker` does, waits until the job has a worker there, drains the node, ends its
agent, and has it forgotten. Then no process, port, placement group, Ray node or amount of it may be left. Memory of
the controller, of the agent that stays and of Ray's head is compared over the cycles.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.placement_group import placement_group_table

from benchmarks.local import Local, local_cluster
from callboard.agents.supplies.worker_env import AGENT_MARKER
from callboard.cli.local.growth import add_worker, end_worker, running_workers
from callboard.cli.local.plan import network_of
from callboard.cli.local.ports import listening_in
from callboard.client.clusters import read_record
from callboard.client.jobs import JobHandle
from callboard.security.processes import marked, process_table
from callboard.v1.job_pb2 import Job, WorkerState
from callboard.wire.refusals import WrongState

JOIN_S = 90.0
WAIT_S = 60.0
SETTLE_S = 30.0
_LOOK_S = 0.1
"""Between looks at Ray's books, which say a moment later what is so already."""

WARM_UP = 4
"""Cycles before memory is compared: caches fill, and allocators keep what they once had."""

GROWTH_MIB = 8.0
"""What the controller and the agent may have grown by after the warm-up, whatever the number of cycles. Ray's own
processes are reported, not judged."""


class Residue(Exception):
    """Something is left behind; the text names it."""


async def join_and_leave(cycles: int) -> None:
    """Lets so many nodes join and leave.

    Raises:
        Residue: something is left of one, or memory grew.
    """
    async with local_cluster(gpus=1, cpus="2") as local:
        await local.client.ensure_pool("joins", pg_pool={"max_dynamic": 8})
        component = {
            "name": "w",
            "actor": "benchmarks.latency_workers:Echo",
            "resources": {"cpu": 1, "gpu": 1},
            "min_workers": 1,
            "max_workers": 8,
        }
        job = await local.client.submit({"name": "grows", "pool": "joins", "components": [component]})
        await job.running(WAIT_S)
        ports = listening_in(network_of(local.plan.block))
        before: dict[str, float] = {}
        for number in range(1, cycles + 1):
            began = time.perf_counter()
            joined_s = await _cycle(local, job)
            await _check(local, ports)
            memory = _memory_mib(local)
            if number == min(WARM_UP, cycles):
                before = memory
            shown = ", ".join(f"{name} {mib:.1f}" for name, mib in memory.items())
            took_s = time.perf_counter() - began
            print(f"cycle {number}: joined in {joined_s:.1f} s, all {took_s:.1f} s; MiB: {shown}", flush=True)
        after = _memory_mib(local)
        grown = {name: after[name] - before[name] for name in ("controller", "agent")}
        if any(mib > GROWTH_MIB for mib in grown.values()):
            raise Residue(f"memory grew over {cycles - WARM_UP} cycles: {grown} MiB")
        told = ", ".join(f"{name} {after[name] - before[name]:+.1f}" for name in after)
        print(f"{cycles} nodes joined and left: nothing is left; MiB since cycle {min(WARM_UP, cycles)}: {told}")


async def _cycle(local: Local, job: JobHandle) -> float:
    client, directory = local.client, local.plan.directory
    began = time.perf_counter()
    added = await add_worker(directory, lambda _: None, timeout_s=JOIN_S, lock_pause_s=0.1)
    joined_s = time.perf_counter() - began
    node = added.node.name.removeprefix("nodes/")
    await job.until(lambda found: _ready(found) == 2, "a worker on the new node", WAIT_S)
    await client.drain_node(node, within=5, reason="the cycle is over")
    await job.until(lambda found: _ready(found) == 1, "the drain", WAIT_S)
    revision = (await client.stats()).revision
    await end_worker(directory, node)
    async with asyncio.timeout(WAIT_S):
        events = client.watch(start_revision=revision + 1)
        while True:
            try:
                await client.remove_node(node)
            except WrongState:
                await anext(events)  # Its goodbye, or the end of a group.
            else:
                return joined_s


def _ready(job: Job) -> int:
    return sum(worker.state == WorkerState.WORKER_STATE_READY for worker in job.workers)


async def _check(local: Local, ports: list[str]) -> None:
    deadline = time.monotonic() + SETTLE_S
    while left := await _left(local, ports):
        if time.monotonic() > deadline:
            raise Residue("; ".join(left))
        await asyncio.sleep(_LOOK_S)


async def _left(local: Local, ports: list[str]) -> list[str]:
    """What is there beyond the first node and the job's one worker."""
    first = local.plan.node_id(0)
    nodes = [node.name.removeprefix("nodes/") for node in await local.client.list_nodes()]
    groups = await local.client.list_placement_groups()
    booked = [key for key, each in placement_group_table().items() if each["state"] != "REMOVED"]
    alive = [each["NodeID"] for each in _ray_nodes() if each["Alive"]]
    processes = marked(f"{AGENT_MARKER}={local.plan.node_directory(1)}", process_table())
    opened = sorted(set(listening_in(network_of(local.plan.block))) - set(ports))
    stats = await local.client.stats()
    found = {
        "nodes": nodes if nodes != [first] else [],
        "agents": sorted(set(running_workers(local.plan.directory)) - {first}),
        "processes": [process.pid for process in processes],
        "ports": [port for port in opened if not port.startswith(f"{local.plan.node_ip(0)}:")],
        "placement groups": [group.name for group in groups][1:],
        "placement groups in Ray": booked[1:],
        "nodes in Ray": alive[1:],
        "GPUs in use": [stats.used.gpu_milli] if stats.used.gpu_milli != 1000 else [],
        "files": [str(local.plan.node_directory(1))] if _holds_sockets(local.plan.node_directory(1)) else [],
    }
    return [f"{what} {items}" for what, items in found.items() if items]


def _ray_nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def _holds_sockets(folder: Path) -> bool:
    return folder.exists() and any(path.is_socket() for path in folder.rglob("*"))


def _memory_mib(local: Local) -> dict[str, float]:
    record = read_record(local.plan.directory)
    assert record is not None
    pids = {entry.role.split()[0]: entry.process.pid for entry in reversed(record.processes)}
    found = {"controller": pids["controller"], "agent": pids["agent"]}
    for process in psutil.Process(pids["agent"]).children(recursive=True):
        if process.name() in {"gcs_server", "raylet"}:
            found[process.name()] = process.pid
    return {name: psutil.Process(pid).memory_info().rss / (1 << 20) for name, pid in found.items()}


__all__ = ["Residue", "join_and_leave"]
