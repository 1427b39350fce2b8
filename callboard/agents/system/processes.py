"""The processes of this machine, as the parts of an agent see them: who lives, who ended, what is used, and the end of
whole trees.

`Processes` is what an agent asks for, so that it also runs where they are simulated; `MachineProcesses` are the real
ones. Walking /proc and waiting for deaths happens on threads of their own, so that one tree in uninterruptible sleep
delays neither the loop nor the end of another tree.

Ends are noticed at once by a pidfd in the event loop: no polling, no SIGCHLD, and it works for processes that aren't
children (a Ray worker is the raylet's child). So does the exit status: until somebody reaps the process it is in /proc,
and after that a pidfd that was opened before tells it (Linux 6.15 and later).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import struct
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from callboard.agents.system import process_tree, usage
from callboard.agents.system.process_tree import Search, TreeEnd, end_tree
from callboard.agents.system.usage import Usage
from callboard.security.processes import (
    ProcessEntry,
    ProcessId,
    companions,
    descendants,
    exit_status,
    identify,
    marked,
    opened,
    process_table,
    start_ms,
    trees_of,
)

_THREADS = 64
"""Trees ended at once: more than a node has workers that hang."""

_SLACK_S = 1.0
"""After the deadline the thread itself needs time to answer; beyond this it hangs in the kernel."""


_INFO = struct.Struct("=QQ11Ii")
"""`struct pidfd_info`: its mask, the cgroup, eleven ids of processes and users, the exit status."""

_WITH_STATUS = 1 << 3
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11


async def exited(process: ProcessId) -> int | None:
    """Return when the process has ended (all of its threads; reaped or not).

    Returns:
        Its exit code, negative for the signal that ended it; None when nobody can tell.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    with opened(process) as descriptor:
        if descriptor is None:
            return None
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
        # In this order: it may be reaped at any moment.
        status = exit_status(process)
        status = _status_of(descriptor) if status is None else status
        return None if status is None else os.waitstatus_to_exitcode(status)


def _status_of(descriptor: int) -> int | None:
    """The wait status of a process that was reaped; None where the kernel doesn't tell."""
    question = bytearray(_INFO.pack(_WITH_STATUS, *[0] * 13))
    try:
        fcntl.ioctl(descriptor, _GET_INFO, question)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(question)
    return int(status) if mask & _WITH_STATUS else None


class Processes(Protocol):
    """What lives on the machine of an agent."""

    def is_living(self, process: ProcessId) -> bool:
        """Whether exactly this process is there and no zombie."""

    def start_ms(self, process: ProcessId) -> int:
        """When it started, in milliseconds since 1970."""

    async def exited(self, process: ProcessId) -> int | None:
        """Return when it has ended: its exit code, negative for a signal; None when nobody can tell."""

    def send_signal(self, process: ProcessId, number: signal.Signals) -> bool:
        """Send a signal to exactly this process; False when it is gone already.

        Raises:
            NotOurProcess: it must not be signalled.
        """

    def usage_of(self, tree: Iterable[ProcessId]) -> Usage:
        """What the living processes of a tree use now."""

    def oom_kills(self) -> int:
        """Processes that the kernel has ended here for lack of memory so far."""

    async def end(
        self,
        leader: ProcessId,
        *,
        marker: str,
        also: Iterable[ProcessId] = (),
        budget_s: float,
        alone: bool = False,
    ) -> TreeEnd:
        """End a worker's tree and prove it gone.

        Args:
            leader: the worker's process.
            marker: "NAME=value" of what it started.
            also: the tree as last seen.
            budget_s: seconds until what is left counts as left.
            alone: the leader died unasked, so its tree has lost its root: take what this node started and
                nobody owns any more.
        """

    def adopt(self, roots: Iterable[ProcessId]) -> None:
        """These and what is below them are ours, although an earlier agent was their parent."""

    async def end_roots(self, roots: Iterable[ProcessId], *, budget_s: float) -> TreeEnd:
        """End the roots with what is below them."""

    async def end_marked(self, roots: Iterable[ProcessId], *, budget_s: float) -> TreeEnd:
        """End the roots and everything that carries the node's marker but is no part of this agent."""

    async def trees(self, roots: Iterable[ProcessId]) -> dict[ProcessId, frozenset[ProcessId]]:
        """The tree below each root, as it is now."""

    async def ours(self) -> frozenset[ProcessId]:
        """Everything that belongs to this node: what is below its agent and what it adopted, and what carries its
        marker."""

    def close(self) -> None:
        """Nothing more is asked."""


class MachineProcesses:
    """The real ones."""

    is_living = staticmethod(ProcessId.is_running)
    start_ms = staticmethod(start_ms)
    send_signal = staticmethod(process_tree.send_signal)
    exited = staticmethod(exited)
    usage_of = staticmethod(usage.usage_of)

    def __init__(self, agent_marker: str) -> None:
        self._agent_marker = agent_marker
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="callboard-end")
        self._adopted: frozenset[ProcessId] = frozenset()

    def oom_kills(self) -> int:
        """In the control groups of this process."""
        return usage.oom_kills()

    async def end(
        self,
        leader: ProcessId,
        *,
        marker: str,
        also: Iterable[ProcessId] = (),
        budget_s: float,
        alone: bool = False,
    ) -> TreeEnd:
        """End a worker's tree."""
        roots = frozenset((leader, *also))

        def search(table: Mapping[int, ProcessEntry]) -> Iterable[ProcessId]:
            found = companions(leader, table) | marked(marker, table)
            return found | self.orphans(table) if alone else found

        return await self._run(roots, search, budget_s)

    def adopt(self, roots: Iterable[ProcessId]) -> None:
        self._adopted |= frozenset(roots)

    async def end_roots(self, roots: Iterable[ProcessId], *, budget_s: float) -> TreeEnd:
        return await self._run(frozenset(roots), None, budget_s)

    async def end_marked(self, roots: Iterable[ProcessId], *, budget_s: float) -> TreeEnd:
        return await self._run(frozenset(roots), self.orphans, budget_s)

    async def trees(self, roots: Iterable[ProcessId]) -> dict[ProcessId, frozenset[ProcessId]]:
        def look() -> dict[ProcessId, frozenset[ProcessId]]:
            return trees_of(roots, process_table())

        return await asyncio.get_running_loop().run_in_executor(self._threads, look)

    async def ours(self) -> frozenset[ProcessId]:
        """What is below this process and what it adopted, and what carries the node's marker."""

        def look() -> frozenset[ProcessId]:
            table = process_table()
            agent = identify(os.getpid())
            assert agent is not None
            return descendants([agent, *self._adopted], table) | marked(self._agent_marker, table)

        return await asyncio.get_running_loop().run_in_executor(self._threads, look)

    def orphans(self, table: Mapping[int, ProcessEntry]) -> frozenset[ProcessId]:
        """What carries the node's marker but has no ancestor in this agent or in what it adopted.

        Living workers are subreapers, so what was theirs stays below them: an orphan's worker is dead.
        """
        agent = identify(os.getpid())
        assert agent is not None
        return marked(self._agent_marker, table) - descendants([agent, *self._adopted], table)

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False)

    async def _run(self, roots: frozenset[ProcessId], search: Search | None, budget_s: float) -> TreeEnd:
        deadline = time.monotonic() + budget_s
        run = asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: end_tree(roots, deadline=deadline, search=search)
        )
        await asyncio.wait([run], timeout=budget_s + _SLACK_S)
        if run.done():
            return run.result()
        return TreeEnd(left=tuple(sorted(roots)), killed=0)
