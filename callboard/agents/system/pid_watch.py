"""A watch on processes that notices at once when one has ended.

A pidfd in the event loop: no polling, no SIGCHLD, and it works for processes that aren't children (a Ray worker is
the raylet's child). So does the exit status: until somebody reaps the process it is in /proc, and after that a pidfd
that was opened before tells it (Linux 6.15 and later).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct

from callboard.agents.system.process_tree import ProcessId, exit_status, identify

_INFO = struct.Struct("=QQ11Ii")
"""`struct pidfd_info`: its mask, the cgroup, eleven ids of processes and users, the exit status."""

_WITH_STATUS = 1 << 3
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11


async def exited(process: ProcessId) -> int | None:
    """Return when the process has ended (all of its threads; reaped or not).

    Returns:
        Its exit code, negative for the signal that ended it; None when nobody can tell.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    try:
        if identify(process.pid) != process:
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
    finally:
        os.close(descriptor)


def _status_of(descriptor: int) -> int | None:
    """The wait status of a process that was reaped; None where the kernel doesn't tell."""
    question = bytearray(_INFO.pack(_WITH_STATUS, *[0] * 13))
    try:
        fcntl.ioctl(descriptor, _GET_INFO, question)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(question)
    return int(status) if mask & _WITH_STATUS else None
