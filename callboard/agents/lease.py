"""May the agent still act on what it was told, and what ends when it may not?

Every message of the controller renews the lease. When it ends, strict workers end: the controller places them
elsewhere once lease + kill_timeout + margin have passed. Relaxed workers run on for `orphan_grace` more.

It is written down as it is renewed: where the agent itself can't act (it was killed, or stopped), its fence ends strict
workers by what is written (`fence`), and the next agent of the node goes on counting from there.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from callboard.agents.lease_file import HeardLease, LeaseTerms, boot_s

__all__ = ["Lease", "LeaseTerms"]

_LOOK_S = 1.0
"""At the latest between looks at the clock: the loop's timers stand still while the machine sleeps. Half of the margin
that the controller adds to a lease."""

_WRITES = 20
"""Per lease, at most: the fence may be early by so much of it, never late."""


class Lease:
    """A clock that runs out unless it is renewed; neither a stopped process nor a sleeping machine can stop it."""

    def __init__(
        self,
        *,
        on_expired: Callable[[], None],
        on_orphaned: Callable[[], None],
        write: Callable[[HeardLease], None] = lambda _: None,
        clock: Callable[[], float] = boot_s,
    ) -> None:
        """
        Args:
            on_expired: called when the lease has run out.
            on_orphaned: called when the grace for orphans has too.
            write: writes it down.
            clock: seconds, on the clock of what is written.
        """
        self._on_expired = on_expired
        self._on_orphaned = on_orphaned
        self._write = write
        self._clock = clock
        self._terms: LeaseTerms | None = None
        self._heard_at = math.inf
        self._written_at = -math.inf
        self._fired: tuple[bool, bool] = (False, False)
        self._changed = asyncio.Event()

    def resume(self, heard: HeardLease) -> None:
        """Go on where an earlier agent of the node stopped: its workers have no more time than they had under it."""
        self._terms = heard.terms
        self._heard_at = heard.heard_s
        self._changed.set()

    def grant(self, terms: LeaseTerms) -> None:
        """A session began."""
        self._terms = terms
        self._written_at = -math.inf
        self.renew()

    def renew(self) -> None:
        """The controller was heard.

        Called *after* `check`: a process that was stopped for longer than its lease must act on that before it
        believes that all is well (NJ-02).
        """
        self._heard_at = self._clock()
        self._fired = (False, False)
        self._changed.set()
        if self._terms is not None and self._heard_at - self._written_at >= self._terms.lease_s / _WRITES:
            self._written_at = self._heard_at
            self._write(HeardLease(self._heard_at, self._terms))

    def check(self) -> bool:
        """Act on what has run out; whether the lease is alive."""
        if self._terms is None:
            return True
        silent_s = self._clock() - self._heard_at
        expired = silent_s >= self._terms.lease_s
        orphaned = silent_s >= self._terms.lease_s + self._terms.orphan_grace_s
        before, self._fired = self._fired, (expired, orphaned)
        if expired and not before[0]:
            self._on_expired()
        if orphaned and not before[1]:
            self._on_orphaned()
        return not expired

    async def watch(self) -> None:
        """Check whenever something may run out; runs until cancelled."""
        while True:
            self._changed.clear()
            timeout = self._next_s()
            if timeout is None:
                await self._changed.wait()
                continue
            # A renewal needn't wake this up: the check then finds time left and sleeps on.
            await asyncio.sleep(min(timeout, _LOOK_S, self._terms.lease_s if self._terms else _LOOK_S))
            self.check()

    def _next_s(self) -> float | None:
        if self._terms is None or self._fired[1]:
            return None
        limit = self._terms.lease_s
        if self._fired[0]:
            limit += self._terms.orphan_grace_s
        return max(0.0, self._heard_at + limit - self._clock())
