"""How does the agent notice at once that a process ended?

A pidfd in the event loop: no polling, no SIGCHLD, and it works for processes that aren't children (a Ray worker is
the raylet's child).
"""

from __future__ import annotations

import asyncio
import os

from callboard.agents.process_tree import ProcessId, identify


async def exited(process: ProcessId) -> None:
    """Return when the process has ended (all of its threads; reaped or not)."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    try:
        if identify(process.pid) != process:
            return
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
    finally:
        os.close(descriptor)
