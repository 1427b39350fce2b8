"""A worker as a plain process: `python -m callboard.agents.host.worker_main FD SUCCESSOR_S`.

Serves one `WorkerHost` on the inherited listening socket, whose address outlives the agent: the next agent of the node
finds the worker by it. Without any agent for SUCCESSOR_S seconds nobody is left to prove this process tree dead, so
it ends itself. (What it can't end, being busy in native code, the next agent finds by its record or marker.)
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from callboard.agents.host.framing import Json, answer_all
from callboard.agents.host.worker_host import CONTROL_METHODS, WorkerHost
from callboard.agents.host.worker_lanes import MainThread

_FIRST_AGENT_S = 30.0
"""For the agent that started this process to connect, at least: it does so at once. If it was killed just then, its
successor has as long as any."""


class _Server:
    """Serves one host to whichever agent is there."""

    def __init__(self, main: MainThread) -> None:
        self._host = WorkerHost(main)
        self._agents = 0
        self._arrived = False
        self._changed = asyncio.Event()

    async def serve(self, descriptor: int, successor_s: float) -> None:
        """Serve until no agent has been there for `successor_s` seconds."""
        async with await asyncio.start_unix_server(self._connected, sock=socket.socket(fileno=descriptor)):
            patience_s = max(_FIRST_AGENT_S, successor_s)
            # One that came and went counts: it may have been killed while this process was still starting.
            while await self._until(lambda: self._arrived, patience_s):
                await self._until(lambda: self._agents == 0, None)
                self._arrived = False
                patience_s = successor_s

    async def _until(self, condition: Callable[[], bool], within_s: float | None) -> bool:
        """Whether the condition became true within so many seconds (None: without limit)."""
        loop = asyncio.get_running_loop()
        deadline = None if within_s is None else loop.time() + within_s
        while not condition():
            left_s = None if deadline is None else deadline - loop.time()
            if left_s is not None and left_s <= 0:
                return False
            self._changed.clear()
            waiting = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait([waiting], timeout=left_s)
            waiting.cancel()
        return True

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._agents += 1
        self._arrived = True
        self._changed.set()
        try:
            await answer_all(reader, writer, self._handle)
        finally:
            self._agents -= 1
            self._changed.set()

    async def _handle(self, method: str, argument: Json) -> Json:
        host = self._host
        match method:
            case "call":
                return await host.call(argument["method"], *argument["args"], **argument["kwargs"])
            case "stream":
                items = host.stream(argument["method"], *argument["args"], **argument["kwargs"])
                return [item async for item in items]
            case "assign":
                return await host.assign(argument)
            case _ if method in CONTROL_METHODS:
                return await getattr(host, method)(**(argument or {}))
            case _:
                raise ValueError(f"unknown method {method!r}")


def _control(main: MainThread) -> None:
    try:
        asyncio.run(_Server(main).serve(int(sys.argv[1]), float(sys.argv[2])))
    except Exception:  # noqa: BLE001 - the last that this process says
        traceback.print_exc()
    finally:
        # The agent made this process the leader of its own session, so the group is ours alone.
        os.killpg(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Serve until no agent is left, then end this process and its group. The main thread is the user's."""
    # As Ray's workers have it; behind everything else, where it hides nothing.
    with suppress(FileNotFoundError):
        sys.path.append(str(Path.cwd()))
    main_thread = MainThread()
    threading.Thread(target=_control, args=(main_thread,), name="callboard-control", daemon=True).start()
    main_thread.serve()


if __name__ == "__main__":
    main()
