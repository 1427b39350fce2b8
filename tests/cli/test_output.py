"""Is what workers printed read from anywhere, in every attempt, and is it said what can't be read?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from callboard.client.calls.watching import MISSING, LogLine
from callboard.client.errors import JobEnded
from callboard.client.jobs import JobHandle
from callboard.client.sync import SyncClient
from callboard.security.dialing import open_channel
from callboard.v1.job_pb2 import ReadJobOutputRequest
from callboard.v1.job_pb2_grpc import JobServiceStub
from callboard.wire.refusals import NotFound, WrongState
from tests.cli.cluster import RealCluster, job, real_cluster, verb

ACTORS = "tests.support.actors:"
ONCE: dict[str, Any] = {"restart": {"max_restarts": 1, "backoff_base": "10ms"}}


def fails(name: str, *, attempts: int = 1, workers: int = 1, gpu: int = 1, **fields: Any) -> dict[str, Any]:
    component = {"kwargs": {"attempts": attempts}, "workers": workers, "resources": {"cpu": 1, "gpu": gpu}}
    return {**job(name, f"{ACTORS}Fails", entry="run", **component), **fields}


async def texts(lines: AsyncIterator[LogLine]) -> list[str]:
    return [f"{line.stream}: {line.text}" async for line in lines]


class TestReading:
    @pytest.mark.timeout(300)
    async def test_ft_a1_every_attempt_is_read_after_the_end_by_every_client(self, shared: RealCluster) -> None:
        handle = await shared.client.submit(fails("flaky", attempts=2, **ONCE))
        following = asyncio.create_task(texts(handle.logs(follow=True)))
        done = await handle.finished(timeout=90)
        assert (handle.state, done.attempt) == ("SUCCEEDED", 2)
        said = {number: {f"stdout: attempt {number}, rank 0", f"stderr: trouble {number}"} for number in (1, 2)}
        assert set(await following) == said[1] | said[2], "a follower goes on with the next attempt"
        for attempt in (1, 2):
            assert set(await texts(handle.logs(attempt=attempt))) == said[attempt]
        assert set(await texts(handle.logs())) == said[2], "the newest attempt, unless another is named"
        one = await verb(shared, "job", "logs", "flaky", "--attempt", "1", "--since", "1h", "--tail", "1")
        assert len(one.stdout.splitlines()) == 1
        shown = await verb(shared, "job", "logs", "flaky", "--attempt", "1", "--since", "1h")
        assert set(shown.stdout.splitlines()) == {"attempt 1, rank 0", "trouble 1"}, shown.output

        def as_a_script() -> list[str]:
            with SyncClient(shared.address) as client:
                return [line.text for line in client.get_job("flaky").logs(component="w", rank=0, attempt=1)]

        assert set(await asyncio.to_thread(as_a_script)) == {"attempt 1, rank 0", "trouble 1"}
        for wrong in ({"attempt": 3}, {"rank": 1}, {"component": "x"}):
            with pytest.raises(NotFound) as refused:
                await texts(handle.logs(**wrong))
            assert str(next(iter(wrong.values()))) in str(refused.value)

    @pytest.mark.timeout(300)
    async def test_ft_a1_a_failed_constructor_shows_why_in_logs_and_in_the_job(self, shared: RealCluster) -> None:
        spec = job("engine", f"{ACTORS}ChildFails", args=["hunter22"], secret_env={"ENGINE_TOKEN": "hunter22"})
        handle = await shared.client.submit(spec)
        failed = await handle.finished(timeout=90)
        assert handle.state == "FAILED"
        assert "see root cause above" in failed.state_reason
        assert "ValueError: no such device" in failed.stderr_tail
        assert "hunter22" not in failed.stderr_tail
        for what in ("get", "explain"):
            shown = await verb(shared, "job", what, "engine")
            assert "ValueError: no such device" in shown.stdout, what
        with pytest.raises(JobEnded) as ended:
            await handle.running()
        assert "ValueError: no such device" in ended.value.stderr_tail
        logs = await verb(shared, "job", "logs", "engine")
        assert (logs.exit_code, "ValueError: no such device" in logs.stdout) == (0, True), logs.output

    async def test_a_job_that_has_not_started_says_so_and_a_follower_waits(self, shared: RealCluster) -> None:
        blocking = await shared.client.submit(job("blocking"))
        await blocking.running(timeout=90)
        waiting = await shared.client.submit(fails("waiting", gpu=2))
        with pytest.raises(WrongState, match="has not started yet"):
            await texts(waiting.logs())
        following = asyncio.create_task(texts(waiting.logs(follow=True)))
        await blocking.cancel()
        await waiting.finished(timeout=90)
        assert set(await following) == {"stdout: attempt 1, rank 0", "stderr: trouble 1"}


class TestMissing:
    @pytest.mark.timeout(300)
    async def test_ft_a1_a_node_that_left_is_named_and_the_rest_is_shown(self, bare: RealCluster) -> None:
        for node in ("n0", "n1"):
            await bare.add_node(node)
        await bare.client.ensure_pool("rlhf", nominal={"cpu": 8})
        handle = await bare.client.submit(fails("both", workers=2, gpu=2))
        await handle.finished(timeout=90)
        lines = [line async for line in handle.logs()]
        assert {(line.rank, line.stream) for line in lines} == {(r, s) for r in (0, 1) for s in ("stdout", "stderr")}
        left = next(line.node for line in lines if line.rank == 1)
        await bare.end_node(left)
        await until_state(bare, left, "LEFT")
        lines = [line async for line in handle.logs()]
        assert {line.rank for line in lines if line.stream != MISSING} == {0}
        (missing,) = (line for line in lines if line.stream == MISSING)
        assert missing.node == left
        assert f"{left} has LEFT" in missing.text
        # It comes back, without what it kept.
        await bare.add_node(left)
        (missing,) = [line async for line in handle.logs(rank=1)]
        assert (missing.rank, missing.stream) == (1, MISSING)
        assert "w/1" in missing.text
        assert set(await texts(handle.logs(rank=1, follow=True))) == set(), "a follower of an ended job ends"

    @pytest.mark.timeout(300)
    async def test_ft_a1_output_goes_with_the_job(self, tmp_path: Path) -> None:
        async with real_cluster(tmp_path, "n0", ended_jobs=1) as cluster:
            await cluster.client.ensure_pool("rlhf", nominal={"cpu": 8})
            jobs: list[JobHandle] = []
            for name in ("first", "second"):
                jobs.append(await cluster.client.submit(fails(name)))
                await jobs[-1].finished(timeout=90)
            async for event in cluster.client.watch(start_revision=1, types=["job.forgotten"]):
                assert event.facts["uid"] == jobs[0].job.uid
                break
            folder = tmp_path / "agents" / "n0" / "output"
            while (folder / jobs[0].job.uid).exists():  # noqa: ASYNC110 - a folder tells nobody
                await asyncio.sleep(0.05)
            assert [path.name for path in folder.iterdir()] == [jobs[1].job.uid]
            with pytest.raises(NotFound) as forgotten:
                await texts(jobs[0].logs())
            assert "is forgotten after" in str(forgotten.value)


class TestBackpressure:
    @pytest.mark.timeout(300)
    async def test_ft_a1_a_reader_that_stops_reading_delays_nobody(self, shared: RealCluster) -> None:
        handle = await shared.client.submit(job("loud", f"{ACTORS}Printer", kwargs={"mebibytes": 32}, entry="loud"))
        await handle.finished(timeout=90)
        async with open_channel(shared.address) as channel:
            request = ReadJobOutputRequest(name=f"jobs/{handle.job.uid}")
            stuck = [JobServiceStub(channel).ReadJobOutput(request) for _ in range(8)]
            for call in stuck:
                await call.read()
            last = await texts(handle.logs(tail=1))
            assert last == [f"stdout: {32 * 16 * 1024 - 1:062d} "]
            count = 0
            async with aclosing(handle.logs()) as lines:
                async for _ in lines:
                    count += 1
            assert count == 32 * 16 * 1024
            assert (await shared.client.stats()).revision
            for call in stuck:
                call.cancel()


async def until_state(cluster: RealCluster, node: str, state: str) -> None:
    async for event in cluster.client.watch(start_revision=1, types=["node."]):
        if (event.subject, event.state) == (f"nodes/{node}", state):
            return
