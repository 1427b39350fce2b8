"""May an agent still act on what it was told?

The rules of ``callboard.agents.lease``: silence first ends strict workers, then, after the grace for orphans, all.
"""

from __future__ import annotations

from collections.abc import Callable

from callboard.simulation.timeline import Timeline, Timer


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
        self._fired = (False, False)
        self._timer: Timer | None = None

    def grant(self, lease_ms: int, orphan_grace_ms: int) -> None:
        """A session began."""
        self._lease_ms, self._orphan_grace_ms = lease_ms, orphan_grace_ms
        self.renew()

    def renew(self) -> None:
        """The controller was heard; called after :meth:`check`."""
        self._heard_ms = self._timeline.now_ms
        self._write(self._heard_ms + self._lease_ms)
        self._fired = (False, False)
        if self._timer is None:
            self._arm()

    def check(self) -> bool:
        """Acts on what has run out; whether the lease is alive."""
        if not self._lease_ms:
            return True
        silent_ms = self._timeline.now_ms - self._heard_ms
        expired = silent_ms >= self._lease_ms
        orphaned = silent_ms >= self._lease_ms + self._orphan_grace_ms
        before, self._fired = self._fired, (expired, orphaned)
        if expired and not before[0]:
            self._on_expired()
        if orphaned and not before[1]:
            self._on_orphaned()
        return not expired

    def _arm(self) -> None:
        limit_ms = self._lease_ms + (self._orphan_grace_ms if self._fired[0] else 0)
        # At least once a lease: a renewal doesn't wake this up.
        wait_ms = min(self._lease_ms, self._heard_ms + limit_ms - self._timeline.now_ms)
        self._timer = self._later(max(1, wait_ms), self._look)

    def _look(self) -> None:
        self._timer = None
        self.check()
        if not self._fired[1]:
            self._arm()
