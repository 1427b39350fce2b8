"""A lease that runs out is acted on, every time it does."""

from __future__ import annotations

import asyncio

from callboard.agents.lease import Lease, LeaseTerms


async def test_a_lease_that_is_renewed_and_runs_out_again_long_before_the_orphans_end_is_noticed() -> None:
    expired: asyncio.Queue[None] = asyncio.Queue()
    lease = Lease(on_expired=lambda: expired.put_nowait(None), on_orphaned=lambda: None)
    watching = asyncio.create_task(lease.watch())
    try:
        lease.grant(LeaseTerms(lease_s=0.05, orphan_grace_s=1_000))
        async with asyncio.timeout(10):
            await expired.get()
            lease.renew()
            await expired.get()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
