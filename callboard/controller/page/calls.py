"""Calls of the page: the services' own methods, behind the same guard as every gRPC call.

The page has no rules of its own about who may do what. A browser's request becomes the bytes of the method's message
and goes through the guard with the token of whoever is logged in: the same table of roles, limits, time bounds, audit
log and log lines, and the same refusals.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import json_format
from google.protobuf.message import Message

from callboard.controller.services.guard import Guard
from callboard.v1 import event_pb2, job_pb2, node_pb2
from callboard.wire.refusals import InvalidRequest

_JOBS, _NODES, _EVENTS = (f"/callboard.v1.{name}/" for name in ("JobService", "NodeService", "EventService"))

CALLABLE = MappingProxyType(
    {
        _JOBS + "GetJob": job_pb2.GetJobRequest,
        _JOBS + "ExplainJob": job_pb2.ExplainJobRequest,
        _JOBS + "CancelJob": job_pb2.CancelJobRequest,
        _JOBS + "PreemptJob": job_pb2.PreemptJobRequest,
        _NODES + "GetNode": node_pb2.GetNodeRequest,
        _NODES + "CordonNode": node_pb2.CordonNodeRequest,
        _NODES + "UncordonNode": node_pb2.UncordonNodeRequest,
        _NODES + "DrainNode": node_pb2.DrainNodeRequest,
        _EVENTS + "ListEvents": event_pb2.ListEventsRequest,
    }
)
"""What the page may call, with the message of each request."""

OUTPUT = _JOBS + "ReadJobOutput"

FOLLOW = _EVENTS + "Watch"
"""The method whose rules the live board is under; its rows are of lists that the same roles may read."""

Metadata = Sequence[tuple[str, str]]


class CallRefused(Exception):
    """The guard or the service refused a call."""

    def __init__(self, code: grpc.StatusCode, why: str) -> None:
        super().__init__(why)
        self.code = code


class PageContext:
    """What a handler is told about a call from a browser, in place of gRPC's context."""

    def __init__(self, metadata: Metadata, peer: str) -> None:
        """
        Args:
            metadata: with the token, as a gRPC client sends it.
            peer: address of the browser, as gRPC writes it.
        """
        self._metadata = metadata
        self._peer = peer
        self.sends: Callable[[Any], Awaitable[None]] = _nowhere
        """Sends a message of a stream."""
        self.gone = False
        """Whether the browser went away."""

    def invocation_metadata(self) -> Metadata:
        """What the caller shows."""
        return self._metadata

    def auth_context(self) -> dict[str, Any]:
        """Browsers show no certificate."""
        return {}

    def peer(self) -> str:
        return self._peer

    def cancelled(self) -> bool:
        return self.gone

    done = cancelled

    async def write(self, message: Any) -> None:
        await self.sends(message)

    async def abort(self, code: grpc.StatusCode, details: str = "", _: object = ()) -> NoReturn:
        raise CallRefused(code, details)


@dataclass(frozen=True)
class _Details:
    method: str
    invocation_metadata: Metadata


async def _nowhere(message: Any) -> None:
    raise AssertionError(f"nobody follows {type(message).__name__}")


class Calls:
    """The services that the page calls. Stands in for a server where services are added to one."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._handlers: list[Any] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """As of a server."""
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """As of a server; the generic ones are the same."""

    async def call(self, method: str, request: Any, context: PageContext) -> dict[str, Any]:
        """The answer of a unary method, as plain values with the names of the protos.

        Args:
            method: one of :data:`CALLABLE`.
            request: plain values with the names of the protos.

        Raises:
            CallRefused: the guard or the service refused it.
            InvalidRequest: the request is not one of the method.
        """
        message = CALLABLE[method]()
        try:
            json_format.ParseDict(request, message)
        except json_format.ParseError as error:
            raise InvalidRequest(f"the request is not one of {method}: {error}") from error
        handler = await self._guarded(method, context, self._find)
        answer: Message = await handler.unary_unary(message.SerializeToString(), context)
        # A job of thousands of workers takes long to write out, and the loop has more to do.
        return await asyncio.to_thread(json_format.MessageToDict, answer, preserving_proto_field_name=True)

    async def read_output(self, request: job_pb2.ReadJobOutputRequest, context: PageContext) -> None:
        """Writes what a job prints to the context.

        Raises:
            CallRefused: the guard or the service refused it.
        """
        handler = await self._guarded(OUTPUT, context, self._find)
        await handler.unary_stream(request.SerializeToString(), context)

    async def run_as(self, method: str, behaviour: Callable[[Any, Any], Awaitable[None]], context: PageContext) -> None:
        """Runs something of the page's own as a stream of a method: with its roles and limits, and ended with it.

        Raises:
            CallRefused: the guard refused it.
        """

        async def find(_: Any) -> Any:
            return grpc.unary_stream_rpc_method_handler(behaviour)

        handler = await self._guarded(method, context, find)
        await handler.unary_stream(b"", context)

    async def _guarded(self, method: str, context: PageContext, find: Callable[[Any], Awaitable[Any]]) -> Any:
        details: Any = _Details(method, context.invocation_metadata())
        handler = await self._guard.intercept_service(find, details)
        assert handler is not None, f"no service has {method}"
        return handler

    async def _find(self, details: Any) -> Any:
        return next((found for each in self._handlers if (found := each.service(details)) is not None), None)
