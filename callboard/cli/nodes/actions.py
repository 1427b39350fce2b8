"""What `callboard node …` does."""

from __future__ import annotations

from collections.abc import Sequence

from callboard.cli.nodes import views as node_views
from callboard.cli.options import wishes
from callboard.cli.show import consoles, words
from callboard.cli.show.exits import CommandFailed
from callboard.cli.show.plain import plain
from callboard.cli.show.printing import done, show_result
from callboard.cli.show.verb_guard import connected
from callboard.client.client import Client
from callboard.model.durations import parse_duration_ms
from callboard.model.quantities import QuantityError
from callboard.v1.node_pb2 import Node
from callboard.wire.refusals import WrongState


@connected
async def show_list(client: Client, *, every: bool) -> None:
    nodes = [node for node in await client.list_nodes() if every or not words.has_left(node)]
    show_result(
        [plain(node) for node in nodes],
        lambda wide: node_views.node_table(nodes, wide=wide),
        empty=f"No nodes at {client.address}. `callboard agent --controller …` joins one.",
    )


@connected
async def show(client: Client, node_id: str) -> None:
    node = await client.get_node(node_id)
    show_result(plain(node), lambda wide: node_views.node_view(node, wide=wide))


@connected
async def cordon(client: Client, node_id: str) -> None:
    _say(await client.cordon_node(node_id), "nothing new starts there")


@connected
async def uncordon(client: Client, node_id: str, gpus: Sequence[int]) -> None:
    """Takes a cordon or a drain back, or opens GPUs."""
    node = await client.uncordon_node(node_id, gpus)
    _say(node, f"GPU {', '.join(map(str, gpus))} takes work there" if gpus else "it takes work")


@connected
async def drain(client: Client, node_id: str, *, within: str, reason: str, wait: bool) -> None:
    """Drains a node, and waits until it is empty."""
    revision = (await client.stats()).revision if wait else 0
    node = await client.drain_node(node_id, within=at_once(within), reason=reason)
    if not (wait and wishes.for_program):
        _say(node, "nothing new starts there, and what runs there yields")
    if wait:
        await emptied(client, node, revision)
        done(await client.get_node(node_id), f"Nothing runs on {node_id} any more.")


@connected
async def remove(client: Client, node_id: str) -> None:
    try:
        await client.remove_node(node_id)
    except WrongState as error:
        raise CommandFailed(
            f"Node {node_id} can't be removed.",
            f"{error}.",
            f"`callboard node drain {node_id}`, end its agent (SIGTERM), then try again.",
        ) from error
    done({"name": f"nodes/{node_id}", "removed": True}, f"Node {node_id} is forgotten.")


def at_once(within: str) -> str:
    """A stated deadline of nothing means now; on the wire 0 stands for none."""
    try:
        return ("1ms" if parse_duration_ms(within) == 0 else within) if within else "0s"
    except QuantityError:
        return within  # The client says what is wrong with it.


async def emptied(client: Client, node: Node, revision: int) -> None:
    """Tells what is still there whenever that changes, until it is nothing."""
    node_id, told = words.node_id(node), ""
    events = client.watch(start_revision=revision + 1)
    while (left := words.amounts(node.used)) != "nothing":
        jobs = words.jobs_on(node)
        now = f"{left} in use{' by ' + ', '.join(jobs) if jobs else ''}"
        if now != told and not wishes.quiet:
            kill = words.kill_in(node)
            consoles.stderr().print(f"{node_id}: {now}{f', {kill}' if kill else ''} …")
            told = now
        await anext(events)
        node = await client.get_node(node_id)
    if (stuck := words.amounts(node.quarantined)) != "nothing":
        raise CommandFailed(
            f"Node {node_id} is not empty.",
            f"{stuck} is quarantined: processes there could not be proved gone.",
            f"Look at it on the machine; `callboard node get {node_id}` shows the devices.",
        )


def _say(node: Node, meaning: str) -> None:
    done(node, f"Node {words.node_id(node)} is {words.node_state(node)}: {meaning}.")
