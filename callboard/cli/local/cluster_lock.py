"""The lock on a cluster of this machine, on a file of its directory: who has it may change the cluster, one at a time.

The lock is the kernel's: it ends with the process that holds it, however that ends. Who has it writes into the file
who it is, for the others' messages.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from callboard.cli.show.exits import UNREACHABLE, CommandFailed
from callboard.security.places import Held, take_lock

LOCK_NAME = "lock"
ATTEMPTS = 10
PAUSE_S = 3.0
"""Between attempts. Whoever adds a node holds the lock for the blink in which it chooses and starts the agent; `up`
holds it for the whole start."""


class ClusterLocked(CommandFailed):
    """The lock could not be had."""

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(
            "Failed to get the lock of the cluster.",
            f"{path} is held by {holder}; {ATTEMPTS} attempts were made.",
            "Try again once that is over.",
        )


class ClusterGone(CommandFailed):
    """The cluster was ended while its lock was waited for."""

    def __init__(self, directory: Path) -> None:
        super().__init__(
            "The cluster does not run any more.",
            f"Nothing of it is left in {directory}.",
            "Start one with `callboard up` or scripts/start_ray_cluster.sh.",
            UNREACHABLE,
        )


def take_cluster_lock(directory: Path, what: str) -> int:
    """Takes the lock; returns a descriptor, to close which gives it back.

    Args:
        directory: of the cluster.
        what: what it is taken for, for others' messages.

    Raises:
        Held: somebody else has it.
        ClusterGone: the directory is not there any more.
    """
    try:
        return take_lock(directory / LOCK_NAME, f"{what} (pid {os.getpid()})")
    except FileNotFoundError:
        # Also where the directory went between the opening and the lock: that is the lock of nothing.
        raise ClusterGone(directory) from None


@asynccontextmanager
async def cluster_lock(
    directory: Path, what: str, *, pause_s: float = PAUSE_S, tell: Callable[[int, int, str], None] | None = None
) -> AsyncIterator[None]:
    """Holds the lock on a cluster's directory while the block runs.

    Args:
        directory: of the cluster.
        what: what the block does, for others' messages.
        pause_s: seconds between attempts.
        tell: told of every attempt that failed: its number, how many there are, who has the lock.

    Raises:
        ClusterLocked: somebody else had it every time.
        ClusterGone: the directory is not there any more.
    """
    lock: int | None = None
    number = 0
    while lock is None:
        number += 1
        try:
            lock = take_cluster_lock(directory, what)
        except Held as held:
            if tell is not None:
                tell(number, ATTEMPTS, held.holder)
            if number == ATTEMPTS:
                raise ClusterLocked(directory / LOCK_NAME, held.holder) from None
            await asyncio.sleep(pause_s)  # The kernel tells nobody that a lock is free again.
    try:
        yield
    finally:
        os.close(lock)
