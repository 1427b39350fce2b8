"""The lease: whether the agent may still act on what it was told, and what ends when it may not.

A lease counts from when the agent *sent* what the controller answered last: its newest answered heartbeat, or Hello.
The controller heard that later, so however long the answer was on its way, the controller's own count, after which it
places a strict job elsewhere (lease + kill_timeout + margin), never ends before ours, at which strict workers end.

Relaxed workers run on: they end when nothing at all was heard for the lease and `orphan_grace` more.

It is written down as it is renewed: where the agent itself can't act (it was killed, or stopped), its fence ends strict
workers by what is written (`fence`), and the next agent of the node goes on counting from there.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from callboard.agents.files.lease_file import HeardLease, LeaseTerms, boot_s

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
            clock: seconds, on the clock of what is written.
        """
        self.now_s = clock
        self._on_expired = on_expired
        self._on_orphaned = on_orphaned
        self._write = write
        self._terms: LeaseTerms | None = None
        self._heard_at = -math.inf
        self._answered_at = -math.inf
        self._written_at = -math.inf
        self._fired: tuple[bool, bool] = (False, False)
        self._changed = asyncio.Event()
        self._renewed = asyncio.Event()

    def resume(self, heard: HeardLease) -> None:
        """Go on where an earlier agent of the node stopped: its workers have no more time than they had under it."""
        self._terms = heard.terms
        self._heard_at = self._answered_at = heard.heard_s
        self._changed.set()

    def grant(self, terms: LeaseTerms, sent_s: float) -> None:
        """A session began.

        Args:
            terms: as Welcome gave them.
            sent_s: when the Hello was sent that it answers, by `now_s`.
        """
        self._terms = terms
        self._written_at = -math.inf
        self.heard()
        self.renew(sent_s)

    def heard(self) -> None:
        """The controller said something.

        Called *after* `check`: a process that was stopped for longer than its lease must act on that before it
        believes that all is well (NJ-02).
        """
        self._heard_at = self.now_s()
        self._fired = (self._fired[0], False)
        self._changed.set()

    def renew(self, sent_s: float) -> None:
        """The controller answered something.

        Args:
            sent_s: when that was sent, by `now_s`.
        """
        assert self._terms is not None, "a lease begins with its terms"
        self._answered_at = max(self._answered_at, sent_s)
        self._fired = (False, self._fired[1])
        self._changed.set()
        self._renewed.set()
        if self._answered_at - self._written_at >= self._terms.lease_s / _WRITES:
            self._written_at = self._answered_at
            self._write(HeardLease(self._answered_at, self._terms))

    def holds(self) -> bool:
        """Whether a strict worker may run: its lease has begun and is not over."""
        return self._terms is not None and self.now_s() < self._ends(self._terms)[0]

    async def held(self) -> None:
        """Return when a strict worker may run."""
        while not self.holds():
            self._renewed.clear()
            await self._renewed.wait()

    def check(self) -> bool:
        """Act on what has run out; whether the controller was heard of within a lease."""
        if self._terms is None:
            return True
        now_s = self.now_s()
        lease_ends, grace_ends = self._ends(self._terms)
        expired, orphaned = now_s >= lease_ends, now_s >= grace_ends
        before, self._fired = self._fired, (expired, orphaned)
        if expired and not before[0]:
            self._on_expired()
        if orphaned and not before[1]:
            self._on_orphaned()
        return now_s < self._heard_at + self._terms.lease_s

    def _ends(self, terms: LeaseTerms) -> tuple[float, float]:
        """When the lease ends and when the grace does. Compared as these sums everywhere: a difference may be rounded
        the other way, and what waits for the end of one would wake up again and again before it."""
        return self._answered_at + terms.lease_s, self._heard_at + (terms.lease_s + terms.orphan_grace_s)

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
        if self._terms is None:
            return None
        ends = [end for fired, end in zip(self._fired, self._ends(self._terms), strict=True) if not fired]
        return max(0.0, min(ends) - self.now_s()) if ends else None
