"""The verdict on a worker's end: why its process ended, as far as can be told; above all whether memory ran out.

Ray's memory monitor ends several workers at once, small ones too; the kernel may end a small one beside a large one. So
an end for lack of memory also names who held most at that time, by what was last seen of each.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping

from callboard.agents.host.worker_process import signal_name
from callboard.agents.runtime import Hosted
from callboard.agents.system.processes import Processes
from callboard.model.frozen import dataclass
from callboard.model.quantities import format_memory
from callboard.security.processes import ProcessId
from callboard.v1 import agent_pb2

_KILLED = ("signal 9", "SIGKILL")
_UNTOLD = "ended"
"""The end of a message that doesn't know how the process ended: only its parent, the raylet, does."""


@dataclass(frozen=True, slots=True)
class ExitVerdict:
    """What is told of an end that nobody asked for.

    Attributes:
        message: one sentence.
        out_of_memory: it was ended for lack of memory.
        peak_bytes: most memory that its process tree was seen to hold; 0: never seen.
    """

    message: str
    out_of_memory: bool = False
    peak_bytes: int = 0


_SHELL = 128
"""What a shell adds to the number of the signal that ended its child."""

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - no temporary file of ours

_CAUSES: Mapping[int, str] = {
    signal.SIGKILL: "usually the out-of-memory killer, a memory limit of its container or batch job, or a `kill -9`",
    signal.SIGSEGV: "a crash in native code: an extension module, CUDA or a driver; `env: {PYTHONFAULTHANDLER: '1'}` "
    "prints where",
    signal.SIGBUS: "usually /dev/shm is full, or a file that is mapped into memory became shorter or unreadable",
    signal.SIGABRT: "native code gave up: a failed assertion, an uncaught C++ exception or NCCL's watchdog; its stderr "
    "says which",
    signal.SIGILL: "native code that was built for another processor",
    signal.SIGFPE: "native code divided an integer by zero",
    signal.SIGTERM: "somebody or a batch system asked it to end",
    signal.SIGINT: "somebody interrupted it (Ctrl-C)",
    signal.SIGHUP: "its terminal or session was closed",
    signal.SIGPIPE: "it wrote to a pipe or socket whose reader had gone",
    signal.SIGALRM: "a timer of its own code ran out, and nothing there handles that (`signal.alarm`)",
    signal.SIGXCPU: "its limit of CPU time was reached (`ulimit -t`)",
    signal.SIGXFSZ: "its limit of file size was reached (`ulimit -f`)",
    signal.SIGSYS: "it made a system call that its sandbox forbids (seccomp)",
}

_CODE_CAUSES = {
    0: "its code ended the process itself, e.g. with os._exit(0)",
    126: "a program it was replaced by can't be executed",
    127: "a program it was replaced by was not found",
}


def how_it_ended(code: int) -> str:
    """What the exit status of a process says: "exit code 42", "killed by signal 9 (SIGKILL)"."""
    if code >= 0:
        return f"exit code {code}"
    return f"killed by signal {-code} ({signal_name(-code)})"


def usual_causes(code: int | None) -> str:
    """What usually makes a process end so; empty where nothing is known."""
    if code is None:
        return ""
    if code < 0:
        return _causes_of_signal(-code)
    if code in _CODE_CAUSES:
        return _CODE_CAUSES[code]
    if _SHELL < code < _SHELL + signal.NSIG:
        causes = _causes_of_signal(code - _SHELL)
        return f"as a shell says {signal_name(code - _SHELL)}" + (f": {causes}" if causes else "")
    return "its code called sys.exit() or os._exit(), or a library did; its stderr may say why"


def _causes_of_signal(number: int) -> str:
    causes = _CAUSES.get(number, "")
    if number == signal.SIGBUS:
        try:
            shared = os.statvfs(_SHARED_MEMORY)
        except OSError:
            return causes
        if shared.f_bavail * 100 < shared.f_blocks:
            return f"{_SHARED_MEMORY} is full: give its container more (--shm-size), or use fewer loader workers"
    return causes


