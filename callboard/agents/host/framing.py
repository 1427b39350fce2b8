"""Frames: how an agent and its children talk over a socketpair.

Length-prefixed JSON: four bytes of length (big endian), then one UTF-8 object. A request is
{"id", "method", "argument"}, its answer {"id", "result"} or {"id", "error": {"kind", "message"}}; answers come in
any order. JSON and not pickle: the agent never loads code that a worker or a job chose (07, Security).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

Json: TypeAlias = Any
"""A value that JSON can carry."""

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Above a checkpoint (1 MiB) and the arguments of a constructor, below what would stall a peer."""

_LENGTH = struct.Struct(">I")


class PeerGone(Exception):
    """The other end closed the socket or died."""


class RemoteError(Exception):
    """The other end answered with an error."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        """Name of the exception's type at the other end."""
        self.message = message


def encode(message: Json, *, from_child: bool = False) -> bytes:
    """The frame of a message.

    Args:
        from_child: it may hold texts of a user's code. Half of a surrogate pair, which no message of the controller
            can carry, becomes "?": it must not end the agent.
    """
    body = json.dumps(message, separators=(",", ":"), ensure_ascii=not from_child).encode(errors="replace")
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes; at most {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> Json:
    """The next message; raises `PeerGone` at the end of the stream."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise PeerGone(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES}")
        return json.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise PeerGone("the other end closed the socket") from error


class Requests:
    """The asking side of one socket. Many requests may be open at once; none has a time limit of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._open: dict[int, asyncio.Future[Json]] = {}
        self._gone: str | None = None
        self._receiver = asyncio.create_task(self._receive())

    @classmethod
    async def over(cls, own_end: socket.socket) -> Requests:
        """Ask over this end of a socketpair, which it owns from now on."""
        return cls(*await asyncio.open_connection(sock=own_end))

    async def ask(self, method: str, argument: Json = None) -> Json:
        """One request and its answer.

        Raises:
            RemoteError: the other end answered with an error.
            PeerGone: the other end is gone, before or meanwhile.
        """
        if self._gone is not None:
            raise PeerGone(self._gone)
        number = next(self._ids)
        answer = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        try:
            # No drain(): the number of open requests is small, and a stuck peer must not block a sender.
            self._writer.write(encode({"id": number, "method": method, "argument": argument}))
            return await answer
        finally:
            self._open.pop(number, None)

    def close(self) -> None:
        """Close the socket; open requests raise `PeerGone`."""
        self._receiver.cancel()
        self._writer.close()

    async def _receive(self) -> None:
        gone = "the socket was closed"
        try:
            while True:
                self._settle(await read_frame(self._reader))
        except PeerGone as error:
            gone = str(error)
        finally:
            self._gone = gone
            for answer in self._open.values():
                if not answer.done():
                    answer.set_exception(PeerGone(gone))

    def _settle(self, message: Json) -> None:
        answer = self._open.get(message["id"])
        if answer is None or answer.done():
            return  # Whoever asked has given up.
        error = message.get("error")
        if error is None:
            answer.set_result(message.get("result"))
        else:
            answer.set_exception(RemoteError(error["kind"], error["message"]))


Handler = Callable[[str, Json], Awaitable[Json]]
"""Answers one request: (method, argument) → result. What it raises is sent as an error."""


async def serve(own_end: socket.socket, handler: Handler) -> None:
    """Answer requests over this end of a socketpair until the other end is gone."""
    await answer_all(*await asyncio.open_connection(sock=own_end), handler)


async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler) -> None:
    """Answer requests until the other end is gone. Every request runs as a task of its own."""
    tasks: set[asyncio.Task[None]] = set()

    async def answer(request: Json) -> None:
        try:
            reply = {"id": request["id"], "result": await handler(request["method"], request["argument"])}
            frame = encode(reply, from_child=True)
        except Exception as error:  # noqa: BLE001 - whatever it is, the one who asked must hear of it
            said = {"kind": type(error).__name__, "message": str(error)}
            frame = encode({"id": request["id"], "error": said}, from_child=True)
        writer.write(frame)

    try:
        while True:
            task = asyncio.create_task(answer(await read_frame(reader)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    except PeerGone:
        return
    finally:
        for task in tasks:
            task.cancel()
        writer.close()
