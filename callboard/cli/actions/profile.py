"""What `callboard profile` does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from callboard.agents.worker_timings import SUFFIX
from callboard.autoplace.profile import Measured, Timing, components, measured, profile_data, read_timings
from callboard.cli import printing, screen
from callboard.cli.autoplace import PlanOutput
from callboard.cli.failing import BAD_INPUT, CommandFailed, Failure
from callboard.cli.session import failing_in_words, with_client
from callboard.client.client import Client
from callboard.client.clusters import run_directory


def run(source: str, *, warmup: int, workflow: bool, controller: str, output: PlanOutput) -> None:
    """Averages the timings of a file or a job and prints the section that they make."""
    if source == "-" or Path(source).exists() or source.endswith((".jsonl", ".json")):
        with failing_in_words():
            _show(_read([_named(source)]), warmup=warmup, workflow=workflow, output=output)
        return

    async def action(client: Client) -> None:
        job = await client.get_job(source)
        files = sorted(run_directory().glob(f"*/*/logs/{job.job.uid}-*{SUFFIX}"))
        if not files:
            raise CommandFailed(
                Failure(
                    f"Job {job.name} has no timings on this machine.",
                    'Its workers record them with `with ctx.timed("rollout"):`, into files of their own machine.',
                    "Record some, or run this on the hosts of its workers; `callboard job get` names its nodes.",
                )
            )
        _show(_read(files), warmup=warmup, workflow=workflow, output=output)

    with_client(controller, action)


def _named(source: str) -> Path | None:
    """The file that is meant; None: the input."""
    if source == "-":
        return None
    path = Path(source)
    if not path.is_file():
        raise CommandFailed(
            Failure(f"There are no timings {source}.", "It is not a file.", "Name another file, or a job.", BAD_INPUT)
        )
    return path


def _read(files: Sequence[Path | None]) -> list[Timing]:
    found: list[Timing] = []
    for file in files:
        if file is None:
            found += read_timings(sys.stdin, "input")
            continue
        try:
            with file.open(encoding="utf-8") as lines:
                found += read_timings(lines, file.name)
        except (OSError, UnicodeDecodeError) as error:
            raise CommandFailed(
                Failure(f"The timings {file} can't be read.", f"{error}.", "Name another file.", BAD_INPUT)
            ) from error
    return found


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
        screen.stderr().print(screen.table(columns, rows, right=columns[1:]))
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
        "spread_seconds": each.spread_seconds,
        "iterations": each.iterations,
        "warmup": each.dropped,
    }
