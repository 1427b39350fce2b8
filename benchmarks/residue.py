"""Does anything stay behind when jobs come and go for long? On real Ray; exit code 1 and a sentence if so.

    python benchmarks/residue.py [--pairs 500] [--reuses 200] [--rounds 50] [--seed 1]
    python benchmarks/residue.py --joins 20

Submit/cancel pairs at random delays of 0 to 200 ms; immediate reuses of the only device; rounds in which a group of
four devices is made and removed. Afterwards no process, actor, placement group or amount may be left: not in
the process table, not in Ray's books, not in our ledger. With --joins, nodes come and go instead, under an elastic job
that grows onto each: see `benchmarks/residue_nodes.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

# Run by path, Python knows the folder of this file only.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))

import ray
from ray.util.placement_group import placement_group_table

from benchmarks.local import Local, local_cluster
from benchmarks.residue_nodes import Residue, join_and_leave
from callboard.agents.supplies.worker_env import AGENT_MARKER
from callboard.client.jobs import JobHandle
from callboard.security.processes import marked, process_table
from callboard.v1.job_pb2 import JobState

MAX_DELAY_S = 0.2
DEVICES = 4
WAIT_S = 60.0
SETTLE_S = 30.0
_LOOK_S = 0.1
"""Between looks at Ray's books, which say a moment later what is so already."""


def main() -> int:
    """Runs all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=500, help="submit/cancel pairs")
    parser.add_argument("--reuses", type=int, default=200, help="reuses of the only device")
    parser.add_argument("--rounds", type=int, default=50, help="groups of four devices made and removed")
    parser.add_argument("--joins", type=int, default=0, help="nodes that join and leave, instead of all the others")
    parser.add_argument("--seed", type=int, default=1, help="of the random delays")
    arguments = parser.parse_args()
    try:
        asyncio.run(join_and_leave(arguments.joins) if arguments.joins else _run(arguments))
    except Residue as residue:
        print(f"left behind: {residue}")
        return 1
    return 0


async def _run(arguments: argparse.Namespace) -> None:
    async with local_cluster(gpus=DEVICES) as local:
        client = local.client
        await client.set_policy({"cancel_timeout": 0.5, "kill_timeout": 5})
        await client.ensure_pool("many", nominal={"gpu": DEVICES}, pg_pool={"max_dynamic": DEVICES})
        await client.ensure_pool("one", nominal={"gpu": 1}, pg_pool={"max_dynamic": 1})
        await client.ensure_pool("four", nominal={"gpu": DEVICES}, pg_pool={"max_dynamic": 1})
        delays = random.Random(arguments.seed)  # noqa: S311 - repeatable, not secret
        for name, work in (
            (f"{arguments.pairs} submit/cancel pairs", _pairs(local, arguments.pairs, delays)),
            (f"{arguments.reuses} reuses of the only device", _reuses(local, arguments.reuses)),
            (f"{arguments.rounds} rounds of a group of {DEVICES} devices", _rounds(local, arguments.rounds)),
        ):
            began = time.perf_counter()
            await work
            await _check(local)
            print(f"{name}: nothing is left, {time.perf_counter() - began:.0f} s", flush=True)


async def _pairs(local: Local, count: int, delays: random.Random) -> None:
    for number in range(count):
        job = await _submit(local, f"pair-{number}", "many", gpus=1)
        await asyncio.sleep(delays.uniform(0, MAX_DELAY_S))  # The delays are the scenario's input.
        await job.cancel()
        await job.finished(WAIT_S)
    await _remove_groups(local, "many")


async def _reuses(local: Local, count: int) -> None:
    """The next job is there before the device is free, and gets it the moment it is."""
    job = previous = await _submit(local, "reuse-0", "one", gpus=1)
    for number in range(1, count + 1):
        await job.running(WAIT_S)
        assert await job.workers()[0].method("echo").remote(number) == number
        waiting = await _submit(local, f"reuse-{number}", "one", gpus=1)
        await job.cancel()
        job, previous = waiting, job
    await job.cancel()
    for ended in (previous, job):
        await ended.finished(WAIT_S)
    await _remove_groups(local, "one")


async def _rounds(local: Local, count: int) -> None:
    for number in range(count):
        job = await _submit(local, f"round-{number}", "four", gpus=DEVICES)
        await job.running(WAIT_S)
        await job.cancel(destroy_placement_groups=True)
        await job.finished(WAIT_S)
        await _until_none(local, "four")


async def _submit(local: Local, name: str, pool: str, *, gpus: int) -> JobHandle:
    component = {"name": "w", "actor": "benchmarks.latency_workers:Echo", "resources": {"cpu": 1, "gpu": gpus}}
    return await local.client.submit({"name": name, "pool": pool, "components": [component]})


async def _remove_groups(local: Local, pool: str) -> None:
    for group in await local.client.list_placement_groups(pool=pool):
        await local.client.delete_placement_group(group.name.removeprefix("placementGroups/"))
    await _until_none(local, pool)


async def _until_none(local: Local, pool: str) -> None:
    revision = (await local.client.stats()).revision
    if not await local.client.list_placement_groups(pool=pool):
        return
    async with asyncio.timeout(WAIT_S):
        async for _ in local.client.watch(start_revision=revision + 1, types=["group."]):
            if not await local.client.list_placement_groups(pool=pool):
                return


async def _check(local: Local) -> None:
    """Compare all books until they agree that nothing is left, or for `SETTLE_S` seconds."""
    deadline = time.monotonic() + SETTLE_S
    while left := await _left(local):
        if time.monotonic() > deadline:
            raise Residue("; ".join(left))
        await asyncio.sleep(_LOOK_S)


async def _left(local: Local) -> list[str]:
    left = []
    jobs = [job.spec.name for job in await local.client.list_jobs() if job.state < JobState.JOB_STATE_SUCCEEDED]
    groups = await local.client.list_placement_groups()
    node = await local.client.get_node(local.plan.node_id(0))
    for what, found in (("jobs", jobs), ("placement groups", groups)):
        if found:
            left.append(f"{what} {found}")
    for what in ("used", "held", "quarantined"):
        amounts = getattr(node, what)
        if amounts.cpu_milli or amounts.gpu_milli or amounts.memory_bytes:
            left.append(f"{what} in the ledger: {amounts}")
    return [*left, *_left_in_ray(), *_left_processes(local)]


def _left_in_ray() -> list[str]:
    left = []
    booked = {key: each["state"] for key, each in placement_group_table().items() if each["state"] != "REMOVED"}
    if booked:
        left.append(f"placement groups in Ray: {booked}")
    total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    taken = {name: total[name] - free.get(name, 0) for name in ("CPU", "GPU", "memory")}
    if any(taken.values()):
        left.append(f"taken in Ray: {taken}")
    named: Any = ray.util.list_named_actors(all_namespaces=True)
    actors = [each["name"] for each in named]
    if actors:
        left.append(f"actors: {actors}")
    return left


def _left_processes(local: Local) -> list[str]:
    table = process_table()
    ours = marked(f"{AGENT_MARKER}={local.plan.node_directory(0)}", table)
    hosts = [each.pid for each in ours if "ray::WorkerHost" in _command_line(each.pid)]
    recorded = [each["name"] for each in local.recorded() if each["role"] in {"worker", "spare"}]
    return [f"{what} {found}" for what, found in (("processes", hosts), ("recorded", recorded)) if found]


def _command_line(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
