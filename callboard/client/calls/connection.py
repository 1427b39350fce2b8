"""The client's connection: one channel, a deadline on every call, careful repeats.

A controller signs every status it sends on purpose (the details in the trailer). A status without that signature was
made by gRPC, a proxy or a torn connection; unless it speaks of the call itself, the connection was lost.

Guaranteed: a call ends by its deadline; a restart of the controller within it is not noticed by calls that may be made
twice. Not guaranteed: that a call whose connection was lost had no effect; such a call is repeated only if doing it
twice equals doing it once.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from operator import methodcaller
from typing import Any

import grpc
import grpc.aio

from callboard.client.calls.methods import Fields, Method, Request, Response, carried
from callboard.client.errors import OlderController, RequestTooLarge, Unreachable
from callboard.model.durations import Backoff
from callboard.security.dialing import KEEPALIVE, FindToken, open_channel
from callboard.security.tls import TlsFiles
from callboard.wire.errors import error_from_rpc, is_answer, parse_error, was_unconnected, why_lost
from callboard.wire.refusals import CallboardError, DeadlineExceeded, ErrorReason, InternalError

DEFAULT_TIMEOUT_S = 30.0
"""Deadline of one call. Above the controller's own bound of a planning (seconds), so that its answer
and not our deadline says what went wrong."""

PAGE_SIZE = 200
"""Objects per page of a list: a job with its history is a few KiB, so a page stays far below 4 MiB (GC-09)."""

DEFAULT_RETRY_S = 10.0
"""How long a call is repeated while no controller has answered this client yet. One that has answered before comes
back (a restart takes about two seconds), so it is waited for until the call's deadline."""

MAX_REQUEST_BYTES = 4 << 20
"""Largest request: what a controller takes. Refused here, because its own refusal names no limit (GC-09)."""

_OWN_CODES = frozenset(
    {
        grpc.StatusCode.DEADLINE_EXCEEDED,  # our own deadline
        grpc.StatusCode.UNIMPLEMENTED,  # an older controller, or no controller
        grpc.StatusCode.RESOURCE_EXHAUSTED,  # an answer that is too large
        grpc.StatusCode.UNAUTHENTICATED,  # a proxy
        grpc.StatusCode.PERMISSION_DENIED,
    }
)
"""Codes that mean what they say although no controller signed them: they would come again at every try."""


_GIVEN_UP = (ErrorReason.STOPPING, ErrorReason.NOT_LEADER)
"""Reasons of a controller that did nothing, and in whose place one that decides is expected."""


def reconnect_backoff() -> Backoff:
    """Pauses before a call or stream is tried again. By chance, so that the clients of a restarted controller don't
    come back as one."""
    return Backoff(0.05, 1.0, uniform=random.uniform)


