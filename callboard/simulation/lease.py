"""May an agent still act on what it was told?

The rules of ``callboard.agents.lease``: silence first ends strict workers, then, after the grace for orphans, all.
"""

from __future__ import annotations

from asyncio import TimerHandle as Timer
from collections.abc import Callable

from callboard.simulation.timeline import Timeline


class Lease:
    """Runs out unless it is renewed."""

    def __init__(
        self,
        timeline: Timeline,
        later: Callable[[float, Callable[[], None]], Timer],
        *,
        on_expired: Callable[[], None],
        on_orphaned: Callable[[], None],
        write: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._timeline = timeline
        self._later = later
        self._on_expired = on_expired
        self._on_orphaned = on_orphaned
        self._write = write
        self._lease_ms = 0
        self._orphan_grace_ms = 0
        self._heard_ms = 0
        self._answered_ms = 0
        self._fired = (False, False)
        self._timer: Timer | None = None

    def grant(self, lease_ms: int, orphan_grace_ms: int, sent_ms: int) -> None:
        """A session began, by the answer to a Hello that was sent then."""
        self._lease_ms, self._orphan_grace_ms = lease_ms, orphan_grace_ms
        self.heard()
        self.renew(sent_ms)

    def heard(self) -> None:
        """The controller said something; called after :meth:`check`."""
        self._heard_ms = self._timeline.now_ms
        self._fired = (self._fired[0], False)
        self._arm()

    def renew(self, sent_ms: int) -> None:
        """The controller answered what was sent then."""
        self._answered_ms = max(self._answered_ms, sent_ms)
        self._write(self._answered_ms + self._lease_ms)
        self._fired = (False, self._fired[1])
        self._arm()

    def check(self) -> bool:
        """Acts on what has run out; whether the controller was heard of within a lease."""
        if not self._lease_ms:
            return True
        now_ms = self._timeline.now_ms
        expired = now_ms - self._answered_ms >= self._lease_ms
        orphaned = now_ms - self._heard_ms >= self._lease_ms + self._orphan_grace_ms
        before, self._fired = self._fired, (expired, orphaned)
        if expired and not before[0]:
            self._on_expired()
        if orphaned and not before[1]:
            self._on_orphaned()
        return now_ms - self._heard_ms < self._lease_ms

    def _arm(self) -> None:
        if self._timer is not None or all(self._fired):
            return
        orphaned_ms = self._heard_ms + self._lease_ms + self._orphan_grace_ms
        end_ms = orphaned_ms if self._fired[0] else min(self._answered_ms + self._lease_ms, orphaned_ms)
        # At least once a lease: a renewal doesn't wake this up.
        self._timer = self._later(max(1, min(self._lease_ms, end_ms - self._timeline.now_ms)), self._look)

    def _look(self) -> None:
        self._timer = None
        self.check()
        self._arm()
