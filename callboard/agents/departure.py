"""Departure: why and when an agent leaves, and notices of a shutdown, after which its node is drained.

It leaves by a signal, by the controller's wish, or because the program that started it is gone. A second signal
hurries.

A notice comes from a command of the operator's, which is run every so often. Exit code 0 with output is a notice: its
first line is the reason of the drain. Anything else is none: another exit code, no output, no answer in time. A drain
is asked for once per notice, until the controller has it; a notice that ends and comes back is a new one. Taking the
drain back is left to people: whoever uncordons a node whose notice still stands has decided so. Guaranteed: the command
and all that it starts in its process group are ended when their time is over, and no more than `OUTPUT_BYTES` of its
output are kept.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress

import grpc

from callboard.agents.link.session import controller_channel
from callboard.agents.options import AgentOptions
from callboard.agents.system.processes import exited
from callboard.model.log import structlog
from callboard.security.processes import ProcessId, identify
from callboard.security.tokens import BadToken
from callboard.v1 import node_pb2, node_pb2_grpc

_log = structlog.get_logger(__name__)


class Departure:
    """Waits for a reason to leave."""

    def __init__(self) -> None:
        self.reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.on_hurry: Callable[[], None] = lambda: None
        """Called for every further signal."""

    def ask(self, reason: str) -> None:
        """Leave; asked again, hurry."""
        if self.reason.done():
            _log.warning("hurrying", why=reason)
            self.on_hurry()
        else:
            self.reason.set_result(reason)

    def listen(self) -> None:
        """Take SIGTERM and SIGINT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask, number.name)

    def ignore(self) -> None:
        """Give the signals back."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    async def follow_parent(self, pid: int) -> None:
        """Leave when our parent is gone: whoever ran us for a demo or `up` must not leave us behind."""
        parent = identify(pid)
        # Only a parent's pid is surely still its own while we can see that it is our parent.
        if parent is not None and os.getppid() == pid:
            await exited(parent)
        self.ask(f"the parent process {pid} is gone")

    async def follow(self, process: ProcessId) -> None:
        """Leave when a process is gone that watches over us without being our parent."""
        await exited(process)
        self.ask(f"the process {process.pid} is gone")


SETTLE_S = 2.0
"""For what a command that was killed has said and nobody read; it comes at once."""

OUTPUT_BYTES = 4096
REASON_CHARS = 200

CALL_S = 10.0
"""Deadline of asking for the drain; asked again at the next look, so that an outage of the controller costs nothing
but that."""

Drain = Callable[[str], Awaitable[bool]]
"""Asks for the drain of this node with a reason; whether that was heard."""


class NoticeWatcher:
    """Looks for notices as long as it runs."""

    def __init__(self, options: AgentOptions, drain: Drain) -> None:
        self._options = options
        self._drain = drain
        self._heard = False
        self._trouble = ""

    async def run(self) -> None:
        """Look, and look again, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._options.notice_every_s)

    async def look(self) -> None:
        """One look, and what follows from it."""
        reason = await self._notice()
        if not reason:
            self._heard = False
        elif not self._heard:
            self._heard = await self._drain(reason)

    async def _notice(self) -> str:
        """The reason of a notice; empty: there is none."""
        options = self._options
        process = await asyncio.create_subprocess_shell(
            options.notice_command,
            env={**os.environ, "CALLBOARD_NODE": options.node_id},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(options.notice_timeout_s):
                said = await _first_bytes(process.stdout)
                code = await process.wait()
        except TimeoutError:
            self._say(f"no answer within {options.notice_timeout_s:g} s")
            return ""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await _settled(process)
        # Beyond what a shell says of a command that it can't find or run, exit codes are the command's own.
        self._say("the shell can't run it" if code in {126, 127} else "")
        lines = said.decode(errors="replace").strip().splitlines()
        return lines[0][:REASON_CHARS] if code == 0 and lines else ""

    def _say(self, trouble: str) -> None:
        if trouble and trouble != self._trouble:
            _log.warning("notice_command_failed", command=self._options.notice_command, why=trouble)
        self._trouble = trouble


async def _settled(process: asyncio.subprocess.Process) -> None:
    """Lets go of a process that was killed. asyncio tells its end only once its output was read to the end, which one
    that left the process group may hold open for ever."""
    assert process.stdout is not None
    with suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_S):
            while await process.stdout.read(OUTPUT_BYTES):
                pass
            await process.wait()


async def _first_bytes(output: asyncio.StreamReader) -> bytes:
    """The beginning of what is said; the rest is read and dropped, so that the command can end."""
    kept = b""
    while chunk := await output.read(OUTPUT_BYTES):
        kept += chunk[: OUTPUT_BYTES - len(kept)]
    return kept


async def ask_for_drain(options: AgentOptions, reason: str) -> bool:
    """Asks the controller to drain this node; whether it heard."""
    within_ms = options.notice_within_ms
    request = node_pb2.DrainNodeRequest(name=f"nodes/{options.node_id}", within_ms=within_ms, reason=reason)
    request.until_rejoin = True  # Who comes back under this id is another program, where no notice stands.
    try:
        async with controller_channel(options) as channel:
            await node_pb2_grpc.NodeServiceStub(channel).DrainNode(request, timeout=CALL_S)
    except grpc.aio.AioRpcError as error:
        _log.warning("notice_not_heard", reason=reason, code=error.code().name, why=error.details())
        return False
    except BadToken as error:
        _log.warning("notice_not_heard", reason=reason, code="UNAUTHENTICATED", why=str(error))
        return False
    _log.warning("notice", reason=reason, within_ms=within_ms)
    return True
