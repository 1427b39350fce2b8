"""`callboard simulate`, `replay` and `store`: the scheduler without a cluster, and the journal of a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from callboard.cli import actions
from callboard.cli.options import argument, option, takes

app = typer.Typer()
store_verbs = typer.Typer(help="Copy, back up and restore what a controller knows.", no_args_is_help=True)
app.add_typer(store_verbs, name="store")

FromArgument = Annotated[str, argument("FROM", "State directory of a controller, or the URL of its PostgreSQL.")]
ToArgument = Annotated[str, argument("TO", "State directory or URL of a PostgreSQL that holds no journal yet.")]
KeyOption = Annotated[
    Path | None,
    option(
        "--key",
        "FILE",
        "Key of the secret values: secrets.key of a controller. Default: in the state directory or beside FILE.",
    ),
]


@app.command(
    "simulate",
    epilog="Example: callboard simulate --seed 7 --hours 24 --nodes 100 --faults all",
    short_help="Run the controller and agents in a virtual cluster with faults.",
)
@takes("output", "quiet")
def simulate(
    seed: Annotated[int, option("--seed", "N", "Seed of all random choices; the same seed gives the same run.")] = 1,
    hours: Annotated[
        float | None, option("--hours", "H", "Virtual hours until everything heals.", min=0.0, max=87_600.0)
    ] = None,
    events: Annotated[
        int | None,
        option(
            "--events",
            "N",
            "Scheduler events until everything heals. Default: 10000, unless hours or jobs are given.",
            min=1,
        ),
    ] = None,
    jobs: Annotated[
        int | None, option("--jobs", "N", "Jobs to submit; everything heals when all have ended.", min=1)
    ] = None,
    nodes: Annotated[int, option("--nodes", "N", "Machines.", min=1, max=10_000)] = 8,
    faults: Annotated[
        str,
        option(
            "--faults",
            "all|none|KIND,…",
            "What goes wrong: drop, duplicate, delay, reorder, partition, agent, node, controller, "
            "ray, worker, client, clock, disk, schedule.",
        ),
    ] = "all",
    schedules: Annotated[
        int,
        option(
            "--schedules",
            "N",
            "How many orders to try in which tasks run that could run at the same time.",
            min=1,
            max=1_000_000,
        ),
    ] = 1,
    schedule: Annotated[
        int, option("--schedule", "N", "The first of these orders; like a seed, it can be run again.", min=0)
    ] = 0,
    shrink_s: Annotated[
        float,
        option(
            "--shrink",
            "SECONDS",
            "How long to look for the fewest faults and events that still break a rule; 0: not at all.",
            min=0.0,
            max=86_400.0,
        ),
    ] = 60.0,
) -> None:
    """Run the real scheduler, journal and protocol in a virtual cluster, and check every rule on the way.

    Equal options give equal runs. A broken rule ends it with exit code 1, the command that replays it, and the fewest
    faults and events that still break it, as a test.
    """
    actions.simulation.run(
        seed=seed,
        hours=hours,
        events=events,
        jobs=jobs,
        nodes=nodes,
        faults=faults,
        schedules=range(schedule, schedule + schedules),
        shrink_s=shrink_s,
    )


@app.command(
    "replay",
    epilog="Example: callboard replay ~/.callboard/state --explain 1234",
    short_help="Rerun the decisions of a controller from its journal.",
)
@takes("output", "quiet")
def replay(
    state_dir: Annotated[Path, argument("STATE_DIR", "State directory of a controller. It may be running.")],
    until: Annotated[int | None, option("--until", "REVISION", "Last revision to replay.", min=1)] = None,
    explain: Annotated[
        int | None,
        option(
            "--explain",
            "REVISION",
            "Explain one decision: which jobs were considered, which rule applied, what each node lacked.",
            min=1,
        ),
    ] = None,
) -> None:
    """Decide again, offline, what a controller decided, and print each decision with its reasons.

    The journal holds the newest events that were decided. The same events on the same records give the same decisions;
    where one differs, this is printed and the exit code is 1.
    """
    actions.replaying.run(state_dir, until=until, explain=explain)


@store_verbs.command(
    "copy",
    short_help="Copy a journal to another database.",
    epilog="Example: callboard store copy ~/.callboard/state postgresql://db/callboard",
)
@takes("output", "quiet")
def copy(source: FromArgument, target: ToArgument, key: KeyOption = None) -> None:
    """Copy a journal from SQLite to PostgreSQL or back, while no controller uses either.

    What was copied is read back and compared. FROM stays as it was.
    """
    actions.storing.copy(source, target, key=key)


@store_verbs.command(
    "backup",
    short_help="Back up a journal while it is used.",
    epilog="Example: callboard store backup ~/.callboard/state callboard.backup",
)
@takes("output", "quiet")
def backup(
    source: FromArgument,
    file: Annotated[Path, argument("FILE", "New file; its key goes beside it, as FILE.key.")],
    key: KeyOption = None,
) -> None:
    """Back up a journal as it is at one moment, while its controller runs."""
    actions.storing.back_up(source, file, key=key)


@store_verbs.command(
    "restore",
    short_help="Restore a backup, whole or up to some time.",
    epilog="Example: callboard store restore callboard.backup ~/restored --until 2026-01-31T08:00:00Z",
)
@takes("output", "quiet")
def restore(
    file: Annotated[Path, argument("FILE", "A file that `callboard store backup` made.")],
    target: ToArgument,
    until: Annotated[
        str,
        option(
            "--until",
            "TIME|REVISION",
            "Restore what was decided up to then. Default: everything. A time without a zone is UTC.",
        ),
    ] = "",
    key: KeyOption = None,
) -> None:
    """Restore a backup, as it was at its end or at an earlier point, into a place that holds no journal."""
    actions.storing.restore(file, target, key=key, until=until)
