"""`callboard worker …`: the processes of jobs."""

from __future__ import annotations

from typing import Annotated

import typer

from callboard.cli import actions, completing
from callboard.cli.options import JobOption, reads

app = typer.Typer(help="Show workers: which process of which job runs where.", no_args_is_help=True)


@app.command("list", epilog="Example: callboard worker list --job train-00 -o wide")
@reads
def list_workers(
    job: JobOption = "",
    node: Annotated[
        str,
        typer.Option(
            "--node",
            metavar="NODE",
            help="Only workers on this node.",
            show_default=False,
            autocompletion=completing.nodes,
        ),
    ] = "",
) -> None:
    """List the workers of every job that has not ended.

    With -o wide it says why a start was cold.
    """
    actions.workers.show_list(job=job, node=node)


@app.callback()
def _group() -> None:
    """Show workers: which process of which job runs where."""
