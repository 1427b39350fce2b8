"""How does a program wait for its job? By events, never by asking again and again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from callboard.client.calls import methods
from callboard.client.client import Client
from callboard.client.errors import JobEnded, NoResult, WaitTimeout
from callboard.client.jobs import JobHandle
from callboard.model.faults import InvalidInput
from callboard.v1.common_pb2 import Allocation, DeviceShare, Reason, WorkerKey
from callboard.v1.event_pb2 import Event, ListEventsResponse, WatchRequest, WatchResponse
from callboard.v1.job_pb2 import (
    CancelJobResponse,
    ComponentSpec,
    GetJobRequest,
    GetJobResponse,
    Job,
    JobSpec,
    JobState,
    ListJobsRequest,
    ListJobsResponse,
    PreemptJobRequest,
    PreemptJobResponse,
    Worker,
    WorkerState,
)
from callboard.v1.node_pb2 import Node
from callboard.wire.enums import text_of
from callboard.wire.refusals import NotFound, RevisionCompacted, Unavailable
from tests.support.fake_api import FakeApi


class Board:
    """One job and its events, as a controller would have them."""

    def __init__(self, api: FakeApi) -> None:
        self.job = Job(name="jobs/train", uid="j1", spec=JobSpec(name="train"), revision=10)
        self.changed = asyncio.Condition()
        self.events: list[Event] = []
        self.streams = 0
        api.on(methods.GET_JOB, lambda _: GetJobResponse(job=self.job))
        api.on(methods.WATCH, self.watch)

    async def enter(self, state: JobState.ValueType, **fields: Any) -> None:
        async with self.changed:
            revision = self.job.revision + 1
            self.job = Job(
                name="jobs/train", uid="j1", spec=JobSpec(name="train"), revision=revision, state=state, **fields
            )
            self.events.append(Event(revision=revision, type="job.changed", subject="jobs/train"))
            self.changed.notify_all()

    async def watch(self, request: WatchRequest) -> AsyncIterator[WatchResponse]:
        self.streams += 1
        revision = request.start_revision
        while True:
            async with self.changed:
                while not self.events or self.events[-1].revision < revision:
                    await self.changed.wait()
                fresh = [event for event in self.events if event.revision >= revision]
            yield WatchResponse(revision=fresh[-1].revision, events=fresh)
            revision = fresh[-1].revision + 1


@pytest.fixture
def board(api: FakeApi) -> Board:
    return Board(api)


async def job_of(client: Client) -> JobHandle:
    return await client.get_job("train")


async def test_running_returns_when_every_worker_answers(board: Board, client: Client) -> None:
    job = await job_of(client)
    waiting = asyncio.create_task(job.running(20))
    await board.enter(JobState.JOB_STATE_STARTING)
    await board.enter(JobState.JOB_STATE_RUNNING)
    assert (await waiting).state == JobState.JOB_STATE_RUNNING
    assert job.state == "RUNNING"


async def test_pc_14_the_end_of_an_earlier_job_of_the_name_is_not_its_own(board: Board, client: Client) -> None:
    await board.enter(JobState.JOB_STATE_RUNNING)
    job = await job_of(client)

    def moved(uid: str, state: str) -> Event:
        revision = board.job.revision + len(board.events) + 1
        return Event(revision=revision, type="job.changed", subject="jobs/train", state=state, facts={"uid": uid})

    board.events += [moved("j0", "CANCELLED")]
    board.events += [moved("j1", "STOPPING")]
    board.events += [moved("j1", "SUCCEEDED")]
    assert [event.state async for event in job.events()] == ["STOPPING", "SUCCEEDED"]


async def test_a_job_that_runs_already_is_not_watched(board: Board, client: Client) -> None:
    await board.enter(JobState.JOB_STATE_RUNNING)
    await (await job_of(client)).running(20)
    assert board.streams == 0


async def test_waiting_asks_only_when_something_happened(api: FakeApi, board: Board, client: Client) -> None:
    job = await job_of(client)
    waiting = asyncio.create_task(job.running(20))
    async with board.changed:
        pass
    await board.enter(JobState.JOB_STATE_RUNNING)
    await waiting
    assert len(api.seen(GetJobRequest)) <= 1 + 1 + len(board.events)


async def test_a_job_that_succeeded_before_anybody_looked_did_run(board: Board, client: Client) -> None:
    job = await job_of(client)
    waiting = asyncio.create_task(job.running(20))
    await board.enter(JobState.JOB_STATE_SUCCEEDED)
    assert (await waiting).state == JobState.JOB_STATE_SUCCEEDED


async def test_a_job_that_fails_first_raises_with_reason_and_traceback(board: Board, client: Client) -> None:
    job = await job_of(client)
    waiting = asyncio.create_task(job.running(20))
    await board.enter(JobState.JOB_STATE_FAILED, state_reason="constructor raised", traceback="Traceback …")
    with pytest.raises(JobEnded) as caught:
        await waiting
    assert (caught.value.state, caught.value.reason) == ("FAILED", "constructor raised")
    assert caught.value.traceback == "Traceback …"


@pytest.mark.parametrize("unfit", [True, False])
def test_a_missing_result_has_the_remedy_of_its_cause(unfit: bool) -> None:
    """Nobody whose node is gone is told to return something smaller."""
    error = NoResult(job="train", missing=("w/0: why",), unfit=unfit)
    assert ("Return JSON" in str(error)) is ("Return JSON" in error.remedy) is unfit


async def test_finished_returns_a_failed_job_as_it_is(board: Board, client: Client) -> None:
    job = await job_of(client)
    await board.enter(JobState.JOB_STATE_FAILED)
    assert (await job.finished(20)).state == JobState.JOB_STATE_FAILED


async def test_a_timeout_says_what_the_job_waits_for(board: Board, client: Client) -> None:
    board.job.state = JobState.JOB_STATE_PENDING
    board.job.waiting_for.append(Reason(message="pool rlhf: 5 of 6 CPU used, asks 2"))
    job = await job_of(client)
    with pytest.raises(WaitTimeout, match="5 of 6 CPU used") as caught:
        await job.running(0.2)
    assert caught.value.state == "PENDING"


async def test_a_log_that_was_compacted_meanwhile_is_read_afresh(api: FakeApi, board: Board, client: Client) -> None:
    first = True

    async def watch(request: WatchRequest) -> AsyncIterator[WatchResponse]:
        nonlocal first
        if first:
            first = False
            board.job.state = JobState.JOB_STATE_RUNNING
            raise RevisionCompacted("revision 11 is gone")
        async for response in board.watch(request):
            yield response

    api.on(methods.WATCH, watch)
    await (await job_of(client)).running(20)


async def test_a_handle_stays_with_its_job_when_the_name_is_used_again(
    api: FakeApi, board: Board, client: Client
) -> None:
    job = await job_of(client)
    await job.refresh()
    assert [request.name for request in api.seen(GetJobRequest)] == ["jobs/train", "jobs/j1"]


@pytest.mark.usefixtures("board")
async def test_what_no_message_carries_is_refused_as_input(client: Client) -> None:
    job = await job_of(client)
    for asked in (
        job.cancel(reason="\ud800"),
        job.scale("a", 10**12),
        anext(job.logs(rank=10**12)),
        job.exec(["true"], rank=10**12),
        client.report("train", {"loss": 10**400}),
        client.get_job("\ud800"),
    ):
        with pytest.raises(InvalidInput, match="no message can carry a value of the call"):
            await asked


async def test_cancel_and_preempt_renew_what_is_known(api: FakeApi, board: Board, client: Client) -> None:
    job = await job_of(client)
    stopping = Job(uid="j1", spec=JobSpec(name="train"), state=JobState.JOB_STATE_STOPPING)
    api.on(methods.CANCEL_JOB, CancelJobResponse(job=stopping))
    await job.cancel("enough")
    assert job.state == "STOPPING"
    api.on(methods.PREEMPT_JOB, PreemptJobResponse(job=stopping))
    await job.preempt(for_job="other")
    assert api.seen(PreemptJobRequest)[0].for_job == "jobs/other"


async def test_workers_come_in_the_order_of_the_spec_and_of_their_ranks(client: Client, api: FakeApi) -> None:
    def worker(component: str, rank: int) -> Worker:
        return Worker(
            key=WorkerKey(job_id="j1", component=component, rank=rank),
            generation=4,
            actor_name=f"cb/j1/{component}/{rank}/g4",
            allocation=Allocation(node_id="n1", devices=[DeviceShare(index=1, id="1", milli=1000)]),
        )

    spec = JobSpec(name="train", components=[ComponentSpec(name="train"), ComponentSpec(name="env")])
    job = Job(uid="j1", spec=spec, workers=[worker("env", 0), worker("train", 1), worker("train", 0)])
    api.on(methods.GET_JOB, GetJobResponse(job=job))
    handle = await client.get_job("train")
    assert [(each.component, each.rank) for each in handle.workers()] == [("train", 0), ("train", 1), ("env", 0)]
    assert [each.devices for each in handle.workers("env")] == [("1",)]
    assert [each.rank for each in handle.workers("train", type=dict)] == [0, 1]
    with pytest.raises(InvalidInput, match=r"job train has no component trian; did you mean train\?"):
        handle.workers("trian")
    with pytest.raises(InvalidInput, match="there are env, train"):
        handle.workers("reward", type=dict)


async def test_states_are_texts_in_both_directions(client: Client, api: FakeApi) -> None:
    job = Job(uid="j1", state=JobState.JOB_STATE_PENDING, workers=[Worker(state=WorkerState.WORKER_STATE_READY)])
    api.on(methods.LIST_JOBS, ListJobsResponse(jobs=[job]))
    (found,) = await client.list_jobs(states=["PENDING", "running"])
    assert (text_of(found), text_of(found.workers[0])) == ("PENDING", "READY")
    assert text_of(Node()) == ""
    found.state = 99  # type: ignore[assignment]  # of a newer controller
    assert text_of(found) == "99"
    with pytest.raises(ValueError, match=r"Worker has no enum 'status'; it has .*state"):
        text_of(found.workers[0], "status")
    with pytest.raises(InvalidInput) as refused:
        await client.list_jobs(states=["RUNING", "PENDING", "GONE"])
    assert [fault.field for fault in refused.value.faults] == ["states[0]", "states[2]"]
    assert "did you mean RUNNING?" in str(refused.value)
    assert len(api.seen(ListJobsRequest)) == 1


async def test_a_watch_goes_on_where_a_stream_ended_without_gap_or_repeat(api: FakeApi, client: Client) -> None:
    streams: list[int] = []

    async def watch(request: WatchRequest) -> AsyncIterator[WatchResponse]:
        streams.append(request.start_revision)
        first = request.start_revision
        yield WatchResponse(revision=first, events=[Event(revision=first)])
        if len(streams) == 2:
            raise Unavailable("stopping")
        # The others end silently, as streams do when keepalive breaks them.

    api.on(methods.WATCH, watch)
    seen = []
    async for event in client.watch(start_revision=5):
        seen.append(event.revision)
        if len(seen) == 4:
            break
    assert seen == [5, 6, 7, 8]
    assert streams == [5, 6, 7, 8]


async def test_a_watch_from_now_starts_at_a_revision_that_was_asked_for(api: FakeApi, client: Client) -> None:
    api.on(methods.LIST_EVENTS, ListEventsResponse(revision=41))

    async def watch(request: WatchRequest) -> AsyncIterator[WatchResponse]:
        yield WatchResponse(revision=request.start_revision, events=[Event(revision=request.start_revision)])

    api.on(methods.WATCH, watch)
    async for event in client.watch():
        assert event.revision == 42
        break


async def test_a_compacted_log_ends_a_watch_with_a_clear_error(api: FakeApi, client: Client) -> None:
    nothing: list[WatchResponse] = []

    async def watch(_: WatchRequest) -> AsyncIterator[WatchResponse]:
        for response in nothing:
            yield response
        raise RevisionCompacted("the log starts at 90")

    api.on(methods.WATCH, watch)
    with pytest.raises(RevisionCompacted, match="starts at 90"):
        async for _ in client.watch(start_revision=3):
            pass


class TestAliases:
    async def test_pc_14_an_alias_leads_to_the_newest_live_job_and_never_to_one_that_ended(self, api: FakeApi) -> None:
        def job(uid: str, *, alias: str) -> Job:
            other = ComponentSpec(name="env")
            named = ComponentSpec(name="actor", ray_options={"name": alias})
            workers = [
                Worker(key=WorkerKey(job_id=uid, component=component, rank=rank), generation=rank + 1)
                for component, rank in (("env", 0), ("actor", 1), ("actor", 0))
            ]
            return Job(name=f"jobs/{uid}", uid=uid, spec=JobSpec(name=uid, components=[other, named]), workers=workers)

        asked: list[list[int]] = []

        def listed(request: ListJobsRequest) -> ListJobsResponse:
            asked.append(list(request.states))
            return ListJobsResponse(jobs=[job("j2", alias="trainer"), job("j1", alias="trainer")])

        api.on(methods.LIST_JOBS, listed)
        async with Client(api.address) as client:
            found = await client.lookup("trainer")
            assert [(handle.uid, handle.component, handle.rank) for handle in found] == [
                ("j2", "actor", 0),
                ("j2", "actor", 1),
            ]
            assert JobState.JOB_STATE_SUCCEEDED not in asked[0]
            with pytest.raises(NotFound, match="alias nobody"):
                await client.lookup("nobody")
