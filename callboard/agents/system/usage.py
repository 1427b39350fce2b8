"""CPU and memory that a process tree uses, and whether the kernel ended one for lack of memory.

Read from /proc (proc(5)) and the agent's own memory cgroup; nothing of it is exact while the tree changes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from callboard.agents.system.cgroups import Cgroups
from callboard.model.frozen import dataclass
from callboard.security.processes import PROC, ProcessId

_OWN = Cgroups()


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tree uses at one moment.

    Attributes:
        cpu_ticks: clock ticks of CPU that its living processes have used so far.
        memory_bytes: resident memory. What processes share is counted for each.
        peak_bytes: sum of the most that each process ever held.
        at_s: monotonic time in seconds.
    """

    cpu_ticks: int = 0
    memory_bytes: int = 0
    peak_bytes: int = 0
    at_s: float = 0.0


def usage_of(tree: Iterable[ProcessId]) -> Usage:
    """What the living processes of a tree use now."""
    ticks = memory = peak = 0
    for process in tree:
        found = _one(process)
        if found is not None:
            ticks, memory, peak = ticks + found[0], memory + found[1], peak + found[2]
    return Usage(ticks, memory, peak, time.monotonic())


def cpu_milli(before: Usage, after: Usage) -> int:
    """Milli-CPU between two looks at a tree; a process that ended meanwhile makes it less, never negative."""
    elapsed_s = after.at_s - before.at_s
    if elapsed_s <= 0:
        return 0
    used_s = (after.cpu_ticks - before.cpu_ticks) / os.sysconf("SC_CLK_TCK")
    return max(0, round(used_s / elapsed_s * 1000))


def oom_kills(cgroups: Cgroups = _OWN) -> int:
    """Processes that the kernel ended for lack of memory in this process's cgroup and those around it, so far.

    0 as well where the kernel doesn't tell.
    """
    # A count holds those of the groups below, so the greatest counts each kill once.
    return max(map(_oom_kill, cgroups.files("memory", "memory.events", "memory.oom_control")), default=0)


def _oom_kill(file: Path) -> int:
    try:
        pairs = (line.split() for line in file.read_text().splitlines())
    except OSError:
        return 0
    return sum(int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] == "oom_kill")


def _one(process: ProcessId) -> tuple[int, int, int] | None:
    """CPU ticks, resident and peak bytes of a process; None when it is gone or another's."""
    folder = PROC / str(process.pid)
    try:
        stat = (folder / "stat").read_bytes()
        status = _fields((folder / "status").read_text(errors="replace"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    if int(fields[19]) != process.start_ticks:
        return None
    resident = _kibibytes(status, "VmRSS")
    return int(fields[11]) + int(fields[12]), resident, max(resident, _kibibytes(status, "VmHWM"))


def _fields(status: str) -> dict[str, str]:
    return dict(line.split(":", 1) for line in status.splitlines() if ":" in line)


def _kibibytes(status: Mapping[str, str], field: str) -> int:
    # A zombie has no memory, and no such line.
    return int(status[field].split()[0]) * 1024 if field in status else 0
