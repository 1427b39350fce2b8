"""`callboard node …`: the machines of the cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from callboard.cli import actions, completing
from callboard.cli.options import ControllerOption, Output, OutputOption, QuietOption, WatchOption

app = typer.Typer(help="Show nodes, take them out of use and put them back.", no_args_is_help=True)

NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="Id of the node.", autocompletion=completing.nodes)]


@app.command("list", epilog="Example: callboard node list")
def list_nodes(
    every: Annotated[bool, typer.Option("--all", "-a", help="Also nodes that have left.", show_default=False)] = False,
    controller: ControllerOption = "",
    output: OutputOption = Output.TABLE,
    _watch: WatchOption = False,
) -> None:
    """List nodes with what is used on each."""
    actions.nodes.show_list(every=every, controller=controller, output=output)


@app.command("get", epilog="Example: callboard node get node-0 -o yaml")
def get(
    node: NodeArgument,
    controller: ControllerOption = "",
    output: OutputOption = Output.TABLE,
    _watch: WatchOption = False,
) -> None:
    """Show one node: what it has, and who is on which device."""
    actions.nodes.show(node, controller=controller, output=output)


@app.command("cordon", epilog="Example: callboard node cordon node-0")
def cordon(
    node: NodeArgument,
    controller: ControllerOption = "",
    quiet: QuietOption = False,
    _output: OutputOption = Output.TABLE,
) -> None:
    """Start nothing new on a node; what runs there goes on."""
    actions.nodes.cordon(node, controller=controller, quiet=quiet)


@app.command("uncordon", epilog="Example: callboard node uncordon node-0")
def uncordon(
    node: NodeArgument,
    controller: ControllerOption = "",
    quiet: QuietOption = False,
    _output: OutputOption = Output.TABLE,
) -> None:
    """Take a cordon or a drain back."""
    actions.nodes.uncordon(node, controller=controller, quiet=quiet)


@app.command("drain", epilog="Example: callboard node drain node-0 --deadline 30s")
def drain(
    node: NodeArgument,
    within: Annotated[
        str,
        typer.Option(
            "--deadline",
            "--within",
            metavar="TIME",
            help="Deadline for running work to leave, e.g. 30s; 0s: at once. Default: each job's own timeouts.",
            show_default=False,
        ),
    ] = "",
    reason: Annotated[str, typer.Option("--reason", help="Reason, shown to people.", show_default=False)] = "",
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until nothing runs there any more.")] = True,
    controller: ControllerOption = "",
    quiet: QuietOption = False,
    _output: OutputOption = Output.TABLE,
) -> None:
    """Start nothing new on a node; what runs there yields, with notice."""
    actions.nodes.drain(node, within=within, reason=reason, wait=wait, controller=controller, quiet=quiet)


@app.command("remove", epilog="Example: callboard node remove node-0")
def remove(
    node: NodeArgument,
    controller: ControllerOption = "",
    quiet: QuietOption = False,
    _output: OutputOption = Output.TABLE,
) -> None:
    """Forget a node that is lost or has left."""
    actions.nodes.remove(node, controller=controller, quiet=quiet)
