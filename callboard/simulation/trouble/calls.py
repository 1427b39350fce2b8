"""Calls of clients: with a delay, an answer that may get lost, and another try when none came."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from callboard.scheduler import Outcome
from callboard.scheduler.records.events import Make
from callboard.simulation.options import Fault
from callboard.simulation.programs.controller import Controller
from callboard.simulation.world.site import Site
from callboard.wire.refusals import Unavailable

RETRY_MS = 2_000


class Calls:
    """The way to the controller for clients and operators."""

    def __init__(self, site: Site, controller: Controller) -> None:
        self.site = site
        self.controller = controller
        self.chance: Random = site.chance.workload
        self.open = True
        """False: nobody asks for anything new."""

    def call(
        self,
        make: Make,
        answered: Callable[[Outcome], None] = lambda _: None,
        again: Callable[[], None] | None = None,
        refused: Callable[[], object] = lambda: None,
    ) -> None:
        """One call.

        Args:
            answered: told the outcome.
            again: done a while later when no answer came, because it was lost or the controller was away.
            refused: told that the answer was no.
        """
        lost = self.chance.random() < 0.02 and Fault.CLIENT in self.site.faults and self.site.happens("lose answer")

        def then(outcome: Outcome) -> None:
            if not lost:
                answered(outcome)
                return
            self.site.count("answer of a call lost")
            if again is not None:
                self.site.timeline.after(RETRY_MS, again)

        def fail(error: Exception) -> None:
            if not isinstance(error, Unavailable):
                refused()
            elif again is not None:
                self.site.timeline.after(RETRY_MS, again)

        wait_ms = self.chance.randint(1, 20)
        self.site.timeline.after(wait_ms, lambda: self.controller.ask(make, then, fail, source="call"))

    def repeat(self, act: Callable[[], None], mean_ms: float) -> None:
        """Does something again and again, as long as anybody asks for anything."""
        repeat(self.site, self.chance, act, mean_ms, lambda: self.open)


def repeat(
    site: Site, chance: Random, act: Callable[[], None], mean_ms: float, goes_on: Callable[[], bool], *, number: int = 1
) -> None:
    """Does something again and again, at random times, as long as it goes on."""
    what = act.__name__.strip("_").replace("_", " ")

    def go() -> None:
        if goes_on():
            repeat(site, chance, act, mean_ms, goes_on, number=number + 1)
            if site.happens(what):
                act()

    site.chance.renew(chance, f"{what}/{number}")
    site.timeline.after(1 + chance.expovariate(1 / mean_ms), go)
