"""A lease that runs out is acted on, every time it does."""

from __future__ import annotations

import asyncio

from callboard.agents.files.lease_file import HeardLease, LeaseTerms
from callboard.agents.link.lease import Lease


async def test_a_lease_that_is_renewed_and_runs_out_again_long_before_the_orphans_end_is_noticed() -> None:
    expired: asyncio.Queue[None] = asyncio.Queue()
    lease = Lease(on_expired=lambda: expired.put_nowait(None), on_orphaned=lambda: None)
    watching = asyncio.create_task(lease.watch())
    try:
        lease.grant(LeaseTerms(lease_s=0.05, orphan_grace_s=1_000), lease.now_s())
        async with asyncio.timeout(90):
            await expired.get()
            lease.renew(lease.now_s())
            await expired.get()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


class Clock:
    """A clock that only the test moves, as a machine's that sleeps jumps."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_machine_that_slept_through_its_lease_acts_as_soon_as_it_is_awake() -> None:
    expired = asyncio.Event()
    clock = Clock()
    lease = Lease(on_expired=expired.set, on_orphaned=lambda: None, clock=clock)
    lease.grant(LeaseTerms(lease_s=1_000, orphan_grace_s=1_000), clock.now_s)
    watching = asyncio.create_task(lease.watch())
    try:
        clock.now_s += 1_001  # The loop's own clock stood still.
        async with asyncio.timeout(90):
            await expired.wait()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_r5_it_counts_from_what_was_sent_however_late_the_answer_comes() -> None:
    events: list[str] = []
    clock = Clock()
    lease = Lease(on_expired=lambda: events.append("strict"), on_orphaned=lambda: events.append("orphans"), clock=clock)
    lease.grant(LeaseTerms(lease_s=10, orphan_grace_s=20), clock.now_s)
    sent_s = clock.now_s + 3
    clock.now_s += 9
    lease.heard()  # An answer that was on its way for six seconds, to what was sent at 3.
    lease.renew(sent_s)
    clock.now_s = sent_s + 9.9
    assert lease.check()
    assert events == []
    clock.now_s = sent_s + 10
    assert lease.check(), "it was heard of within a lease, so the session goes on"
    assert events == ["strict"]
    lease.renew(clock.now_s - 1)
    lease.renew(sent_s)  # An older answer takes nothing back.
    clock.now_s += 8.9
    lease.check()
    assert events == ["strict"]
    clock.now_s += 0.1
    lease.check()
    assert events == ["strict", "strict"]


async def test_a_strict_start_waits_for_a_lease() -> None:
    clock = Clock()
    lease = Lease(on_expired=lambda: None, on_orphaned=lambda: None, clock=clock)
    starting = asyncio.create_task(lease.held())
    await asyncio.sleep(0)
    assert not starting.done(), "no session has begun"
    lease.grant(LeaseTerms(lease_s=10, orphan_grace_s=20), clock.now_s - 10)
    await asyncio.sleep(0)
    assert not starting.done(), "it was over when the Welcome came"
    assert not lease.holds()
    lease.renew(clock.now_s)
    await starting
    assert lease.holds()
    clock.now_s += 10
    assert not lease.holds()


async def test_a_successor_goes_on_counting_from_what_was_written() -> None:
    events: list[str] = []
    clock = Clock()
    lease = Lease(on_expired=lambda: events.append("strict"), on_orphaned=lambda: events.append("orphans"), clock=clock)
    assert lease.check(), "nothing is known yet"
    lease.resume(HeardLease(clock.now_s - 9, LeaseTerms(lease_s=10, orphan_grace_s=20)))
    assert lease.check()
    clock.now_s += 1
    assert not lease.check()
    assert events == ["strict"]
    clock.now_s += 20
    lease.check()
    assert events == ["strict", "orphans"]


async def test_it_is_written_down_a_few_times_per_lease_and_never_late() -> None:
    written: list[HeardLease] = []
    clock = Clock()
    lease = Lease(on_expired=lambda: None, on_orphaned=lambda: None, write=written.append, clock=clock)
    lease.grant(LeaseTerms(lease_s=10, orphan_grace_s=20), clock.now_s)
    for _ in range(100):
        clock.now_s += 0.1
        lease.renew(clock.now_s)
        assert written[-1].heard_s <= clock.now_s
        assert clock.now_s - written[-1].heard_s <= 0.5
    assert 10 <= len(written) <= 25
