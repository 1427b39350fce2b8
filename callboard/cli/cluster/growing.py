"""What `callboard add-worker` does."""

from __future__ import annotations

from pathlib import Path

from callboard.cli.local.growth import Added, add_worker, end_worker, running_workers
from callboard.cli.local.interrupts import Interrupts, run_locally
from callboard.cli.nodes.actions import at_once, emptied
from callboard.cli.show import words
from callboard.cli.show.exits import BAD_INPUT, UNREACHABLE, CommandFailed
from callboard.cli.show.printing import done, tell
from callboard.cli.show.verb_guard import failing_in_words, with_client
from callboard.client.client import Client
from callboard.client.clusters import read_record, running_clusters
from callboard.security.places import run_directory


def add(*, name: str, timeout_s: float, lock_pause_s: float) -> None:
    """Adds a node and waits until it takes work."""

    async def main(_: Interrupts) -> Added:
        return await add_worker(
            cluster_to_grow(name), lambda text: tell(f"{text} …"), timeout_s=timeout_s, lock_pause_s=lock_pause_s
        )

    added = run_locally(main)
    has = words.amounts(added.node.capacity)
    on = f" on GPU {', '.join(added.gpus)}" if added.gpus else ""
    missing = "" if added.node.devices else "; it joined without a GPU"
    done(added.node, f"Node {words.node_id(added.node)} is READY{on}: {has}{missing}.")


def remove(node_id: str, *, deadline: str, name: str) -> None:
    """Drains a node, waits until it is empty, and ends its agent."""
    with failing_in_words():
        directory = cluster_to_grow(name)
        agents = running_workers(directory)
        first, *others = sorted(agents, key=_rank_in)
        chosen = node_id or (others or [first])[-1]
        if chosen not in others:
            why, what = (
                ("It is the first node: the others depend on it.", f"Node {chosen} can't be removed.")
                if chosen in agents
                else (f"Its agents are those of {', '.join(agents)}.", f"No agent of {chosen} runs on this machine.")
            )
            remedy = "Name another node, or end the whole cluster with `callboard down`."
            raise CommandFailed(what, why, remedy, BAD_INPUT)
        record = read_record(directory)
        assert record is not None, "the cluster was found by its record"

    async def action(client: Client) -> None:
        revision = (await client.stats()).revision
        node = await client.drain_node(chosen, within=at_once(deadline), reason="removed from the command line")
        await emptied(client, node, revision)
        await end_worker(directory, chosen)
        gone = {"name": f"nodes/{chosen}", "removed": True}
        done(gone, f"Node {chosen} is removed; `callboard add-worker` takes its place.")

    with_client(action, record.controller)


def _rank_in(node_id: str) -> int:
    """The place of a node in its cluster: those of `up` are called node-N."""
    return int(node_id.rpartition("-")[2])


def cluster_to_grow(name: str) -> Path:
    """Directory of the cluster that is meant.

    Raises:
        CommandFailed: none runs, or several do.
    """
    base = run_directory()
    found = [record for record in running_clusters(base) if name in ("", record.name)]
    if not found:
        raise CommandFailed(
            f"No cluster {name} runs on this machine." if name else "No cluster runs on this machine.",
            f"None is recorded in {base}.",
            "Start one with `callboard up` or scripts/start_ray_cluster.sh.",
            UNREACHABLE,
        )
    if len(found) > 1:
        raise CommandFailed(
            "It is not clear which cluster is meant.",
            f"{len(found)} run on this machine: {', '.join(record.name for record in found)}.",
            f"Name one, for example with --name {found[0].name}.",
            BAD_INPUT,
        )
    return found[0].directory
