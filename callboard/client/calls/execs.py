"""Programs in the environments of workers, as a client runs them: `ExecSession`, both ways, until the program ends.

Not guaranteed: that one goes on when the connection or the controller is lost. It ends then, and nothing is repeated:
what a program did is not known to be done once.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from callboard.client.calls import methods
from callboard.client.calls.connection import Connection
from callboard.client.calls.methods import carried
from callboard.model.frozen import dataclass
from callboard.v1.common_pb2 import ExecCommand, ExecInput, TerminalSize
from callboard.v1.job_pb2 import ExecWorkerRequest, ExecWorkerResponse, ExecWorkerStart
from callboard.wire.refusals import Unavailable

PIECE_BYTES = 64 << 10
"""Of input in one message."""

MOST_KEPT_BYTES = 16 << 20
"""Of each stream, of a program whose output is returned."""


@dataclass(frozen=True, slots=True)
class ExecDone:
    """How a program ended.

    Attributes:
        exit_code: as of a shell: 128 and the number for a signal.
        reason: why it did not run, or was ended before its time; empty: it ended by itself.
        stdout: the end of what it wrote to standard output, at most 16 MiB.
        stderr: likewise of standard error.
    """

    exit_code: int
    reason: str = ""
    stdout: bytes = b""
    stderr: bytes = b""


class ExecSession:
    """One program, or the terminal of a worker's command. Iterate :meth:`output` to its end; then :attr:`done` is
    set."""

    def __init__(
        self,
        connection: Connection,
        job: str,
        command: Sequence[str],
        *,
        component: str = "",
        rank: int = 0,
        terminal: bool = False,
        size: tuple[int, int] | None = None,
        terminal_type: str = "",
    ) -> None:
        """
        Args:
            connection: of the client.
            job: resource name of the job.
            command: the program and its arguments; empty: attach to the terminal of the worker's command.
            component: of the worker; empty: the only one.
            rank: of the worker.
            terminal: give it a terminal.
            size: rows and columns of that.
            terminal_type: for TERM; empty: as the worker has it.
        """
        self._connection = connection
        with carried():
            asked = ExecCommand(
                arguments=command, terminal=terminal, terminal_type=terminal_type, attach=not command, size=_size(size)
            )
            self._start = ExecWorkerStart(name=job, component=component, rank=rank, command=asked)
        self._call: Any = None
        self._writing = asyncio.Lock()
        self.done: ExecDone | None = None
        self.started = False
        """Whether the program ran."""

    async def output(self) -> AsyncGenerator[tuple[str, bytes], None]:
        """("stdout" or "stderr", data), piece by piece, until the program has ended.

        Raises:
            Unavailable: the controller or the node's agent was lost, and the program ended.
            CallboardError: it was refused; the type says why.
        """
        async with self._connection.both_ways(methods.EXEC_WORKER) as call:
            self._call = call
            await call.write(ExecWorkerRequest(start=self._start))
            while isinstance(response := await call.read(), ExecWorkerResponse):
                match response.output.WhichOneof("content"):
                    case "started":
                        self.started = True
                        yield "", b""
                    case "stdout":
                        yield "stdout", response.output.stdout
                    case "stderr":
                        yield "stderr", response.output.stderr
                    case "end":
                        end = response.output.end
                        self.done = ExecDone(end.exit_code, end.reason)
                        await self._finish()
                    case _:
                        pass  # of a newer version
            if self.done is None and await call.code() is not grpc.StatusCode.OK:
                raise self._connection.translated(await _error_of(call), methods.EXEC_WORKER)
            if self.done is None:
                raise Unavailable("the connection ended before the program did")

    async def _finish(self) -> None:
        """Write no more. The controller waits for that: a write to a call that has ended loses how it ended."""
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            async with self._writing:
                await self._call.done_writing()

    async def send(self, data: bytes) -> None:
        """Give data to its standard input; waits while it takes none."""
        for place in range(0, len(data), PIECE_BYTES):
            await self._put(ExecInput(data=data[place : place + PIECE_BYTES]))

    async def end_input(self) -> None:
        """Nothing more comes on its standard input."""
        await self._put(ExecInput(end=True))

    async def resize(self, rows: int, columns: int) -> None:
        """Its terminal has this size now."""
        await self._put(ExecInput(size=_size((rows, columns))))

    async def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        await self._put(ExecInput(signal=number))

    async def _put(self, given: ExecInput) -> None:
        if self._call is None:
            return
        try:
            async with self._writing:  # gRPC allows one at a time
                if self.done is not None or self._call.done():
                    return
                await self._call.write(ExecWorkerRequest(input=given))
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            if not self._call.done():
                raise  # else whoever reads its output learns how it ended


async def run_exec(session: ExecSession, stdin: bytes) -> ExecDone:
    """Run a program to its end; its output is returned."""

    async def give() -> None:
        await session.send(stdin)
        await session.end_input()

    kept = {"stdout": bytearray(), "stderr": bytearray()}
    giving: asyncio.Future[None] | None = None
    try:
        async with aclosing(session.output()) as output:
            async for stream, data in output:
                if giving is None and session.started:
                    giving = asyncio.ensure_future(give())
                if stream:
                    kept[stream] += data
                    del kept[stream][:-MOST_KEPT_BYTES]
    finally:
        if giving is not None:
            giving.cancel()
            await asyncio.wait([giving])
    assert session.done is not None, "its output came to an end"
    return replace(session.done, stdout=bytes(kept["stdout"]), stderr=bytes(kept["stderr"]))


def _size(size: tuple[int, int] | None) -> TerminalSize | None:
    return None if size is None else TerminalSize(rows=size[0], columns=size[1])


async def _error_of(call: Any) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )
