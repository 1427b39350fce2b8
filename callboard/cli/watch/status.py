"""What `callboard status` does."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.text import Text

from callboard.cli.jobs import views as job_views
from callboard.cli.jobs.pending import with_reasons
from callboard.cli.nodes import views as node_views
from callboard.cli.options import wishes
from callboard.cli.pools import views as pool_views
from callboard.cli.show import printing, screen, words
from callboard.cli.show.gpu_picture import GpuPicture
from callboard.cli.show.plain import plain
from callboard.cli.show.session import connected
from callboard.client.client import Client
from callboard.client.cluster_calls import ObjectStore
from callboard.model.quantities import format_memory
from callboard.v1.job_pb2 import Job
from callboard.v1.node_pb2 import Node
from callboard.v1.pool_pb2 import Pool
from callboard.v1.scheduler_pb2 import Stats
from callboard.wire.amounts import resources_from_proto
from callboard.wire.refusals import CallboardError

_GIB = 1 << 30

_STORES_S = 3.0
"""For the object stores; above what an agent waits for its Ray."""

_SHOWN_STORES = 6
"""Object stores on the screen, unless all are wanted."""


@connected
async def show(client: Client) -> None:
    """Shows the cluster on one screen."""
    # Beside everything else: what Ray says of itself is the slowest to come.
    nodes = await client.list_nodes()
    stats, pools, jobs, stores = await asyncio.gather(
        client.stats(), client.list_pools(), client.list_jobs(states=words.LIVE_STATES), _stores(client, nodes)
    )
    if wishes.for_program:
        everything = {
            "controller": client.address,
            "stats": plain(stats),
            "nodes": [plain(node) for node in nodes],
            "pools": [plain(pool) for pool in pools],
            "jobs": [plain(job) for job in jobs],
            "object_stores": None if isinstance(stores, str) else [asdict(store) for store in stores],
            "object_stores_unknown": stores if isinstance(stores, str) else "",
        }
        printing.print_data(everything)
    else:
        jobs = await with_reasons(client, jobs)
        screen.stdout(wide=wishes.wide).print(
            _view(client.address, stats, nodes, pools, jobs, stores, wide=wishes.wide)
        )


async def _stores(client: Client, nodes: list[Node]) -> list[ObjectStore] | str:
    """How full Ray's object stores are, or why that isn't known. An agent that is stuck holds nothing up."""
    asked = asyncio.ensure_future(client.object_stores(nodes))
    try:
        await asyncio.wait([asked], timeout=_STORES_S)
        return asked.result() if asked.done() else f"no answer within {_STORES_S:g} s"
    except CallboardError as error:
        return str(error)
    finally:
        asked.cancel()


def _view(
    address: str,
    stats: Stats,
    nodes: list[Node],
    pools: list[Pool],
    jobs: list[Job],
    stores: list[ObjectStore] | str,
    *,
    wide: bool,
) -> Group:
    parts: list[RenderableType] = [_headline(address, stats), *_object_stores(stores, wide=wide), ""]
    nodes = [node for node in nodes if wide or not words.has_left(node)]
    if nodes:
        parts += [GpuPicture(nodes), *_troubles(nodes)]
        if wide and any(node.devices for node in nodes):
            parts += ["", node_views.device_table(nodes)]
    else:
        parts.append("No nodes yet: `callboard agent --controller …` joins one.")
    if pools:
        parts += ["", pool_views.pool_table(pools, wide=wide)]
    if jobs:
        parts += ["", job_views.job_table(jobs, wide=wide)]
    else:
        parts += ["", Text("No jobs are running or waiting.", style="dim")]
    return Group(*parts)


def _headline(address: str, stats: Stats) -> Text:
    line = Text(f"Controller {address}", style="bold")
    line.append(f", up {words.duration(stats.uptime_ms)}", style="not bold")
    counted = ", ".join(f"{count} {state.lower()}" for state, count in sorted(stats.nodes.items()) if count)
    line.append(f", nodes: {counted or 'none'}", style="not bold")
    line.append(f", preemptions so far: {stats.total_preemptions}", style="not bold")
    if stats.warm_starts or stats.cold_starts:
        line.append(f", starts: {stats.warm_starts} warm, {stats.cold_starts} cold", style="not bold")
    line.append(f"\nIn use: {_usage(stats)}", style="not bold")
    if stats.reconciling:
        line.append("\nIt waits for its agents before it admits anything.", style="yellow")
    return line


def _usage(stats: Stats) -> str:
    """ "4/8 CPU, 2.4/4 GPU (0 whole free, 1.6 in parts), 2GiB/16GiB memory", and what is held or can't be used."""
    whole = resources_from_proto(stats.capacity)
    names = dict.fromkeys(("cpu", "gpu", *(name for name, _ in whole.items())))
    parts = [f"{words.share(stats.used, stats.capacity, name)} {words.UNITS.get(name, name)}" for name in names]
    if resources_from_proto(stats.capacity).gpu_milli:
        parts[list(names).index("gpu")] += f" ({words.free_gpus(stats)})"
    for what, message in (("held", stats.held), ("quarantined", stats.quarantined)):
        if resources_from_proto(message):
            parts.append(f"{what} {words.amounts(message)}")
    return ", ".join(parts)


def _object_stores(stores: list[ObjectStore] | str, *, wide: bool) -> list[Text]:
    """ "Object store: 1GiB/6GiB; node-1 1GiB/2GiB, node-0 0B/2GiB", the fullest first."""
    if isinstance(stores, str):
        return [Text(f"Object store: not known, {stores}", style="yellow")]
    if not stores:
        return []
    fullest = sorted(stores, key=lambda store: -store.used_bytes / max(1, store.total_bytes))
    shown = fullest if wide else fullest[:_SHOWN_STORES]
    used, total = sum(store.used_bytes for store in stores), sum(store.total_bytes for store in stores)
    each = ", ".join(
        f"{store.node_id or f'Ray node {store.ray_node_id[:8]}'} {_part(store.used_bytes, store.total_bytes)}"
        for store in shown
    )
    more = f" and {len(stores) - len(shown)} more" if len(stores) > len(shown) else ""
    return [Text(f"Object store: {_part(used, total)}; {each}{more}")]


def _part(used_bytes: int, total_bytes: int) -> str:
    return f"{_short(used_bytes)}/{_short(total_bytes)}"


def _short(amount_bytes: int) -> str:
    """Rounded as it is read: "6.7GiB", "12MiB". Below a gibibyte it is rounded up, so that some is never none."""
    if amount_bytes >= _GIB:
        return f"{amount_bytes / _GIB:.1f}".removesuffix(".0") + "GiB"
    return format_memory(-(-amount_bytes >> 20) << 20)


def _troubles(nodes: list[Node]) -> list[Text]:
    return [
        Text(f"{words.node_id(node)} is {words.node_state(node)}: {words.node_why(node)}", style="yellow")
        for node in nodes
        if words.node_state(node) != "READY"
    ]
