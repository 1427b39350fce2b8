"""What `callboard profile` does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from callboard.autoplace.problem.profile import Measured, Timing, components, measured, profile_data, read_timings
from callboard.cli.autoplace.verbs import PlanOutput
from callboard.cli.show import consoles, printing, tables
from callboard.cli.show.exits import BAD_INPUT, CommandFailed
from callboard.cli.show.verb_guard import failing_in_words, with_client
from callboard.client.calls.watching import MISSING
from callboard.client.client import Client
from callboard.model.inputs.source import why_unreadable


def run(source: str, *, warmup: int, workflow: bool, output: PlanOutput) -> None:
    """Averages the timings of a file or a job and prints the section that they make."""
    if source == "-" or Path(source).exists() or source.endswith((".jsonl", ".json")):
        with failing_in_words():
            _show(_read(source), warmup=warmup, workflow=workflow, output=output)
        return

    async def action(client: Client) -> None:
        job = await client.get_job(source)
        recorded: dict[str, list[str]] = {}
        async for line in job.timings():
            if line.stream == MISSING:
                consoles.stderr().print(f"Missing: {line.text}.", soft_wrap=True)
            else:
                worker = f"{job.name}/{line.component}/{line.rank}, attempt {line.attempt}"
                recorded.setdefault(worker, []).append(line.text)
        if not recorded:
            raise CommandFailed(
                f"Job {job.name} has no timings.",
                'Its workers record them with `with ctx.timed("rollout"):`.',
                "Record some; see docs/autoplace.md.",
            )
        timings = [timing for worker, lines in recorded.items() for timing in read_timings(lines, worker)]
        _show(timings, warmup=warmup, workflow=workflow, output=output)

    with_client(action)


def _read(source: str) -> list[Timing]:
    """The timings of a file, or of the input."""
    if source == "-":
        return read_timings(sys.stdin, "input")
    file = Path(source)
    if not file.is_file():
        raise CommandFailed(
            f"There are no timings {source}.", "It is not a file.", "Name another file, or a job.", BAD_INPUT
        )
    try:
        with file.open(encoding="utf-8") as lines:
            return read_timings(lines, file.name)
    except (OSError, UnicodeDecodeError) as error:
        why = why_unreadable(error)
        said = f"{why[0].upper()}{why[1:]}."
        raise CommandFailed(f"The timings {file} can't be read.", said, "Name another file.", BAD_INPUT) from error


def _show(timings: Sequence[Timing], *, warmup: int, workflow: bool, output: PlanOutput) -> None:
    found = measured(timings, warmup=warmup)
    section: dict[str, Any] = (
        {"workflow": {"components": components(found)}} if workflow else {"profile_data": profile_data(found)}
    )
    if output is PlanOutput.JSON:
        printing.print_json({**section, "measured": [_plain(each) for each in found]})
        return
    if output is PlanOutput.TEXT:
        columns = ("component", "GPUs", "envs", "seconds", "spread", "iterations", "warm-up")
        rows = [_row(each) for each in found]
        consoles.stderr().print(tables.table(columns, rows, right=columns[1:]))
    printing.print_yaml(section)


def _row(each: Measured) -> tuple[str, ...]:
    return (
        each.component,
        "?" if each.gpus is None else str(each.gpus),
        "" if each.envs is None else str(each.envs),
        f"{each.seconds:.5g}",
        f"{each.spread_seconds:.2g}",
        str(each.iterations),
        str(each.dropped),
    )


def _plain(each: Measured) -> dict[str, Any]:
    return {
        "component": each.component,
        "gpus": each.gpus,
        "envs_per_instance": each.envs,
        "seconds": each.seconds,
        "median_seconds": each.median_seconds,
        "spread_seconds": each.spread_seconds,
        "iterations": each.iterations,
        "warmup": each.dropped,
    }
