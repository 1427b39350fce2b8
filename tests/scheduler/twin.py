"""A twin: a scheduler that lives through a history while another is made anew from the records before every event.

Both decide; everything is compared. Whatever the first one remembers beside the records shows as a difference as soon
as it matters. Each event is also decided on the twin and taken back, which must leave no trace.

    python -m tests.scheduler.twin --seeds 1000:1070 --events 1500 --nodes 4

runs simulations with all faults under a twin and prints how many events were decided twice, each taken back once. Of
three seeds one leaves nearly every pass, gang and growth to later events, and one leaves some of them.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields, replace
from typing import Any

from callboard.scheduler import Outcome, Refusal, Scheduler, State
from callboard.scheduler.handlers import passes
from callboard.scheduler.records.events import Event, Tick
from callboard.scheduler.state import transaction
from callboard.scheduler.state.invariants import whole


class Differs(AssertionError):
    """A scheduler made from the records decides otherwise."""


class Twin(Scheduler):
    """Decides every event twice and raises :class:`Differs` where that gives two answers."""

    compared = 0
    """Events decided twice so far, by all of them."""

    undone_every = 1
    """Of how many events one is decided on the twin and taken back, too; long runs need not do it with each."""

    def handle(self, event: Event) -> Outcome:
        """Decides an event, and has the twin decide it."""
        other = Scheduler(State.of(self.state.records()), self._history_limit)
        if other.next_wake_ms() != self.next_wake_ms():
            raise Differs(f"before {event}: wakes at {self.next_wake_ms()}, its twin at {other.next_wake_ms()}")
        if Twin.compared % self.undone_every == 0:
            before = whole(other.state)
            _decided(other.rehearse, event)
            _same("undone", event, before, whole(other.state))
        theirs = _decided(other.handle, event)
        due = self.state.deadlines.due(event.now_ms) if isinstance(event, Tick) else []
        mine = _decided(super().handle, event)
        _compare(event, mine, theirs)
        if other.next_wake_ms() != self.next_wake_ms():
            raise Differs(f"after {event}: wakes at {self.next_wake_ms()}, its twin at {other.next_wake_ms()}")
        left = [deadline for deadline in due if self.state.deadlines.stands(deadline)]
        if left and isinstance(mine, Outcome):
            raise Differs(f"{event} left {left} due, and so would every other")
        Twin.compared += 1
        if isinstance(mine, Exception):
            raise mine
        assert isinstance(mine, Outcome)
        return mine


def _decided(decide: Any, event: Event) -> Outcome | Exception | None:
    """The outcome, or why there is none. The event is a copy, so that no two can share what is in it."""
    try:
        outcome: Outcome | None = decide(replace(event))
    except Exception as error:  # noqa: BLE001 - a defect must show alike, too
        return error
    return outcome


def _compare(event: Event, mine: Outcome | Exception | None, theirs: Outcome | Exception | None) -> None:
    if not (isinstance(mine, Outcome) and isinstance(theirs, Outcome)):
        if type(mine) is not type(theirs) or _told(mine) != _told(theirs):
            raise Differs(f"{event}: {mine!r}, its twin {theirs!r}")
        return
    for name in ("changes", "commands", "events"):
        ours, others = getattr(mine, name), getattr(theirs, name)
        for place, (one, other) in enumerate(zip(ours, others, strict=False)):
            _same(f"{name}[{place}]", event, one, other)
        _same(name, event, ours, others)
    _same("result", event, mine.result, theirs.result)


def _told(error: Any) -> object:
    return (
        {each.name: getattr(error, each.name) for each in fields(error)} if isinstance(error, Refusal) else str(error)
    )


def _same(what: str, event: Event, mine: Any, theirs: Any) -> None:
    if isinstance(mine, Refusal) and isinstance(theirs, Refusal):
        mine, theirs = _told(mine), _told(theirs)
    if isinstance(mine, dict) and isinstance(theirs, dict) and mine != theirs:
        name = next(name for name in mine if mine[name] != theirs.get(name))
        what, mine, theirs = f"{what}: {name}", mine[name], theirs[name]
    if mine != theirs:
        raise Differs(f"{what} of {event}:\n  {mine}\nits twin:\n  {theirs}")


LIMITS = (
    (passes, "MOST_PLANS", (passes.MOST_PLANS, 1, 3)),
    (passes, "MOST_HEADS", (passes.MOST_HEADS, 0, 2)),
    (passes, "MOST_STEPS", (passes.MOST_STEPS, 2, 1)),
    (transaction, "MOST_STARTS", (transaction.MOST_STARTS, 1, 2)),
    (transaction, "MOST_GROWTH", (transaction.MOST_GROWTH, 1, 2)),
)
"""What bounds one event, seed by seed in turn."""


def set_limits(turn: int) -> None:
    """Bounds events as in a seed's turn; the first one's bounds are those that ship."""
    for module, name, values in LIMITS:
        setattr(module, name, values[turn % len(values)])


def simulate(seed: int, events: int, nodes: int) -> str:
    """One simulated run with all faults under a twin; returns what is wrong, or nothing."""
    set_limits(seed)
    try:
        # Histories are also run by interpreters that have nothing of what the simulator needs.
        from callboard.simulation import SimulationOptions, Simulator

        simulator = Simulator(SimulationOptions(seed=seed, events=events, nodes=nodes))
        simulator.controller.make_scheduler = Twin
        failure = simulator.run().failure
    finally:
        set_limits(0)
    return f"seed {seed}: {failure}" if failure is not None else ""


def main() -> None:
    """Runs some seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="1000:1070", help="first:end")
    parser.add_argument("--events", type=int, default=1_500)
    parser.add_argument("--nodes", type=int, default=4)
    options = parser.parse_args()
    first, end = map(int, options.seeds.split(":"))
    for seed in range(first, end):
        wrong = simulate(seed, options.events, options.nodes)
        sys.stdout.write(wrong and f"{wrong}\n")
        sys.stdout.write(f"seeds to {seed}: {Twin.compared} events decided twice and taken back, each\n")
        sys.stdout.flush()
        if wrong:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
