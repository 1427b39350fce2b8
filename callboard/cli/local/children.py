"""Programs of a cluster as children in sessions of their own, their output in a file; and their ends, by pid and start
time: politely first, with proof.

The ends work for children and for programs that an earlier `up --detach` left, because they wait on pidfds.
Guaranteed: nothing but the recorded processes and what descends from them gets a signal (NJ-05), and
when an end returns, each of them has ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from callboard.agents.system.process_tree import end_tree, send_signal
from callboard.agents.system.processes import exited
from callboard.cli.show.exits import BAD_INPUT, FAILED, UNREACHABLE, CommandFailed
from callboard.security.processes import ProcessId, identify

Result = TypeVar("Result")


class ChildEnded(CommandFailed):
    """A program of the cluster ended by itself.

    Attributes:
        exit_code: its exit code; negative: the signal that killed it.
    """

    def __init__(self, role: str, exit_code: int, last_lines: Iterable[str]) -> None:
        """
        Args:
            role: which program.
            exit_code: its exit code.
            last_lines: of its output.
        """
        how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
        super().__init__(
            f"The {role} {how}.",
            "\n       ".join(("its last lines were:", *last_lines)),
            "Correct what it says and start again.",
            exit_code if exit_code in (BAD_INPUT, UNREACHABLE) else FAILED,
        )
        self.exit_code = exit_code


class Child:
    """One program of the cluster.

    Attributes:
        role: "controller", "agent node-0".
        log: file with its output.
    """

    def __init__(
        self, role: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.role = role
        self.log = log
        with log.open("ab") as output:
            # A session of its own: the terminal's Ctrl-C reaches us alone, and we end it in order.
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "callboard.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
        # Our own child stays a zombie until we reap it: its pid can't be another's yet.
        self.process = identify(self._popen.pid) or ProcessId(self._popen.pid, 0)

    async def ended(self) -> ChildEnded:
        """Waits for its end and says how it ended."""
        await exited(self.process)
        return ChildEnded(self.role, self._popen.wait(), self.last_lines())

    def last_lines(self, count: int = 15) -> tuple[str, ...]:
        with self.log.open(encoding="utf-8", errors="replace") as lines:
            return tuple(line.rstrip("\n") for line in deque(lines, count))

    def reap(self) -> None:
        """Forgets a child that has ended, so that no zombie stays."""
        self._popen.poll()


async def unless_ended(work: Awaitable[Result], children: Sequence[Child]) -> Result:
    """The result of ``work``.

    Raises:
        ChildEnded: a child ended before that.
    """
    working = asyncio.ensure_future(work)
    endings = [asyncio.ensure_future(child.ended()) for child in children]
    try:
        await asyncio.wait({working, *endings}, return_when=asyncio.FIRST_COMPLETED)
        for ending in endings:
            if ending.done():
                raise ending.result()
        return working.result()
    finally:
        for task in (working, *endings):
            task.cancel()
        await asyncio.gather(working, *endings, return_exceptions=True)


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
