"""`callboard placement` and `callboard plan`: what a placement or a job means, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from callboard.cli import actions
from callboard.cli.options import (
    ConfigPathOption,
    ControllerOption,
    Output,
    OutputOption,
    OverridesArgument,
    argument,
    option,
    takes,
)

app = typer.Typer()


placement_verbs = typer.Typer(help="Check placements and draw them, before anything starts.", no_args_is_help=True)
app.add_typer(placement_verbs, name="placement")


@placement_verbs.command("show", epilog="Example: callboard placement show train.yaml --nodes 8+8 --svg train.svg")
def show(
    file: Annotated[
        str,
        argument(
            "FILE",
            "An RLinf config or a job, as YAML or JSON; with --config-path the name of a Hydra "
            "config; - reads the input.",
        ),
    ],
    overrides: OverridesArgument = None,
    config_path: ConfigPathOption = None,
    nodes: Annotated[
        str,
        option(
            "--nodes",
            "NODES",
            "Describe the nodes instead of asking a controller: 8+8, or 4x(8gpu,32cpu)+2x(32cpu). "
            "Default: `nodes` of the file, else the controller's.",
        ),
    ] = "",
    controller: ControllerOption = "",
    _output: OutputOption = Output.TABLE,
    svg: Annotated[Path | None, option("--svg", "FILE", "Also draw the placement as SVG into this file.")] = None,
) -> None:
    """Show which component's ranks are on which GPU of which node.

    A file with faults ends with exit code 2 and says all of them, each with its line and column.
    """
    actions.placement.show(
        file, overrides=overrides or [], config_path=config_path, nodes=nodes, controller=controller, svg=svg
    )


@app.command(
    "plan",
    epilog='Example: callboard plan job.yaml --nodes "8x(8gpu,32cpu)+16x(32cpu)"',
    short_help="Show what a job needs and whether it fits, without a controller.",
)
@takes("output")
def plan(
    file: Annotated[Path, argument("FILE", "YAML or JSON file with the job; - reads the input.")],
    nodes: Annotated[
        str,
        option(
            "--nodes",
            "NODES",
            "The cluster: 8+8 (GPUs per node), 4x(2gpu,32cpu), or sums of these. Default: `nodes` of "
            "the file, else of the file of roles; without any only the totals are shown.",
        ),
    ] = "",
    roles: Annotated[
        Path | None,
        option(
            "--roles",
            "FILE",
            "YAML file with presets of further roles, as for the controller; it may state nodes, too.",
        ),
    ] = None,
) -> None:
    """Say what a job needs per component and pool, where it would go on a cluster, what is left and what doesn't fit.

    Asks no controller. Nodes with GPUs are in the node group gpu, those without in cpu. Exit code 3: it does not fit.
    """
    actions.plan.show(file, nodes=nodes, roles=roles)