_OPTIONS: tuple[tuple[str, int], ...] = (
    *KEEPALIVE,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


class Connection:
    """The channel to the controller that leads. Belongs to the event loop it is first used in."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry_s: float = DEFAULT_RETRY_S,
        use_proxy: bool = False,
        find: FindToken | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        """
        Args:
            address: "host:port", or those of several controllers of which one leads, with commas between them.
            timeout_s: deadline of a call in seconds.
            retry_s: how long a call is repeated while no controller has answered yet.
            use_proxy: go through http_proxy of the environment.
            find: looks for the token; None: as every program of this account does.
            tls: files to connect with; None: they are found as by every program of this account.
        """
        self.address = address
        self.timeout_s = timeout_s
        self._retry_s = retry_s
        self._answered = False
        """A controller was there: it answered, or it was lost in the middle of a call."""
        # http_proxy in the environment is meant for the web, not for the cluster (GC-10).
        options = (*_OPTIONS, ("grpc.enable_http_proxy", int(use_proxy)))
        self._channel = open_channel(address, options, find=find, tls=tls)

    async def close(self) -> None:
        """Ends every call in flight and the channel."""
        await self._channel.close()

    async def ask(
        self, method: Method[Fields, Request, Response], *args: Fields.args, **fields: Fields.kwargs
    ) -> Response:
        """One call as :meth:`call` makes it, of a request with these fields."""
        with carried():
            request = method.request(*args, **fields)
        return await self.call(method, request)

    async def call(
        self, method: Method[..., Request, Response], request: Request, *, timeout_s: float | None = None
    ) -> Response:
        """One call, repeated while that is safe and the controller is away.

        Args:
            method: what to call.
            request: its request.
            timeout_s: deadline in seconds over all repeats; None: the connection's.

        Raises:
            RequestTooLarge: the request is larger than a message may be; nothing was sent.
            Unreachable: nobody answered.
            Unavailable: the controller answered that it, or the node it asked, can't; the text says why.
            CallboardError: it refused; the type says why.
        """
        if (size := request.ByteSize()) > MAX_REQUEST_BYTES:
            raise RequestTooLarge(what=method.path, size=size, limit=MAX_REQUEST_BYTES)
        loop = asyncio.get_running_loop()
        start = loop.time()
        deadline = start + (self.timeout_s if timeout_s is None else timeout_s)
        backoff = reconnect_backoff()
        failed: grpc.aio.AioRpcError | None = None
        maybe_done = False  # a try got as far as the controller, and its answer was lost
        while True:
            try:
                response = await self._call_once(method, request, deadline - loop.time())
            except grpc.aio.AioRpcError as error:
                self._answered |= is_answer(error) or (is_lost(error) and not _was_not_done(error))
                if maybe_done and method.gone_is_done and parse_error(error).reason is ErrorReason.NOT_FOUND:
                    return method.response()
                if failed is not None and loop.time() >= deadline and not is_answer(error):
                    raise self.translated(failed, method) from failed  # why there was no answer, not that time is over
                give_up = deadline if self._comes_back(error) else min(deadline, start + self._retry_s)
                not_done = _was_not_done(error)
                if _is_elsewhere(error):
                    self._channel.moved(error)
                if not _is_away(error) or not (not_done or method.may_repeat(request)) or loop.time() >= give_up:
                    raise self.translated(error, method) from error
                failed, maybe_done = error, maybe_done or not not_done
            else:
                self._answered = True
                return _decoded(method, response)
            await asyncio.sleep(min(backoff.next_s(), give_up - loop.time()))
            await self.ready(give_up - loop.time())

    async def pages(
        self, method: Method[Fields, Request, Response], *args: Fields.args, **fields: Fields.kwargs
    ) -> AsyncIterator[Response]:
        """Every page of a list, in order; no reply meets a size limit that way (GC-09)."""
        with carried():
            asked: Any = method.request(*args, **fields)
        asked.page_size = PAGE_SIZE
        while True:
            page: Any = await self.call(method, asked)
            yield page
            asked.page_token = page.next_page_token
            if not asked.page_token:
                return

    async def stream(
        self, method: Method[..., Request, Response], request: Request, *, timeout_s: float
    ) -> AsyncIterator[Response]:
        """The responses of a stream, until it ends or ``timeout_s`` is over.

        Raises:
            Unavailable: the controller went away or is stopping; :class:`Unreachable` where it did not say so.
            CallboardError: it refused; the type says why.
        """
        begin = self._channel.unary_stream(**_coded(method))
        answered = False
        while True:
            call = begin(request, timeout=timeout_s)
            try:
                with self._told_that_it_moved():
                    async for response in call:
                        answered = self._answered = True
                        yield _decoded(method, response)
            except grpc.aio.AioRpcError as error:
                if _is_elsewhere(error):
                    self._channel.moved(error)
                if answered or not self._has_another_token(error):
                    raise self.translated(error, method) from error
            else:
                return
            finally:
                call.cancel()

    @asynccontextmanager
    async def both_ways(self, method: Method[..., Request, Response]) -> AsyncIterator[Any]:
        """A stream in both directions, for as long as the block runs; errors of gRPC become those of the client.

        Raises:
            As :meth:`stream`.
        """
        call = self._channel.stream_stream(**_coded(method))()
        try:
            with self._told_that_it_moved():
                yield call
        except grpc.aio.AioRpcError as error:
            raise self.translated(error, method) from error
        finally:
            call.cancel()

    @contextmanager
    def _told_that_it_moved(self) -> Iterator[None]:
        """A connection that was replaced, because another call of this client went on to another controller or found
        another certificate, ends its calls after a while. gRPC then raises CancelledError, as if somebody had cancelled
        the task.

        Raises:
            Unreachable: instead of that.
        """
        try:
            yield
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            detail = "this client went on to another connection"
            raise Unreachable(address=self.address, detail=detail) from error

    async def ready(self, timeout_s: float) -> bool:
        """Whether the controller could be reached within ``timeout_s``."""
        try:
            async with asyncio.timeout(max(timeout_s, 0)):
                await self._channel.channel_ready()
        except TimeoutError:
            return False
        return True

    async def _call_once(self, method: Method[..., Request, Response], request: Request, timeout_s: float) -> Response:
        call = self._channel.unary_unary(**_coded(method))
        metadata = _trace_context()
        with self._told_that_it_moved():
            try:
                response: Response = await call(request, timeout=max(timeout_s, 0.001), metadata=metadata)
            except grpc.aio.AioRpcError as error:
                if not self._has_another_token(error):
                    raise
                response = await call(request, timeout=max(timeout_s, 0.001), metadata=metadata)
            return response

    def _has_another_token(self, error: grpc.aio.AioRpcError) -> bool:
        """Whether a call was refused for its token, before anything was done, and there is another one now: it was
        rotated, or the controller registered it only after this client looked."""
        return error.code() is grpc.StatusCode.UNAUTHENTICATED and self._channel.renew()

    def _comes_back(self, error: grpc.aio.AioRpcError) -> bool:
        """Whether the controller was there and is expected back. One that answers with a trouble of its own, such as
        a journal it can't write, is not away."""
        return self._answered and self._retry_s > 0 and (is_lost(error) or parse_error(error).reason in _GIVEN_UP)

    def translated(self, error: grpc.aio.AioRpcError, method: Method[..., Any, Any]) -> CallboardError:
        """The error that a caller of the client gets for a call of ``method``."""
        if is_lost(error):
            return Unreachable(address=self.address, detail=why_lost(error.code(), error.details()))
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not is_answer(error):
            return DeadlineExceeded(
                f"the controller at {self.address} did not answer in time, although something listens there: its "
                "process may be stopped or overloaded"
            )
        if error.code() is grpc.StatusCode.UNIMPLEMENTED and not is_answer(error):
            return OlderController(address=self.address, call=method.path)
        refused = error_from_rpc(error)
        kind, _, name = refused.error.metadata.get("subject", "").partition("/")
        if refused.error.reason is ErrorReason.NOT_FOUND and kind == "pools":
            refused.add_note(f'client.ensure_pool("{name}") makes it; client.list_pools() shows the pools there are')
        return refused


def _trace_context() -> tuple[tuple[str, str], ...]:
    """Where a program that uses OpenTelemetry is in a trace, so that the controller's spans join it. It isn't imported
    for that: who has not imported it has no trace."""
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415 - an extra

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())


