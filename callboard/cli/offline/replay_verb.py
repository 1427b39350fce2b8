"""`callboard replay`: what a controller decided, decided again from its state directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from callboard.cli import actions
from callboard.cli.options import takes


def add_to(app: typer.Typer) -> None:
    """Adds the verb to the program."""
    app.command(
        "replay",
        epilog="Example: callboard replay ~/.callboard/state --explain 1234",
        short_help="Rerun the decisions of a controller from its journal.",
    )(replay)


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
