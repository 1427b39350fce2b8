"""What holds against a real controller and real worker processes? Named cases of `cases/scenarios.md`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from callboard._version import __version__
from callboard.client.calls import methods
from callboard.client.errors import RequestTooLarge
from callboard.client.jobs import JobHandle
from callboard.controller.logs import configure_logs
from callboard.model.inputs.job import job_spec
from callboard.scheduler.records.events import JobCancelled, JobSubmitted
from callboard.security.dialing import open_channel
from callboard.v1 import agent_pb2, agent_pb2_grpc, job_pb2, node_pb2, pool_pb2
from callboard.wire.refusals import InvalidRequest, NotFound
from tests.cli.cluster import ACTOR, RealCluster, job, real_cluster, verb

STRANGE_NAMES = ("../../x", "a/b", "a\n", "x" * 300, "💥", "%s", "__proto__", "", "a b", "-a")


async def is_whole(cluster: RealCluster) -> None:
    """Nothing is used and no worker process lives."""
    node = await cluster.client.get_node("n0")
    assert (node.used.cpu_milli, node.used.gpu_milli, node.quarantined.gpu_milli) == (0, 0, 0)
    assert cluster.processes() == []


class TestPC13KillImmediatelyAfterCreate:
    @pytest.mark.timeout(300)
    async def test_pc_13_a_cancel_soon_after_a_submit_always_ends_as_cancelled(self, cluster: RealCluster) -> None:
        for turn in range(6):
            for delay_ms in (0, 1, 5, 20, 100):
                handle = await cluster.client.submit(job(f"brief-{turn}-{delay_ms}"))
                # The delay is the case itself, not a wait for something.
                await asyncio.sleep(delay_ms / 1000)
                await handle.cancel()
                ended = await handle.finished(timeout=90)
                assert ended.state == job_pb2.JobState.JOB_STATE_CANCELLED
        await is_whole(cluster)
        after = await cluster.client.submit(job("after"))
        await after.running(timeout=90)
        await after.cancel()
        await after.finished(timeout=90)
        await is_whole(cluster)


class TestPC14NamesOutliveTheirActors:
    @pytest.mark.timeout(300)
    async def test_pc_14_a_name_is_free_at_once_and_leads_to_the_new_job(self, cluster: RealCluster) -> None:
        seen: set[tuple[str, int]] = set()
        current = await cluster.client.submit(job("again"))
        for _ in range(12):
            await current.running(timeout=90)
            (worker,) = current.job.workers
            assert (worker.key.job_id, worker.generation) not in seen, "a name is never used twice"
            seen.add((worker.key.job_id, worker.generation))
            await current.cancel()
            current = await self.resubmitted(cluster, current)
        await current.cancel()
        await current.finished(timeout=90)
        await is_whole(cluster)

    @staticmethod
    async def resubmitted(cluster: RealCluster, before: JobHandle) -> JobHandle:
        """The next job of the name, looked up all the time while the old one goes."""
        ended = asyncio.create_task(before.finished(timeout=90))
        while not ended.done():
            found = await cluster.client.get_job("again")
            assert found.job.uid == before.job.uid
            assert found.state in {"STOPPING", "CANCELLED"}
        await ended
        after = await cluster.client.submit(job("again"))
        assert (await cluster.client.get_job("again")).job.uid == after.job.uid
        assert (await cluster.client.get_job(before.job.uid)).state == "CANCELLED"
        return after

    async def test_pc_14_of_an_unknown_name_nothing_is_found(self, bare: RealCluster) -> None:
        with pytest.raises(NotFound):
            await bare.client.get_job("never")


class TestSE05NamesAsInjection:
    @pytest.mark.parametrize("name", STRANGE_NAMES, ids=lambda name: ascii(name[:20]))
    async def test_se_05_a_strange_name_is_refused_at_every_entry(self, bare: RealCluster, name: str) -> None:
        component = job_pb2.ComponentSpec(name="w", actor=ACTOR)
        strange = job_pb2.ComponentSpec(name=name, actor=ACTOR)

        def submit(**fields: Any) -> Any:
            spec = job_pb2.JobSpec(**({"name": "ok", "pool": "rlhf", "components": [component]} | fields))
            return bare.client.call(methods.SUBMIT_JOB, job_pb2.SubmitJobRequest(spec=spec))

        calls = [
            submit(name=name),
            submit(pool=name),
            submit(components=[strange]),
            bare.client.call(methods.CREATE_POOL, pool_pb2.CreatePoolRequest(pool_id=name)),
            bare.client.call(methods.GET_JOB, job_pb2.GetJobRequest(name=f"jobs/{name}")),
            bare.client.call(methods.CANCEL_JOB, job_pb2.CancelJobRequest(name=f"jobs/{name}")),
            bare.client.call(methods.GET_POOL, pool_pb2.GetPoolRequest(name=f"pools/{name}")),
            bare.client.call(methods.CORDON_NODE, node_pb2.CordonNodeRequest(name=f"nodes/{name}")),
            bare.client.delete_placement_group(name),
        ]
        for call in calls:
            with pytest.raises(InvalidRequest, match="A-Za-z"):
                await call
        await self.refused_as_a_node(bare, name)
        assert (await bare.client.stats()).uptime_ms >= 0, "the controller is alive"
        assert (await bare.client.list_jobs(), await bare.client.list_pools(), await bare.client.list_nodes()) == (
            [],
            [],
            [],
        )

    @staticmethod
    async def refused_as_a_node(cluster: RealCluster, name: str) -> None:
        async with open_channel(cluster.address) as channel:
            session = agent_pb2_grpc.AgentServiceStub(channel).Session(timeout=60)
            await session.write(agent_pb2.SessionRequest(hello=agent_pb2.Hello(node_id=name, version=__version__)))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in session:
                    pass
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    @pytest.mark.parametrize("name", STRANGE_NAMES, ids=lambda name: ascii(name[:20]))
    async def test_se_05_a_verb_refuses_a_strange_name_as_bad_input(self, bare: RealCluster, name: str) -> None:
        for line in (("job", "get"), ("pool", "get"), ("node", "cordon"), ("pg", "delete")):
            shown = await verb(bare, *line, "--", name)
            assert shown.exit_code == 2, shown.output


class TestGC09Sizes:
    async def test_gc_09_a_submit_of_5_mb_is_refused_before_it_is_sent(self, bare: RealCluster, tmp_path: Path) -> None:
        file = tmp_path / "large.yaml"
        file.write_text("name: large\npool: rlhf\n# " + "x" * (5 << 20))
        shown = await verb(bare, "job", "submit", str(file))
        assert shown.exit_code == 2
        assert "larger than 4194304 bytes" in shown.stderr
        large = job_pb2.SubmitJobRequest(spec=job_pb2.JobSpec(labels={"a": "x" * (5 << 20)}))
        with pytest.raises(RequestTooLarge, match="at most 4194304"):
            await bare.client.call(methods.SUBMIT_JOB, large)

    @pytest.mark.slow
    @pytest.mark.timeout(300)
    async def test_gc_09_5000_finished_jobs_are_listed_in_pages(self, tmp_path: Path) -> None:
        configure_logs("console", "error")
        async with real_cluster(tmp_path, ended_jobs=5000) as cluster:
            await cluster.client.ensure_pool("rlhf", nominal={"cpu": 8})

            assert cluster.controller is not None
            driver, old = cluster.controller.driver, job_spec(job("old") | {"wait_for_nodes": "1h"})

            async def end_one(number: int) -> None:
                """As its service does; 10,000 calls would take longer than all that is asked here."""
                spec = replace(old, name=f"old-{number}")
                await driver.ask(
                    lambda now_ms, cause: JobSubmitted(now_ms=now_ms, cause=cause, uid=spec.name, spec=spec),
                    lambda _: None,
                    source="submit",
                )
                await driver.ask(
                    lambda now_ms, cause: JobCancelled(now_ms=now_ms, cause=cause, uid=spec.name),
                    lambda _: None,
                    source="cancel",
                )

            for start in range(0, 5000, 250):
                await asyncio.gather(*(end_one(number) for number in range(start, start + 250)))
            page = await cluster.client.call(methods.LIST_JOBS, job_pb2.ListJobsRequest(page_size=1000))
            assert page.next_page_token
            assert page.ByteSize() < 4 << 20
            assert len({found.uid for found in await cluster.client.list_jobs()}) == 5000
            shown = await verb(cluster, "job", "list", "--all", "-o", "json")
            assert len(json.loads(shown.stdout)) == 5000
            assert "No jobs are running" in (await verb(cluster, "status")).stdout
