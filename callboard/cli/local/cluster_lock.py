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

from callboard.security.places import Held, take_lock

LOCK_NAME = "lock"
ATTEMPTS = 10
PAUSE_S = 3.0
"""Between attempts. Whoever adds a node holds the lock for the blink in which it chooses and starts the agent; `up`
holds it for the whole start."""


class ClusterLocked(Exception):
    """The lock could not be had.

    Attributes:
        holder: who has it, as it said itself.
        attempts: how often it was tried.
    """

    def __init__(self, path: Path, holder: str, attempts: int) -> None:
        super().__init__(f"{path} is held by {holder} after {attempts} attempts")
        self.path = path
        self.holder = holder
        self.attempts = attempts


class ClusterGone(Exception):
    """The cluster was ended while its lock was waited for."""

    def __init__(self, directory: Path) -> None:
        super().__init__(f"the cluster of {directory} was ended meanwhile")
        self.directory = directory


class ClusterLock:
    """The lock on a cluster's directory; see :func:`cluster_lock`."""

    def __init__(self, directory: Path, what: str) -> None:
        self._path = directory / LOCK_NAME
        self._what = what
        self._fd: int | None = None

    def take(self) -> bool:
        """Takes the lock if nobody has it.

        Raises:
            ClusterGone: the directory is not there any more.
        """
        try:
            self._fd = take_lock(self._path, f"{self._what} (pid {os.getpid()})")
        except FileNotFoundError:
            # Also where the directory went between the opening and the lock: that is the lock of nothing.
            raise ClusterGone(self._path.parent) from None
        except Held:
            return False
        return True

    def holder(self) -> str:
        """Who has it, as far as that is known."""
        try:
            return self._path.read_text(encoding="utf-8") or "another program"
        except FileNotFoundError:
            return "another program"

    def give_back(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@asynccontextmanager
async def cluster_lock(
    directory: Path,
    what: str,
    *,
    attempts: int = ATTEMPTS,
    pause_s: float = PAUSE_S,
    tell: Callable[[int, int, str], None] | None = None,
) -> AsyncIterator[ClusterLock]:
    """Holds the lock on a cluster's directory while the block runs.

    Args:
        what: what the block does, for others' messages.
        attempts: how often to try.
        pause_s: seconds between attempts.
        tell: told of every attempt that failed: its number, how many there are, who has the lock.

    Raises:
        ClusterLocked: somebody else had it every time.
        ClusterGone: the directory is not there any more.
    """
    mine = ClusterLock(directory, what)
    for number in range(1, attempts + 1):
        if mine.take():
            break
        if tell is not None:
            tell(number, attempts, mine.holder())
        if number < attempts:
            await asyncio.sleep(pause_s)  # The kernel tells nobody that a lock is free again.
    else:
        raise ClusterLocked(directory / LOCK_NAME, mine.holder(), attempts)
    try:
        yield mine
    finally:
        mine.give_back()
