"""Do status, figures and ledger say the same, whatever path a worker or node went?"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from callboard.controller.server import Controller
from callboard.v1 import job_pb2, node_pb2, pool_pb2, scheduler_pb2
from tests.controller.support import Api, api_at, job, options_for, pool, quick_policy, running
from tests.controller.test_metrics import Samples, labelled, scrape
from tests.support.fake_agent import FakeAgent, worker_exited


async def ledger(api: Api) -> Any:
    return (await api.scheduler.GetStats(scheduler_pb2.GetStatsRequest())).stats


async def at_one_revision(controller: Controller, look: Callable[[], Awaitable[Any]]) -> Any:
    """What several questions are answered while nothing changes in between."""
    while True:
        revision = controller.driver.state.meta.revision
        seen = await look()
        if controller.driver.state.meta.revision == revision:
            return seen


async def agree(controller: Controller, api: Api) -> Samples:
    """The figures, after they were compared with what services answer and the ledger holds."""

    async def look() -> Any:
        return (
            await scrape(controller),
            await ledger(api),
            (await api.nodes.ListNodes(node_pb2.ListNodesRequest())).nodes,
            (await api.jobs.ListJobs(job_pb2.ListJobsRequest())).jobs,
        )

    figures, stats, nodes, jobs = await at_one_revision(controller, look)
    state = controller.driver.state
    used = sum(node.used.gpu_milli for node in nodes)
    assert figures["callboard_gpus", labelled(state="used")] * 1000 == stats.used.gpu_milli == used
    counted = {name: count for name, count in stats.nodes.items() if count}
    assert counted == _counted(figures, "callboard_nodes") == _states(nodes, node_pb2.NodeState, "NODE_STATE_")
    shown = _states(jobs, job_pb2.JobState, "JOB_STATE_")
    assert {name: count for name, count in stats.jobs.items() if count} == _counted(figures, "callboard_jobs") == shown
    live = [worker for one in jobs for worker in one.workers if worker.state == job_pb2.WORKER_STATE_READY]
    assert len(live) == sum(1 for worker in state.workers.values() if worker.state.value == "READY")
    return cast("Samples", figures)


def _counted(figures: Samples, name: str) -> dict[str, float]:
    return {dict(labels)["state"]: value for (found, labels), value in figures.items() if found == name and value}


def _states(messages: Any, wrapper: Any, prefix: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for message in messages:
        name = wrapper.Name(message.state).removeprefix(prefix)
        counts[name] = counts.get(name, 0) + 1
    return counts


@pytest.mark.parametrize("path", ["exit", "drain", "goodbye", "silence", "cancel"])
async def test_mu_02_every_way_of_dying_is_seen_alike_everywhere(tmp_path: Path, path: str) -> None:
    silent = {"lease_ms": 400, "heartbeat_ms": 100} if path == "silence" else {}
    async with (
        running(options_for(tmp_path, metrics="127.0.0.1:0", **silent)) as controller,
        api_at(controller.address) as api,
    ):
        await api.pools.CreatePool(pool())
        if silent:  # The time of a kill is added to the silence that is borne.
            await api.scheduler.SetPolicy(scheduler_pb2.SetPolicyRequest(policy=quick_policy()))
        agent = FakeAgent(controller.address, "n1", gpus=2)
        await agent.join()
        await api.submit(job("a", gpu=1000))
        await api.until_job("a", "RUNNING")
        await agree(controller, api)
        if path == "exit":
            await agent.reported(worker_exited(agent.got("start_worker")[0]))
        elif path == "drain":
            await api.nodes.DrainNode(node_pb2.DrainNodeRequest(name="nodes/n1"))
        elif path == "goodbye":
            await agent.goodbye()
        elif path == "silence":
            await agent.cut()
        else:
            await api.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/a"))
        ends = ("FAILED", "PENDING", "CANCELLED")
        began = (await api.until_job("a", "RUNNING")).revision
        await api.until(lambda event: event.subject == "jobs/a" and event.state in ends, start=began + 1)
        figures = await agree(controller, api)
        assert figures["callboard_gpus", labelled(state="used")] == 0
        shown = await api.job("a")
        assert not [worker for worker in shown.workers if worker.state == job_pb2.WORKER_STATE_READY]
        await agent.cut()


async def test_mu_01_what_is_gone_leaves_no_figure_behind(tmp_path: Path) -> None:
    async with (
        running(options_for(tmp_path, metrics="127.0.0.1:0")) as controller,
        api_at(controller.address) as api,
    ):
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address, "n1", gpus=2):
            await api.until(lambda event: event.subject == "nodes/n1" and event.state == "READY")
            before = await scrape(controller)
            leaver = FakeAgent(controller.address, "n2", gpus=4)
            await leaver.join()
            await api.until(lambda event: event.subject == "nodes/n2" and event.state == "READY")
            assert _total(await scrape(controller)) == 6
            await leaver.goodbye()
            await api.until(lambda event: event.subject == "nodes/n2" and event.state == "LEFT")
            after = await scrape(controller)
            assert _total(after) == _total(before) == 2
            assert not [key for key in after if ("node", "n2") in key[1]]
            for number in range(20):
                await api.submit(job(f"j{number}"))
                await api.until_job(f"j{number}", "RUNNING")
                await api.jobs.CancelJob(job_pb2.CancelJobRequest(name=f"jobs/j{number}"))
                await api.until_job(f"j{number}", "CANCELLED")
            last = await scrape(controller)
            # Not a series for each job that ever was.
            assert not [key for key in last if any(value.startswith("j1") for _, value in key[1])]


def _total(figures: Samples) -> float:
    return sum(value for (name, _), value in figures.items() if name == "callboard_gpus")


async def test_mu_08_figures_and_ledger_never_drift_apart(tmp_path: Path) -> None:
    async with (
        running(options_for(tmp_path, metrics="127.0.0.1:0")) as controller,
        api_at(controller.address) as api,
    ):
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address, "n1", gpus=4):
            for number in range(12):
                await api.submit(job(f"j{number}", gpu=(0, 500, 1000, 2000)[number % 4]))
                if number % 3 == 2:
                    await api.jobs.CancelJob(job_pb2.CancelJobRequest(name=f"jobs/j{number - 1}"))
                    await api.until_job(f"j{number - 1}", "CANCELLED")

                async def look() -> Any:
                    return await scrape(controller), (await api.pools.ListPools(pool_pb2.ListPoolsRequest())).pools

                figures, (found,) = await at_one_revision(controller, look)
                usage = figures["callboard_pool_usage", labelled(pool="rlhf", resource="gpu")]
                assert usage * 1000 == found.used.gpu_milli
