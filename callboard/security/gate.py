"""The gate in front of every method: who calls, whether they may, how often, and what is written down about it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from callboard.model.frozen import dataclass
from callboard.security.audit_log import AuditLog
from callboard.security.caller_roles import OPEN, Identity, Role, check_role, handle_for
from callboard.wire.refusals import LimitReached, NotAuthenticated

READ_ONLY = (
    "Get",
    "List",
    "Explain",
    "Watch",
    "Check",
    "Read",
    "SendOutput",
    "AttachExec",
    "Inspect",
    "Resolve",
    "Search",
)
"""First parts of the names of methods that change nothing; every other call is written to the audit log."""

CHATTY = frozenset({"RenewJobs", "ReportSignals", "ServerReflectionInfo"})
"""Methods that tell the controller what goes on and come all the time; or that only read, by another name."""


MOST_REMEMBERED = 10_000
"""Clients whose calls are counted; beyond that those are forgotten that have not called for two seconds."""

PROBE = Identity("probe", Role.VIEWER)
"""Every caller of a method that is open to all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """What one client may do at one time. The owner, and agents, have no such limits.

    Attributes:
        requests_s: calls in a second; twice as many at once. One that changes something takes as much as
            :data:`CHANGE_COST` others.
        streams: watches and other streams that are open.
        refusals_s: refusals in a second of what is no valid request, or of somebody unknown at one address; more wait.
            This one holds for the owner and agents, too: their mistakes come as fast as anybody's.
    """

    requests_s: int = 200
    streams: int = 50
    refusals_s: int = 50


CHANGE_COST = 4
"""Calls that one takes the place of that changes something: it is decided, journaled and told to others."""

LONGEST_WAIT_S = 1.0
"""Longest that a refusal waits."""


class Gate:
    """One controller's gate."""

    def __init__(
        self,
        identify: Callable[[Any, bytes], Identity],
        *,
        limits: ClientLimits | None = None,
        audit: AuditLog | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            identify: tells who shows some metadata and a certificate, or raises.
            limits: of each client; None: the usual ones.
            audit: where changes are written down; None: nowhere.
            now_s: a clock that never goes back.
        """
        self._identify = identify
        self._limits = limits or ClientLimits()
        self._audit = audit
        self._now_s = now_s
        self._left: dict[str, tuple[float, float]] = {}
        """Calls that a client may still make, and when that was reckoned."""
        self._refusals_left: dict[str, tuple[float, float]] = {}
        self._streams: Counter[str] = Counter()

    def identify(self, method: str, metadata: Any, certificate: bytes = b"") -> Identity:
        """Who makes a call of ``method`` and shows this metadata and certificate; services find it by ``caller()``.

        Raises:
            NotAuthenticated: nobody knows who it is.
        """
        who = PROBE if method in OPEN else self._identify(metadata, certificate)
        handle_for(who)
        return who

    def check_still(self, who: Identity, metadata: Any, certificate: bytes) -> None:
        """Checks that what a stream showed when it began still stands for the same client.

        Raises:
            NotAuthenticated: it was revoked, replaced or expired, or has another role now.
        """
        if who is not PROBE and self._identify(metadata, certificate) != who:
            raise NotAuthenticated(f"{who.name} has another role now. Call again")

    @contextmanager
    def passing(self, who: Identity, method: str, *, stream: bool) -> Iterator[None]:
        """Lets one call in, as long as the block runs.

        Raises:
            NotAllowed: their role does not include the method.
            LimitReached: they call too often, or have too many streams.
        """
        if method not in OPEN:
            check_role(who, method)
        if who.role in (None, Role.AGENT) or method in OPEN:
            yield
            return
        self._count_call(who.name, CHANGE_COST if changes(method.rpartition("/")[2]) else 1)
        if not stream:
            yield
            return
        if self._streams[who.name] >= self._limits.streams:
            raise LimitReached(f"{who.name} has {self._limits.streams} streams open already; close some and try again")
        self._streams[who.name] += 1
        try:
            yield
        finally:
            self._streams[who.name] -= 1
            if not self._streams[who.name]:
                del self._streams[who.name]

    def write_down(
        self, who: Identity | None, method: str, subject: str, peer: str, *, code: str, why: str = ""
    ) -> None:
        """Writes a call of a known client that changed something, or was meant to, to the audit log."""
        name = method.rpartition("/")[2]
        if self._audit is None or who is None or not changes(name) or method in OPEN:
            return
        self._audit.add(
            at_ms=time.time_ns() // 1_000_000,
            who=who.name,
            role=who.role or "",
            method=name,
            subject=subject,
            peer=peer,
            code=code,
            why=why,
        )

    def patience_s(self, who: Identity | None, peer: str) -> float:
        """How long a refusal waits that cost its caller nothing to provoke: one that comes again at once and for ever
        must not take the time of others."""
        name = f"peer {peer.rpartition(':')[0]}" if who is None else who.name
        rate = self._limits.refusals_s
        left = self._left_of(self._refusals_left, name, rate)
        wait_s = min(max(0.0, (1 - left) / rate), LONGEST_WAIT_S)
        self._refusals_left[name] = (max(left - 1, -rate * LONGEST_WAIT_S), self._now_s())
        return wait_s

    def _count_call(self, name: str, cost: int) -> None:
        rate = self._limits.requests_s
        left, cost = self._left_of(self._left, name, rate), min(cost, 2 * rate)
        self._left[name] = (left if left < cost else left - cost, self._now_s())
        if left < cost:
            what = f"{rate / CHANGE_COST:g} changes" if cost > 1 else f"{rate} calls"
            raise LimitReached(f"{name} makes more than {what} a second; call less often")

    def _left_of(self, buckets: dict[str, tuple[float, float]], name: str, rate: float) -> float:
        """What is in a bucket that fills by so many a second and holds twice as many."""
        now_s = self._now_s()
        left, reckoned_s = buckets.get(name, (2.0 * rate, now_s))
        if len(buckets) >= MOST_REMEMBERED:
            # Names come from a company's login, too; one that called long ago has its whole bucket again.
            for each in [each for each, of in buckets.items() if now_s - of[1] >= 2]:
                del buckets[each]
        return min(2.0 * rate, left + (now_s - reckoned_s) * rate)


def changes(name: str) -> bool:
    """Whether a method of this name changes something."""
    return not name.startswith(READ_ONLY) and name not in CHATTY
