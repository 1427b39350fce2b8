"""Process trees: how a process is ended with everything it started, and how that is proved.

A process is known by pid *and* start time, so a reused pid is never mistaken for the recorded one;
signals go through a pidfd that was compared with that identity after it was opened. The walk stops
(SIGSTOP) what it finds until nothing new turns up, then kills all of it: a stopped process can't fork
away. Gone means that the whole thread group has exited; a zombie holds nothing and counts as gone.

Guaranteed: `end_tree` returns by its deadline and names what is left. Not guaranteed: that a process in
uninterruptible sleep goes away; that is what `left` is for (QUARANTINED).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")

_STATE, _PARENT, _GROUP, _SESSION, _THREADS, _START, _EXIT_STATUS = 0, 1, 2, 3, 17, 19, 49
"""Fields of /proc/[pid]/stat, counted from the one after the name (proc(5))."""


class NotOurProcess(Exception):
    """A process that must not be signalled: pid 0 or 1, this process itself, or another user's."""

    def __init__(self, pid: int, why: str) -> None:
        super().__init__(f"process {pid} is not ended: {why}")
        self.pid = pid
        self.why = why


@dataclass(frozen=True, order=True, slots=True)
class ProcessId:
    """Identity of a process that a reused pid doesn't share."""

    pid: int
    start_ticks: int
    """Start time in clock ticks after boot (field 22 of /proc/[pid]/stat)."""


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One line of the process table."""

    id: ProcessId
    parent: int
    group: int
    session: int
    gone: bool
    """A zombie whose threads have all exited: it holds nothing, only its parent hasn't looked yet."""


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


def read_entry(pid: int) -> ProcessEntry | None:
    """The process with this pid; None when there is none."""
    try:
        text = (PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may itself hold spaces and parentheses.
    fields = text[text.rindex(b")") + 2 :].split()
    return ProcessEntry(
        id=ProcessId(pid, int(fields[_START])),
        parent=int(fields[_PARENT]),
        group=int(fields[_GROUP]),
        session=int(fields[_SESSION]),
        # A leader that exited before its other threads is shown as a zombie too, with them counted.
        gone=fields[_STATE] in (b"Z", b"X") and int(fields[_THREADS]) <= 1,
    )


def identify(pid: int) -> ProcessId | None:
    """The identity of the process that has this pid now; None when there is none."""
    entry = read_entry(pid)
    return None if entry is None else entry.id


def is_living(process: ProcessId) -> bool:
    """Whether exactly this process is there and no zombie."""
    entry = read_entry(process.pid)
    return entry is not None and entry.id == process and not entry.gone


def start_ms(process: ProcessId) -> int:
    """Start time in milliseconds since 1970, as far as the boot time is known (whole seconds)."""
    boot_s = next(
        int(line.split()[1]) for line in (PROC / "stat").read_text().splitlines() if line.startswith("btime ")
    )
    return boot_s * 1000 + process.start_ticks * 1000 // os.sysconf("SC_CLK_TCK")


def process_table() -> dict[int, ProcessEntry]:
    entries = (read_entry(int(folder.name)) for folder in PROC.iterdir() if folder.name.isdigit())
    return {entry.id.pid: entry for entry in entries if entry is not None}


def exit_status(process: ProcessId) -> int | None:
    """The wait status of a process that has ended and that nobody has reaped yet; None of any other."""
    try:
        text = (PROC / str(process.pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    if int(fields[_START]) != process.start_ticks or fields[_STATE] not in (b"Z", b"X"):
        return None
    return int(fields[_EXIT_STATUS])


def descendants(roots: Iterable[ProcessId], table: Mapping[int, ProcessEntry]) -> frozenset[ProcessId]:
    """The roots that are in the table, and everything below them."""
    return _below(roots, table, _children(table))


def trees_of(roots: Iterable[ProcessId], table: Mapping[int, ProcessEntry]) -> dict[ProcessId, frozenset[ProcessId]]:
    """Each root with everything below it; an empty tree for one that is not in the table."""
    children = _children(table)
    return {root: _below((root,), table, children) for root in roots}


def _children(table: Mapping[int, ProcessEntry]) -> Mapping[int, Sequence[ProcessEntry]]:
    """By pid: the processes right below it."""
    children: dict[int, list[ProcessEntry]] = {}
    for entry in table.values():
        children.setdefault(entry.parent, []).append(entry)
    return children


def _below(
    roots: Iterable[ProcessId], table: Mapping[int, ProcessEntry], children: Mapping[int, Sequence[ProcessEntry]]
) -> frozenset[ProcessId]:
    found: set[ProcessId] = set()
    queue = [table[root.pid] for root in roots if root.pid in table and table[root.pid].id == root]
    while queue:
        entry = queue.pop()
        if entry.id not in found:
            found.add(entry.id)
            queue.extend(children.get(entry.id.pid, ()))
    return frozenset(found)


def companions(leader: ProcessId, table: Mapping[int, ProcessEntry]) -> frozenset[ProcessId]:
    """Processes in the group or session that `leader` led.

    The kernel gives no pid away that is still the number of a group or session, so they are its own
    even when it is dead.
    """
    living = table.get(leader.pid)
    if living is not None and living.id != leader:
        return frozenset()
    return frozenset(entry.id for entry in table.values() if leader.pid in (entry.group, entry.session))


def marked(marker: str, table: Mapping[int, ProcessEntry]) -> frozenset[ProcessId]:
    """Processes of this user that were started with `marker` ("NAME=value") in their environment."""
    wanted = marker.encode()
    user = os.geteuid()
    found: set[ProcessId] = set()
    for pid, entry in table.items():
        folder = PROC / str(pid)
        # A process may end at any moment, or belong to somebody else.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if folder.stat().st_uid == user and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.add(entry.id)
    return frozenset(found)


@contextlib.contextmanager
def opened(process: ProcessId) -> Iterator[int | None]:
    """A pidfd of exactly this process; None when it is gone and reaped."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        yield None
        return
    try:
        # The descriptor pins the process, so a comparison made after opening can't go stale.
        yield descriptor if identify(process.pid) == process else None
    finally:
        os.close(descriptor)


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
        killed.update(process for process in alive if _kill(process))
        left = wait_gone(alive, deadline)
        if left or time.monotonic() >= deadline:
            return TreeEnd(left=tuple(sorted(left)), killed=len(killed))


def _kill(process: ProcessId) -> bool:
    return _is_own(process) and send_signal(process, signal.SIGKILL)


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
