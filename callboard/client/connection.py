"""How does a call reach the controller? One channel, a deadline on every call, careful repeats.

Guaranteed: a call ends by its deadline; it is repeated only after UNAVAILABLE and only if doing it
twice equals doing it once. Not guaranteed: that a call that failed with UNAVAILABLE had no effect.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from callboard.client.errors import RequestTooLarge, Unreachable
from callboard.client.methods import Method
from callboard.wire.errors import CallboardError, error_from_rpc, is_answer

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)

DEFAULT_TIMEOUT_S = 30.0
"""Deadline of one call. Above the controller's own bound of a planning (seconds), so that its answer
and not our deadline says what went wrong."""

DEFAULT_RETRY_S = 10.0
"""How long a call is repeated while the controller is away: a restart takes about two seconds."""

MAX_REQUEST_BYTES = 4 << 20
"""Largest request: what a controller takes. Refused here, because its own refusal names no limit (GC-09)."""

_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 1.0

_OPTIONS: tuple[tuple[str, int], ...] = (
    # Shorter than the 40 s a cut link went unnoticed; the server's minimum is set to match (docs/agents.md).
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


class Connection:
    """The channel to one controller. Belongs to the event loop it is first used in."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry_s: float = DEFAULT_RETRY_S,
        use_proxy: bool = False,
    ) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._retry_s = retry_s
        # http_proxy in the environment is meant for the web, not for the cluster (GC-10).
        options = (*_OPTIONS, ("grpc.enable_http_proxy", int(use_proxy)))
        self._channel = grpc.aio.insecure_channel(address, options=options)

    async def close(self) -> None:
        """Ends every call in flight and the channel."""
        await self._channel.close()

    async def call(
        self,
        method: Method[Request, Response],
        request: Request,
        *,
        timeout_s: float | None = None,
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
        give_up = min(deadline, start + self._retry_s) if method.repeatable else start
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                return await self._call_once(method, request, deadline - loop.time())
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or loop.time() >= give_up:
                    raise self._translated(error) from error
            # Jittered, so that the clients of a restarted controller don't come back as one.
            await asyncio.sleep(min(backoff_s, give_up - loop.time()) * random.uniform(0.5, 1.0))  # noqa: S311
            backoff_s = min(backoff_s * 2, _LAST_BACKOFF_S)
            await self._ready(give_up - loop.time())

    async def stream(
        self, method: Method[Request, Response], request: Request, *, timeout_s: float
    ) -> AsyncIterator[Response]:
        """The responses of a stream, until it ends or ``timeout_s`` is over.

        Raises:
            Unreachable: the controller went away.
            CallboardError: it refused; the type says why.
        """
        call = self._channel.unary_stream(
            method.full_path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )(request, timeout=timeout_s)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise self._translated(error) from error
        finally:
            call.cancel()

    async def ready(self, timeout_s: float) -> bool:
        """Whether the controller could be reached within ``timeout_s``."""
        return await self._ready(timeout_s)

    async def _call_once(self, method: Method[Request, Response], request: Request, timeout_s: float) -> Response:
        call = self._channel.unary_unary(
            method.full_path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        return await call(request, timeout=max(timeout_s, 0.001))

    async def _ready(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(max(timeout_s, 0)):
                await self._channel.channel_ready()
        except TimeoutError:
            return False
        return True

    def _translated(self, error: grpc.aio.AioRpcError) -> CallboardError:
        # A controller that says why it can't is there: what it said is the reason.
        if error.code() is grpc.StatusCode.UNAVAILABLE and not is_answer(error):
            return Unreachable(address=self.address, detail=error.details() or "")
        return error_from_rpc(error)
