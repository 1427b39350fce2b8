"""A controller that was killed comes back with everything it acknowledged, and counts what runs before it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from callboard.controller.journal.state_dir import StateDir
from callboard.controller.journal.store import Store
from callboard.scheduler import State, check_invariants
from callboard.v1 import (
    agent_pb2,
    event_pb2,
    job_pb2,
    node_pb2,
    policy_pb2,
    pool_pb2,
    scheduler_pb2,
)
from tests.controller.support import Api, api_at, job, pool
from tests.support.controller_process import ControllerProcess
from tests.support.fake_agent import FakeAgent, worker_ready


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[ControllerProcess]:
    async with ControllerProcess(tmp_path / "state", "--reconcile-grace-ms", "60000") as started:
        yield started


async def killed_and_restarted(process: ControllerProcess) -> None:
    await process.kill()
    await process.start()


def state_on_disk(path: Path) -> State:
    directory = StateDir(path)
    directory.open()
    store = Store.of(directory, events_kept=100_000)
    state = store.load()
    store.close()
    directory.close()
    return state


async def stats(api: Api) -> scheduler_pb2.Stats:
    response: scheduler_pb2.GetStatsResponse = await api.scheduler.GetStats(scheduler_pb2.GetStatsRequest())
    return response.stats


async def test_r1_everything_acknowledged_is_there_after_a_kill(process: ControllerProcess) -> None:
    agent = FakeAgent(process.address)
    async with api_at(process.address) as api:
        await api.pools.CreatePool(pool(labels={"team": "a"}))
        await api.scheduler.SetPolicy(
            scheduler_pb2.SetPolicyRequest(policy=policy_pb2.PreemptionPolicy(cancel_timeout_ms=777))
        )
        await agent.join()
        spec = job("a", gpu=1000)
        spec.components[0].env["HF_TOKEN"] = "hunter2"
        submitted = await api.submit(spec, request_id="r1")
        await api.until_job("a", "RUNNING")
        await api.submit(job("b"))
        await api.until_job("b", "RUNNING")
        await api.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/b"))
        await api.until_job("b", "CANCELLED")
        await api.nodes.CordonNode(node_pb2.CordonNodeRequest(name="nodes/n0"))
        before = await api.events.ListEvents(event_pb2.ListEventsRequest(page_size=1000))
        await killed_and_restarted(process)
    async with api_at(process.address) as api:
        found = await api.job("a")
        assert (found.uid, found.state) == (submitted.uid, job_pb2.JOB_STATE_RUNNING)
        assert (await api.job("b")).state == job_pb2.JOB_STATE_CANCELLED
        assert (await api.submit(spec, request_id="r1")).uid == submitted.uid
        policy = await api.scheduler.GetPolicy(scheduler_pb2.GetPolicyRequest())
        assert policy.policy.cancel_timeout_ms == 777
        kept = (await api.pools.GetPool(pool_pb2.GetPoolRequest(name="pools/rlhf"))).pool
        assert dict(kept.spec.labels) == {"team": "a"}
        after = await api.events.ListEvents(event_pb2.ListEventsRequest(page_size=1000))
        assert list(after.events)[: len(before.events)] == list(before.events)
        assert (await stats(api)).term == 2
        node = (await api.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n0"))).node
        assert node.state == node_pb2.NODE_STATE_SUSPECT
        welcome = await agent.join()
        assert (welcome.term, welcome.epoch) == (2, 2)
        assert [ref.generation for ref in welcome.keep] == list(agent.workers)
        node = (await api.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n0"))).node
        assert node.state == node_pb2.NODE_STATE_CORDONED
        assert not (await stats(api)).reconciling
    await agent.cut()


async def test_nj_14_what_ran_before_can_still_be_stopped(process: ControllerProcess) -> None:
    agent = FakeAgent(process.address)
    async with api_at(process.address) as api:
        await api.pools.CreatePool(pool())
        await agent.join()
        for name in ("a", "b"):
            await api.submit(job(name, gpu=1000))
            await api.until_job(name, "RUNNING")
        await killed_and_restarted(process)
    async with api_at(process.address) as api:
        await agent.join()
        for name in ("a", "b"):
            await api.jobs.CancelJob(job_pb2.CancelJobRequest(name=f"jobs/{name}"))
        for name in ("a", "b"):
            await api.until_job(name, "CANCELLED")
        assert not agent.workers
        assert (await stats(api)).used.gpu_milli == 0
    await agent.cut()


async def test_ql_03_nothing_is_admitted_before_what_runs_is_counted(process: ControllerProcess) -> None:
    agents = [FakeAgent(process.address, f"n{number}", gpus=4) for number in range(2)]
    async with api_at(process.address) as api:
        await api.pools.CreatePool(pool(gpu=2000))
        for agent in agents:
            await agent.join()
        for number in range(2):
            await api.submit(job(f"runs{number}", gpu=1000))
            await api.until_job(f"runs{number}", "RUNNING")
        for number in range(3):
            await api.submit(job(f"waits{number}", gpu=1000))
        await killed_and_restarted(process)
    async with api_at(process.address) as api:
        assert (await stats(api)).reconciling
        await agents[0].join()
        await agents[0].heartbeat()
        found = await stats(api)
        assert found.reconciling  # the second is still on its way
        assert dict(found.jobs) == {"RUNNING": 2, "PENDING": 3}
        assert not any(agent.got("start_worker")[2:] for agent in agents)
        await agents[1].join()
        found = await stats(api)
        assert not found.reconciling
        assert (found.used.gpu_milli, dict(found.jobs)) == (2000, {"RUNNING": 2, "PENDING": 3})
        await api.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/runs0"))
        await api.until_job("waits0", "RUNNING")
        assert (await stats(api)).used.gpu_milli == 2000
    for agent in agents:
        await agent.cut()


async def test_what_was_owed_is_owed_after_a_kill(process: ControllerProcess) -> None:
    agent = FakeAgent(process.address, hold={"start_worker", "stop_worker"})
    async with api_at(process.address) as api:
        await api.pools.CreatePool(pool())
        await agent.join()
        spec = job("a")
        spec.components[0].env["HF_TOKEN"] = "hunter2"
        await api.submit(spec)
        start = await agent.command("start_worker")
        await killed_and_restarted(process)
    async with api_at(process.address) as api:
        await agent.join()
        again = await agent.command("start_worker")
        assert again.command_id == start.command_id
        assert again.start_worker == start.start_worker
        assert again.start_worker.env["HF_TOKEN"] == "hunter2"
        assert again.term == 2
        await agent.reported(worker_ready(again))
        await api.until_job("a", "RUNNING")
        await api.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/a"))
        stop = await agent.command("stop_worker")
        await killed_and_restarted(process)
    async with api_at(process.address) as api:
        agent.hold.clear()
        await agent.join()
        await api.until_job("a", "CANCELLED")
        again = agent.got("stop_worker")[-1]
        # What is left of its time: the restart lengthens no stop (FT-D2).
        assert again.stop_worker.cancel_timeout_ms < stop.stop_worker.cancel_timeout_ms
        again.stop_worker.cancel_timeout_ms = stop.stop_worker.cancel_timeout_ms
        assert (again.command_id, again.stop_worker) == (stop.command_id, stop.stop_worker)
    await agent.cut()


async def test_ql_11_reports_of_before_the_kill_change_nothing_twice(process: ControllerProcess) -> None:
    agent = FakeAgent(process.address, hold={"start_worker"})
    async with api_at(process.address) as api:
        await api.pools.CreatePool(pool())
        await agent.join()
        await api.submit(job("a", gpu=1000))
        report = worker_ready(await agent.command("start_worker"))
        await agent.reported(report)
        agent.workers[report.worker_ready.generation] = await running_worker(api, "a")
        await killed_and_restarted(process)
    async with api_at(process.address) as api:
        await agent.join()
        before = (await stats(api)).revision
        await agent.reported(report)  # its acknowledgement was lost, so it is sent again
        after = await stats(api)
        assert after.revision == before
        assert after.used.gpu_milli == 1000
    await agent.cut()


async def running_worker(api: Api, name: str) -> agent_pb2.WorkerReport:
    worker = (await api.job(name)).workers[0]
    return agent_pb2.WorkerReport(
        worker=worker.key,
        generation=worker.generation,
        state=agent_pb2.AGENT_WORKER_STATE_READY,
        pid=worker.pid,
    )


async def test_a_node_that_never_comes_back_is_given_up_and_its_work_runs_elsewhere(tmp_path: Path) -> None:
    options = ("--reconcile-grace-ms", "100", "--heartbeat-ms", "50", "--lease-ms", "100")
    async with ControllerProcess(tmp_path / "state", *options) as process:
        gone, back = FakeAgent(process.address, "gone"), FakeAgent(process.address, "back")
        async with api_at(process.address) as api:
            await api.scheduler.SetPolicy(
                scheduler_pb2.SetPolicyRequest(policy=policy_pb2.PreemptionPolicy(kill_timeout_ms=1))
            )
            await api.pools.CreatePool(pool())
            await gone.join()
            alive = asyncio.create_task(gone.beat(0.02))
            await api.submit(job("a", gpu=1000))
            await api.until_job("a", "RUNNING")
            await killed_and_restarted(process)
            alive.cancel()
            await asyncio.wait({alive})
        async with api_at(process.address) as api:
            await back.join()
            beating = asyncio.create_task(back.beat(0.02))
            await api.until(lambda event: event.subject == "nodes/gone" and event.state == "LOST")
            await back.command("start_worker")
            beating.cancel()
            await asyncio.wait({beating})
        await back.cut()


async def test_r1_killed_at_random_moments_it_loses_nothing_it_acknowledged(process: ControllerProcess) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    acknowledged: dict[str, str] = {}
    number = 0
    async with api_at(process.address) as api:
        await api.pools.CreatePool(pool(cpu=10**9))
    for _ in range(2):  # `scripts/chaos` kills it many more times
        agent = FakeAgent(process.address, cpu_milli=10**7)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await agent.join()
        kill_after = chance.randrange(5, 60)
        async with api_at(process.address) as api:

            async def submit(name: str, stubs: Api = api) -> None:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    acknowledged[name] = (await stubs.submit(job(name))).uid
                    if chance.random() < 0.3:
                        await stubs.jobs.CancelJob(job_pb2.CancelJobRequest(name=f"jobs/{name}"))
                        acknowledged[name] += " cancelled"

            tasks = set()
            for _ in range(60):
                number += 1
                tasks.add(asyncio.create_task(submit(f"j{number}")))
            while tasks:
                _, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if len(tasks) <= 60 - kill_after and process.exit_code is None:
                    await process.kill()
        await agent.cut()
        state = state_on_disk(process.state_dir)
        check_invariants(state)
        for name, expected in acknowledged.items():
            uid, _, cancelled = expected.partition(" ")
            found = state.jobs.get(uid)
            assert found is not None, f"{name} is lost (seed {seed})"
            if cancelled:
                assert found.state.value in ("STOPPING", "CANCELLED"), f"the cancel of {name} is lost (seed {seed})"
        await process.start()


async def test_r4_real_workers_run_on_and_are_found_again(process: ControllerProcess, tmp_path: Path) -> None:
    options = {
        "node_id": "n0",
        "controller": process.address,
        "runtime": "process",
        "simulate_gpus": 2,
        "cpu_milli": 3000,
        "memory_bytes": 4 << 30,
        "run_dir": str(tmp_path / "n0"),
    }
    (tmp_path / "agent.json").write_text(json.dumps(options))
    root = Path(__file__).parents[2]
    agent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "callboard.agents", str(tmp_path / "agent.json")),
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with api_at(process.address) as api:
            await api.pools.CreatePool(pool())
            await api.until(lambda event: event.type == "node.ready")
            spec = job("a", gpu=1000)
            spec.components[0].actor = "tests.support.actors:Plain"
            await api.submit(spec)
            await api.until_job("a", "RUNNING")
            worker = (await api.job("a")).workers[0]
            await killed_and_restarted(process)
        async with api_at(process.address) as api:
            back = await api.until(lambda event: event.type == "node.ready" and event.reason == "its agent is back")
            found = await api.job("a")
            assert found.state == job_pb2.JOB_STATE_RUNNING
            assert (found.workers[0].pid, found.workers[0].generation) == (worker.pid, worker.generation)
            os.kill(worker.pid, 0)
            await api.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/a"))
            await api.until_job("a", "CANCELLED", start=back.revision)
            with pytest.raises(ProcessLookupError):
                os.kill(worker.pid, 0)
    finally:
        agent.terminate()
        await agent.wait()
