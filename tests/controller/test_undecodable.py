"""Bytes that are no message are refused like any wrong input, by every method, and leave few lines in the log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from callboard.client.client import Client
from callboard.controller.server import SERVICES, Controller
from callboard.security.dialing import open_channel
from callboard.v1 import agent_pb2, scheduler_pb2
from callboard.wire.errors import parse_error
from callboard.wire.refusals import ErrorReason, InternalError
from tests.controller.support import refusal_of
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
