"""What holds against a real controller and real worker processes? Named cases of `cases/scenarios.md`."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from typer.testing import CliRunner, Result

from callboard._version import __version__
from callboard.cli.local.ports import free_port
from callboard.cli.main import app
from callboard.client import Client, methods
from callboard.client.errors import RequestTooLarge
from callboard.client.jobs import JobHandle
from callboard.controller.logs import configure_logs
from callboard.v1 import agent_pb2, agent_pb2_grpc, job_pb2, node_pb2, pool_pb2
from callboard.wire.errors import CallboardError, InvalidRequest, NotFound
from tests.cli.cluster import ROOT, RealCluster, real_cluster
from tests.cli.machine import Machine, wait_for_line

STRANGE_NAMES = ("../../x", "a/b", "a\n", "x" * 300, "💥", "%s", "__proto__", "", "a b", "-a")
ACTOR = "tests.support.actors:Plain"


@pytest.fixture
async def bare(tmp_path: Path) -> AsyncIterator[RealCluster]:
    """A controller without nodes."""
    configure_logs("console", "error")
    async with real_cluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
async def cluster(bare: RealCluster) -> RealCluster:
    """A controller, a node, and a pool."""
    await bare.add_node("n0")
    await bare.client.ensure_pool("rlhf", nominal={"cpu": 8})
    return bare


def job(name: str, actor: str = ACTOR, **component: Any) -> dict[str, Any]:
    stated = {"name": "w", "actor": actor, "resources": {"cpu": 1, "gpu": 2}} | component
    return {"name": name, "pool": "rlhf", "components": [stated]}


async def verb(cluster: RealCluster, *arguments: str) -> Result:
    """A command line, beside the loop of the controller."""
    line = [*arguments, "--controller", cluster.address]
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, line, env={"COLUMNS": "200", "NO_COLOR": "1"}))


async def program(cluster: RealCluster, *arguments: str) -> asyncio.subprocess.Process:
    """A command line in a process of its own, to run while others do."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "callboard.cli", *arguments, "--controller", cluster.address),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )


async def first_line(process: asyncio.subprocess.Process) -> str:
    """What it prints first."""
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def is_whole(cluster: RealCluster) -> None:
    """Nothing is used and no worker process lives."""
    node = await cluster.client.get_node("n0")
    assert (node.used.cpu_milli, node.used.gpu_milli, node.quarantined.gpu_milli) == (0, 0, 0)
    assert cluster.processes() == []


class TestPC13KillImmediatelyAfterCreate:
    @pytest.mark.timeout(120)
    async def test_a_cancel_soon_after_a_submit_always_ends_as_cancelled(self, cluster: RealCluster) -> None:
        for turn in range(6):
            for delay_ms in (0, 1, 5, 20, 100):
                handle = await cluster.client.submit(job(f"brief-{turn}-{delay_ms}"))
                # The delay is the case itself, not a wait for something.
                await asyncio.sleep(delay_ms / 1000)
                await handle.cancel()
                ended = await handle.finished(timeout=30)
                assert ended.state == job_pb2.JobState.JOB_STATE_CANCELLED
        await is_whole(cluster)
        after = await cluster.client.submit(job("after"))
        await after.running(timeout=30)
        await after.cancel()
        await after.finished(timeout=30)
        await is_whole(cluster)


