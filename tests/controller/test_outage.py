"""A disk that is slow or full: what is in memory is still told, what must be on disk waits or is refused (R7, R10)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from callboard.controller.journal.codec import Decision
from callboard.controller.journal.journal import SqliteJournal
from callboard.controller.journal.state_dir import StoreFailed
from callboard.controller.loop import driver as driver_module
from callboard.controller.loop.inbox import Inbox
from callboard.controller.server import Controller
from callboard.controller.sessions import session
from callboard.controller.sessions.session import MOST_UNDECIDED
from callboard.scheduler.records.job_records import Change, EventRecord
from callboard.v1 import agent_pb2, event_pb2, job_pb2, scheduler_pb2
from callboard.wire.errors import parse_error
from callboard.wire.refusals import ErrorReason
from tests.controller.support import Api, job, pool, refusal_of
from tests.support.fake_agent import FakeAgent


class Disk:
    """The journal's disk in a test's hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = asyncio.Event()
        self.free.set()
        self.busy = asyncio.Event()
        self.full = False
        commit = SqliteJournal.commit
        disk = self

        async def held(
            journal: SqliteJournal,
            changes: Sequence[Change],
            events: Sequence[EventRecord],
            decisions: Sequence[Decision],
        ) -> None:
            disk.busy.set()
            await disk.free.wait()
            if disk.full:
                raise StoreFailed(journal.where, "can't be written, the disk is full", "Free some space.")
            await commit(journal, changes, events, decisions)

        monkeypatch.setattr(SqliteJournal, "commit", held)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(driver_module, "RETRY_FIRST_S", 0.01)
    return Disk(monkeypatch)


