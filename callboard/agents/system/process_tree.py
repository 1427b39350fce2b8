"""Process trees: how a process is ended with everything it started, and how that is proved.

Signals go through a pidfd that was compared with the identity of a process after it was opened. The walk stops
(SIGSTOP) what it finds until nothing new turns up, then kills all of it: a stopped process can't fork away.

Guaranteed: `end_tree` returns by its deadline and names what is left. Not guaranteed: that a process in
uninterruptible sleep goes away; that is what `left` is for (QUARANTINED).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping

from callboard.model.frozen import dataclass
from callboard.security.processes import PROC, ProcessEntry, ProcessId, descendants, opened, process_table


class NotOurProcess(Exception):
    """A process that must not be signalled: pid 0 or 1, this process itself, or another user's."""

    def __init__(self, pid: int, why: str) -> None:
        super().__init__(f"process {pid} is not ended: {why}")
        self.pid = pid
        self.why = why


@dataclass(frozen=True, slots=True)
class TreeEnd:
    """What came of ending a tree."""

    left: tuple[ProcessId, ...]
    """Processes that could not be proved gone by the deadline."""
    killed: int
    """Processes that were alive and got the SIGKILL."""

    @property
    def gone(self) -> bool:
        """Whether nothing is left."""
        return not self.left


def refuse_foreign(process: ProcessId) -> None:
    """Raise `NotOurProcess` for a process that an agent has no business with."""
    if process.pid <= 1:
        raise NotOurProcess(process.pid, "an agent ends only what it started")
    if process.pid == os.getpid():
        raise NotOurProcess(process.pid, "it is the agent itself")
    if not _is_own(process):
        raise NotOurProcess(process.pid, "it belongs to another user")


def _is_own(process: ProcessId) -> bool:
    try:
        return (PROC / str(process.pid)).stat().st_uid == os.geteuid()
    except FileNotFoundError:
        return True


def send_signal(process: ProcessId, number: signal.Signals) -> bool:
    """Send one signal to exactly this process; False when it is gone already."""
    refuse_foreign(process)
    with opened(process) as descriptor:
        if descriptor is None:
            return False
        try:
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        return True


def wait_gone(processes: Iterable[ProcessId], deadline: float) -> frozenset[ProcessId]:
    """Wait until the processes are gone; returns those that weren't by `deadline` (monotonic s).

    A pidfd becomes readable when the last thread of its group has exited, also while the parent hasn't
    reaped it: exactly what "gone" means here.
    """
    with contextlib.ExitStack() as stack:
        poller = select.poll()
        waiting: dict[int, ProcessId] = {}
        for process in processes:
            descriptor = stack.enter_context(opened(process))
            if descriptor is not None:
                poller.register(descriptor, select.POLLIN)
                waiting[descriptor] = process
        while waiting:
            left_ms = max(0, int((deadline - time.monotonic()) * 1000))
            ready = poller.poll(left_ms)
            if not ready:
                break
            for descriptor, _ in ready:
                poller.unregister(descriptor)
                del waiting[descriptor]
        return frozenset(waiting.values())


Search = Callable[[Mapping[int, ProcessEntry]], Iterable[ProcessId]]
"""Finds further members of a tree that its parent links no longer show."""


def end_tree(roots: Iterable[ProcessId], *, deadline: float, search: Search | None = None) -> TreeEnd:
    """Kill the roots and everything below them, and prove that all of it is gone.

    A child that changed its user can't be signalled; it is waited for and else named in `left`.

    Args:
        roots: recorded processes; those already gone are skipped.
        deadline: `time.monotonic()` by which to give up.
        search: finds members that were reparented away (marker, group, session).

    Raises:
        NotOurProcess: a root must not be signalled. Nothing was done then.
    """
    roots = tuple(roots)
    for root in roots:
        refuse_foreign(root)
    killed: set[ProcessId] = set()
    while True:
        alive = _stop_until_stable(roots, search, deadline)
        if not alive:
            return TreeEnd(left=(), killed=len(killed))
        killed.update(each for each in alive if _is_own(each) and send_signal(each, signal.SIGKILL))
        left = wait_gone(alive, deadline)
        if left or time.monotonic() >= deadline:
            return TreeEnd(left=tuple(sorted(left)), killed=len(killed))


def _stop_until_stable(roots: Iterable[ProcessId], search: Search | None, deadline: float) -> frozenset[ProcessId]:
    """Every living member of the tree, all of them stopped unless the deadline came first."""
    stopped: set[ProcessId] = set()
    while True:
        table = process_table()
        members = set(descendants(roots, table))
        if search is not None:
            members |= descendants(search(table), table)
        members = {member for member in members if member.pid not in (1, os.getpid()) and not table[member.pid].gone}
        fresh = members - stopped
        if not fresh or time.monotonic() >= deadline:
            return frozenset(members)
        for member in fresh:
            if _is_own(member):
                send_signal(member, signal.SIGSTOP)
        stopped |= fresh
