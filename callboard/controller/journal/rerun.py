"""A rerun of what a controller decided, from its journal alone: the same events on the same records.

A rerun that comes to something else than what is written shows a defect, or that another version decided. Whatever it
comes to, it goes on from what is written, so that one difference does not lead to others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from callboard.controller.journal.codec import Decision, Told, digest_of
from callboard.controller.journal.store import History, read_history
from callboard.model.frozen import dataclass
from callboard.scheduler import Outcome, Refusal, Scheduler, State
from callboard.scheduler.account.explain import Explanation
from callboard.scheduler.records.job_records import Change, EventRecord, MetaRecord, Put


@dataclass(frozen=True, slots=True)
class Step:
    """One decision, rerun.

    Attributes:
        decision: what is written of it; None: of changes that are older than the journal of events.
        outcome: what the rerun came to: an outcome, a refusal, or a defect; None without a decision.
        considered: with the name of each job that waited, the account of it when this was decided, best-ranked first;
            empty unless asked for.
        differences: what the rerun came to otherwise, each a sentence.
    """

    revision: int
    decision: Decision | None
    outcome: Outcome | Exception | None
    changes: tuple[Change, ...]
    events: tuple[EventRecord, ...]
    considered: tuple[tuple[str, Explanation], ...]
    differences: tuple[str, ...]


def rerun(path: Path, *, until: int | None = None, explain: int | None = None) -> Iterator[Step]:
    """Decides again what is written in a journal, oldest first.

    Args:
        until: last revision to rerun; None: all.
        explain: revision whose decision is explained.

    Raises:
        StoreFailed: the journal can't be read.
    """
    history = read_history(path)
    state = State()
    for change in history.base:
        state.apply(change)
    last = 0
    for number, decision, changes in decided(history):
        if until is not None and state.meta.revision >= until:
            return
        for fruitless in history.fruitless.get(number, ()):
            yield _step(state, fruitless, (), history, None)
        yield _step(state, decision, changes, history, explain)
        last = number + len(changes) - 1
    if until is None or state.meta.revision < until:
        for fruitless in history.fruitless.get(last + 1, ()):
            yield _step(state, fruitless, (), history, None)


def decided(history: History) -> Iterator[tuple[int, Decision | None, tuple[Change, ...]]]:
    """What is written, decision by decision: the number of its first change, it if it is known, and its changes."""
    numbers = sorted(history.changes)
    at = 0
    while at < len(numbers):
        decision = history.decisions.get(numbers[at])
        count = _undecided(history, numbers, at) if decision is None else decision.changes
        yield numbers[at], decision, tuple(history.changes[number] for number in numbers[at : at + count])
        at += count


def _undecided(history: History, numbers: list[int], at: int) -> int:
    """How many changes follow that no decision is written of."""
    end = at
    while end < len(numbers) and numbers[end] not in history.decisions:
        end += 1
    return end - at


def _step(
    state: State, decision: Decision | None, changes: tuple[Change, ...], history: History, explain: int | None
) -> Step:
    """Reruns one decision and brings the state to what is written."""
    before = state.meta.revision
    metas = [change.record for change in changes if isinstance(change, Put) and isinstance(change.record, MetaRecord)]
    after = metas[-1].revision if metas else before
    events = tuple(history.events[r] for r in range(before + 1, after + 1) if r in history.events)
    considered: tuple[tuple[str, Explanation], ...] = ()
    differences: list[str] = []
    outcome: Outcome | Exception | None = None
    if decision is not None:
        scheduler = Scheduler(state, decision.ended_jobs)
        try:
            if explain is not None and before < explain <= after:
                considered = tuple(scheduler.considered(decision.event))
            outcome = scheduler.rehearse(decision.event)
        except Exception as error:  # noqa: BLE001 - a defect that shows in the rerun is what is looked for
            outcome = error
        differences += _differences(decision, outcome, changes, events)
    for change in changes:
        state.apply(change)
    if decision is not None and not differences and state.deadlines.next_ms() != decision.wake_ms:
        differences.append(f"it next looks at the time at {state.deadlines.next_ms()}, not at {decision.wake_ms}")
    return Step(after, decision, outcome, changes, events, considered, tuple(differences))


def _differences(
    decision: Decision, outcome: Outcome | Exception, changes: tuple[Change, ...], events: tuple[EventRecord, ...]
) -> list[str]:
    told = decision.told
    if isinstance(outcome, Refusal):
        mine = Told.of(outcome)
        if changes or (told is not None and not told.refused):
            return [f"it is refused: {outcome}"]
        # Earlier versions wrote down the account, too.
        same = told is None or told in (mine, replace(mine, digest=digest_of(outcome)))
        return [] if same else ["it is refused for another reason"]
    if not isinstance(outcome, Outcome):
        return [f"it raises {outcome!r}"]
    found = []
    if len(outcome.changes) != len(changes):
        found.append(f"it leads to {len(outcome.changes)} changes, not to {len(changes)}")
    pairs = enumerate(zip(outcome.changes, changes, strict=False), 1)
    found += [f"change {n} is {mine}, not {written}" for n, (mine, written) in pairs if mine != written][:1]
    kept = {event.revision: event for event in events}
    said = [event for event in outcome.events if kept.get(event.revision, event) != event]
    found += [f"its log says {event}, not {kept[event.revision]}" for event in said[:1]]
    if told is not None:
        mine = Told.of(outcome)
        if told.refused:
            found.append("it is not refused")
        elif mine.commands != told.commands:
            found.append(f"it leads to {mine.commands} commands, not to {told.commands}")
        elif mine != told:
            found.append("its commands or its result are others")
    return found
