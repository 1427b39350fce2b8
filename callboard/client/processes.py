"""Recorded processes: a pid and a start time, because pids alone are reused.

Reads `/proc` itself, because the client depends on nothing that could.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
# Fields of /proc/<pid>/stat behind the last ")", which ends a name that may hold anything.
_STATE, _PARENT, _THREADS, _START = 0, 1, 17, 19


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process of this machine.

    Attributes:
        pid: its pid.
        start_ticks: when it started, in clock ticks since boot.
    """

    pid: int
    start_ticks: int

    def is_running(self) -> bool:
        """Whether it still runs. A zombie has ended: it holds nothing but its pid."""
        fields = _stat(self.pid)
        return fields is not None and not _has_ended(fields) and int(fields[_START]) == self.start_ticks


def identify(pid: int) -> ProcessId | None:
    """The process that has ``pid`` now; None when there is none, or only a zombie."""
    fields = _stat(pid)
    if fields is None or _has_ended(fields):
        return None
    return ProcessId(pid, int(fields[_START]))


def descendants(roots: list[ProcessId]) -> list[ProcessId]:
    """Every running process below ``roots``, children before their own children.

    A process whose parent ended was handed to another parent and is not found: call this while the
    roots still run.
    """
    children: dict[int, list[ProcessId]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) is not None:
            found = ProcessId(int(entry.name), int(fields[_START]))
            children.setdefault(int(fields[_PARENT]), []).append(found)
    below: list[ProcessId] = []
    queue = [root for root in roots if root.is_running()]
    while queue:
        found_here = children.get(queue.pop(0).pid, [])
        below.extend(found_here)
        queue.extend(found_here)
    return below


def _has_ended(fields: list[str]) -> bool:
    # A process is shown as a zombie once its first thread has ended; the others keep files and ports open.
    return fields[_STATE] in "ZX" and int(fields[_THREADS]) <= 1


def _stat(pid: int) -> list[str] | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()
