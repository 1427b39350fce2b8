"""What `callboard status` does."""

from __future__ import annotations

import asyncio

from rich.console import Group, RenderableType
from rich.text import Text

from callboard.cli import job_views, pool_views, printing, screen, words
from callboard.cli.gpu_picture import gpu_picture
from callboard.cli.options import Output
from callboard.cli.pending import with_reasons
from callboard.cli.plain import plain
from callboard.cli.session import with_client
from callboard.client.client import Client
from callboard.v1.job_pb2 import Job
from callboard.v1.node_pb2 import Node
from callboard.v1.pool_pb2 import Pool
from callboard.v1.scheduler_pb2 import Stats
from callboard.wire.amounts import resources_from_proto


def show(*, controller: str, output: Output) -> None:
    """Shows the cluster on one screen."""

    async def action(client: Client) -> None:
        stats, nodes, pools, jobs = await asyncio.gather(
            client.stats(), client.list_nodes(), client.list_pools(), client.list_jobs(states=words.LIVE_STATES)
        )
        if output in (Output.JSON, Output.YAML):
            everything = {
                "controller": client.address,
                "stats": plain(stats),
                "nodes": [plain(node) for node in nodes],
                "pools": [plain(pool) for pool in pools],
                "jobs": [plain(job) for job in jobs],
            }
            (printing.print_json if output is Output.JSON else printing.print_yaml)(everything)
        else:
            jobs = await with_reasons(client, jobs)
            screen.stdout(wide=output is Output.WIDE).print(
                _view(client.address, stats, nodes, pools, jobs, wide=output is Output.WIDE)
            )

    with_client(controller, action)


def _view(address: str, stats: Stats, nodes: list[Node], pools: list[Pool], jobs: list[Job], *, wide: bool) -> Group:
    parts: list[RenderableType] = [_headline(address, stats), ""]
    if nodes:
        parts += [gpu_picture(nodes), *_troubles(nodes)]
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
    """ "4/8 CPU, 1/1 GPU, 2GiB/16GiB memory", and what is held or can't be used."""
    whole = resources_from_proto(stats.capacity)
    names = dict.fromkeys(("cpu", "gpu", *(name for name, _ in whole.items())))
    parts = [f"{words.share(stats.used, stats.capacity, name)} {words.UNITS.get(name, name)}" for name in names]
    for what, message in (("held", stats.held), ("quarantined", stats.quarantined)):
        if resources_from_proto(message):
            parts.append(f"{what} {words.amounts(message)}")
    return ", ".join(parts)


def _troubles(nodes: list[Node]) -> list[Text]:
    return [
        Text(f"{words.node_id(node)} is {words.node_state(node)}: {node.state_reason}", style="yellow")
        for node in nodes
        if words.node_state(node) != "READY"
    ]
