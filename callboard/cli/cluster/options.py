"""Options that several verbs about clusters and agents share."""

from __future__ import annotations

from typing import Annotated

import typer

from callboard.cli.options import option

ExitWithParentOption = Annotated[
    int | None, option("--exit-with-parent", "PID", "End when this program, which started it, ends.", hidden=True)
]
MachineGpusOption = Annotated[
    str,
    option(
        "--machine-gpus",
        "auto|N",
        "Deal out this machine's GPUs, each to one node: auto, the real ones (8 simulated where "
        "there are none), or N simulated ones. Without --agents or --gpus-per-node they are "
        "shared equally, by at most 3 nodes. Default: every node has simulated GPUs of its own.",
    ),
]


def counted_by(context: typer.Context) -> list[str]:
    """Which of the number of nodes and the number of GPUs of each somebody stated."""
    sources = {
        "agents": context.get_parameter_source("agents"),
        "gpus_per_node": context.get_parameter_source("gpus"),
    }
    return [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
