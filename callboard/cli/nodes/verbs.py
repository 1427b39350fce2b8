"""`callboard node …`: the machines of the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from callboard.cli import actions, completing
from callboard.cli.options import StateDirOption, argument, option, reads, takes, writes

app = typer.Typer()
node_verbs = typer.Typer(help="Show nodes, take them out of use and put them back.", no_args_is_help=True)
app.add_typer(node_verbs, name="node")

NodeArgument = Annotated[str, argument("NODE", "Id of the node.", autocompletion=completing.nodes)]


@node_verbs.command("list", epilog="Example: callboard node list")
@reads
def list_nodes(
    every: Annotated[bool, option("--all", "-a", "Also nodes that have left.")] = False,
) -> None:
    """List nodes with what is used on each."""
    actions.nodes.show_list(every=every)


@node_verbs.command("get", epilog="Example: callboard node get node-0 -o yaml")
@reads
def get(node: NodeArgument) -> None:
    """Show one node: what it has, and who is on which device."""
    actions.nodes.show(node)


@node_verbs.command("cordon", epilog="Example: callboard node cordon node-0")
@writes
def cordon(node: NodeArgument) -> None:
    """Start nothing new on a node; what runs there goes on."""
    actions.nodes.cordon(node)


@node_verbs.command(
    "uncordon", epilog="Example: callboard node uncordon node-0", short_help="Take a cordon or a drain back."
)
@writes
def uncordon(
    node: NodeArgument,
    gpu: Annotated[
        list[int] | None,
        option(
            "--gpu",
            "N",
            "Instead of the node, open this closed GPU, by its index on the node; may be repeated.",
            min=0,
        ),
    ] = None,
) -> None:
    """Take a cordon or a drain back, or open a GPU that was closed.

    A closed GPU takes no new work. One that you open takes work again, whatever reason the agent gave against it, until
    the agent reports another reason.
    """
    actions.nodes.uncordon(node, gpu or [])


@node_verbs.command("drain", epilog="Example: callboard node drain node-0 --deadline 30s")
@writes
def drain(
    node: NodeArgument,
    within: Annotated[
        str,
        option(
            "--deadline",
            "--within",
            "TIME",
            "Deadline for running work to leave, e.g. 30s; 0s: at once. Default: each job's own timeouts.",
        ),
    ] = "",
    reason: Annotated[str, option("--reason", "TEXT", "Reason, shown to people.")] = "",
    wait: Annotated[bool, option("--wait/--no-wait", "Wait until nothing runs there any more.")] = True,
) -> None:
    """Start nothing new on a node; what runs there yields, with notice."""
    actions.nodes.drain(node, within=within, reason=reason, wait=wait)


@node_verbs.command("remove", epilog="Example: callboard node remove node-0")
@writes
def remove(node: NodeArgument) -> None:
    """Forget a node that is lost or has left."""
    actions.nodes.remove(node)


token_app = typer.Typer(help="Make tokens by which agents on other machines join.", no_args_is_help=True)
node_verbs.add_typer(token_app, name="token")


@token_app.command("create", epilog="Example: callboard node token create --ttl 1h --node node-7 --file join.token")
@takes("output")
def create_token(
    file: Annotated[Path, option("--file", "FILE", "File to write the token to (mode 0600).")],
    ttl: Annotated[str, option("--ttl", "TIME", "How long the token is valid.")] = "1h",
    node: Annotated[str, option("--node", "ID", "The only node that may join with it. Default: any.")] = "",
    state_dir: StateDirOption = None,
) -> None:
    """Make a join token, on the controller's machine. It can be used once; see also `callboard token list`."""
    actions.tokens.create_join(lasts=ttl, node=node, file=file, state_dir=state_dir)
