"""What `callboard autoplace` does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import typer
from rich.text import Text

from callboard.autoplace.accepted import Answer, answer_for_job, answer_for_problem
from callboard.autoplace.applying import with_placement
from callboard.autoplace.gantt import bars_of, chart_lines
from callboard.autoplace.picture import draw
from callboard.autoplace.plan import Plan
from callboard.autoplace.png import to_png
from callboard.autoplace.problem import NoPlan
from callboard.autoplace.report import (
    as_plain,
    comparison_rows,
    heading_lines,
    nodes_of,
    notes_of,
    placement_of,
    section_of,
    span_rows,
    staleness_rows,
    summary_line,
    table_lines,
)
from callboard.autoplace.rlinf_config import ProfileMissing
from callboard.autoplace.svg import to_svg
from callboard.cli import screen
from callboard.cli.autoplace import PlanOutput
from callboard.cli.autoplace_search import Searching
from callboard.cli.autoplace_task import Task, task_of
from callboard.cli.cluster_source import ClusterSource, described_cluster, live_cluster
from callboard.cli.config_source import ConfigSource, load_config
from callboard.cli.failures import BAD_INPUT, NO_PLAN, CommandFailed, Failure
from callboard.cli.file_faults import fault_lines
from callboard.cli.file_replacing import replace_file, write_new
from callboard.cli.session import failing_in_words
from callboard.model.faults import InvalidInput

TERMINAL_COLOURS = ("blue", "yellow", "green", "red", "magenta", "cyan", "bright_blue", "bright_red", "bright_green")
"""Colours that every terminal has, by a component's place in the workflow."""

PICTURES = (".svg", ".png")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outputs:
    """Where the answer goes besides the screen."""

    apply: bool
    write: Path | None
    plot: Path | None


def run(
    config: str,
    *,
    config_path: Path | None,
    nodes: str,
    controller: str,
    time_limit: float,
    mixed: bool,
    apply: bool,
    write: Path | None,
    plot: Path | None,
    output: PlanOutput,
    quiet: bool,
) -> None:
    """Searches the placement of a config, shows it, and puts it where it is wanted."""
    outputs = _Outputs(apply=apply, write=write, plot=plot)
    with failing_in_words():
        _check(outputs, nodes, controller)
        source = load_config(config, config_path)
        cluster = _cluster(nodes, controller)
        searching = Searching(time_limit, quiet=quiet)
        try:
            task = task_of(source, cluster, mixed=mixed)
            _check_source(outputs, source, task)
            with searching:
                answer = _answer(task, searching)
        except ProfileMissing as error:
            raise CommandFailed(_profile_missing(error, source.file)) from error
        except InvalidInput as error:
            _refuse(source, error)
        except NoPlan as error:
            raise CommandFailed(_no_plan(error)) from error
        if searching.interrupted:
            screen.stderr().print("The search was ended; this is the best that was found.")
        _show(answer, task, output, quiet=quiet)
        _put(answer, task, source, outputs)


def _cluster(nodes: str, controller: str) -> ClusterSource | None:
    """The cluster that was stated; None: the config's own."""
    if nodes:
        return described_cluster(nodes)
    return live_cluster(controller) if controller else None


def _answer(task: Task, searching: Searching) -> Answer:
    if task.job is None:
        return answer_for_problem(task.problem, searching.search)
    return answer_for_job(task.job, searching.search)


# What can be refused before anything is searched.


def _check(outputs: _Outputs, nodes: str, controller: str) -> None:
    if nodes and controller:
        raise _bad("Two clusters are stated.", "--nodes describes one, --controller names another.", "Leave one out.")
    if outputs.apply and outputs.write is not None:
        raise _bad(
            "The placement can't go to two files.",
            "--apply changes the config, --write makes a new one.",
            "Choose one.",
        )
    if outputs.write is not None and outputs.write.exists():
        raise _bad(f"{outputs.write} is there already.", "--write makes a new file.", "Name another, or remove it.")
    if outputs.plot is None:
        return
    if outputs.plot.suffix.lower() not in PICTURES:
        why = f"Its name ends with {outputs.plot.suffix or 'nothing'}."
        raise _bad(f"{outputs.plot} is no kind of picture.", why, f"End it with {' or '.join(PICTURES)}.")
    if outputs.plot.suffix.lower() == ".png" and find_spec("PIL") is None:
        raise _bad("PNG can't be drawn here.", "Pillow is not installed.", "pip install pillow, or name an .svg file.")


def _check_source(outputs: _Outputs, source: ConfigSource, task: Task) -> None:
    if not outputs.apply:
        return
    if task.job is None:
        raise _bad(
            f"{source.file} has no place for a placement.",
            "It describes a workflow in the general form; RLinf's configs have cluster.component_placement.",
            "Paste the section where it belongs, or use --write.",
        )
    own = source.own.get("cluster")
    stated = isinstance(own, dict) and "component_placement" in own
    if source.composed and not stated:
        raise _bad(
            f"The placement is not in {source.file}.",
            "It comes from another file of its defaults.",
            "Name that file, paste the section, or use --write.",
        )


