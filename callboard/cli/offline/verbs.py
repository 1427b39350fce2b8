"""`callboard simulate` and `callboard replay`: the scheduler without a cluster, and the past of a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from callboard.cli import actions
from callboard.cli.options import takes

app = typer.Typer()


@app.command(
    "simulate",
    epilog="Example: callboard simulate --seed 7 --hours 24 --nodes 100 --faults all",
    short_help="Run the controller and agents in a virtual cluster with faults.",
)
@takes("output", "quiet")
def simulate(
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Seed of all random choices; the same seed gives the same run.")
    ] = 1,
    hours: Annotated[
        float | None,
        typer.Option(
            "--hours",
            metavar="H",
            help="Virtual hours until everything heals.",
            min=0.0,
            max=87_600.0,
            show_default=False,
        ),
    ] = None,
    events: Annotated[
        int | None,
        typer.Option(
            "--events",
            metavar="N",
            help="Scheduler events until everything heals. Default: 10000, unless hours or jobs are given.",
            min=1,
            show_default=False,
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", metavar="N", help="Jobs to submit; it heals when all have ended.", min=1, show_default=False
        ),
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", help="Machines.", min=1, max=10_000)] = 8,
    faults: Annotated[
        str,
        typer.Option(
            "--faults",
            metavar="all|none|KIND,…",
            help="What goes wrong: drop, duplicate, delay, reorder, partition, agent, node, controller, ray, worker, "
            "client, clock, disk, schedule.",
        ),
    ] = "all",
    schedules: Annotated[
        int,
        typer.Option(
            "--schedules",
            metavar="N",
            help="How many interleavings to try: orders in which tasks that could go on at once do so.",
            min=1,
            max=1_000_000,
        ),
    ] = 1,
    schedule: Annotated[
        int, typer.Option("--schedule", metavar="N", help="The first of them; one replays like a seed.", min=0)
    ] = 0,
    shrink_s: Annotated[
        float,
        typer.Option(
            "--shrink",
            metavar="SECONDS",
            help="How long to look for the fewest faults and events that still break a rule; 0: not at all.",
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
    state_dir: Annotated[
        Path, typer.Argument(metavar="STATE_DIR", help="State directory of a controller. It may be running.")
    ],
    until: Annotated[
        int | None,
        typer.Option("--until", metavar="REVISION", help="Last revision to replay.", min=1, show_default=False),
    ] = None,
    explain: Annotated[
        int | None,
        typer.Option(
            "--explain",
            metavar="REVISION",
            help="Explain one decision: which jobs were considered, which rule applied, what each node lacked.",
            min=1,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Decide again, offline, what a controller decided, and print each decision with its reasons.

    The journal holds the newest events that were decided. The same events on the same records give the same decisions;
    where one differs, this is printed and the exit code is 1.
    """
    actions.replaying.run(state_dir, until=until, explain=explain)