class TestPC14NamesOutliveTheirActors:
    @pytest.mark.timeout(120)
    async def test_a_name_is_free_at_once_and_leads_to_the_new_job(self, cluster: RealCluster) -> None:
        seen: set[tuple[str, int]] = set()
        current = await cluster.client.submit(job("again"))
        for _ in range(12):
            await current.running(timeout=30)
            (worker,) = current.job.workers
            assert (worker.key.job_id, worker.generation) not in seen, "a name is never used twice"
            seen.add((worker.key.job_id, worker.generation))
            await current.cancel()
            current = await self.resubmitted(cluster, current)
        await current.cancel()
        await current.finished(timeout=30)
        await is_whole(cluster)

    @staticmethod
    async def resubmitted(cluster: RealCluster, before: JobHandle) -> JobHandle:
        """The next job of the name, looked up all the time while the old one goes."""
        ended = asyncio.create_task(before.finished(timeout=30))
        while not ended.done():
            found = await cluster.client.get_job("again")
            assert found.job.uid == before.job.uid
            assert found.state in {"STOPPING", "CANCELLED"}
        await ended
        after = await cluster.client.submit(job("again"))
        assert (await cluster.client.get_job("again")).job.uid == after.job.uid
        assert (await cluster.client.get_job(before.job.uid)).state == "CANCELLED"
        return after

    async def test_of_an_unknown_name_nothing_is_found(self, bare: RealCluster) -> None:
        with pytest.raises(NotFound):
            await bare.client.get_job("never")


class TestSE05NamesAsInjection:
    @pytest.mark.parametrize("name", STRANGE_NAMES, ids=lambda name: ascii(name[:20]))
    async def test_a_strange_name_is_refused_at_every_entry(self, bare: RealCluster, name: str) -> None:
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
        async with grpc.aio.insecure_channel(cluster.address) as channel:
            session = agent_pb2_grpc.AgentServiceStub(channel).Session(timeout=10)
            await session.write(agent_pb2.SessionRequest(hello=agent_pb2.Hello(node_id=name, version=__version__)))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in session:
                    pass
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    @pytest.mark.parametrize("name", STRANGE_NAMES, ids=lambda name: ascii(name[:20]))
    async def test_a_verb_refuses_it_as_bad_input(self, bare: RealCluster, name: str) -> None:
        for line in (("job", "get"), ("pool", "get"), ("node", "cordon"), ("pg", "delete")):
            shown = await verb(bare, *line, "--", name)
            assert shown.exit_code == 2, shown.output


class TestGC09Sizes:
    async def test_a_submit_of_5_mb_is_refused_before_it_is_sent(self, bare: RealCluster, tmp_path: Path) -> None:
        file = tmp_path / "large.yaml"
        file.write_text("name: large\npool: rlhf\n# " + "x" * (5 << 20))
        shown = await verb(bare, "job", "submit", str(file))
        assert shown.exit_code == 2
        assert "larger than 4194304 bytes" in shown.stderr
        large = job_pb2.SubmitJobRequest(spec=job_pb2.JobSpec(labels={"a": "x" * (5 << 20)}))
        with pytest.raises(RequestTooLarge, match="at most 4194304"):
            await bare.client.call(methods.SUBMIT_JOB, large)

    @pytest.mark.slow
    @pytest.mark.timeout(180)
    async def test_5000_finished_jobs_are_listed_in_pages(self, tmp_path: Path) -> None:
        configure_logs("console", "error")
        async with real_cluster(tmp_path, ended_jobs=5000) as cluster:
            await cluster.client.ensure_pool("rlhf", nominal={"cpu": 8})

            async def end_one(number: int) -> None:
                handle = await cluster.client.submit(job(f"old-{number}") | {"wait_for_nodes": "1h"})
                await handle.cancel()

            for start in range(0, 5000, 250):
                await asyncio.gather(*(end_one(number) for number in range(start, start + 250)))
            page = await cluster.client.call(methods.LIST_JOBS, job_pb2.ListJobsRequest(page_size=1000))
            assert page.next_page_token
            assert page.ByteSize() < 4 << 20
            assert len({found.uid for found in await cluster.client.list_jobs()}) == 5000
            shown = await verb(cluster, "job", "list", "--all", "-o", "json")
            assert len(json.loads(shown.stdout)) == 5000
            assert "No jobs are running" in (await verb(cluster, "status")).stdout


