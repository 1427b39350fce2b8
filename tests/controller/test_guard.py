"""Every call ends with an answer or a status, whatever its handler does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from callboard.controller.services.guard import Guard
from callboard.model.faults import Fault, InvalidInput
from callboard.scheduler.records.refusals import Reason, Refusal, RefusalCode
from callboard.security.caller_roles import ANYBODY
from callboard.security.gate import Gate
from callboard.wire.errors import parse_error
from callboard.wire.refusals import ErrorReason
from tests.controller.support import refusal_of

Behaviour = Callable[[bytes, grpc.aio.ServicerContext[Any, Any]], Awaitable[bytes | None]]


@asynccontextmanager
async def serving(behaviour: Behaviour, *, stream: bool = False, timeout_s: float = 30) -> AsyncIterator[Any]:
    """A guarded server with one method; gives (call, guard, server)."""
    guard = Guard(gate=Gate(lambda *_: ANYBODY), call_timeout_s=timeout_s)
    server = grpc.aio.server(interceptors=(guard,))
    make: Any = grpc.unary_stream_rpc_method_handler if stream else grpc.unary_unary_rpc_method_handler
    handlers = grpc.method_handlers_generic_handler("t.S", {"Do": make(behaviour)})
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = (channel.unary_stream if stream else channel.unary_unary)("/t.S/Do")
        yield call, guard, server
    await server.stop(0)
    assert await guard.idle(5)


async def test_gc_04_a_cancelled_inner_task_becomes_a_status() -> None:
    async def behaviour(request: bytes, context: Any) -> bytes:
        inner = asyncio.ensure_future(asyncio.Event().wait())
        inner.cancel()
        await inner
        return b"never"

    async with serving(behaviour) as (call, _, _server):
        error = await refusal_of(call(b""))  # without a deadline
        assert error.code == "UNAVAILABLE"


async def test_gc_04_in_a_stream_as_well() -> None:
    async def behaviour(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        inner = asyncio.ensure_future(asyncio.Event().wait())
        inner.cancel()
        await inner

    async with serving(behaviour, stream=True) as (call, _, _server):  # type: ignore[arg-type]
        stream = call(b"")
        assert await stream.read() == b"first"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_stream_that_ends_in_the_middle_of_its_first_write_still_gets_its_status() -> None:
    async def behaviour(request: bytes, context: Any) -> None:
        writing = asyncio.ensure_future(context.write(b"first"))
        await asyncio.sleep(0)  # it began, and gRPC says that it is done only when this loop runs again
        writing.cancel()
        raise InvalidInput([Fault("rank", "too large")])

    async with serving(behaviour, stream=True) as (call, _, _server):
        streamed = call(b"", timeout=5)
        assert await streamed.read() == b"first"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await streamed.read()
        assert parse_error(caught.value).code == "INVALID_ARGUMENT"


async def test_gc_01_the_end_waits_for_the_last_lines_of_a_handler() -> None:
    may_end, released = asyncio.Event(), asyncio.Event()

    async def behaviour(request: bytes, context: Any) -> bytes:
        try:
            await context.abort(grpc.StatusCode.NOT_FOUND, "nothing here")
        finally:
            await may_end.wait()
            released.set()
        return b"never"

    async with serving(behaviour) as (call, guard, server):
        assert (await refusal_of(call(b""))).code == "NOT_FOUND"
        await server.stop(5)  # returns at once: the call is over for gRPC
        assert not released.is_set()
        assert not await guard.idle(0.01)
        may_end.set()
        assert await guard.idle(5)
        assert released.is_set()


async def test_a_call_without_a_deadline_is_bounded() -> None:
    async def behaviour(request: bytes, context: Any) -> bytes:
        await asyncio.Event().wait()
        return b"never"

    async with serving(behaviour, timeout_s=0.02) as (call, _, _server):
        error = await refusal_of(call(b""))
        assert error.code == "DEADLINE_EXCEEDED"
        assert "/t.S/Do took longer" in error.message


async def test_a_caller_that_goes_away_ends_its_handler() -> None:
    entered, ended = asyncio.Event(), asyncio.Event()

    async def behaviour(request: bytes, context: Any) -> bytes:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return b"never"

    async with serving(behaviour) as (call, guard, _server):
        calling = call(b"")
        await entered.wait()
        calling.cancel()
        await ended.wait()
        assert await guard.idle(5)


async def test_a_defect_is_internal_and_tells_nothing_of_the_inside() -> None:
    async def behaviour(request: bytes, context: Any) -> bytes:
        raise KeyError("hunter2")

    async with serving(behaviour) as (call, _, _server):
        error = await refusal_of(call(b""))
        assert (error.code, error.reason) == ("INTERNAL", ErrorReason.INTERNAL)
        assert "hunter2" not in error.message


async def test_refusals_keep_code_reason_field_and_account() -> None:
    raised: list[Exception] = []

    async def behaviour(request: bytes, context: Any) -> bytes:
        raise raised[-1]

    async with serving(behaviour) as (call, _, _server):
        raised.append(InvalidInput([Fault("spec.name", "is no name"), Fault("spec.pool", "is missing")]))
        error = await refusal_of(call(b""))
        assert (error.code, [fault.field for fault in error.faults]) == ("INVALID_ARGUMENT", ["spec.name", "spec.pool"])

        short = Reason("QUOTA_SHORT", "pools/p", "pool p: 5 of 6 cpu used, asks 2", "cpu", 2000, 1000)
        changes = ("raise pool p cpu by 1", "uncordon n3")
        raised.append(Refusal(RefusalCode.QUOTA_EXCEEDED, "pools/p", "too large", "spec.components", (short,), changes))
        error = await refusal_of(call(b""))
        assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", ErrorReason.QUOTA_EXCEEDED)
        assert [(one.subject, one.description) for one in error.quota] == [("pools/p", short.message)]
        assert error.metadata["reason.0"] == f"QUOTA_SHORT {short.message}"
        assert (error.metadata["unblock.0"], error.metadata["unblock.1"]) == changes
        assert [fault.field for fault in error.faults] == ["spec.components"]

        for code in RefusalCode:
            raised.append(Refusal(code, "jobs/a", "why, and what to do"))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"")
            found = parse_error(caught.value)
            assert found.reason.value == code.value
            assert found.metadata["subject"] == "jobs/a"
