"""Does the SDK work without an event loop of one's own? One loop in the background, for every thread (GC-07)."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from callboard.client.background import background_loop
from callboard.client.calls import methods
from callboard.client.client import Client
from callboard.client.errors import WaitTimeout
from callboard.client.jobs import JobHandle
from callboard.client.sync import SyncClient, SyncJobHandle
from callboard.v1.event_pb2 import Event, WatchRequest, WatchResponse
from callboard.v1.job_pb2 import GetJobResponse, Job, JobSpec, JobState, ScaleJobRequest, ScaleJobResponse
from callboard.v1.scheduler_pb2 import GetStatsResponse, Stats
from callboard.wire.refusals import NotFound
from tests.support.fake_api import FakeApi, ThreadedApi


@pytest.fixture
def threaded() -> Iterator[FakeApi]:
    """A controller beside a test without a loop."""
    with ThreadedApi() as fake:
        fake.on(methods.GET_STATS, GetStatsResponse(stats=Stats(uptime_ms=5)))
        yield fake


def public(kind: type) -> dict[str, Any]:
    return {name: member for name, member in inspect.getmembers(kind) if not name.startswith("_")}


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(("blocking", "loop"), [(SyncClient, Client), (SyncJobHandle, JobHandle)])
def test_every_method_is_there_with_the_same_arguments(blocking: type, loop: type) -> None:
    theirs, ours = public(loop), public(blocking)
    assert set(theirs) - {"target"} <= set(ours)
    for name, member in theirs.items():
        if inspect.isfunction(member):
            assert parameters(ours[name]) == parameters(member), name
            assert not inspect.iscoroutinefunction(ours[name]), name
            assert ours[name].__doc__, name
            assert "await " not in ours[name].__doc__, name
            returns = str(inspect.signature(ours[name]).return_annotation)
            assert not returns.startswith(("Async", "JobHandle", "Coroutine")), name


def test_calls_return_what_the_client_returns_and_raise_what_it_raises(threaded: FakeApi) -> None:
    def unknown(_: Any) -> Any:
        raise NotFound("there is no job x")

    threaded.on(methods.GET_JOB, unknown)
    with SyncClient(threaded.address, retry=0) as client:
        assert client.stats().uptime_ms == 5
        assert client.reachable(5)
        with pytest.raises(NotFound, match="no job x"):
            client.get_job("x")


def test_a_job_is_steered_and_waited_for(threaded: FakeApi) -> None:
    pending = Job(uid="j1", spec=JobSpec(name="train"), revision=3, state=JobState.JOB_STATE_PENDING)
    threaded.on(methods.GET_JOB, GetJobResponse(job=pending))
    threaded.on(methods.SCALE_JOB, ScaleJobResponse(job=pending))

    async def nothing(_: WatchRequest) -> AsyncIterator[WatchResponse]:
        await asyncio.Event().wait()
        yield WatchResponse()

    threaded.on(methods.WATCH, nothing)
    with SyncClient(threaded.address) as client:
        job = client.get_job("train")
        assert (job.name, job.state, job.workers()) == ("train", "PENDING", [])
        job.scale("rollout", 3)
        with pytest.raises(WaitTimeout):
            job.running(timeout=0.05)
    assert threaded.seen(ScaleJobRequest)[0].workers == 3


def test_events_are_iterated_and_the_stream_ends_with_the_loop(threaded: FakeApi) -> None:
    async def watch(request: WatchRequest) -> AsyncIterator[WatchResponse]:
        for revision in itertools.count(request.start_revision):
            yield WatchResponse(revision=revision, events=[Event(revision=revision)])

    threaded.on(methods.WATCH, watch)
    with SyncClient(threaded.address) as client:
        assert [event.revision for event in itertools.islice(client.watch(start_revision=7), 3)] == [7, 8, 9]


def test_gc_07_threads_share_one_loop_and_one_client(threaded: FakeApi) -> None:
    before = threading.active_count()
    with SyncClient(threaded.address) as client, ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: client.stats(), range(600)))

        def own(_: int) -> int:
            with SyncClient(threaded.address) as another:
                return another.stats().uptime_ms

        assert set(pool.map(own, range(60))) == {5}
        assert threading.active_count() <= before + 6 + 1


def test_gc_07_several_threads_make_no_noise(threaded: FakeApi) -> None:
    """In a process of its own, whose whole output is looked at."""
    program = f"""
import asyncio, threading
from callboard import Client, SyncClient
def calls():
    with SyncClient({threaded.address!r}) as client:
        for _ in range(250):
            client.stats()
threads = [threading.Thread(target=calls) for _ in range(4)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
async def notebook():
    with SyncClient({threaded.address!r}) as client:
        return client.stats().uptime_ms
print(asyncio.run(notebook()))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("5\n", "", 0)


async def test_it_works_where_a_loop_runs_already(threaded: FakeApi) -> None:
    with SyncClient(threaded.address) as client:
        assert client.stats().uptime_ms == 5


def test_its_own_loop_refuses_to_wait_for_itself(threaded: FakeApi) -> None:
    async def inside() -> None:
        SyncClient(threaded.address)

    with pytest.raises(RuntimeError, match="inside its own event loop"):
        background_loop().run(inside())
