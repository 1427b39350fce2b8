"""`callboard add-worker`: clusters that grow and shrink while they run."""

from __future__ import annotations

from typing import Annotated

import typer

from callboard.cli import actions
from callboard.cli.options import QuietOption

ClusterOption = Annotated[
    str,
    typer.Option("--name", metavar="NAME", help="Cluster of this machine. Default: the only one.", show_default=False),
]


def add_to(app: typer.Typer) -> None:
    """Adds the verbs to the program."""
    app.command(
        "add-worker",
        epilog="Example: callboard add-worker",
        short_help="Add a node to a cluster of this machine.",
    )(add_worker)


def add_worker(
    name: ClusterOption = "",
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Give up if it is not ready after this long.", min=1)
    ] = 120.0,
    lock_pause: Annotated[
        float,
        typer.Option("--lock-pause", metavar="SECONDS", help="Between the 10 attempts to get the lock.", min=0.01),
    ] = 3.0,
    quiet: QuietOption = False,
) -> None:
    """Add a node to a running cluster of this machine, on the lowest free GPU, and wait until it takes work."""
    actions.growing.add(name=name, timeout_s=timeout, lock_pause_s=lock_pause, quiet=quiet)
