"""`callboard policy …`: when a job must yield."""

from __future__ import annotations

from typing import Annotated

import typer

from callboard.cli import actions
from callboard.cli.options import reads, takes

app = typer.Typer(help="Read and set the preemption policy: who yields to whom.", no_args_is_help=True)


@app.command("get", epilog="Example: callboard policy get -o yaml > policy.yaml")
@reads
def get() -> None:
    """Show the policy, every default filled in. The YAML form can be given to `policy set`."""
    actions.policy.show()


@app.command("set", epilog="Example: callboard policy set cancel_timeout=500ms aggressiveness=HIGH")
@takes("controller", "output", "quiet")
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
) -> None:
    """Set the policy: as a whole from a file, or single fields."""
    actions.policy.change(changes, validate=validate)
