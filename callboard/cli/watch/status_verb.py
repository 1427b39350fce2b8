"""`callboard status`: the cluster on one screen."""

from __future__ import annotations

import typer

from callboard.cli import actions
from callboard.cli.options import ControllerOption, Output, OutputOption, WatchOption


def add_to(app: typer.Typer) -> None:
    """Adds the verb to the program."""
    app.command("status", epilog="Example: callboard status")(status)


def status(controller: ControllerOption = "", output: OutputOption = Output.TABLE, _watch: WatchOption = False) -> None:
    """Show nodes with their GPUs, pools, jobs and why they wait."""
    actions.status.show(controller=controller, output=output)
