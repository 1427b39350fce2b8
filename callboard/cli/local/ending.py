"""Ends of recorded programs, by pid and start time: politely first, with proof.

Works for children and for programs that an earlier `up --detach` left, because it waits on pidfds.
Guaranteed: nothing but the recorded processes and what descends from them gets a signal (NJ-05), and
when it returns, each of them has ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from callboard.client.clusters import ProcessId, descendants, identify

KILL_PROOF_S = 5.0
"""How long the kernel may take to end a killed process before we say that it did not."""


class StillRunning(Exception):
    """Processes did not end, though they were killed."""

    def __init__(self, processes: Sequence[ProcessId]) -> None:
        super().__init__(f"did not end: {', '.join(str(process.pid) for process in processes)}")
        self.processes = tuple(processes)


async def ended(process: ProcessId) -> None:
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if not process.is_running():
            return
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(fd, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(fd)
    finally:
        os.close(fd)


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


async def kill_trees(roots: Sequence[ProcessId]) -> None:
    """Kills processes with all that descends from them, and waits until every one has ended.

    Raises:
        StillRunning: the kernel did not end one of them in time.
    """
    # Stopped first, so that nothing is forked behind the list.
    stopped: list[ProcessId] = []
    while fresh := [
        process for process in (*roots, *descendants(list(roots))) if process not in stopped and process.is_running()
    ]:
        for process in fresh:
            send(process, signal.SIGSTOP)
        stopped.extend(fresh)
    for process in stopped:
        send(process, signal.SIGKILL)
    await proved_gone(stopped, KILL_PROOF_S)


async def proved_gone(processes: Sequence[ProcessId], timeout_s: float) -> None:
    """Waits until every process has ended.

    Raises:
        StillRunning: one has not in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            for process in processes:
                await ended(process)
    except TimeoutError:
        raise StillRunning([process for process in processes if process.is_running()]) from None


def marked(assignment: str) -> list[ProcessId]:
    """Running processes of this user in whose environment a variable begins like ``assignment`` ("NAME=value")."""
    needle = b"\0" + assignment.encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue  # Somebody else's, or gone.
        if needle in b"\0" + environment and (process := identify(int(entry.name))) is not None:
            found.append(process)
    return found


def send(process: ProcessId, number: signal.Signals) -> None:
    """Sends a signal to ``process``, never to another one that has its pid by now."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        # The pidfd pins whoever has the pid now; the start time says whether that is the one we mean.
        if process.is_running():
            signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return  # It ended between the look and the signal.
    finally:
        os.close(fd)
