"""What carries a program in a worker's environment between its relay (`host.worker_exec`) and the controller.

Each has a connection to the controller of its own, as output has (`output_sender`), and a socket of its own to its
relay, in a folder that is ours alone. Nothing is kept here: each piece is passed on before the next is taken, so a
reader that is slow holds back the program. The program ends when either side is gone.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from callboard.agents.host.framing import Json
from callboard.agents.host.worker_exec import CLOSE, DATA, END, HEADER, PIECE_BYTES, SIGNAL, SIZE, STDERR, STDOUT, frame
from callboard.agents.runtime import HostError
from callboard.agents.system.tasks import cancelled
from callboard.model.log import structlog
from callboard.security.dialing import Channel
from callboard.security.tokens import BadToken
from callboard.v1 import agent_pb2, agent_pb2_grpc, common_pb2

_log = structlog.get_logger(__name__)

MOST_EXECS = 16
"""At one time; the controller asks for no more of one node. Each costs a connection and two processes."""

_BEGIN_S = 15.0
"""For the worker's host to start the program, and for its relay to connect. Code of the user that holds the GIL keeps
the host from answering."""

_END_S = 5.0
"""For the controller to take the end of a program."""

_CANNOT_RUN, _KILLED = 126, 137
"""Exit codes: of a shell for what can't be run, and of what was killed."""

Control = Callable[[str, Json], Awaitable[Json]]
"""Asks the host of a worker: (method, argument) → answer."""

_Stream = Any
"""``grpc.aio.StreamStreamCall``: its methods for reading and writing have no types."""


