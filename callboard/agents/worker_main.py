"""A worker as a plain process: `python -m callboard.agents.worker_main FD`.

Serves one `WorkerHost` over the inherited end of a socketpair. The end of that socket means that the agent is
gone: nobody is left to prove this process tree dead, so it ends itself. (What it can't end, being busy in
native code, the node's next agent finds by its marker.)
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

from callboard.agents.framing import Json, serve
from callboard.agents.worker_host import WorkerHost


async def _serve(descriptor: int) -> None:
    host = WorkerHost()

    async def handle(method: str, argument: Json) -> Json:
        match method:
            case "call":
                return await host.call(argument["method"], *argument["args"], **argument["kwargs"])
            case "stream":
                items = host.stream(argument["method"], *argument["args"], **argument["kwargs"])
                return [item async for item in items]
            case "ping":
                return await host.ping()
            case "assign":
                return await host.assign(argument)
            case "cancel":
                return await host.cancel()
            case "checkpoint":
                return await host.checkpoint(argument["wait_s"], argument["take"])
            case "progress":
                return await host.progress()
            case "report":
                return await host.report()
            case _:
                raise ValueError(f"unknown method {method!r}")

    await serve(socket.socket(fileno=descriptor), handle)


def main() -> None:
    """Serve until the agent is gone, then end this process and its group."""
    asyncio.run(_serve(int(sys.argv[1])))
    # The agent made this process the leader of its own session, so the group is ours alone.
    os.killpg(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
