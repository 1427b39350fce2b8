"""`callboard plan`: what a job needs and whether it fits, before anything is launched."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from callboard.cli import actions
from callboard.cli.options import takes


def add_to(app: typer.Typer) -> None:
    """Adds the verb to the program."""
    app.command(
        "plan",
        epilog='Example: callboard plan job.yaml --nodes "8x(8gpu,32cpu)+16x(32cpu)"',
        short_help="Show what a job needs and whether it fits, without a controller.",
    )(plan)


@takes("output")
def plan(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML or JSON file with the job; - reads the input.")],
    nodes: Annotated[
        str,
        typer.Option(
            "--nodes",
            metavar="TEXT",
            help="The cluster: 8+8 (GPUs per node), 4x(2gpu,32cpu), or sums of these. Default: `nodes` of the file, "
            "else of the file of roles; without any only the totals are said.",
            show_default=False,
        ),
    ] = "",
    roles: Annotated[
        Path | None,
        typer.Option(
            "--roles",
            metavar="FILE",
            help="YAML file with presets of further roles, as the controller has; and with nodes.",
        ),
    ] = None,
) -> None:
    """Say what a job needs per component and pool, where it would go on a cluster, what is left and what doesn't fit.

    Asks no controller. Nodes with GPUs are in the node group gpu, those without in cpu. Exit code 3: it does not fit.
    """
    actions.plan.show(file, nodes=nodes, roles=roles)
