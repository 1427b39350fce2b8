"""What `callboard simulate` does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import typer
from rich.console import RenderableType
from rich.text import Text

from callboard.cli.options import wishes
from callboard.cli.show import consoles, printing, tables
from callboard.cli.show.exits import BAD_INPUT, FAILED, INTERRUPTED, CommandFailed
from callboard.cli.show.verb_guard import failing_in_words
from callboard.simulation import (
    Shrunk,
    SimulationFailure,
    SimulationOptions,
    SimulationReport,
    parse_faults,
    shrink,
    simulate,
)
from callboard.simulation.options import Fault, UnknownFault

DEFAULT_EVENTS = 10_000
PROGRESS_S = 2.0
"""Between lines of progress."""


def run(
    *,
    seed: int,
    hours: float | None,
    events: int | None,
    jobs: int | None,
    nodes: int,
    faults: str,
    schedules: Sequence[int],
    shrink_s: float,
) -> None:
    """Runs one simulation, in one interleaving after the other; ends with 1 if a rule was broken."""
    if hours is None and events is None and jobs is None:
        events = DEFAULT_EVENTS
    with failing_in_words():
        try:
            chosen = parse_faults(faults)
        except UnknownFault as error:
            raise CommandFailed(
                "The faults are not clear.", f"{error}.", "Name some, or say all or none.", BAD_INPUT
            ) from error
    if Fault.SCHEDULE not in chosen:
        schedules = schedules[:1]  # The others would be the same.
    options = SimulationOptions(seed=seed, hours=hours, events=events, jobs=jobs, nodes=nodes, faults=chosen)
    shrunk: Shrunk | None = None
    progress = None if wishes.quiet else _progress()
    try:
        tried = choices = 0
        orders: dict[int, None] = {}
        while True:
            options = replace(options, schedule=schedules[tried])
            report = simulate(options, progress)
            tried, choices = tried + 1, choices + report.choices
            orders[report.order] = None
            if report.failure is not None or tried == len(schedules):
                break
        if report.failure is not None and shrink_s:
            if not wishes.quiet:
                consoles.stderr().print(f"a rule was broken; looks for the least that breaks it ({shrink_s:g} s)")
            shrunk = shrink(options, within_s=shrink_s)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if wishes.for_program:
        plain = {
            **report.as_plain(),
            "schedules": len(orders),
            "scenario": shrunk.scenario if shrunk is not None else "",
        }
        printing.print_data(plain)
    else:
        _show(report, len(orders), choices)
        if report.failure is not None:
            _show_failure(report.failure, shrunk)
    if report.failure is not None:
        raise typer.Exit(FAILED)


def _progress() -> Callable[[int, int], None]:
    console = consoles.stderr()
    begun_s = time.monotonic()
    said_s = begun_s

    def say(events: int, virtual_ms: int) -> None:
        nonlocal said_s
        now_s = time.monotonic()
        if now_s - said_s >= PROGRESS_S:
            said_s = now_s
            console.print(f"{events} events, {_span(virtual_ms)} virtual, {now_s - begun_s:.0f} s", style="dim")

    return say


def _show(report: SimulationReport, schedules: int, choices: int) -> None:
    verdict = "every rule held" if report.passed else "a rule was broken"
    rows: list[tuple[str, RenderableType]] = [
        ("seed", str(report.seed)),
        ("verdict", Text(verdict, style="green" if report.passed else "bold red")),
        ("events", f"{report.events} in {report.wall_s:.1f} s ({report.events_per_s:.0f}/s)"),
        ("decisions", f"{report.decisions_per_s:.0f}/s in the scheduler alone"),
        ("virtual time", f"{_span(report.virtual_ms)} on {report.nodes} nodes"),
        ("jobs", ", ".join(f"{count} {state}" for state, count in report.jobs) or "none ended"),
        ("preemptions", str(report.preemptions)),
        ("processes", f"{report.processes} started"),
        ("promises", f"{report.promises} answers given and kept"),
        (
            "schedules",
            f"{schedules} different tried; {choices} times several tasks could go on, and their order was drawn",
        ),
        ("checks", f"every invariant {report.full_checks} times, what was touched each time"),
        ("journal", f"{report.journal_changes} changes, sha256 {report.journal_digest}"),
        ("faults", ", ".join(f"{what} {count}" for what, count in report.faults) or "none"),
    ]
    consoles.stdout().print(tables.facts(rows))


def _show_failure(failure: SimulationFailure, shrunk: Shrunk | None) -> None:
    console = consoles.stderr()
    shown = [
        f"error: {failure.message}",
        f"  rule: {failure.rule}, at step {failure.step}, after {_span(failure.at_ms)} of virtual time",
        "  story of the job:",
        *(f"    {line}" for line in failure.story),
        "  last events:",
        *(f"    {line}" for line in failure.last_events),
        f"  replay: {failure.command}",
    ]
    if shrunk is not None:
        least = f"{shrunk.after} of {shrunk.before} faults and acts of users ({shrunk.runs} runs)"
        shown += [f"  the least that was found to break it: {least}; as a test:", *shrunk.scenario.splitlines()]
    for number, line in enumerate(shown):
        console.print(line, style="bold red" if number == 0 else None, soft_wrap=True)


def _span(milliseconds: int) -> str:
    """``93784000`` → ``"26:03:04"``."""
    seconds = milliseconds // 1_000
    return f"{seconds // 3_600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
