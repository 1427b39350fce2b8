"""`callboard pg …`: placement groups."""

from __future__ import annotations

from typing import Annotated

import typer

from callboard.cli import actions, completing
from callboard.cli.options import PoolOption, reads, writes

app = typer.Typer(help="Show and remove placement groups, which book room in Ray.", no_args_is_help=True)

GroupArgument = Annotated[
    str,
    typer.Argument(
        metavar="ID", help="Id of the placement group, as `pg list -o wide` shows it.", autocompletion=completing.groups
    ),
]


@app.command("list", epilog="Example: callboard pg list --pool rlhf -o wide")
@reads
def list_groups(pool: PoolOption = "") -> None:
    """List placement groups."""
    actions.groups.show_list(pool=pool)


@app.command("get", epilog="Example: callboard pg get pg-7")
@reads
def get(group: GroupArgument) -> None:
    """Show one placement group: what it books where, and who uses it."""
    actions.groups.show(group)


@app.command("delete", epilog="Example: callboard pg delete pg-7")
@writes
def delete(
    group: GroupArgument,
    when_free: Annotated[
        bool, typer.Option("--when-free", help="Also remove a group that is in use, once its job has left it.")
    ] = False,
) -> None:
    """Remove an idle placement group.

    A reserved one stays away until its pool is changed.
    """
    actions.groups.delete(group, when_free=when_free)
