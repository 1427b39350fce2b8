"""How does a call reach the controller?"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from callboard.client.calls import methods
from callboard.client.calls.methods import Method
from callboard.client.client import Client
from callboard.client.errors import Unreachable
from callboard.model.faults import Fault, InvalidInput
from callboard.security import dialing
from callboard.v1.common_pb2 import OUTPUT_STREAM_TIMINGS, OutputChunk
from callboard.v1.event_pb2 import Event, ListEventsRequest, WatchRequest, WatchResponse
from callboard.v1.job_pb2 import (
    GetJobResponse,
    Job,
    JobSpec,
    ListJobsRequest,
    ListJobsResponse,
    PreemptJobRequest,
    PreemptJobResponse,
    ReadJobOutputRequest,
    ReadJobOutputResponse,
    SubmitJobRequest,
    SubmitJobResponse,
)
from callboard.v1.pool_pb2 import CreatePoolRequest, CreatePoolResponse, Pool, UpdatePoolResponse
from callboard.v1.scheduler_pb2 import GetStatsRequest, GetStatsResponse, Stats
from callboard.wire.refusals import (
    CallboardError,
    DeadlineExceeded,
    ErrorReason,
    InvalidRequest,
    NotFound,
    NotLeader,
    QuotaExceeded,
    QuotaViolation,
    Unavailable,
    Unschedulable,
)
from tests.support.fake_api import FakeApi, Unsigned

JOB = {"name": "train", "pool": "rlhf", "components": [{"name": "actor", "actor": "pkg.module:Class"}]}


def fails_first(times: int, answer: Any) -> Any:
    """Unavailable so many times, then ``answer``."""
    left = iter(range(times))

    def respond(_: Any) -> Any:
        if next(left, None) is not None:
            raise Unavailable("stopping")
        return answer

    return respond


async def test_a_submit_is_repeated_with_the_same_request_id(api: FakeApi, client: Client) -> None:
    api.on(methods.SUBMIT_JOB, fails_first(2, SubmitJobResponse(job=Job(uid="j1", spec=JobSpec(name="train")))))
    job = await client.submit(JOB)
    assert job.name == "train"
    ids = [request.request_id for request in api.seen(SubmitJobRequest)]
    assert len(ids) == 3
    assert len(set(ids)) == 1
    assert ids[0]


async def test_two_submits_have_two_request_ids(api: FakeApi, client: Client) -> None:
    api.on(methods.SUBMIT_JOB, SubmitJobResponse(job=Job(uid="j1")))
    await client.submit(JOB)
    await client.submit(JOB)
    first, second = (request.request_id for request in api.seen(SubmitJobRequest))
    assert first != second


async def test_a_preempt_is_never_repeated(api: FakeApi, client: Client) -> None:
    api.on(methods.PREEMPT_JOB, fails_first(1, None))
    with pytest.raises(Unavailable):
        await client.call(methods.PREEMPT_JOB, PreemptJobRequest(name="jobs/a"))
    assert len(api.seen(PreemptJobRequest)) == 1


async def test_what_is_not_unavailable_is_not_repeated(api: FakeApi, client: Client) -> None:
    def refuse(_: Any) -> Any:
        raise NotFound("no job x")

    api.on(methods.GET_JOB, refuse)
    with pytest.raises(NotFound, match="no job x"):
        await client.get_job("x")
    assert len(api.requests) == 1


async def test_nobody_there_is_said_with_the_address() -> None:
    async with Client("127.0.0.1:1", retry=0.2) as client:
        with pytest.raises(Unreachable) as caught:
            await client.stats()
    assert caught.value.address == "127.0.0.1:1"


async def test_a_watch_goes_on_when_another_call_of_its_client_goes_to_another_controller(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialing, "CLOSE_S", 0.0)  # how long the streams of a connection that was replaced may go on
    leader = FakeApi()
    await leader.start()

    async def first(_: Any) -> AsyncIterator[WatchResponse]:
        yield WatchResponse(events=[Event(revision=1)])
        await asyncio.Event().wait()

    async def rest(request: WatchRequest) -> AsyncIterator[WatchResponse]:
        yield WatchResponse(events=[Event(revision=request.start_revision)])
        await asyncio.Event().wait()

    def refuse(_: Any) -> Any:
        raise NotLeader("a standby", metadata={"leader": leader.address})

    api.on(methods.WATCH, first)
    leader.on(methods.WATCH, rest)
    api.on(methods.CREATE_POOL, refuse)
    async with Client(f"{api.address},{leader.address}", timeout=10, retry=5) as client:
        events = client.watch(start_revision=1)
        assert (await anext(events)).revision == 1
        following = asyncio.ensure_future(anext(events))
        await client.create_pool({"name": "p"})
        assert (await following).revision == 2
    assert leader.seen(WatchRequest)[0].start_revision == 2
    await leader.stop()


async def test_whoever_waits_for_a_controller_goes_on_waiting_when_another_call_goes_to_the_next(api: FakeApi) -> None:
    channel = dialing.open_channel(f"127.0.0.1:1,{api.address}")
    waiting = asyncio.create_task(channel.channel_ready())
    await asyncio.sleep(0)  # it waits for the first
    assert channel.moved()
    await waiting
    assert channel.address == api.address
    await channel.close()


LOST = [
    (grpc.StatusCode.UNAVAILABLE, "Socket closed"),
    (grpc.StatusCode.CANCELLED, "CANCELLED"),
    (grpc.StatusCode.UNKNOWN, "Stream removed"),
    (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2"),
    (grpc.StatusCode.ABORTED, ""),
    (grpc.StatusCode.DATA_LOSS, ""),
]
"""What a torn connection, a GOAWAY, a reset stream or a proxy make of a call."""


def lost_first(code: grpc.StatusCode, details: str, answer: Any) -> Any:
    """Twice that status, as no controller sends it, then ``answer``."""
    left = iter(range(2))

    def respond(_: Any) -> Any:
        if next(left, None) is not None:
            raise Unsigned(code, details)
        return answer

    return respond


@pytest.mark.parametrize(("code", "details"), LOST)
async def test_ft_f1_a_status_that_no_controller_sends_is_a_lost_connection(
    api: FakeApi, client: Client, code: grpc.StatusCode, details: str
) -> None:
    api.on(methods.SUBMIT_JOB, lost_first(code, details, SubmitJobResponse(job=Job(uid="j1"))))
    await client.submit(JOB)
    assert len({request.request_id for request in api.seen(SubmitJobRequest)}) == 1
    api.on(methods.GET_STATS, lost_first(code, details, GetStatsResponse(stats=Stats(revision=7))))
    assert (await client.stats()).revision == 7
    api.on(methods.PREEMPT_JOB, lost_first(code, details, None))
    with pytest.raises(Unreachable) as caught:
        await client.call(methods.PREEMPT_JOB, PreemptJobRequest(name="jobs/a"))
    assert details in str(caught.value)
    assert len(api.seen(PreemptJobRequest)) == 1


ENDS = [*(Unsigned(code, details) for code, details in LOST), Unavailable("stopping", reason=ErrorReason.STOPPING)]


@pytest.mark.parametrize("end", ENDS, ids=str)
async def test_ft_f1_a_watch_survives_every_way_that_its_controller_goes(
    api: FakeApi, client: Client, end: Exception
) -> None:
    async def watch(request: WatchRequest) -> AsyncIterator[WatchResponse]:
        first = request.start_revision
        yield WatchResponse(revision=first, events=[Event(revision=first)])
        raise end

    api.on(methods.WATCH, watch)
    seen = client.watch(start_revision=1)
    assert [(await anext(seen)).revision for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("end", ENDS, ids=str)
async def test_ft_f1_output_survives_every_way_that_its_controller_goes(
    api: FakeApi, client: Client, end: Exception
) -> None:
    async def read(request: ReadJobOutputRequest) -> AsyncIterator[ReadJobOutputResponse]:
        offset = request.selection.after[0].offset if request.selection.after else 0
        if offset < 6:
            chunk = OutputChunk(component="w", stream=OUTPUT_STREAM_TIMINGS, offset=offset, data=b"1\n")
            yield ReadJobOutputResponse(chunk=chunk)
            raise end

    api.on(methods.GET_JOB, GetJobResponse(job=Job(uid="j1", spec=JobSpec(name="train"))))
    api.on(methods.READ_JOB_OUTPUT, read)
    job = await client.get_job("train")
    assert [line.text async for line in job.timings()] == ["1", "1", "1"]


@pytest.mark.parametrize("code", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED])
async def test_ft_f1_what_would_come_again_is_not_repeated(api: FakeApi, client: Client, code: grpc.StatusCode) -> None:
    api.on(methods.GET_STATS, lost_first(code, "no", GetStatsResponse()))
    with pytest.raises(CallboardError) as caught:
        await client.stats()
    assert (caught.value.error.code, len(api.requests)) == (code.name, 1)


async def test_ft_f1_a_removal_whose_answer_was_lost_is_done_when_nothing_is_left(api: FakeApi, client: Client) -> None:
    answers: list[Exception] = []

    def answer(_: Any) -> Any:
        raise answers.pop(0)

    removals: list[tuple[Method[..., Any, Any], Callable[[str], Awaitable[Any]]]] = [
        (methods.DELETE_POOL, client.delete_pool),
        (methods.DELETE_PLACEMENT_GROUP, client.delete_placement_group),
        (methods.REMOVE_NODE, client.remove_node),
    ]
    for method, remove in removals:
        api.on(method, answer)
        answers[:] = [Unsigned(grpc.StatusCode.UNKNOWN, "Stream removed"), NotFound("there is no such thing")]
        assert await remove("x") is None
        answers[:] = [NotFound("there is no such thing")]
        with pytest.raises(NotFound):
            await remove("x")


async def test_ft_f1_a_change_based_on_an_etag_is_not_repeated_and_any_other_is(api: FakeApi, client: Client) -> None:
    lost = (grpc.StatusCode.CANCELLED, "")
    api.on(methods.UPDATE_POOL, lost_first(*lost, UpdatePoolResponse(pool=Pool(name="pools/p"))))
    spec = {"name": "p", "nominal": {"cpu": 1}}
    with pytest.raises(Unreachable):
        await client.update_pool(spec, etag="e1")
    api.on(methods.UPDATE_POOL, lost_first(*lost, UpdatePoolResponse(pool=Pool(name="pools/p"))))
    assert (await client.update_pool(spec)).name == "pools/p"


async def test_ft_f1_what_the_stopping_controller_refused_is_tried_again_whatever_it_is(
    api: FakeApi, client: Client
) -> None:
    left = iter(range(2))

    def respond(_: Any) -> Any:
        if next(left, None) is not None:
            raise Unavailable("the controller is stopping", reason=ErrorReason.STOPPING)
        return PreemptJobResponse(job=Job(uid="j1"))

    api.on(methods.PREEMPT_JOB, respond)
    assert (await client.call(methods.PREEMPT_JOB, PreemptJobRequest(name="jobs/a"))).job.uid == "j1"


async def test_ft_f1_one_that_answered_before_is_waited_for_until_the_deadline(api: FakeApi) -> None:
    address = api.address
    async with Client(address, timeout=30, retry=0.001) as client:
        await client.stats()
        await api.stop()
        api.on(methods.GET_STATS, GetStatsResponse(stats=Stats(revision=7)))
        waiting = asyncio.create_task(client.stats())
        done, _ = await asyncio.wait({waiting}, timeout=0.5)
        assert not done
        await api.start(address)
        assert (await waiting).revision == 7


async def test_a_controller_that_comes_back_is_waited_for(api: FakeApi) -> None:
    address = api.address
    await api.stop()
    api.on(methods.GET_STATS, GetStatsResponse(stats=Stats(revision=7)))
    async with Client(address, retry=20) as client:
        waiting = asyncio.create_task(client.stats())
        await api.start(address)
        assert (await waiting).revision == 7


async def test_every_call_has_a_deadline(api: FakeApi) -> None:
    async def never(_: Any) -> Any:
        await asyncio.Event().wait()

    api.on(methods.GET_STATS, never)
    async with Client(api.address, timeout=0.2) as client:
        with pytest.raises(DeadlineExceeded):
            await client.stats()
    remaining = api.contexts[0].time_remaining()
    assert remaining is not None


async def test_proxy_variables_do_not_capture_the_call(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """GC-10."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    api.on(methods.GET_STATS, GetStatsResponse(stats=Stats(revision=3)))
    async with Client(api.address, retry=0) as client:
        assert (await client.stats()).revision == 3
    async with Client(api.address, retry=0, use_proxy=True) as through_proxy:
        with pytest.raises(Unreachable):
            await through_proxy.stats()


