"""Does a job of three workers survive the death of a raylet, and of an agent? On real Ray, four nodes here."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from callboard.agents.ray.ray_command import free_port
from callboard.cli.local.cluster import LocalCluster
from callboard.cli.local.growth import running_workers
from callboard.cli.local.machine_gpus import machine_gpus
from callboard.cli.local.plan import ClusterPlan, free_block
from callboard.client.client import Client
from callboard.client.jobs import JobHandle
from callboard.v1.job_pb2 import Job, JobState, Worker, WorkerState
from callboard.v1.node_pb2 import Node

WAIT_S = 90.0
"""Detection (18 s for an agent that is silent, 1 s for a raylet) and one start, on a machine that is busy."""


class Quiet:
    """An observer that says nothing."""

    def step(self, text: str) -> None:
        """Something begins."""

    def nodes(self, nodes: object) -> None:
        """The nodes as they are now."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not pytest's: Ray's sockets have 107 bytes for their path."""
    directory = Path(f"/tmp/cb-lost-{os.getpid()}")
    directory.mkdir(mode=0o700)
    yield directory
    assert not directory.exists(), "the cluster took its files along"


@pytest.fixture
async def cluster(folder: Path) -> AsyncIterator[tuple[LocalCluster, Client]]:
    """Four nodes with a GPU each, at most 18 s until a silent one is given up."""
    plan = ClusterPlan(
        name="lost",
        directory=folder / "c",
        port=free_port(),
        agents=4,
        cpus="1",
        gpus=1,
        machine_gpus=machine_gpus("4").ids,
        warm_spares=0,
        block=free_block(()),
    )
    built = LocalCluster(plan, Quiet(), hurry=asyncio.Event())
    try:
        await built.start(120)
        async with Client(plan.controller) as client:
            await client.set_policy({"cancel_timeout": 1, "kill_timeout": 1})
            await client.ensure_pool("p")
            yield built, client
    finally:
        await built.stop()


def raylet_of(agent: psutil.Process) -> psutil.Process:
    (raylet,) = [each for each in agent.children(recursive=True) if each.name() == "raylet"]
    return raylet


def ready(job: Job) -> list[Worker]:
    return [worker for worker in job.workers if worker.state == WorkerState.WORKER_STATE_READY]


async def recovered(job: JobHandle, attempt: int) -> None:
    """Whole again: three ranks, three devices, no two processes on one."""

    def whole(found: Job) -> bool:
        running = found.state == JobState.JOB_STATE_RUNNING and found.attempt > attempt
        return running and len(ready(found)) == 3

    await job.until(whole, "three workers again", WAIT_S)
    workers = ready(job.job)
    assert sorted(worker.key.rank for worker in workers) == [0, 1, 2]
    assert len({(w.allocation.node_id, share.id) for w in workers for share in w.allocation.devices}) == 3
    assert len({worker.visible_devices for worker in workers}) == 3, "no two see one GPU of this machine"
    assert all(psutil.pid_exists(worker.pid) for worker in workers)


def victim(job: JobHandle, nodes: list[Node]) -> Worker:
    """A worker that is not on Ray's head."""
    heads = {node.name.removeprefix("nodes/") for node in nodes if node.ray_head}
    return next(worker for worker in ready(job.job) if worker.allocation.node_id not in heads)


def tell(capsys: pytest.CaptureFixture[str], what: str, began: float) -> None:
    """The figure that the case asks for, on the screen whatever is captured."""
    with capsys.disabled():
        sys.stdout.write(f"\nwhole again {time.monotonic() - began:.1f} s after {what} killed\n")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_job_survives_a_killed_raylet_and_a_killed_agent(
    cluster: tuple[LocalCluster, Client], capsys: pytest.CaptureFixture[str]
) -> None:
    built, client = cluster
    actor = "tests.support.actors:Plain"
    component = {"name": "w", "actor": actor, "workers": 3, "resources": {"cpu": 1, "gpu": 1}}
    job = await client.submit({"name": "trio", "pool": "p", "components": [component]})
    await job.running(WAIT_S)
    nodes = await client.list_nodes()

    before = job.job.attempt
    hit = victim(job, nodes)
    agent = psutil.Process(running_workers(built.plan.directory)[hit.allocation.node_id].pid)
    began = time.monotonic()
    raylet_of(agent).send_signal(signal.SIGKILL)
    await recovered(job, before)
    tell(capsys, "a raylet was", began)
    told = await client.list_events(types=["job.rank_map"], subject="jobs/trio")
    assert sorted(told[-1].facts) == ["w/0", "w/1", "w/2"], "ranks are announced anew"
    assert all(w.generation > hit.generation for w in ready(job.job) if w.key.rank == hit.key.rank)

    before = job.job.attempt
    hit = victim(job, nodes)
    began = time.monotonic()
    os.kill(running_workers(built.plan.directory)[hit.allocation.node_id].pid, signal.SIGKILL)
    await recovered(job, before)
    tell(capsys, "an agent was", began)
    assert hit.allocation.node_id not in {worker.allocation.node_id for worker in ready(job.job)}
    assert (await client.stats()).nodes["LOST"] == 1
    await job.cancel()
    await job.finished(WAIT_S)
