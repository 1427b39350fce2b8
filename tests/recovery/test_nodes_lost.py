"""What becomes of jobs whose nodes die or are drained? With real agents of plain processes, and a short lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from callboard.client.client import Client
from callboard.client.jobs import JobHandle
from callboard.controller.logs import configure_logs
from callboard.controller.options import ControllerOptions
from callboard.controller.server import Controller
from callboard.v1.job_pb2 import JobState, Worker, WorkerState
from callboard.wire.amounts import resources_from_proto
from tests.cli.cluster import RealCluster, job

WAIT_S = 90.0

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[RealCluster]:
    """A controller that gives a node up after 4 s: lease 1 s, kill timeout 1 s, margin 2 s."""
    configure_logs("console", "error")
    (tmp_path / "agents").mkdir()
    options = ControllerOptions(
        listen="127.0.0.1:0", state_dir=tmp_path / "state", stop_grace_ms=500, lease_ms=1000, heartbeat_ms=300
    )
    controller = Controller(options)
    await controller.start()
    try:
        async with Client(controller.address) as client:
            await client.set_policy({"cancel_timeout": 1, "kill_timeout": 1})
            await client.ensure_pool("rlhf")
            cluster = RealCluster(tmp_path / "agents", controller.address, client)
            try:
                yield cluster
            finally:
                await cluster.stop_agents()
    finally:
        await controller.stop()


async def gang(site: RealCluster, name: str, workers: int) -> JobHandle:
    handle = await site.client.submit(job(name, workers=workers, resources={"gpu": 1}) | {"wait_for_nodes": "60s"})
    await handle.running(WAIT_S)
    return handle


def ready(handle: JobHandle) -> list[Worker]:
    return [worker for worker in handle.job.workers if worker.state == WorkerState.WORKER_STATE_READY]


def places(handle: JobHandle) -> list[tuple[str, str]]:
    """(node, device) of every worker that is ready."""
    return [(w.allocation.node_id, share.id) for w in ready(handle) for share in w.allocation.devices]


async def until_attempt(handle: JobHandle, attempt: int) -> None:
    await handle.until(
        lambda found: found.attempt >= attempt and found.state == JobState.JOB_STATE_RUNNING, "another attempt", WAIT_S
    )


async def test_nj_07_two_nodes_that_die_in_a_row_cost_a_job_of_three_nothing_but_a_restart(site: RealCluster) -> None:
    for number in range(5):
        await site.add_node(f"n{number}", gpus=1)
    handle = await gang(site, "trio", 3)
    first, second = [node for node, _ in places(handle)][:2]
    generations = [worker.generation for worker in ready(handle)]
    await site.kill_node(first)
    await asyncio.sleep(0.1)  # The case itself: the second dies before the first is given up.
    await site.kill_node(second)
    await until_attempt(handle, 2)
    if handle.job.attempt == 2 and len(ready(handle)) < 3:
        await until_attempt(handle, 3)
    now = places(handle)
    assert sorted(worker.key.rank for worker in ready(handle)) == [0, 1, 2]
    assert len(set(now)) == 3, "no device is used twice"
    assert {node for node, _ in now} == {f"n{number}" for number in range(5)} - {first, second}
    assert min(worker.generation for worker in ready(handle)) > max(generations), "every rank is fenced anew"
    told = await site.client.list_events(types=["job.rank_map"], subject="jobs/trio")
    assert told[-1].state == "STARTING", "ranks are announced anew before they start"
    assert sorted(told[-1].facts) == ["w/0", "w/1", "w/2"]
    stats = await site.client.stats()
    assert (stats.used.gpu_milli, stats.held.gpu_milli) == (3000, 0)
    assert stats.nodes["LOST"] == 2


async def test_nj_07_a_node_that_dies_while_the_job_recovers_from_another(site: RealCluster) -> None:
    for number in range(5):
        await site.add_node(f"n{number}", gpus=1)
    handle = await gang(site, "trio", 3)
    revision = (await site.client.stats()).revision
    before = [node for node, _ in places(handle)]
    await site.kill_node(before[0])
    async for event in site.client.watch(start_revision=revision + 1, subject="jobs/trio"):
        if event.state == "RECOVERING":
            break
    await handle.refresh()
    alive = [worker.allocation.node_id for worker in handle.job.workers if worker.allocation.node_id != before[0]]
    await site.kill_node(alive[0])
    await handle.until(
        lambda found: (
            found.state == JobState.JOB_STATE_RUNNING
            and not {before[0], alive[0]} & {worker.allocation.node_id for worker in found.workers}
        ),
        "three living nodes",
        WAIT_S,
    )
    assert len(set(places(handle))) == 3


async def test_nj_08_of_two_half_lost_gangs_one_starts_whole_and_the_other_holds_nothing(site: RealCluster) -> None:
    for number in range(4):
        await site.add_node(f"n{number}", gpus=1)
    gangs = {name: await gang(site, name, 2) for name in ("a", "b")}
    for handle in gangs.values():
        await site.kill_node(places(handle)[0][0])
    waiting = [asyncio.create_task(until_attempt(handle, 2)) for handle in gangs.values()]
    done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
    assert len(done) == 1
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    states = {}
    for name, handle in gangs.items():
        await handle.refresh()
        states[handle.state] = name
    loser = gangs[states["PENDING"]]
    winner = gangs[states["RUNNING"]]
    assert len(set(places(winner))) == 2
    assert ready(loser) == []
    stats = await site.client.stats()
    assert (stats.used.gpu_milli, stats.held.gpu_milli) == (2000, 0), "the one that waits holds nothing"
    await site.add_node("n4", gpus=2)
    await loser.running(WAIT_S)


async def test_nj_10_nothing_starts_on_a_node_after_the_answer_to_its_drain(site: RealCluster) -> None:
    for number in range(2):
        await site.add_node(f"n{number}", gpus=2)
    quiet = await gang(site, "quiet", 1)  # Nobody ever calls it.
    node = places(quiet)[0][0]
    starting = [
        await site.client.submit(job(f"starts-{number}", resources={"gpu": 1}) | {"wait_for_nodes": "60s"})
        for number in range(2)
    ]
    drained = await site.client.drain_node(node, within=3, reason="maintenance")
    late = [
        await site.client.submit(job(f"late-{number}", resources={"gpu": 1}) | {"wait_for_nodes": "60s"})
        for number in range(2)
    ]
    revision = drained.revision
    events = site.client.watch(start_revision=revision)
    while resources_from_proto((await site.client.get_node(node)).used).items():
        await anext(events)
    for handle in (quiet, *starting, *late):
        await handle.refresh()
        assert node not in {place for place, _ in places(handle)}
        assert handle.state in {"PENDING", "STARTING", "RUNNING"}, "nobody failed"
    entered = [change.state for change in quiet.job.history]
    assert "PREEMPTING" in entered, "it was asked to yield, not cut off"
    assert any("drain" in change.reason for change in quiet.job.history), quiet.job.history
    await site.client.uncordon_node(node)
    for handle in (quiet, *starting, *late):
        if handle.state == "RUNNING":
            await handle.complete()
