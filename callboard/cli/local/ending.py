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
from contextlib import suppress
from typing import Any

from callboard.agents.system.process_tree import end_tree
from callboard.security.processes import ProcessId, opened

KILL_PROOF_S = 5.0
"""How long the kernel may take to end a killed process before we say that it did not."""


class StillRunning(Exception):
    """Processes did not end, though they were killed."""

    def __init__(self, processes: Sequence[ProcessId]) -> None:
        super().__init__(f"did not end: {', '.join(str(process.pid) for process in processes)}")
        self.processes = tuple(processes)


async def ended(process: ProcessId) -> None:
    with opened(process) as descriptor:
        if descriptor is None:
            return
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(descriptor)


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
        send(program, signal.SIGTERM)
        send(program, signal.SIGCONT)  # one that somebody stopped could not answer
    waits = [asyncio.ensure_future(ended(program)) for program in programs]
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


def send(process: ProcessId, number: signal.Signals) -> None:
    """Sends a signal to ``process``, never to another one that has its pid by now."""
    with opened(process) as descriptor, suppress(ProcessLookupError):  # it may end between the look and the signal
        if descriptor is not None:
            signal.pidfd_send_signal(descriptor, number)
