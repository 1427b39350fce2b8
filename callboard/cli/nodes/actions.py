"""What `callboard node …` does."""

from __future__ import annotations

from callboard.cli.nodes import views as node_views
from callboard.cli.options import Output, wishes
from callboard.cli.show import printing, screen, words
from callboard.cli.show.failing import CommandFailed, Failure
from callboard.cli.show.plain import plain
from callboard.cli.show.session import with_client
from callboard.cli.show.showing import done
from callboard.cli.show.showing import show as show_result
from callboard.client.client import Client
from callboard.model.durations import parse_duration_ms
from callboard.model.quantities import QuantityError
from callboard.v1.node_pb2 import Node
from callboard.wire.refusals import WrongState


def show_list(*, every: bool, controller: str, output: Output) -> None:
    """Lists nodes."""

    async def action(client: Client) -> None:
        nodes = [node for node in await client.list_nodes() if every or not words.has_left(node)]
        if output is Output.JSON:
            printing.print_json([plain(node) for node in nodes])
        elif output is Output.YAML:
            printing.print_yaml([plain(node) for node in nodes])
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


def drain(node_id: str, *, within: str, reason: str, wait: bool, controller: str, quiet: bool) -> None:
    """Drains a node, and waits until it is empty."""

    async def action(client: Client) -> None:
        revision = (await client.stats()).revision if wait else 0
        node = await client.drain_node(node_id, within=at_once(within), reason=reason)
        if not (wait and wishes.for_program):
            _say(node, "nothing new starts there, and what runs there yields", quiet=quiet)
        if wait:
            await emptied(client, node, revision, quiet=quiet)
            done(await client.get_node(node_id), f"Nothing runs on {node_id} any more.", quiet=quiet)

    with_client(controller, action)


def remove(node_id: str, *, controller: str, quiet: bool) -> None:
    """Has a node forgotten."""

    async def action(client: Client) -> None:
        try:
            await client.remove_node(node_id)
        except WrongState as error:
            raise CommandFailed(
                Failure(
                    f"Node {node_id} can't be removed.",
                    f"{error}.",
                    f"`callboard node drain {node_id}`, end its agent (SIGTERM), then try again.",
                )
            ) from error
        done({"name": f"nodes/{node_id}", "removed": True}, f"Node {node_id} is forgotten.", quiet=quiet)

    with_client(controller, action)


def at_once(within: str) -> str:
    """A stated deadline of nothing means now; on the wire 0 stands for none."""
    try:
        return ("1ms" if parse_duration_ms(within) == 0 else within) if within else "0s"
    except QuantityError:
        return within  # The client says what is wrong with it.


async def emptied(client: Client, node: Node, revision: int, *, quiet: bool) -> None:
    """Tells what is still there whenever that changes, until it is nothing."""
    node_id, told = words.node_id(node), ""
    events = client.watch(start_revision=revision + 1)
    while (left := words.amounts(node.used)) != "nothing":
        jobs = sorted({worker.job for use in node.devices for worker in use.workers})
        now = f"{left} in use{' by ' + ', '.join(jobs) if jobs else ''}"
        if now != told and not quiet:
            kill = words.kill_in(node)
            screen.stderr().print(f"{node_id}: {now}{f', {kill}' if kill else ''} …")
            told = now
        await anext(events)
        node = await client.get_node(node_id)
    if (stuck := words.amounts(node.quarantined)) != "nothing":
        raise CommandFailed(
            Failure(
                f"Node {node_id} is not empty.",
                f"{stuck} is quarantined: processes there could not be proved gone.",
                f"Look at it on the machine; `callboard node get {node_id}` shows the devices.",
            )
        )


def _say(node: Node, meaning: str, *, quiet: bool) -> None:
    done(node, f"Node {words.node_id(node)} is {words.node_state(node)}: {meaning}.", quiet=quiet)
