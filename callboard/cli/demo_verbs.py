"""`callboard demo …`: live demonstrations."""

from __future__ import annotations

from typing import Annotated

import typer

from callboard.cli import actions
from callboard.cli.options import QuietOption

app = typer.Typer(help="Watch callboard at work on a cluster of its own.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Watch callboard at work on a cluster of its own."""


@app.command("rlhf", epilog="Example: callboard demo rlhf --json")
def rlhf(
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON with the verdicts.")] = False,
    ray_address: Annotated[
        str,
        typer.Option(
            "--ray-address",
            metavar="HOST:PORT",
            envvar="RAY_ADDRESS",
            help="Use this Ray cluster instead of starting one.",
        ),
    ] = "",
    agents: Annotated[int, typer.Option("--agents", metavar="N", help="Nodes.", min=1, max=16)] = 3,
    cpus_per_node: Annotated[str, typer.Option("--cpus-per-node", metavar="N", help="CPUs of each node.")] = "3",
    memory_per_node: Annotated[
        str, typer.Option("--memory-per-node", metavar="SIZE", help="Memory of each node.")
    ] = "4GiB",
    gpus_per_node: Annotated[
        int, typer.Option("--gpus-per-node", metavar="N", help="Simulated GPUs of each node.", min=1, max=8)
    ] = 2,
    quiet: QuietOption = False,
) -> None:
    """An RLHF run in six acts: rollouts, a reward model and a trainer share GPUs, and yield to each other."""
    actions.demos.rlhf(
        as_json=as_json,
        ray_address=ray_address,
        agents=agents,
        cpus=cpus_per_node,
        memory=memory_per_node,
        gpus=gpus_per_node,
        quiet=quiet,
    )
