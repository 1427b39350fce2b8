"""Why did a worker's process end, as far as can be told? Above all: was it for lack of memory?"""

from __future__ import annotations

from dataclasses import dataclass

from callboard.agents.memory_watch import Held
from callboard.model.quantities import format_memory

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


def exit_verdict(
    message: str,
    *,
    oom_kills: int,
    peak_bytes: int,
    asked_bytes: int,
    ray_says: str = "",
    larger: Held | None = None,
) -> ExitVerdict:
    """The verdict on an end.

    Args:
        message: how the process ended, as its runtime says.
        oom_kills: processes that the kernel ended on this node for lack of memory while the worker lived.
        peak_bytes: most memory that the worker's tree was seen to hold.
        asked_bytes: memory that the worker asked for; 0: none.
        ray_says: Ray's words, if its memory monitor ended the worker.
        larger: the worker of the node that held most when last seen, if that is another one.
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
    if killed and held:
        return ExitVerdict(f"{message}; {held}", False, peak_bytes)
    return ExitVerdict(message, False, peak_bytes)


def _in_mebibytes(amount_bytes: int) -> str:
    """Whole ones: less says nothing about a process."""
    return format_memory(max(amount_bytes >> 20, 1) << 20)
