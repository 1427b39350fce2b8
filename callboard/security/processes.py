"""The processes of this machine: how each is known, what is below it, and what it was started with.

A process is known by pid *and* start time, so a reused pid is never mistaken for the recorded one. Gone means that the
whole thread group has exited; a zombie holds nothing and counts as gone. Read without psutil: it takes several times as
long, and a client depends on nothing that could.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from callboard.model.frozen import dataclass

PROC = Path("/proc")

_STATE, _PARENT, _GROUP, _SESSION, _THREADS, _START, _EXIT_STATUS = 0, 1, 2, 3, 17, 19, 49
"""Fields of /proc/[pid]/stat, counted from the one after the name (proc(5))."""


@dataclass(frozen=True, order=True, slots=True)
class ProcessId:
    """Identity of a process that a reused pid doesn't share."""

    pid: int
    start_ticks: int
    """Start time in clock ticks after boot (field 22 of /proc/[pid]/stat)."""

    def is_running(self) -> bool:
        """Whether exactly this process is there and no zombie, which holds nothing but its pid."""
        entry = read_entry(self.pid)
        return entry is not None and entry.id == self and not entry.gone


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One line of the process table."""

    id: ProcessId
    parent: int
    group: int
    session: int
    gone: bool
    """A zombie whose threads have all exited: it holds nothing, only its parent hasn't looked yet."""


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


def marked(marker: str, table: Mapping[int, ProcessEntry], *, prefix: bool = False) -> frozenset[ProcessId]:
    """Processes of this user that were started with `marker` ("NAME=value") in their environment; ``prefix``: or with a
    value that only begins so."""
    wanted = f"\0{marker}{'' if prefix else chr(0)}".encode()
    user = os.geteuid()
    found: set[ProcessId] = set()
    for pid, entry in table.items():
        folder = PROC / str(pid)
        # A process may end at any moment, or belong to somebody else.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if folder.stat().st_uid == user and wanted in b"\0" + (folder / "environ").read_bytes() + b"\0":
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
