"""`callboard placement …`: look at a placement before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from callboard.cli import actions
from callboard.cli.options import ConfigPathOption, ControllerOption, Output, OutputOption, OverridesArgument

app = typer.Typer(help="Check placements and draw them, before anything starts.", no_args_is_help=True)


@app.command("show", epilog="Example: callboard placement show train.yaml --nodes 8+8 --svg train.svg")
def show(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="An RLinf config or a job, as YAML or JSON; with --config-path the name of a Hydra config; "
            "- reads the input.",
        ),
    ],
    overrides: OverridesArgument = None,
    config_path: ConfigPathOption = None,
    nodes: Annotated[
        str,
        typer.Option(
            "--nodes",
            metavar="TEXT",
            help="Describe the nodes instead of asking a controller: 8+8, or 4x(8gpu,32cpu)+2x(32cpu). "
            "Default: `nodes` of the file, else the controller's.",
            show_default=False,
        ),
    ] = "",
    controller: ControllerOption = "",
    _output: OutputOption = Output.TABLE,
    svg: Annotated[
        Path | None,
        typer.Option(
            "--svg", metavar="FILE", help="Also draw the placement as SVG into this file.", show_default=False
        ),
    ] = None,
) -> None:
    """Show which component's ranks are on which GPU of which node.

    A file with faults ends with exit code 2 and says all of them, each with its line and column.
    """
    actions.placement.show(
        file,
        overrides=overrides or [],
        config_path=config_path,
        nodes=nodes,
        controller=controller,
        svg=svg,
    )
