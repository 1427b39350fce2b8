"""May the agent still act on what it was told, and what ends when it may not?

Every message of the controller renews the lease. When it ends, strict workers end: the controller places them
elsewhere once lease + kill_timeout + margin have passed. Relaxed workers run on for `orphan_grace` more.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LeaseTerms:
    """As Welcome gave them, in seconds."""

    lease_s: float
    orphan_grace_s: float


class Lease:
    """A clock that runs out unless it is renewed; counts in loop time, which a stopped process can't stop."""

    def __init__(self, *, on_expired: Callable[[], None], on_orphaned: Callable[[], None]) -> None:
        self._on_expired = on_expired
        self._on_orphaned = on_orphaned
        self._terms: LeaseTerms | None = None
        self._heard_at = math.inf
        self._fired: tuple[bool, bool] = (False, False)
        self._changed = asyncio.Event()

    def grant(self, terms: LeaseTerms) -> None:
        """A session began."""
        self._terms = terms
        self.renew()

    def renew(self) -> None:
        """The controller was heard.

        Called *after* `check`: a process that was stopped for longer than its lease must act on that before it
        believes that all is well (NJ-02).
        """
        self._heard_at = asyncio.get_running_loop().time()
        self._fired = (False, False)
        self._changed.set()

    def check(self) -> bool:
        """Act on what has run out; whether the lease is alive."""
        if self._terms is None:
            return True
        silent_s = asyncio.get_running_loop().time() - self._heard_at
        expired = silent_s >= self._terms.lease_s
        orphaned = silent_s >= self._terms.lease_s + self._terms.orphan_grace_s
        if expired and not self._fired[0]:
            self._on_expired()
        if orphaned and not self._fired[1]:
            self._on_orphaned()
        self._fired = (expired, orphaned)
        return not expired

    async def watch(self) -> None:
        """Check whenever something may run out; runs until cancelled."""
        while True:
            self._changed.clear()
            timeout = self._next_s()
            if timeout is None:
                await self._changed.wait()
                continue
            # A renewal needn't wake this up: the check then finds time left and sleeps on. Never longer than a lease,
            # though: once it has run out the next thing due is the orphans' end, and a lease that is renewed and runs
            # out again before that would go unnoticed.
            await asyncio.sleep(min(timeout, self._terms.lease_s) if self._terms else timeout)
            self.check()

    def _next_s(self) -> float | None:
        if self._terms is None or self._fired[1]:
            return None
        limit = self._terms.lease_s
        if self._fired[0]:
            limit += self._terms.orphan_grace_s
        return max(0.0, self._heard_at + limit - asyncio.get_running_loop().time())
