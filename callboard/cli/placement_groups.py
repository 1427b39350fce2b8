"""`callboard pg …`: placement groups."""

from __future__ import annotations

import typer

from callboard.cli import actions
from callboard.cli.options import ControllerOption, Output, OutputOption, PoolOption

app = typer.Typer(help="Look at placement groups: what is booked in Ray, for whom.", no_args_is_help=True)


@app.command("list", epilog="Example: callboard pg list --pool rlhf -o wide")
def list_groups(pool: PoolOption = "", controller: ControllerOption = "", output: OutputOption = Output.TABLE) -> None:
    """List placement groups."""
    actions.groups.show_list(pool=pool, controller=controller, output=output)


@app.callback()
def _group() -> None:
    """Look at placement groups: what is booked in Ray, for whom."""
