"""`callboard node …`: the machines of the cluster."""

from __future__ import annotations

import typer

from callboard.cli import actions
from callboard.cli.options import ControllerOption, Output, OutputOption

app = typer.Typer(help="Look at nodes: what they have and who uses it.", no_args_is_help=True)


@app.command("list", epilog="Example: callboard node list")
def list_nodes(controller: ControllerOption = "", output: OutputOption = Output.TABLE) -> None:
    """List nodes with what is used on each."""
    actions.nodes.show_list(controller=controller, output=output)


@app.callback()
def _group() -> None:
    """Look at nodes: what they have and who uses it."""