async def test_a_long_list_is_read_page_by_page(api: FakeApi, client: Client) -> None:
    """GC-09: five thousand ended jobs, never in one reply."""

    def page(request: ListJobsRequest) -> ListJobsResponse:
        first = int(request.page_token or 0)
        last = min(first + request.page_size, 5000)
        jobs = [Job(uid=f"j{number}") for number in range(first, last)]
        return ListJobsResponse(jobs=jobs, next_page_token=str(last) if last < 5000 else "")

    api.on(methods.LIST_JOBS, page)
    jobs = await client.list_jobs(pool="rlhf", states=["SUCCEEDED"])
    assert [job.uid for job in jobs] == [f"j{number}" for number in range(5000)]
    assert all(0 < request.page_size <= 1000 for request in api.seen(ListJobsRequest))


async def test_a_refusal_keeps_its_type_and_its_facts(api: FakeApi, client: Client) -> None:
    def quota(_: Any) -> Any:
        raise QuotaExceeded("too much", quota=(QuotaViolation("pools/rlhf", "asks 9 CPU of 6"),))

    api.on(methods.SUBMIT_JOB, quota)
    with pytest.raises(QuotaExceeded) as short:
        await client.submit(JOB)
    assert short.value.error.quota[0].subject == "pools/rlhf"

    def fields(_: Any) -> Any:
        raise InvalidRequest("bad", faults=(Fault("spec.name", "no slash"),))

    api.on(methods.SUBMIT_JOB, fields)
    with pytest.raises(InvalidRequest) as bad:
        await client.submit(JOB)
    assert bad.value.faults == (Fault("spec.name", "no slash"),)

    def nowhere(_: Any) -> Any:
        raise Unschedulable("no node has 9 GPUs")

    api.on(methods.SUBMIT_JOB, nowhere)
    with pytest.raises(Unschedulable):
        await client.submit(JOB)


@pytest.mark.parametrize("name", ["../../x", "a/b", "a\n", "x" * 300, "😀", "%s", "", "__proto__"])
async def test_a_strange_name_is_refused_before_anything_is_sent(api: FakeApi, client: Client, name: str) -> None:
    """SE-05."""
    with pytest.raises(InvalidInput):
        await client.submit(JOB | {"name": name})
    with pytest.raises(InvalidInput):
        await client.ensure_pool(name, nominal={"cpu": 1})
    assert api.requests == []


async def test_a_pool_in_human_units_arrives_in_exact_ones(api: FakeApi, client: Client) -> None:
    api.on(methods.CREATE_POOL, lambda request: CreatePoolResponse(pool=Pool(name=f"pools/{request.pool_id}")))
    pool = await client.ensure_pool("rlhf", nominal={"cpu": 6, "memory": "8GiB"}, pg_pool={"max_dynamic": 2})
    assert pool.name == "pools/rlhf"
    sent = api.seen(CreatePoolRequest)[0].spec
    assert sent.nominal.cpu_milli == 6000
    assert sent.nominal.memory_bytes == 8 << 30
    assert sent.pg_pool.max_dynamic == 2


async def test_events_are_listed_through_all_pages(api: FakeApi, client: Client) -> None:
    from callboard.v1.event_pb2 import Event, ListEventsResponse

    def page(request: ListEventsRequest) -> ListEventsResponse:
        first = request.start_revision or 1
        return ListEventsResponse(events=[Event(revision=first)], next_revision=first + 1 if first < 4 else 0)

    api.on(methods.LIST_EVENTS, page)
    assert [event.revision for event in await client.list_events()] == [1, 2, 3, 4]


def test_clients_in_two_loops_of_one_process_do_not_disturb_each_other() -> None:
    """GC-07."""
    answered: list[int] = []

    def in_a_loop_of_its_own() -> None:
        async def calls() -> None:
            api = FakeApi()
            api.on(methods.GET_STATS, GetStatsResponse(stats=Stats(revision=1)))
            await api.start()
            async with Client(api.address) as client:
                for _ in range(200):
                    await client.stats()
            answered.append(len(api.seen(GetStatsRequest)))
            await api.stop()

        asyncio.run(calls())

    threads = [threading.Thread(target=in_a_loop_of_its_own) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert answered == [200, 200]


async def test_a_refusal_names_the_method_that_helps(api: FakeApi, client: Client) -> None:
    """The command line's verbs are no help to a program."""

    def refuse(_: Any) -> Any:
        raise NotFound("there is no pool typo", metadata={"subject": "pools/typo"})

    api.on(methods.GET_POOL, refuse)
    with pytest.raises(NotFound) as caught:
        await client.get_pool("typo")
    (note,) = caught.value.__notes__
    assert 'client.ensure_pool("typo")' in note
    assert "callboard pool" not in f"{caught.value}{note}"
