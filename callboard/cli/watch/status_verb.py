"""`callboard status`: the cluster on one screen."""

from __future__ import annotations

import typer

from callboard.cli import actions
from callboard.cli.options import reads


def add_to(app: typer.Typer) -> None:
    """Adds the verb to the program."""
    app.command("status", epilog="Example: callboard status")(status)


@reads
def status() -> None:
    """Show nodes with their GPUs, pools, jobs and why they wait."""
    actions.status.show()