class ExecCarrier:
    """The programs that run in the environments of this node's workers."""

    def __init__(self, sockets: Path, dial: Callable[[], Channel]) -> None:
        self._sockets = sockets
        self._dial = dial
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, ask: agent_pb2.StartExec, control: Control | None) -> None:
        """Run a program beside everything else.

        Args:
            control: asks the worker's host; None: the worker isn't here, or isn't ready.
        """
        if len(self._running) >= MOST_EXECS:
            _log.warning("exec_not_begun", why=f"{MOST_EXECS} are under way")
            return
        task = asyncio.create_task(self._run(ask, control), name=f"exec {ask.exec_id[:8]}")
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("exec_failed", exc_info=error)

    async def close(self) -> None:
        """Break off what is under way."""
        await cancelled(self._running)

    async def _run(self, ask: agent_pb2.StartExec, control: Control | None) -> None:
        who = {"worker": f"{ask.worker.job_id}/{ask.worker.component}/{ask.worker.rank}"}
        stream: _Stream = None
        try:
            async with self._dial() as channel:
                stream = agent_pb2_grpc.AgentServiceStub(channel).AttachExec()
                await stream.write(agent_pb2.AttachExecRequest(exec_id=ask.exec_id))
                if (end := await self._carry(ask, control, stream)) is not None:
                    await _tell_end(end, stream)
                    await stream.read()  # the controller has taken it, or is gone
        except grpc.aio.AioRpcError as error:
            _log.info("exec_broken_off", **who, why=f"{error.code().name}: {error.details()}")
        except asyncio.InvalidStateError:  # a write to a stream that has ended
            _log.info("exec_broken_off", **who, why=f"{(await stream.code()).name}: {await stream.details()}")
        except BadToken as error:
            _log.warning("exec_not_begun", **who, why=str(error))

    async def _carry(
        self, ask: agent_pb2.StartExec, control: Control | None, stream: _Stream
    ) -> common_pb2.ExecEnd | None:
        """Run the program to its end; None: the controller was told how it ended, or is gone."""
        if control is None:
            return _no("the worker is not ready on this node any more")
        name = f"x-{ask.exec_id}"
        directory = os.open(self._sockets, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        listener = socket.socket(socket.AF_UNIX)
        try:
            # By way of the folder's descriptor: paths of sockets hold 107 bytes.
            listener.bind(f"/proc/self/fd/{directory}/{name}")
            listener.listen(1)
            listener.setblocking(False)
            asked = control("execute", {"folder": str(self._sockets), "name": name, "asked": _plan(ask.command)})
            async with asyncio.timeout(_BEGIN_S):
                answer = await asked
                if "problem" in answer:
                    return _no(answer["problem"], answer["exit_code"])
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            reader, writer = await asyncio.open_unix_connection(sock=connection)
        except HostError as error:
            return _no(f"the worker can't be asked: {error}")
        except TimeoutError:
            why = f"the worker did not answer within {_BEGIN_S:g} s; code that holds Python's GIL keeps it from that"
            return _no(why)
        except OSError as error:
            return _no(f"its node can't make a socket: {error.strerror}")
        finally:
            listener.close()
            (self._sockets / name).unlink(missing_ok=True)
            os.close(directory)
        if ask.command.attach and ask.command.HasField("size"):
            writer.write(_size_frame(ask.command.size))
        up = asyncio.ensure_future(_to_controller(reader, stream))
        down = asyncio.ensure_future(_to_program(stream, writer))
        try:
            # To cancel a read would end the call: the controller ends it, once it has heard of the end or is gone.
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
            if up.done():
                up.result()
                await asyncio.wait({down}, timeout=_END_S)
            if down.done():
                down.result()
            return None
        finally:
            await cancelled([up, down])
            writer.close()


async def _to_controller(reader: asyncio.StreamReader, stream: _Stream) -> None:
    """Pass on what the relay says, the end included."""
    while True:
        try:
            kind, size = HEADER.unpack(await reader.readexactly(HEADER.size))
            content = await reader.readexactly(size if size <= PIECE_BYTES else 0)
        except (asyncio.IncompleteReadError, ConnectionError):
            await _tell_end(
                _no("its worker ended, or the process that kept it was killed; it ended with that", _KILLED), stream
            )
            return
        if kind == END:
            await _tell_end(common_pb2.ExecEnd(**json.loads(content)), stream)
            return
        output = common_pb2.ExecOutput(started=True)
        if kind == STDOUT:
            output = common_pb2.ExecOutput(stdout=content)
        elif kind == STDERR:
            output = common_pb2.ExecOutput(stderr=content)
        await stream.write(agent_pb2.AttachExecRequest(output=output))


async def _tell_end(end: common_pb2.ExecEnd, stream: _Stream) -> None:
    await stream.write(agent_pb2.AttachExecRequest(output=common_pb2.ExecOutput(end=end)))
    await stream.done_writing()


async def _to_program(stream: _Stream, writer: asyncio.StreamWriter) -> None:
    """Pass on what the controller says, until it says no more: then nobody is there."""
    while isinstance(response := await stream.read(), agent_pb2.AttachExecResponse):
        match response.input.WhichOneof("content"):
            case "data":
                writer.write(frame(DATA, response.input.data))
            case "end":
                writer.write(frame(CLOSE))
            case "size":
                writer.write(_size_frame(response.input.size))
            case "signal":
                writer.write(frame(SIGNAL, str(response.input.signal).encode()))
            case _:
                pass  # of a newer version
        with suppress(ConnectionError):  # its other half reads how the program ended
            await writer.drain()


def _size_frame(size: common_pb2.TerminalSize) -> bytes:
    return frame(SIZE, json.dumps([size.rows, size.columns]).encode())


def _plan(command: common_pb2.ExecCommand) -> Json:
    return {
        "command": list(command.arguments),
        "terminal": command.terminal,
        "rows": command.size.rows or 24,
        "columns": command.size.columns or 80,
        "terminal_type": command.terminal_type,
        "attach": command.attach,
    }


def _no(why: str, exit_code: int = _CANNOT_RUN) -> common_pb2.ExecEnd:
    return common_pb2.ExecEnd(exit_code=exit_code, reason=why)
