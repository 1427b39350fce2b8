"""`callboard add-worker`, `demand` and `autoscale`: clusters that grow and shrink while they run."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from callboard.cli import actions, completing
from callboard.cli.options import argument, option, reads, takes

ClusterOption = Annotated[str, option("--name", "NAME", "Cluster of this machine. Default: the only one.")]


app = typer.Typer()


class ProviderName(StrEnum):
    """Where nodes come from."""

    LOCAL = "local"
    COMMAND = "command"


@app.command(
    "add-worker", epilog="Example: callboard add-worker", short_help="Add a node to a cluster of this machine."
)
@takes("quiet", "output")
def add_worker(
    name: ClusterOption = "",
    timeout: Annotated[
        float, option("--timeout", "SECONDS", "Give up if it is not ready after this time.", min=1)
    ] = 120.0,
    lock_pause: Annotated[
        float, option("--lock-pause", "SECONDS", "Time between the 10 attempts to get the lock.", min=0.01)
    ] = 3.0,
) -> None:
    """Add a node to a running cluster of this machine, on the lowest free GPU, and wait until it takes work."""
    actions.growing.add(name=name, timeout_s=timeout, lock_pause_s=lock_pause)


@app.command(
    "remove-worker",
    epilog="Example: callboard remove-worker node-3",
    short_help="Remove a node from a cluster of this machine.",
)
@takes("quiet", "output")
def remove_worker(
    node: Annotated[
        str, argument("NODE", "Node to remove. Default: the one of the highest rank.", autocompletion=completing.nodes)
    ] = "",
    deadline: Annotated[str, option("--deadline", "TIME", "Deadline for running work to leave.")] = "30s",
    name: ClusterOption = "",
) -> None:
    """Drain a node that this machine runs, end its agent, and give its place back to `callboard add-worker`."""
    actions.growing.remove(node, deadline=deadline, name=name)


@app.command(
    "demand",
    epilog="Example: callboard demand -o json",
    short_help="Show the demand that the cluster can't serve yet.",
)
@reads
def demand() -> None:
    """Show workers that have no place: their shapes, how many, of which pools, since when. For autoscalers."""
    actions.autoscaling.show_demand()


@app.command(
    "autoscale",
    epilog="Example: callboard autoscale --provider local --min 1 --max 4",
    short_help="Add and remove nodes as demand changes.",
)
@takes("controller", "quiet")
def autoscale(
    provider: Annotated[
        ProviderName, option("--provider", "local: agents on this machine; command: the commands --up and --down.")
    ] = ProviderName.LOCAL,
    least: Annotated[int, option("--min", "N", "Fewest nodes.", min=0)] = 1,
    most: Annotated[int, option("--max", "N", "Most nodes.", min=1, max=10_000)] = 4,
    idle: Annotated[str, option("--idle", "TIME", "Remove a node after it was idle for this time.")] = "60s",
    every: Annotated[str, option("--every", "TIME", "Time between two checks of the demand.")] = "5s",
    notice: Annotated[str, option("--notice", "TIME", "Deadline of the drain before a node is removed.")] = "30s",
    grow_elastic: Annotated[
        bool, option("--grow-elastic", "Add nodes also for elastic components that could grow.")
    ] = False,
    up: Annotated[str, option("--up", "COMMAND", "Command that starts one node; its name is in CALLBOARD_NODE.")] = "",
    down: Annotated[str, option("--down", "COMMAND", "Command that ends the node named in CALLBOARD_NODE.")] = "",
    node: Annotated[
        str, option("--node", "cpu=N,gpu=N,memory=SIZE", "Size of a new node, needed while no node has joined yet.")
    ] = "",
    name: ClusterOption = "",
) -> None:
    """Add nodes while workers wait for room, and remove those on which nothing runs, drained first. Ctrl-C ends it."""
    actions.autoscaling.run(
        provider=provider.value,
        least=least,
        most=most,
        idle=idle,
        every=every,
        notice=notice,
        grow_elastic=grow_elastic,
        up=up,
        down=down,
        node=node,
        name=name,
    )
