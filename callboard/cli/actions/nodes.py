"""What `callboard node …` does."""

from __future__ import annotations

from callboard.cli import node_views, screen, words
from callboard.cli.options import Output
from callboard.cli.plain import plain
from callboard.cli.session import with_client
from callboard.cli.showing import show as show_result
from callboard.client.client import Client
from callboard.v1.node_pb2 import Node


def show_list(*, controller: str, output: Output) -> None:
    """Lists nodes."""

    async def action(client: Client) -> None:
        nodes = await client.list_nodes()
        if output is Output.JSON:
            screen.print_json([plain(node) for node in nodes])
        elif output is Output.YAML:
            screen.print_yaml([plain(node) for node in nodes])
        elif nodes:
            screen.stdout(wide=output is Output.WIDE).print(node_views.node_table(nodes, wide=output is Output.WIDE))
        else:
            screen.stderr().print(f"No nodes at {client.address}. `callboard agent --controller …` joins one.")

    with_client(controller, action)


def show(node_id: str, *, controller: str, output: Output) -> None:
    """Shows one node."""

    async def action(client: Client) -> None:
        node = await client.get_node(node_id)
        show_result(plain(node), output, lambda wide: node_views.node_view(node, wide=wide))

    with_client(controller, action)


def cordon(node_id: str, *, controller: str, quiet: bool) -> None:
    """Cordons a node."""

    async def action(client: Client) -> None:
        _say(await client.cordon_node(node_id), "nothing new starts there", quiet=quiet)

    with_client(controller, action)


def uncordon(node_id: str, *, controller: str, quiet: bool) -> None:
    """Takes a cordon or a drain back."""

    async def action(client: Client) -> None:
        _say(await client.uncordon_node(node_id), "it takes work", quiet=quiet)

    with_client(controller, action)


def drain(node_id: str, *, within: str, reason: str, controller: str, quiet: bool) -> None:
    """Drains a node."""

    async def action(client: Client) -> None:
        node = await client.drain_node(node_id, within=within, reason=reason)
        _say(node, "nothing new starts there, and what runs there yields", quiet=quiet)

    with_client(controller, action)


def _say(node: Node, meaning: str, *, quiet: bool) -> None:
    if not quiet:
        screen.stderr().print(f"Node {words.node_id(node)} is {words.node_state(node)}: {meaning}.")
