"""What `callboard status` does."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace

from rich.console import Group, RenderableType
from rich.text import Text

from callboard.cli.jobs import views as job_views
from callboard.cli.jobs.pending import MOST, with_reasons
from callboard.cli.nodes import views as node_views
from callboard.cli.options import wishes
from callboard.cli.pools import views as pool_views
from callboard.cli.show import consoles, printing, words
from callboard.cli.show.gpu_picture import GpuPicture
from callboard.cli.show.plain import plain
from callboard.cli.show.verb_guard import connected
from callboard.client.calls.cluster_calls import ObjectStore
from callboard.client.client import Client
from callboard.model.quantities import format_memory
from callboard.v1.common_pb2 import DeviceState
from callboard.v1.job_pb2 import Job
from callboard.v1.node_pb2 import Node
from callboard.v1.scheduler_pb2 import GetOverviewResponse, Stats
from callboard.wire.amounts import resources_from_proto
from callboard.wire.refusals import CallboardError

_GIB = 1 << 30

_STORES_S = 3.0
"""For the object stores; above what an agent waits for its Ray."""

_SHOWN_STORES = 6
"""Object stores on the screen, unless all are wanted."""


SHOWN = 50
"""Nodes, and jobs, on the screen, unless all are wanted: a terminal shows about as many lines."""

_EXPLAINED = 3
"""Waiting jobs that say why, if there are more jobs than a screen shows."""


@connected
async def show(client: Client) -> None:
    """Shows the cluster on one screen. It costs the controller as much as a screen shows, however large the cluster;
    programs, and whoever wants it wide, get everything."""
    if wishes.for_program or wishes.wide:
        seen = await client.everything()
    else:
        seen = await client.overview(nodes=SHOWN, jobs=SHOWN)
    if wishes.for_program:
        stores = await _stores(client, seen)
        everything = {
            "controller": client.address,
            "stats": plain(seen.stats),
            "nodes": [plain(node) for node in seen.nodes],
            "pools": [plain(pool) for pool in seen.pools],
            "jobs": [plain(job) for job in seen.jobs],
            "object_stores": None if isinstance(stores, str) else [asdict(store) for store in stores],
            "object_stores_unknown": stores if isinstance(stores, str) else "",
        }
        printing.print_data(everything)
    else:
        # Why a job waits is worked out from everything that runs: of a large cluster a few answers must do.
        most = _EXPLAINED if seen.more_jobs else MOST
        # Beside everything else: what Ray says of itself is the slowest to come.
        stores, jobs = await asyncio.gather(_stores(client, seen), with_reasons(client, seen.jobs, most=most))
        consoles.stdout(wide=wishes.wide).print(_view(client.address, seen, jobs, stores, wide=wishes.wide))


async def _stores(client: Client, seen: GetOverviewResponse) -> list[ObjectStore] | str:
    """How full Ray's object stores are, or why that isn't known. An agent that is stuck holds nothing up."""
    asked = asyncio.ensure_future(client.object_stores(seen.nodes))
    try:
        await asyncio.wait([asked], timeout=_STORES_S)
        if not asked.done():
            return f"no answer within {_STORES_S:g} s"
        return [replace(store, node_id=seen.ray_nodes.get(store.ray_node_id, "")) for store in asked.result()]
    except CallboardError as error:
        return str(error)
    finally:
        asked.cancel()


def _view(
    address: str, seen: GetOverviewResponse, jobs: list[Job], stores: list[ObjectStore] | str, *, wide: bool
) -> Group:
    parts: list[RenderableType] = [
        _headline(address, seen.stats),
        *_controllers(seen.stats),
        *_object_stores(stores, wide=wide),
        "",
    ]
    nodes = [node for node in seen.nodes if wide or not words.has_left(node)]
    if nodes:
        parts += [GpuPicture(nodes), *_more(seen.more_nodes, "node"), *_troubles(nodes)]
        if wide and any(node.devices for node in nodes):
            parts += ["", node_views.device_table(nodes)]
    else:
        parts.append("No nodes yet: `callboard agent --controller …` joins one.")
    if seen.pools:
        parts += ["", pool_views.pool_table(list(seen.pools), wide=wide), *_more(seen.more_pools, "pool")]
    if jobs:
        parts += [
            "",
            job_views.job_table(jobs, wide=wide),
            *_more(seen.more_jobs, "job", "; `callboard job explain NAME` says why one waits"),
        ]
    else:
        parts += ["", Text("No jobs are running or waiting.", style="dim")]
    return Group(*parts)


def _more(count: int, noun: str, further: str = "") -> list[Text]:
    """ "and 950 more nodes: `callboard node list` shows all"."""
    if not count:
        return []
    which = noun if count == 1 else f"{noun}s"
    return [Text(f"and {count} more {which}: `callboard {noun} list` shows all{further}", style="dim")]


def _controllers(stats: Stats) -> list[str]:
    """Who leads and who stands by, where there may be several."""
    if not stats.controllers:
        return []
    leader = next((each.address for each in stats.controllers if each.leads), "")
    standbys = ", ".join(each.address for each in stats.controllers if not each.leads)
    line = f"Term {stats.term}, {f'{leader} leads' if leader else 'nobody leads'}, standbys: {standbys or 'none'}"
    if stats.standby:
        line += f"; as a standby knew it {words.duration(stats.age_ms)} ago, at revision {stats.revision}"
    return [line]


def _headline(address: str, stats: Stats) -> Text:
    line = Text(f"Controller {address}", style="bold")
    line.append(f", up {words.duration(stats.uptime_ms)}", style="not bold")
    counted = ", ".join(f"{count} {state.lower()}" for state, count in sorted(stats.nodes.items()) if count)
    line.append(f", nodes: {counted or 'none'}", style="not bold")
    line.append(f", preemptions so far: {stats.total_preemptions}", style="not bold")
    preloaded = f"{stats.preloaded_starts} preloaded, " if stats.preloaded_starts else ""
    if preloaded or stats.warm_starts or stats.cold_starts:
        line.append(f", starts: {preloaded}{stats.warm_starts} warm, {stats.cold_starts} cold", style="not bold")
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
    return (
        [
            Text(f"{words.node_id(node)} is {words.node_state(node)}: {words.node_why(node)}", style="yellow")
            for node in nodes
            if words.node_state(node) != "READY"
        ]
        + [
            Text(f"{words.node_id(node)} does not preload {', '.join(state.modules)}: {state.refused}", style="yellow")
            for node in nodes
            for state in node.preloads
            if state.refused
        ]
        + [
            Text(f"{words.node_id(node)}: GPU {use.device.id} {_of_device(use.state)}", style="yellow")
            for node in nodes
            for use in node.devices
            if use.state.closed or use.state.warning
        ]
    )


def _of_device(state: DeviceState) -> str:
    return f"takes no new work: {state.closed}" if state.closed else f"is unusual: {state.warning}"
