"""Ends of recorded programs, by pid and start time: politely first, with proof.

Works for children and for programs that an earlier `up --detach` left, because it waits on pidfds.
Guaranteed: nothing but the recorded processes and what descends from them gets a signal (NJ-05), and
when it returns, each of them has ended.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterable, Sequence
from typing import Any

from callboard.agents.system.process_tree import end_tree, send_signal
from callboard.agents.system.processes import exited
from callboard.security.processes import ProcessId

KILL_PROOF_S = 5.0
"""How long the kernel may take to end a killed process before we say that it did not."""


class StillRunning(Exception):
    """Processes did not end, though they were killed."""

    def __init__(self, processes: Sequence[ProcessId]) -> None:
        super().__init__(f"did not end: {', '.join(str(process.pid) for process in processes)}")
        self.processes = tuple(processes)


async def end_politely(programs: Sequence[ProcessId], *, grace_s: float, hurry: asyncio.Event) -> list[ProcessId]:
    """Asks programs to end (SIGTERM), also stopped ones, and waits.

    Args:
        programs: which; all are asked at once.
        grace_s: how long to wait.
        hurry: stop waiting when it is set.

    Returns:
        Those that still run.
    """
    for program in programs:
        send_signal(program, signal.SIGTERM)
        send_signal(program, signal.SIGCONT)  # one that somebody stopped could not answer
    waits = [asyncio.ensure_future(exited(program)) for program in programs]
    hurried: asyncio.Future[Any] = asyncio.ensure_future(hurry.wait())
    everything: asyncio.Future[Any] = asyncio.gather(*waits)
    try:
        await asyncio.wait({everything, hurried}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (everything, hurried):
            task.cancel()
        await asyncio.gather(everything, hurried, return_exceptions=True)
    return [program for program in programs if program.is_running()]


async def kill_trees(roots: Iterable[ProcessId]) -> None:
    """Kills processes with all that descends from them, and waits until every one has ended.

    Raises:
        StillRunning: the kernel did not end one of them in time.
    """
    end = await asyncio.to_thread(end_tree, roots, deadline=time.monotonic() + KILL_PROOF_S)
    if not end.gone:
        raise StillRunning(end.left)