async def health_of(api: Api, wanted: int) -> None:
    """Waits until the health service says ``wanted``."""
    stub: Any = health_pb2_grpc.HealthStub(api.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    async for response in watch:
        if response.status == wanted:
            break
    watch.cancel()


async def test_r7_a_slow_disk_holds_up_what_must_be_on_it_and_nothing_else(
    disk: Disk, controller: Controller, api: Api
) -> None:
    await api.pools.CreatePool(pool())
    async with FakeAgent(controller.address) as agent:
        await api.submit(job("a"))
        await api.until_job("a", "RUNNING")
        watch = api.events.Watch(event_pb2.WatchRequest())
        await watch.read()
        disk.free.clear()
        disk.busy.clear()
        submitted = asyncio.ensure_future(api.submit(job("b")))
        await disk.busy.wait()
        for _ in range(20):
            stats = (await api.scheduler.GetStats(scheduler_pb2.GetStatsRequest())).stats
            assert sum(stats.jobs.values()) == 2
            await agent.heartbeat()
        read = asyncio.ensure_future(api.job("b"))
        told = asyncio.ensure_future(watch.read())
        done, _ = await asyncio.wait({submitted, read, told}, timeout=0.05)
        assert not done
        assert not [command for command in agent.commands if "g2" in command.command_id]
        disk.free.set()
        assert (await submitted).name == "jobs/b"
        assert (await read).name == "jobs/b"
        assert (await told).events
        watch.cancel()


async def test_r7_an_agent_that_sends_without_end_is_read_at_a_bounded_rate(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "MESSAGES_S", 100)
    monkeypatch.setattr(session, "PATIENCE_S", 0.5)
    loop = asyncio.get_running_loop()
    async with FakeAgent(controller.address, "n1") as flooding, FakeAgent(controller.address, "n2") as calm:
        began = loop.time()
        for number in range(1_000, 1_150):
            await flooding.say(heartbeat=agent_pb2.Heartbeat(sequence=number))
        await calm.heartbeat()
        others = loop.time() - began
        await flooding.until(lambda: 1_149 in flooding.replies)
        assert others < 0.9 <= loop.time() - began, "a hundred beyond the fifty at once"


async def test_r7_a_flood_of_reports_waits_at_its_agent_and_calls_come_between(
    disk: Disk, controller: Controller, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, most, total = 0, 0, 0
    put = Inbox.put_patiently

    async def counted(inbox: Inbox, make: Any, then: Any, source: str) -> Any:
        nonlocal waiting, most, total
        answer = await put(inbox, make, then, source)
        waiting, total = waiting + 1, total + 1
        most = max(most, waiting)

        def decided(_: object) -> None:
            nonlocal waiting
            waiting -= 1

        answer.add_done_callback(decided)
        return answer

    async with FakeAgent(controller.address) as agent:
        await api.pools.CreatePool(pool())
        monkeypatch.setattr(Inbox, "put_patiently", counted)
        report = agent_pb2.Report()
        report.worker_exited.worker.job_id, report.worker_exited.generation = "nobody", 7
        disk.free.clear()
        disk.busy.clear()
        submitted = asyncio.ensure_future(api.submit(job("holds")))
        await disk.busy.wait()  # Nothing is decided until the disk is free.
        ids = []
        for _ in range(5 * MOST_UNDECIDED):
            report.ClearField("report_id")
            ids.append(await agent.report(report))
        health: Any = health_pb2_grpc.HealthStub(api.channel)
        while waiting < MOST_UNDECIDED:
            await health.Check(health_pb2.HealthCheckRequest())
        for _ in range(50):  # Turns in which more would come.
            await health.Check(health_pb2.HealthCheckRequest())
        between = asyncio.ensure_future(api.submit(job("between")))
        disk.free.set()
        await submitted
        await between
        await agent.until(lambda: set(ids) <= set(agent.acked))
    assert total >= 5 * MOST_UNDECIDED
    assert most <= MOST_UNDECIDED


async def test_r10_a_full_disk_refuses_everything_and_goes_on_from_the_last_good_state(
    disk: Disk, controller: Controller, api: Api
) -> None:
    await api.pools.CreatePool(pool())
    agent = FakeAgent(controller.address)
    await agent.join()
    await api.submit(job("kept"))
    await api.until_job("kept", "RUNNING")
    await health_of(api, health_pb2.HealthCheckResponse.SERVING)
    watch = api.events.Watch(event_pb2.WatchRequest())
    await watch.read()

    disk.full = True
    error = await refusal_of(api.submit(job("lost")))
    assert (error.code, error.reason) == ("UNAVAILABLE", ErrorReason.STORE_FAILED)
    assert "the disk is full" in error.message
    assert await agent.over() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await watch.read()
    assert parse_error(caught.value).reason is ErrorReason.STORE_FAILED
    await health_of(api, health_pb2.HealthCheckResponse.NOT_SERVING)
    for call in (
        api.scheduler.GetStats(scheduler_pb2.GetStatsRequest()),
        api.job("kept"),
        api.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/kept")),
    ):
        assert (await refusal_of(call)).reason is ErrorReason.STORE_FAILED
    with pytest.raises(grpc.aio.AioRpcError):
        await agent.join()

    disk.full = False
    await health_of(api, health_pb2.HealthCheckResponse.SERVING)
    found = await api.jobs.ListJobs(job_pb2.ListJobsRequest())
    assert [one.name for one in found.jobs] == ["jobs/kept"]
    welcome = await agent.join()
    assert welcome.term == 2
    assert [ref.generation for ref in welcome.keep] == list(agent.workers)
    await api.submit(job("new"))
    await api.until_job("new", "RUNNING")
    log = (await api.events.ListEvents(event_pb2.ListEventsRequest(page_size=1000))).events
    assert [event.revision for event in log] == list(range(1, len(log) + 1))
    await agent.cut()


async def test_a_clean_stop_during_an_outage_ends(disk: Disk, controller: Controller, api: Api) -> None:
    disk.full = True
    assert (await refusal_of(api.pools.CreatePool(pool()))).reason is ErrorReason.STORE_FAILED
    # The fixture stops the controller now; the test is that this returns.