def exit_verdict(
    message: str,
    *,
    oom_kills: int,
    peak_bytes: int,
    asked_bytes: int,
    ray_says: str = "",
    code: int | None = None,
    larger: Held | None = None,
    is_command: bool = False,
) -> ExitVerdict:
    """The verdict on an end.

    Args:
        message: how the process ended, as its runtime says.
        oom_kills: processes that the kernel ended on this node for lack of memory while the worker lived.
        peak_bytes: most memory that the worker's tree was seen to hold.
        asked_bytes: memory that the worker asked for; 0: none.
        code: its exit code, negative for a signal; None: not known.
        ray_says: Ray's words, if its memory monitor ended the worker.
        larger: the worker of the node that held most when last seen, if that is another one.
        is_command: it is the end of a command, which may have begun with the end of one of its children.
    """
    killed = any(word in message for word in _KILLED)
    held = f"its processes held up to {_in_mebibytes(peak_bytes)}" if peak_bytes else ""
    if asked_bytes and held:
        held += f", it asked for {format_memory(asked_bytes)}"
    more = ""
    if larger is not None and larger.held_bytes > peak_bytes:
        more = f"{larger.name} held most on the node, {_in_mebibytes(larger.held_bytes)}"
        more += f", and asked for {format_memory(larger.asked_bytes)}" if larger.asked_bytes else ""
    if ray_says:
        line = ray_says.strip().splitlines()[0][:300] if ray_says.strip() else ""
        parts = ["out of memory: Ray's memory monitor ended it", held, more, line]
        return ExitVerdict("; ".join(part for part in parts if part), True, peak_bytes)
    if oom_kills > 0 and (killed or message.endswith(_UNTOLD)):
        parts = [f"out of memory: the kernel ended it ({message})", held, more]
        return ExitVerdict("; ".join(part for part in parts if part), True, peak_bytes)
    beside = ""
    if oom_kills > 0 and is_command:
        # A launcher whose child was ended says so by an exit code of its own, or not at all.
        what = "a process" if oom_kills == 1 else f"{oom_kills} processes"
        beside = (
            f"while it ran, the kernel ended {what} on this node for lack of memory, perhaps one that it had started"
        )
    parts = [message, usual_causes(code), beside, held if killed or beside else "", more if beside else ""]
    return ExitVerdict("; ".join(part for part in parts if part), False, peak_bytes)


class Footprint:
    """What the processes of one worker were seen to hold.

    Attributes:
        tree: the process tree as last seen, for the day it dies alone.
        peak_bytes: most memory that the tree was seen to hold.
    """

    def __init__(self, command: agent_pb2.StartWorker, processes: Processes, memory: MemoryWatch) -> None:
        self.tree: frozenset[ProcessId] = frozenset()
        self.peak_bytes = 0
        worker = command.worker
        self._name = f"{command.job_name or worker.job_id}/{worker.component}/{worker.rank}"
        self._asked_bytes = command.allocation.resources.memory_bytes
        self._processes = processes
        self._memory = memory
        self._beside_bytes = 0
        self._oom_kills = processes.oom_kills()

    def see_tree(self, process: ProcessId, tree: frozenset[ProcessId]) -> None:
        """The tree as it is now; an empty one means that it died just now, and the last one is what counts."""
        self.tree = tree or self.tree
        used = self._processes.usage_of(tree)
        own = self._processes.usage_of([process]).memory_bytes if process in tree else 0
        self._beside_bytes = used.memory_bytes - min(own, used.memory_bytes)
        self.peak_bytes = max(self.peak_bytes, used.peak_bytes)

    def see_memory(self, process: ProcessId) -> None:
        """Remember what its own process holds now, and held at most so far."""
        used = self._processes.usage_of([process])
        self.peak_bytes = max(self.peak_bytes, used.peak_bytes)
        if used.memory_bytes:
            held_bytes = used.memory_bytes + self._beside_bytes
            self._memory.see(Held(self._name, held_bytes, self._asked_bytes, _now_s()))

    def verdict(
        self,
        message: str,
        code: int | None,
        oom_kills: int,
        hosted: Hosted | None = None,
        ray_says: str = "",
        *,
        is_command: bool = False,
    ) -> ExitVerdict:
        """Why it, or the command that it runs, ended as `message` says; its host may know what it held."""
        self.peak_bytes = max(self.peak_bytes, hosted.peak_bytes if hosted is not None else 0)
        return exit_verdict(
            message,
            oom_kills=oom_kills - self._oom_kills,
            ray_says=ray_says,
            code=code,
            peak_bytes=self.peak_bytes,
            asked_bytes=self._asked_bytes,
            larger=self._memory.larger_than(self._name, _now_s()),
            is_command=is_command,
        )


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _in_mebibytes(amount_bytes: int) -> str:
    """Whole ones: less says nothing about a process."""
    return format_memory(max(amount_bytes >> 20, 1) << 20)


RECENT_S = 10.0
"""What was seen longer ago is of a worker that is gone: the others are looked at twice a second. Long enough for
workers that were ended together to name each other, whichever's end is told first."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a worker was last seen to hold.

    Attributes:
        name: "job/component/rank".
        held_bytes: resident memory of its process tree.
        asked_bytes: memory that it asked for; 0: none.
        at_s: when, in seconds of the loop's clock.
    """

    name: str
    held_bytes: int
    asked_bytes: int
    at_s: float


class MemoryWatch:
    """What each worker of the node was last seen to hold."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}

    def see(self, held: Held) -> None:
        """Remember it, and forget what is no more."""
        self._held[held.name] = held
        for name in [name for name, each in self._held.items() if held.at_s - each.at_s > RECENT_S]:
            del self._held[name]

    def larger_than(self, name: str, now_s: float) -> Held | None:
        """The worker that held most, unless it is the one called ``name``."""
        recent = [held for held in self._held.values() if now_s - held.at_s <= RECENT_S]
        most = max(recent, key=lambda held: held.held_bytes, default=None)
        return None if most is None or most.name == name else most
