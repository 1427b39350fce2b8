"""Bytes that are no message are refused like any wrong input, by every method, and leave few lines in the log."""

from __future__ import annotations

import base64
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from callboard.client.client import Client
from callboard.controller.server import SERVICES, Controller
from callboard.security.dialing import open_channel
from callboard.v1 import agent_pb2, job_pb2, scheduler_pb2
from callboard.wire.errors import parse_error
from callboard.wire.refusals import ErrorReason, InternalError
from tests.controller.support import Api, refusal_of
from tests.support.fake_agent import FakeAgent

GARBAGE = b"\xff\xff\xff\xff not a message"

METHODS = [
    (f"/{service.full_name}/{method.name}", method.client_streaming, method.server_streaming)
    for module in (*SERVICES, health_pb2, reflection_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


async def garbage() -> AsyncIterator[bytes]:
    yield GARBAGE


async def refused(channel: Any, path: str, streams: bool, streamed: bool) -> Any:
    if streams:
        call: Any = channel.stream_stream(path)(garbage(), timeout=30)
    elif streamed:
        call = channel.unary_stream(path)(GARBAGE, timeout=30)
    else:
        return await refusal_of(channel.unary_unary(path)(GARBAGE, timeout=30))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return parse_error(caught.value)


async def test_ft_i1_every_method_refuses_what_is_no_message(
    controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(METHODS) > 30
    with structlog.testing.capture_logs() as lines:
        async with open_channel(controller.address) as channel:
            for path, streams, streamed in METHODS:
                for _ in range(2):
                    error = await refused(channel, path, streams, streamed)
                    assert (error.code, error.reason) == ("INVALID_ARGUMENT", ErrorReason.INVALID_FIELD), path
                    assert path in error.message
    seen = [line for line in lines if line["log_level"] not in {"debug", "info"}]
    assert [line["event"] for line in seen] == ["messages can't be decoded"]
    assert not [line for line in lines if line["event"] == "call" and line["log_level"] != "debug"]
    assert caplog.records == [], "nor does gRPC log a traceback"


async def test_ft_i1_a_later_message_of_a_stream_ends_it_as_a_first_one(controller: Controller) -> None:
    agent = FakeAgent(controller.address)

    async def messages() -> AsyncIterator[bytes]:
        yield agent_pb2.SessionRequest(hello=agent.hello).SerializeToString()
        yield GARBAGE

    async with open_channel(controller.address) as channel:
        session: Any = channel.stream_stream("/callboard.v1.AgentService/Session")
        call = session(messages(), timeout=30)
        seen: list[bytes] = []

        async def read() -> None:
            async for response in call:
                seen.append(response)  # noqa: PERF401 - what came before the error counts

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read()
        assert agent_pb2.SessionResponse.FromString(seen[0]).HasField("welcome")
    assert parse_error(caught.value).code == "INVALID_ARGUMENT"


async def test_ft_i1_an_answer_that_is_no_message_is_an_error_in_words() -> None:
    async def answer(_request: bytes, _context: object) -> bytes:
        return GARBAGE

    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name,
                {"GetStats": grpc.unary_unary_rpc_method_handler(answer)},
            ),
        )
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with Client(f"127.0.0.1:{port}") as client:
        with pytest.raises(InternalError, match=r"SchedulerService/GetStats can't be decoded"):
            await client.stats()
    await server.stop(0)


DEEP = "[" * 5000
"""JSON that is nested deeper than its reader's stack."""

STRINGS = [
    *("", "x", "jobs/j", "nodes/n0", "pools/p", "j", "p", "a:B", "🙂", "\x00", "x" * 5000, "../..", "-1", "{", "nan"),
    DEEP,
    base64.urlsafe_b64encode(b"checksum" + DEEP.encode()).decode(),  # a page token
]
NUMBERS = [0, 1, -1, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)]
FLOATS = [0.0, -1.0, float("nan"), float("inf"), 1e308]