def _coded(method: Method[..., Any, Any]) -> dict[str, Any]:
    """What a channel makes a call of a method from."""
    return {
        "method": method.full_path,
        "request_serializer": methodcaller("SerializeToString"),
        "response_deserializer": method.response.FromString,
    }


def _decoded(method: Method[..., Request, Response], response: Response | None) -> Response:
    """The response. grpc.aio gives None for what it can't decode."""
    if response is None:
        raise InternalError(f"the answer to {method.path} can't be decoded; is the controller of another version?")
    return response


def is_lost(error: grpc.aio.AioRpcError) -> bool:
    """Whether a status means that the connection was lost: no controller sends it on purpose."""
    return not is_answer(error) and error.code() not in _OWN_CODES


def _is_elsewhere(error: grpc.aio.AioRpcError) -> bool:
    """Whether another controller may lead by now."""
    return _is_away(error) and (is_lost(error) or parse_error(error).reason in (*_GIVEN_UP, ErrorReason.STORE_FAILED))


def _is_away(error: grpc.aio.AioRpcError) -> bool:
    """Whether another try may find a controller that answers."""
    return is_lost(error) or error.code() is grpc.StatusCode.UNAVAILABLE


def _was_not_done(error: grpc.aio.AioRpcError) -> bool:
    """Whether a call certainly had no effect: no connection could be made, or the controller took nothing any more."""
    if is_lost(error):
        return was_unconnected(error.details() or "")
    return parse_error(error).reason in _GIVEN_UP
