"""Renewal: a task of the client that says it is alive as long as it is open, for session-owned jobs.

Guaranteed: while the client is open and its event loop runs, every job it submitted with a session owner is renewed
three times per lease. Not guaranteed: that a job outlives a controller, a link or an event loop that stands still
for a whole lease; a lease is chosen with that in mind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from callboard.client import methods
from callboard.client.connection import Connection
from callboard.v1.job_pb2 import RenewJobsRequest
from callboard.wire.refusals import CallboardError

BATCH = 1000
"""Jobs of one call: what the controller takes."""

_AGAIN_S = 1.0
"""Before the next try after one that failed; less where the lease is short."""


class SessionKeeper:
    """Renews session-owned jobs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lease_ms: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    @property
    def kept(self) -> tuple[str, ...]:
        """Uids of the jobs that are renewed; those that ended are forgotten once nothing of their batch lives."""
        return tuple(self._lease_ms)

    def keep(self, uid: str, lease_ms: int) -> None:
        """Renew the job from now on.

        Args:
            uid: of the job.
            lease_ms: its session lease in milliseconds.
        """
        self._lease_ms[uid] = lease_ms
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="callboard session")

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        while self._lease_ms:
            self._changed.clear()
            uids = tuple(self._lease_ms)
            rests_s = [await self._renew(uids[start : start + BATCH]) for start in range(0, len(uids), BATCH)]
            known_s = [rest_s for rest_s in rests_s if rest_s is not None]
            # A job that is added meanwhile may have a shorter lease than all before it.
            if known_s:
                waiting = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait([waiting], timeout=min(known_s))
                waiting.cancel()

    async def _renew(self, uids: Sequence[str]) -> float | None:
        """Seconds until these must be renewed again; None: they have all ended, and are forgotten."""
        third_s = min(self._lease_ms[uid] for uid in uids) / 3000
        request = RenewJobsRequest(names=[f"jobs/{uid}" for uid in uids])
        try:
            response = await self._connection.call(methods.RENEW_JOBS, request, timeout_s=max(third_s, 1.0))
        except CallboardError:
            return min(third_s, _AGAIN_S)  # The controller is away; what is lost by that, its next answers will tell.
        if not response.next_ms:
            for uid in uids:
                del self._lease_ms[uid]
            return None
        return response.next_ms / 1000