def _refuse(source: ConfigSource, error: InvalidInput) -> NoReturn:
    """Every fault with its line, as a compiler shows them."""
    console = screen.stderr()
    for line in fault_lines(str(source.file), source.text, error.faults):
        console.print(line, soft_wrap=True)
    count = f"{len(error.faults)} faults" if len(error.faults) > 1 else "1 fault"
    said = f"error: {source.file} has {count}; nothing was done."
    console.print(said, style="bold red", markup=False, soft_wrap=True)
    raise typer.Exit(BAD_INPUT)


def _bad(what: str, why: str, remedy: str) -> CommandFailed:
    return CommandFailed(Failure(what, why, remedy, BAD_INPUT))


def _profile_missing(error: ProfileMissing, file: Path) -> Failure:
    listed = "\n       ".join(str(fault) for fault in error.faults)
    return Failure(
        f"Profile data not provided in {file}.",
        listed,
        "Measure a few iterations on all GPUs and add the seconds; `callboard profile` averages recorded ones.",
        BAD_INPUT,
    )


def _no_plan(error: NoPlan) -> Failure:
    listed = "\n       ".join(
        f"{cause.component}: {cause.reason} ({_counts(cause.gpus)})" if cause.gpus else str(cause)
        for cause in error.causes
    )
    return Failure(
        "There is no placement for this workflow.",
        listed,
        "Measure the component at a count that fits, change its parallel sizes, or state a larger cluster.",
        NO_PLAN,
    )


def _counts(gpus: Sequence[int]) -> str:
    if len(gpus) > 8:
        return f"looked at {gpus[0]} to {gpus[-1]} GPUs"
    return f"looked at {', '.join(map(str, gpus))} GPUs"


# What is shown.


def _show(answer: Answer, task: Task, output: PlanOutput, *, quiet: bool) -> None:
    if output is PlanOutput.JSON:
        screen.print_json({**as_plain(answer), **task.facts})
        return
    notes = [*task.notes, *notes_of(answer)]
    if output is PlanOutput.YAML:
        _print(section_of(answer).splitlines())
        _print_notes(notes, quiet=quiet)
        return
    plan = answer.plan
    _print(heading_lines(answer))
    _print(["", f"{summary_line(plan)}.", ""])
    _print(table_lines(comparison_rows(answer), headings=("layout", "seconds", "")))
    _print(["", *table_lines(span_rows(plan), headings=("component", "GPUs", "when", "work", "cost"))])
    _print([""])
    _print_chart(plan)
    if answer.staleness:
        headings = ("staleness", "a batch every", "each on its way", "placement")
        _print(["", *table_lines(staleness_rows(answer), headings=headings)])
    _print_notes(notes, quiet=quiet)


def _print_chart(plan: Plan) -> None:
    console = screen.stdout()
    bars = bars_of(plan)
    names = list(dict.fromkeys(bar.component for bar in bars))
    width = min(console.width, 120)
    lines, axis = chart_lines(bars, gpus=plan.problem.gpus, seconds=_length(plan), width=width)
    for line in lines:
        shown = Text(f"{line.label} │")
        for piece in line.pieces:
            colour = TERMINAL_COLOURS[names.index(piece.component) % len(TERMINAL_COLOURS)] if piece.component else ""
            shown.append(piece.text, style=colour)
        shown.append("│")
        console.print(shown, soft_wrap=True)
    console.print(Text(axis), soft_wrap=True)


def _length(plan: Plan) -> float:
    return max((span.end_seconds for span in plan.spans), default=0.0)


def _print(lines: Iterable[str]) -> None:
    console = screen.stdout()
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _print_notes(notes: Sequence[str], *, quiet: bool) -> None:
    console = screen.stderr()
    for note in () if quiet else dict.fromkeys(notes):
        console.print(f"note: {note}.", style="dim", markup=False, soft_wrap=True)


# Where it is put.


def _put(answer: Answer, task: Task, source: ConfigSource, outputs: _Outputs) -> None:
    try:
        if outputs.apply:
            backup = replace_file(source.file, _changed(answer, source))
            screen.stderr().print(f"{source.file} has the placement now; it was {backup.name} before.", markup=False)
        if outputs.write is not None:
            text = _changed(answer, source) if task.job is not None else section_of(answer)
            write_new(outputs.write, text.encode())
            screen.stderr().print(f"{outputs.write} is written.", markup=False)
        if outputs.plot is not None:
            outputs.plot.write_bytes(_picture(answer.plan, outputs.plot.suffix.lower()))
            screen.stderr().print(f"{outputs.plot} is drawn.", markup=False)
    except OSError as error:
        raise CommandFailed(
            Failure(
                f"{error.filename or 'A file'} could not be written.",
                f"{error.strerror or error}.",
                "Name another place; the placement is above.",
            )
        ) from error


def _changed(answer: Answer, source: ConfigSource) -> str:
    return with_placement(source.text, nodes_of(answer), placement_of(answer))


def _picture(plan: Plan, suffix: str) -> bytes:
    picture = draw(bars_of(plan), gpus=plan.problem.gpus, seconds=_length(plan), title=summary_line(plan))
    return to_png(picture) if suffix == ".png" else to_svg(picture).encode()
