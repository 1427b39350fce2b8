"""The report of a simulation: its figures, and of a failure everything that helps to understand it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from callboard.model.frozen import dataclass


@dataclass(frozen=True, slots=True)
class SimulationFailure:
    """A rule that was broken.

    Attributes:
        step: events decided until then.
        at_ms: virtual time.
        story: what is known of the job concerned, line by line.
        last_events: the last events decided, oldest first.
        command: command line that replays it.
    """

    step: int
    at_ms: int
    rule: str
    message: str
    story: tuple[str, ...]
    last_events: tuple[str, ...]
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """What one simulation did.

    Attributes:
        events: decided by the scheduler.
        virtual_ms: virtual time that passed.
        wall_s: seconds that it took.
        handle_s: seconds of these inside ``Scheduler.handle``.
        jobs: (state, count) of the jobs that ended, or are listed.
        faults: (what, count) of what was injected and met.
        promises: answers that were given, and held.
        processes: process trees that were started.
        full_checks: how often every invariant was checked.
        choices: how often several tasks could go on at once, and their order was drawn.
        order: stands for all that was drawn so; equal for equal interleavings of one history.
        journal_digest: SHA-256 of everything committed.
        journal_changes: changes committed.
        failure: the broken rule; None: every rule held.
    """

    seed: int
    command: str
    nodes: int
    events: int
    virtual_ms: int
    wall_s: float
    handle_s: float
    jobs: tuple[tuple[str, int], ...]
    preemptions: int
    faults: tuple[tuple[str, int], ...]
    promises: int
    processes: int
    full_checks: int
    choices: int
    order: int
    journal_digest: str
    journal_changes: int
    failure: SimulationFailure | None = None

    @property
    def passed(self) -> bool:
        return self.failure is None

    @property
    def events_per_s(self) -> float:
        """Events per second of the whole simulation."""
        return self.events / self.wall_s if self.wall_s else 0.0

    @property
    def decisions_per_s(self) -> float:
        """Events per second of the scheduler alone."""
        return self.events / self.handle_s if self.handle_s else 0.0

    def as_plain(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        plain = asdict(self)
        plain["jobs"], plain["faults"] = dict(self.jobs), dict(self.faults)
        plain["passed"] = self.passed
        plain["events_per_s"] = round(self.events_per_s, 1)
        plain["decisions_per_s"] = round(self.decisions_per_s, 1)
        plain["wall_s"], plain["handle_s"] = round(self.wall_s, 3), round(self.handle_s, 3)
        return plain
