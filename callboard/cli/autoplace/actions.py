"""What `callboard autoplace` does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.text import Text

from callboard.autoplace.answer.gantt import bars_of, chart_lines
from callboard.autoplace.answer.report import (
    Answer,
    answer_for_job,
    answer_for_problem,
    as_plain,
    comparison_rows,
    heading_lines,
    notes_of,
    section_of,
    span_rows,
    staleness_rows,
    summary_line,
    table_lines,
)
from callboard.autoplace.problem.plan import Plan
from callboard.autoplace.problem.problem import NoPlan
from callboard.autoplace.rlinf.config import ProfileMissing
from callboard.cli.autoplace.outputs import Outputs, length_of
from callboard.cli.autoplace.progress import Searching
from callboard.cli.autoplace.task import Task, left_out_note, task_of
from callboard.cli.autoplace.verbs import PlanOutput
from callboard.cli.layouts.cluster_source import ClusterSource, described_cluster, live_cluster
from callboard.cli.layouts.config_source import ConfigSource, load_config
from callboard.cli.show import consoles, printing
from callboard.cli.show.exits import BAD_INPUT, NO_PLAN, CommandFailed
from callboard.cli.show.file_faults import refuse
from callboard.cli.show.verb_guard import failing_in_words
from callboard.model.faults import InvalidInput

TERMINAL_COLOURS = ("blue", "yellow", "green", "red", "magenta", "cyan", "bright_blue", "bright_red", "bright_green")
"""Colours that every terminal has, by a component's place in the workflow."""


def run(
    config: str,
    *,
    overrides: Sequence[str],
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
    outputs = Outputs(apply=apply, write=write, plot=plot)
    with failing_in_words():
        _check_cluster(nodes, controller)
        outputs.check()
        source = load_config(config, config_path, overrides)
        cluster = _cluster(nodes, controller)
        searching = Searching(time_limit, quiet=quiet)
        try:
            task = task_of(source, cluster, mixed=mixed)
            outputs.check_source(source, general=task.job is None)
            with searching:
                answer = _answer(task, searching)
        except ProfileMissing as error:
            raise _profile_missing(error, source) from error
        except InvalidInput as error:
            if source.left_out:
                _print_notes([left_out_note(source)], quiet=False)
            refuse(str(source.file), source.text, error.faults)
        except NoPlan as error:
            raise _no_plan(error) from error
        if searching.interrupted:
            consoles.stderr().print("The search was ended; this is the best that was found.")
        _show(answer, task, output, quiet=quiet)
        outputs.put(answer, source)


def _check_cluster(nodes: str, controller: str) -> None:
    if nodes and controller:
        why = "--nodes describes one, --controller names another."
        raise CommandFailed("Two clusters are stated.", why, "Leave one out.", BAD_INPUT)


def _cluster(nodes: str, controller: str) -> ClusterSource | None:
    """The cluster that was stated; None: the config's own."""
    if nodes:
        return described_cluster(nodes)
    return live_cluster(controller) if controller else None


def _answer(task: Task, searching: Searching) -> Answer:
    if task.job is None:
        return answer_for_problem(task.problem, searching.search)
    return answer_for_job(task.job, searching.search)


def _profile_missing(error: ProfileMissing, source: ConfigSource) -> CommandFailed:
    listed = [str(fault) for fault in error.faults]
    if source.left_out:
        listed.append(left_out_note(source))
    return CommandFailed(
        f"Profile data not provided in {source.file}.",
        "\n       ".join(listed),
        "Measure a few iterations on all GPUs and add the seconds; `callboard profile` averages recorded ones.",
        BAD_INPUT,
    )


def _no_plan(error: NoPlan) -> CommandFailed:
    listed = "\n       ".join(
        f"{cause.component}: {cause.reason} ({_counts(cause.gpus)})" if cause.gpus else str(cause)
        for cause in error.causes
    )
    return CommandFailed(
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
        printing.print_json({**as_plain(answer), **task.facts})
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
    console = consoles.stdout()
    bars = bars_of(plan)
    names = list(dict.fromkeys(bar.component for bar in bars))
    width = min(console.width, 120)
    lines, axis = chart_lines(bars, gpus=plan.problem.gpus, seconds=length_of(plan), width=width)
    for line in lines:
        shown = Text(f"{line.label} │")
        for piece in line.pieces:
            colour = TERMINAL_COLOURS[names.index(piece.component) % len(TERMINAL_COLOURS)] if piece.component else ""
            shown.append(piece.text, style=colour)
        shown.append("│")
        console.print(shown, soft_wrap=True)
    console.print(Text(axis), soft_wrap=True)


def _print(lines: Iterable[str]) -> None:
    console = consoles.stdout()
    for line in lines:
        console.print(line, soft_wrap=True)


def _print_notes(notes: Sequence[str], *, quiet: bool) -> None:
    console = consoles.stderr()
    for note in () if quiet else dict.fromkeys(notes):
        console.print(f"note: {note}.", style="dim", soft_wrap=True)
