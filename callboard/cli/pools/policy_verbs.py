"""`callboard policy …`: when a job must yield."""

from __future__ import annotations

from typing import Annotated

import typer

from callboard.cli import actions
from callboard.cli.options import ControllerOption, Output, OutputOption, QuietOption, WatchOption

app = typer.Typer(help="Read and set the preemption policy: who yields to whom.", no_args_is_help=True)


@app.command("get", epilog="Example: callboard policy get -o yaml > policy.yaml")
def get(controller: ControllerOption = "", output: OutputOption = Output.TABLE, _watch: WatchOption = False) -> None:
    """Show the policy, every default filled in. The YAML form can be given to `policy set`."""
    actions.policy.show(controller=controller, output=output)


@app.command("set", epilog="Example: callboard policy set cancel_timeout=500ms aggressiveness=HIGH")
def set_policy(
    changes: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE | KEY=VALUE…",
            help="A YAML file with the whole policy, or single fields to change; values are YAML.",
        ),
    ],
    validate: Annotated[
        bool, typer.Option("--validate", help="Only check; change nothing.", show_default=False)
    ] = False,
    controller: ControllerOption = "",
    output: OutputOption = Output.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Set the policy: as a whole from a file, or single fields."""
    actions.policy.change(changes, validate=validate, controller=controller, output=output, quiet=quiet)