class TestReads:
    async def test_mu_05_a_status_of_three_jobs_shows_no_internal_ids(self, cluster: RealCluster) -> None:
        for number in range(3):
            await cluster.client.submit(job(f"job-{number}"))
        await (await cluster.client.get_job("job-0")).running(timeout=30)
        uids = [found.uid for found in await cluster.client.list_jobs()]
        for line in (("status",), ("job", "list"), ("worker", "list"), ("node", "get", "n0")):
            shown = await verb(cluster, *line)
            assert shown.exit_code == 0, shown.output
            assert "job-0" in shown.stdout
            assert [uid for uid in uids if uid in shown.stdout or uid.removeprefix("j-") in shown.stdout] == []
        assert uids[0] in (await verb(cluster, "job", "list", "-o", "wide")).stdout

    async def test_mu_07_a_resource_error_names_the_controller_and_its_nodes(
        self, cluster: RealCluster, tmp_path: Path
    ) -> None:
        file = tmp_path / "job.json"
        file.write_text(json.dumps(job("huge", resources={"cpu": 1, "gpu": 16})))
        shown = await verb(cluster, "job", "submit", str(file))
        assert shown.exit_code == 3
        assert f"controller {cluster.address}" in shown.stderr
        assert "with n0" in shown.stderr

    async def test_every_service_is_found_by_reflection(self, bare: RealCluster) -> None:
        async with grpc.aio.insecure_channel(bare.address) as channel:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]  # made for both
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            (answer,) = [answer async for answer in stub.ServerReflectionInfo(iter([asked]), timeout=10)]
            listed = {service.name for service in answer.list_services_response.service}
            described = reflection_pb2.ServerReflectionRequest(file_containing_symbol="callboard.v1.JobService")
            (found,) = [answer async for answer in stub.ServerReflectionInfo(iter([described]), timeout=10)]
        ours = {"Agent", "Event", "Job", "Node", "PlacementGroup", "Pool", "Scheduler"}
        assert listed == {f"callboard.v1.{name}Service" for name in ours} | {
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        assert found.file_descriptor_response.file_descriptor_proto


class TestVerbs:
    @pytest.mark.timeout(90)
    async def test_a_job_is_followed_with_its_log_to_its_end(self, cluster: RealCluster, tmp_path: Path) -> None:
        talker = job("talk", "tests.support.actors:Talker", kwargs={"gate": str(tmp_path / "gate")}, entry="run")
        handle = await cluster.client.submit(talker)
        await handle.running(timeout=30)
        watching = await program(cluster, "job", "watch", "talk")
        following = await program(cluster, "job", "logs", "talk", "--follow")
        assert "Job talk is RUNNING" in await first_line(watching)
        assert await first_line(following) == "hello from the worker"
        (tmp_path / "gate").touch()
        (states, _), (lines, _) = await watching.communicate(), await following.communicate()
        assert (watching.returncode, following.returncode) == (0, 0)
        assert states.decode().splitlines()[-1].startswith("Job talk is SUCCEEDED")
        assert lines.decode() == "goodbye\n"

    async def test_the_log_of_a_job_that_ended_is_found_while_its_agent_runs(
        self, cluster: RealCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "gate").touch()
        quick = job("quick", "tests.support.actors:Talker", kwargs={"gate": str(tmp_path / "gate")}, entry="run")
        await (await cluster.client.submit(quick)).finished(timeout=30)
        monkeypatch.setenv("CALLBOARD_RUN_DIR", str(tmp_path))
        shown = await verb(cluster, "job", "logs", "quick", "--tail", "1")
        assert (shown.exit_code, shown.stdout) == (0, "goodbye\n"), shown.output
        monkeypatch.setenv("CALLBOARD_RUN_DIR", str(tmp_path / "elsewhere"))
        lost = await verb(cluster, "job", "logs", "quick")
        assert lost.exit_code == 1
        assert "job get" in lost.stderr

    async def test_a_pool_is_changed_and_ended(self, cluster: RealCluster) -> None:
        shown = await verb(cluster, "pool", "set", "rlhf", "nominal.gpu=2", "labels.team=a", "-o", "json")
        assert shown.exit_code == 0, shown.output
        spec = json.loads(shown.stdout)["spec"]
        assert (spec["nominal"]["cpu_milli"], spec["nominal"]["gpu_milli"], spec["labels"]) == (
            8000,
            2000,
            {"team": "a"},
        )
        stale = await verb(cluster, "pool", "set", "rlhf", "nominal.gpu=1", "--etag", "1")
        assert stale.exit_code == 1
        assert "changed since it was read" in stale.stderr
        await (await cluster.client.submit(job("holds"))).running(timeout=30)
        refused = await verb(cluster, "pool", "delete", "rlhf")
        assert (refused.exit_code, "--force" in refused.stderr) == (1, True)
        assert (await verb(cluster, "pool", "delete", "rlhf", "--force")).exit_code == 0
        await (await cluster.client.get_job("holds")).finished(timeout=30)
        with pytest.raises(NotFound):
            await cluster.client.get_pool("rlhf")

    async def test_a_node_is_drained_and_taken_back(self, cluster: RealCluster) -> None:
        handle = await cluster.client.submit(job("moves"))
        await handle.running(timeout=30)
        assert (await verb(cluster, "node", "drain", "n0", "--within", "5s")).exit_code == 0
        await handle.until(lambda found: found.state == job_pb2.JobState.JOB_STATE_PENDING, "yield", 30)
        assert "DRAINING" in (await verb(cluster, "node", "get", "n0")).stdout
        assert (await verb(cluster, "node", "uncordon", "n0")).exit_code == 0
        await handle.running(timeout=30)
        assert handle.job.attempt == 2

    async def test_an_elastic_component_is_scaled(self, cluster: RealCluster) -> None:
        elastic = job("grows", resources={"cpu": 1}, min_workers=1, max_workers=3)
        handle = await cluster.client.submit(elastic)
        await handle.running(timeout=30)
        for count in (1, 2):
            shown = await verb(cluster, "job", "scale", "grows", "w", str(count))
            assert shown.exit_code == 0, shown.output
            await handle.until(partial(has_ready, count), f"{count} workers", 30)
        with pytest.raises(CallboardError):
            await handle.scale("w", 9)

    async def test_a_session_owned_job_lives_as_long_as_its_client(self, cluster: RealCluster) -> None:
        owner = Client(cluster.address)
        spec = job("owned") | {"owner": {"session": {"lease": "1s"}}}
        uid = (await owner.submit(spec)).job.uid
        handle = await cluster.client.get_job(uid)
        await handle.running(timeout=30)
        with pytest.raises(TimeoutError):
            await handle.finished(timeout=2.5)  # More than two leases.
        await owner.close()
        ended = await handle.finished(timeout=30)
        assert ended.state == job_pb2.JobState.JOB_STATE_CANCELLED


def has_ready(count: int, found: job_pb2.Job) -> bool:
    return count == sum(worker.state == job_pb2.WorkerState.WORKER_STATE_READY for worker in found.workers)


def test_mu_07_two_controllers_and_no_address_is_an_error_that_lists_them(machine: Machine) -> None:
    """Also: a controller on port 0 registers the port it got."""
    state = machine.run_dir.parent
    first = machine.start("controller", "--listen", "127.0.0.1:0", "--state-dir", str(state / "a"))
    wait_for_line(first, "listening")
    (record,) = machine.clusters()
    assert not record.controller.endswith(":0")
    assert record.controller in machine.run("status").stdout
    port = free_port()
    second = machine.start("controller", "--listen", f"127.0.0.1:{port}", "--state-dir", str(state / "b"))
    wait_for_line(second, "listening")
    shown = machine.run("job", "list")
    assert shown.returncode == 2
    assert record.controller in shown.stderr
    assert f"127.0.0.1:{port}" in shown.stderr
    for controller in (first, second):
        controller.send_signal(signal.SIGTERM)
        controller.communicate(timeout=20)
    assert machine.clusters() == []