def hostile(chance: random.Random, kind: Descriptor, depth: int = 0) -> Any:
    """A message that decodes, filled by chance with what nobody should send."""
    message = GetMessageClass(kind)()
    for field in kind.fields:
        if chance.random() < (0.45 if depth else 0.2):
            continue
        if field.message_type is not None and depth > 5:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
            place = getattr(message, field.name)
            if value.message_type is not None:
                place[scalar(chance, key)].CopyFrom(hostile(chance, value.message_type, depth + 1))
            else:
                place[scalar(chance, key)] = scalar(chance, value)
        elif field.is_repeated:
            for _ in range(chance.choice([0, 1, 1, 2, 3])):
                if field.message_type is not None:
                    getattr(message, field.name).append(hostile(chance, field.message_type, depth + 1))
                else:
                    getattr(message, field.name).append(scalar(chance, field))
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(hostile(chance, field.message_type, depth + 1))
        else:
            setattr(message, field.name, scalar(chance, field))
    return message


def scalar(chance: random.Random, field: FieldDescriptor) -> Any:
    """A value of a field: one that is within its type and hardly ever within its meaning."""
    if field.enum_type is not None:
        return chance.choice([*(value.number for value in field.enum_type.values), 99])
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case FieldDescriptor.CPPTYPE_STRING:
            text = chance.choice(STRINGS)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return chance.choice(FLOATS)
        case FieldDescriptor.CPPTYPE_INT32:
            return chance.choice(NUMBERS[:5])
        case FieldDescriptor.CPPTYPE_UINT32 | FieldDescriptor.CPPTYPE_UINT64:
            return chance.choice(NUMBERS[:2])
        case _:
            return chance.choice(NUMBERS)


@pytest.mark.parametrize("seed", range(2))
async def test_ft_i1_a_message_that_decodes_is_never_an_internal_error_whatever_it_holds(
    controller: Controller, seed: int
) -> None:
    """Each refusal has a meaning: what the fields hold is a mistake of the caller's."""
    chance = random.Random(seed)
    async with open_channel(controller.address) as channel, FakeAgent(controller.address, "n0", cpu_milli=8000):
        for module in SERVICES:
            for service in module.DESCRIPTOR.services_by_name.values():
                for method in service.methods:
                    path = f"/{service.full_name}/{method.name}"
                    for _ in range(8):
                        message = hostile(chance, method.input_type).SerializeToString()
                        code = await answered(channel, path, message, method.client_streaming, method.server_streaming)
                        assert code not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), (
                            path,
                            GetMessageClass(method.input_type).FromString(message),
                        )


async def test_ft_i1_json_that_is_nested_too_deep_is_refused_wherever_it_stands(api: Api) -> None:
    def component() -> job_pb2.ComponentSpec:
        return job_pb2.ComponentSpec(name="c", actor="a:B", workers=1)

    placed = component()
    placed.places.add(node_id="n0", hardware_json=DEEP)
    given, named = component(), component()
    given.args_json, named.kwargs_json = DEEP, DEEP
    for spec in (placed, given, named):
        error = await refusal_of(api.submit(job_pb2.JobSpec(name="j", pool="p", components=[spec])))
        assert error.code == "INVALID_ARGUMENT", error
    token = base64.urlsafe_b64encode(b"checksum" + DEEP.encode()).decode()
    error = await refusal_of(api.jobs.ListJobs(job_pb2.ListJobsRequest(page_token=token)))
    assert error.code == "INVALID_ARGUMENT", error


async def answered(channel: Any, path: str, message: bytes, streams: bool, streamed: bool) -> grpc.StatusCode:
    """The status of a call; of a stream also OK if there is an answer, or none yet."""

    async def one() -> AsyncIterator[bytes]:
        yield message

    try:
        if streams:
            await channel.stream_stream(path)(one(), timeout=0.5).read()
        elif streamed:
            await channel.unary_stream(path)(message, timeout=0.5).read()
        else:
            await channel.unary_unary(path)(message, timeout=30)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK
