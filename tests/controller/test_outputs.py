"""Does the controller pass output on, hold back who is too fast, and say what can't be read?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from callboard.controller.options import Limits
from callboard.controller.server import Controller
from callboard.controller.sessions import outputs
from callboard.v1 import agent_pb2, common_pb2, job_pb2, scheduler_pb2
from tests.controller.support import Api, api_at, job, options_for, pool, quick_policy, refusal_of, running
from tests.support.fake_agent import FakeAgent

OUT = common_pb2.OUTPUT_STREAM_STDOUT


@pytest.fixture
async def agent(controller: Controller, api: Api) -> AsyncIterator[FakeAgent]:
    await api.pools.CreatePool(pool())
    async with FakeAgent(controller.address) as joined:
        yield joined


def chunk(data: bytes, offset: int = 0, **fields: Any) -> agent_pb2.SendOutputRequest:
    stated: dict[str, Any] = {"component": "w", "rank": 0, "attempt": 1, "generation": 1, "stream": OUT} | fields
    return agent_pb2.SendOutputRequest(chunk=common_pb2.OutputChunk(data=data, offset=offset, **stated))


COMPLETE = agent_pb2.SendOutputRequest(complete=True)


def read(api: Api, name: str = "train", *, follow: bool = False, **selection: Any) -> Any:
    asked = common_pb2.OutputSelection(**selection)
    return api.jobs.ReadJobOutput(job_pb2.ReadJobOutputRequest(name=f"jobs/{name}", selection=asked, follow=follow))


async def all_of(call: Any) -> list[job_pb2.ReadJobOutputResponse]:
    return [response async for response in call]


async def asked(agent: FakeAgent, number: int = 1) -> agent_pb2.ReadOutput:
    """The number-th read that the agent is asked for."""
    await agent.until(lambda: len(agent.reads) >= number)
    return agent.reads[number - 1]


async def ran(api: Api, name: str = "train") -> job_pb2.Job:
    """A job that ran and ended."""
    await api.submit(job(name))
    await api.until_job(name, "RUNNING")
    await api.jobs.CompleteJob(job_pb2.CompleteJobRequest(name=f"jobs/{name}"))
    await api.until_job(name, "SUCCEEDED")
    return await api.job(name)


async def test_ft_a1_an_ended_jobs_output_is_asked_of_the_node_it_ran_on(api: Api, agent: FakeAgent) -> None:
    train = await ran(api)
    call = read(api, rank=0, tail_lines=5)
    reading = asyncio.create_task(all_of(call))
    wanted = await asked(agent)
    assert (wanted.job_id, wanted.follow, wanted.selection.tail_lines) == (train.uid, False, 5)
    assert (wanted.selection.first_attempt, wanted.selection.last_attempt) == (1, 1)
    async with agent.sending(wanted.read_id) as sending:
        for item in (chunk(b"one\n"), chunk(b"two\n", 4), agent_pb2.SendOutputRequest(caught_up=True), COMPLETE):
            await sending.write(item)
        shown = await reading
    assert [bytes(each.chunk.data) for each in shown] == [b"one\n", b"two\n"]
    assert {each.chunk.node_id for each in shown} == {"n0"}


async def test_ft_a1_what_is_missing_is_named(api: Api, agent: FakeAgent, controller: Controller) -> None:
    await ran(api)
    controller.outputs.open_s = 0.2
    (gap,) = [each.gap for each in await all_of(read(api))]
    assert (gap.code, "did not answer" in gap.message) == ("CUT_OFF", True)
    controller.outputs.open_s = 10.0

    reading = asyncio.create_task(all_of(read(api)))
    async with agent.sending((await asked(agent, 2)).read_id) as sending:
        await sending.write(COMPLETE)
        (gap,) = [each.gap for each in await reading]
    assert (gap.code, gap.component, gap.rank, gap.attempt, gap.node_id) == ("NOT_KEPT", "w", 0, 1, "n0")

    call = read(api)
    async with agent.sending((await asked(agent, 3)).read_id) as sending:
        await sending.write(chunk(b"half"))
        assert bytes((await call.read()).chunk.data) == b"half"
    gap = (await call.read()).gap
    assert (gap.code, "broke off" in gap.message) == ("CUT_OFF", True)

    await agent.cut()
    await api.until(lambda event: True)
    while controller.sessions.live:  # noqa: ASYNC110 - the end of a stream is no event
        await asyncio.sleep(0.01)
    (gap,) = [each.gap for each in await all_of(read(api))]
    assert (gap.code, gap.node_id, "not connected" in gap.message) == ("NODE_AWAY", "n0", True)
    await agent.join()
    await agent.goodbye("back to the lab")
    await api.until(lambda event: event.subject == "nodes/n0" and event.state == "LEFT")
    (gap,) = [each.gap for each in await all_of(read(api))]
    assert (gap.code, "n0 has LEFT" in gap.message, "host fake" in gap.message) == ("NODE_GONE", True, True)


async def test_ft_a1_a_lost_node_is_named_with_its_host(tmp_path: Path) -> None:
    options = options_for(tmp_path, lease_ms=300, heartbeat_ms=100)
    async with running(options) as controller, api_at(controller.address) as api:
        await api.pools.CreatePool(pool())
        await api.scheduler.SetPolicy(scheduler_pb2.SetPolicyRequest(policy=quick_policy()))
        async with FakeAgent(controller.address) as agent:
            await ran(api)
        await api.until(lambda event: event.subject == "nodes/n0" and event.state == "LOST")
        (gap,) = [each.gap for each in await all_of(read(api))]
        assert (gap.code, gap.node_id) == ("NODE_GONE", agent.node_id)
        assert "n0 is LOST" in gap.message
        assert "host fake" in gap.message


async def test_ft_a1_a_slow_reader_holds_back_its_own_stream_alone(api: Api, agent: FakeAgent) -> None:
    await ran(api)
    slow, quick = read(api), read(api)
    first, second = await asked(agent, 1), await asked(agent, 2)
    block = b"x" * (64 << 10)
    async with agent.sending(first.read_id) as held, agent.sending(second.read_id) as free:

        async def pour() -> None:
            for number in range(2048):
                await held.write(chunk(block, number * len(block)))

        pouring = asyncio.create_task(pour())
        for number in range(256):
            await free.write(chunk(block, number * len(block)))
            assert len((await quick.read()).chunk.data) == len(block)
        await free.write(COMPLETE)
        assert await quick.read() is grpc.aio.EOF
        await agent.heartbeat()
        assert not pouring.done(), "128 MiB don't go to a reader that takes none"
        slow.cancel()
        await asyncio.wait({pouring})
        pouring.exception()


async def test_a_follower_is_told_to_finish_with_the_job_and_goes_on_after_a_break(api: Api, agent: FakeAgent) -> None:
    await api.submit(job("train"))
    await api.until_job("train", "RUNNING")
    call = read(api, follow=True)
    async with agent.sending((await asked(agent, 1)).read_id) as sending:
        await sending.write(chunk(b"one\n"))
        assert bytes((await call.read()).chunk.data) == b"one\n"
    await agent.cut()
    await agent.join()
    again = await asked(agent, 2)
    (place,) = again.selection.after
    assert (place.component, place.rank, place.stream, place.offset) == ("w", 0, OUT, 4)
    async with agent.sending(again.read_id) as sending:
        await sending.write(agent_pb2.SendOutputRequest(caught_up=True))
        assert (await call.read()).caught_up
        await api.jobs.CompleteJob(job_pb2.CompleteJobRequest(name="jobs/train"))
        assert (await sending.read()).finish
        await sending.write(chunk(b"last\n", 4))
        await sending.write(COMPLETE)
        assert bytes((await call.read()).chunk.data) == b"last\n"
        assert await call.read() is grpc.aio.EOF


async def test_a_member_of_a_colocation_group_is_read_by_its_process(api: Api, agent: FakeAgent) -> None:
    group = [
        job_pb2.ComponentSpec(name=name, actor="pkg.workers:Worker", colocation_group="both") for name in ("a", "b")
    ]
    for component in group:
        component.resources.cpu_milli = 1000
    await api.submit(job("train", components=group))
    await api.until_job("train", "RUNNING")
    call = read(api, component="b")
    reading = asyncio.create_task(all_of(call))
    assert (await asked(agent)).selection.component == "both"
    call.cancel()
    await asyncio.wait({reading})
    refused = await refusal_of(read(api, component="c").read())
    assert (refused.code, "it has both, a, b" in refused.message) == ("NOT_FOUND", True), refused.message


async def test_reads_are_bounded_and_only_those_asked_for_may_be_answered(
    api: Api, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ran(api)
    monkeypatch.setattr(outputs, "MOST_READS", 2)
    calls = [read(api) for _ in range(2)]
    await asked(agent, 2)
    refused = await refusal_of(read(api).read())
    assert refused.code == "RESOURCE_EXHAUSTED"
    for call in calls:
        call.cancel()
    async with agent.sending("read-1") as sending:
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await sending.read()
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("selection", "field"),
    [
        ({"rank": -1}, "selection.rank"),
        ({"first_attempt": 3, "last_attempt": 2}, "selection.last_attempt"),
        ({"component": "../x"}, "selection.component"),
        ({"since_ms": -1}, "selection.since_ms"),
        ({"after": [common_pb2.OutputPosition(offset=-1, stream=OUT)]}, "selection.after"),
    ],
)
async def test_wrong_selections_are_refused_by_field(
    api: Api, agent: FakeAgent, selection: dict[str, Any], field: str
) -> None:
    await ran(api)
    refused = await refusal_of(read(api, **selection).read())
    assert (refused.code, [fault.field for fault in refused.faults]) == ("INVALID_ARGUMENT", [field])


async def test_ft_a1_forgotten_jobs_are_told_to_their_nodes_and_to_those_that_were_away(tmp_path: Path) -> None:
    options = options_for(tmp_path, limits=Limits(ended_jobs=1))
    async with running(options) as controller, api_at(controller.address) as api:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address) as agent:
            uids = [(await ran(api, name)).uid for name in ("one", "two")]
            await agent.until(lambda: agent.forgotten == uids[:1])
            agent.hello.output_jobs.extend([*uids, "j-of-long-ago"])
            await agent.join()
            await agent.until(lambda: agent.forgotten == [uids[0], uids[0], "j-of-long-ago"])
