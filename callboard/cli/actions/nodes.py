"""What `callboard node …` does."""

from __future__ import annotations

from callboard.cli import node_views, screen
from callboard.cli.options import Output
from callboard.cli.plain import plain
from callboard.cli.session import with_client
from callboard.client.client import Client


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
