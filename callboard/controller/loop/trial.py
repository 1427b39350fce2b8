"""Trials for ``validate_only``: an event decided and taken back."""

from __future__ import annotations

from callboard.controller.loop.driver import Driver
from callboard.controller.loop.inbox import Make
from callboard.scheduler.records.events import Event


async def trial(driver: Driver, make: Make) -> Event:
    """Decides an event as if it were asked, and takes everything back; returns the event.

    Raises:
        Refusal: the scheduler would refuse it.
        Unavailable: not serving, or the journal failed meanwhile.
    """
    driver.check_serving()
    event = make(driver.now_ms(), "trial")
    driver.scheduler.rehearse(event)
    await driver.journaled()
    return event
