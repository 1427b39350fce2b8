"""What `callboard replay` does."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from callboard.cli.options import wishes
from callboard.cli.show import consoles, printing
from callboard.cli.show.exits import BAD_INPUT, FAILED, CommandFailed
from callboard.cli.show.verb_guard import failing_in_words
from callboard.controller.journal.rerun import Step, rerun
from callboard.controller.journal.state_dir import JOURNAL_NAME, StoreFailed
from callboard.scheduler import Refusal
from callboard.scheduler.account.explain import Explanation


def run(state_dir: Path, *, until: int | None, explain: int | None) -> None:
    """Replays a journal; ends with 1 if a decision differs."""
    last = explain if explain is not None else until
    decisions = differences = 0
    shown: list[dict[str, Any]] = []
    console = consoles.stdout()
    with failing_in_words():
        try:
            for step in rerun(state_dir / JOURNAL_NAME, until=last, explain=explain):
                decisions += step.decision is not None
                differences += bool(step.differences)
                if explain is not None and not step.considered and step.revision < explain:
                    continue
                if wishes.for_program:
                    shown.append(_plain(step))
                elif not wishes.quiet or step.differences:
                    for indent, line in _lines(step):
                        _print(console, indent, line)
        except StoreFailed as error:
            raise CommandFailed(
                "The journal can't be replayed.", f"{error.path}: {error.why}.", error.remedy, BAD_INPUT
            ) from error
    if wishes.for_program:
        whole = {"decisions": decisions, "differing": differences, "steps": shown}
        printing.print_data(whole)
    else:
        what = "all as they were" if not differences else f"{differences} of them differ"
        console.print(f"{decisions} decisions replayed, {what}.")
    if differences:
        raise typer.Exit(FAILED)


def _print(console: Console, indent: int, line: str) -> None:
    """One line, which a terminal shows folded and indented as a whole; a pipe gets it as it is."""
    if console.is_terminal:
        console.print(Padding(Text(line), (0, 0, 0, indent)))
    else:
        console.print(" " * indent + line, soft_wrap=True)


def _lines(step: Step) -> Iterator[tuple[int, str]]:
    """One decision for a reader: lines and how far each is indented."""
    if step.decision is None:
        yield 0, f"{step.revision}  changes without a decision that was kept: {len(step.changes)}"
        return
    event = step.decision.event
    at = datetime.fromtimestamp(event.now_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    yield 0, f"{step.revision}  {at}  {type(event).__name__}  {event.cause}".rstrip()
    yield from ((4, f"{entry.subject} {entry.state}: {entry.reason}") for entry in step.events)
    if isinstance(step.outcome, Refusal) and not step.changes:
        yield 4, f"refused: {step.outcome}"
    for name, account in step.considered:
        yield 2, f"{name}: {account.verdict}, {account.summary}"
        victims = {f"jobs/{victim.victim_name}" for victim in account.victims}
        yield from ((4, f"{each.victim_name} yields by rule {each.rule}: {each.reason}") for each in account.victims)
        yield from ((4, reason.message) for reason in account.reasons if reason.subject not in victims)
        yield from ((4, f"would help: {change}") for change in account.unblock)
    yield from ((2, f"DIFFERS: {difference}") for difference in step.differences)


def _plain(step: Step) -> dict[str, Any]:
    """The same for programs."""
    event = step.decision.event if step.decision is not None else None
    return {
        "revision": step.revision,
        "event": type(event).__name__ if event is not None else "",
        "cause": event.cause if event is not None else "",
        "at_ms": event.now_ms if event is not None else 0,
        "changes": len(step.changes),
        "refused": str(step.outcome) if isinstance(step.outcome, Refusal) else "",
        "log": [{"subject": each.subject, "state": each.state, "reason": each.reason} for each in step.events],
        "considered": {name: _account(account) for name, account in step.considered},
        "differences": list(step.differences),
    }


def _account(account: Explanation) -> dict[str, Any]:
    return {
        "verdict": account.verdict,
        "summary": account.summary,
        "reasons": [reason.message for reason in account.reasons],
        "victims": [
            {"job": victim.victim_name, "rule": victim.rule.value, "reason": victim.reason}
            for victim in account.victims
        ],
        "unblock": list(account.unblock),
    }
