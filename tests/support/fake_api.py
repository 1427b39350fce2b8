"""A controller for tests of the client: answers each call with what the test says."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.message import Message

from callboard.client.calls import methods
from callboard.client.calls.methods import Method
from callboard.wire.errors import status_of
from callboard.wire.refusals import CallboardError

Answer = Callable[..., Any]


class Unsigned(Exception):
    """A status that no controller sends on purpose: gRPC, a proxy or a torn connection made it."""

    def __init__(self, code: grpc.StatusCode, details: str = "") -> None:
        super().__init__(f"{code.name} {details}")
        self.code = code
        self.details = details


ALL_METHODS: dict[str, Method[..., Any, Any]] = {
    value.full_path: value for value in vars(methods).values() if isinstance(value, Method)
}


def unreleased() -> frozenset[str]:
    """Paths of the methods that the last release, as `protos/released.binpb` describes it, did not have."""
    described = FileDescriptorSet.FromString((Path(__file__).parents[2] / "protos" / "released.binpb").read_bytes())
    known = {
        f"/{file.package}.{service.name}/{method.name}"
        for file in described.file
        for service in file.service
        for method in service.method
    }
    return frozenset(ALL_METHODS) - known


class FakeApi(grpc.GenericRpcHandler):
    """Answers by functions; keeps every request.

    An answer is a message, a function of the request, an async function of it, or an async generator function
    for streams. A CallboardError that it raises becomes the status the real controller would send; Unsigned becomes
    that status, without the details that a controller adds.
    """

    def __init__(self) -> None:
        self.requests: list[Message] = []
        self.contexts: list[Any] = []
        self.address = ""
        self.lacks: frozenset[str] = frozenset()
        """Paths of methods that it doesn't know, as an older controller: gRPC itself answers UNIMPLEMENTED."""
        self._answers: dict[str, Any] = {}
        self._server: grpc.aio.Server | None = None

    def on(self, method: Method[..., Any, Any], answer: Any) -> None:
        """Answers ``method`` with ``answer``."""
        self._answers[method.full_path] = answer

    def answer(self, method: Method[..., Any, Any]) -> Any:
        """The message that ``method`` is answered with."""
        return self._answers[method.full_path]

    def seen(self, kind: type[Message]) -> list[Any]:
        """Requests of one type, in order."""
        return [request for request in self.requests if isinstance(request, kind)]

    async def start(self, address: str = "127.0.0.1:0") -> None:
        """Listens."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((self,))
        port = self._server.add_insecure_port(address)
        await self._server.start()
        self.address = f"{address.rpartition(':')[0]}:{port}"

    async def stop(self) -> None:
        """Stops at once."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def service(self, details: Any) -> Any:
        """What gRPC asks for the handler of a path."""
        method = ALL_METHODS.get(details.method)
        if method is None or method.full_path in self.lacks:
            return None
        serialize = method.response.SerializeToString
        if method in (methods.WATCH, methods.READ_JOB_OUTPUT):
            return grpc.unary_stream_rpc_method_handler(
                self._stream(method), lambda sent: method.request().FromString(sent), serialize
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary(method), lambda sent: method.request().FromString(sent), serialize
        )

    def _unary(self, method: Method[..., Any, Any]) -> Any:
        async def handle(request: Message, context: Any) -> Message:
            self.requests.append(request)
            self.contexts.append(context)
            answer = self._answers.get(method.full_path)
            try:
                if callable(answer):
                    answer = answer(request)
                if inspect.isawaitable(answer):
                    answer = await answer
            except (CallboardError, Unsigned) as error:
                await _refuse(context, error)
            response: Message = answer if answer is not None else method.response()
            return response

        return handle

    def _stream(self, method: Method[..., Any, Any]) -> Any:
        async def handle(request: Message, context: Any) -> Any:
            self.requests.append(request)
            try:
                async for response in self._answers[method.full_path](request):
                    yield response
            except (CallboardError, Unsigned) as error:
                await _refuse(context, error)

        return handle


async def _refuse(context: Any, error: CallboardError | Unsigned) -> None:
    if isinstance(error, Unsigned):
        await context.abort(error.code, error.details)
    else:
        status = status_of(error)
        await context.abort(status.code, status.message, status.trailing_metadata)


class ThreadedApi:
    """A FakeApi that runs beside a synchronous test, in a loop of its own."""

    def __init__(self) -> None:
        self.api = FakeApi()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FakeApi:
        self._thread.start()
        self.do(self.api.start())
        return self.api

    def do(self, action: Coroutine[Any, Any, None]) -> None:
        """Lets it stop or start."""
        asyncio.run_coroutine_threadsafe(action, self._loop).result(10)

    def __exit__(self, *_: object) -> None:
        self.do(self.api.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
