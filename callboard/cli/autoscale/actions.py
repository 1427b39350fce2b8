"""What `callboard demand` and `callboard autoscale` do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import typer
from rich.table import Table

from callboard.cli.autoscale.loop import Autoscaler, Limits, Provider
from callboard.cli.autoscale.providers import CommandProvider, LocalProvider
from callboard.cli.cluster.growing import cluster_to_grow
from callboard.cli.local.growth import running_plan
from callboard.cli.local.interrupts import Interrupts, run_locally
from callboard.cli.options import reading, wishes
from callboard.cli.show import consoles, tables, words
from callboard.cli.show.plain import plain
from callboard.cli.show.printing import show_result, tell
from callboard.cli.show.verb_guard import connected
from callboard.client.client import Client
from callboard.model.durations import parse_duration_ms
from callboard.model.quantities import QuantityError, Resources
from callboard.v1.scheduler_pb2 import Demand


@connected
async def show_demand(client: Client) -> None:
    demands = await client.demand()
    nothing = "Nothing is wanted beyond what there is."
    show_result([plain(entry) for entry in demands], lambda _: _table(demands), empty=nothing)
    if not wishes.for_program and any(entry.shape.gpu_milli for entry in demands):
        consoles.stdout().print(f"GPUs: {words.free_gpus(await client.stats())}.")


def run(
    *,
    provider: str,
    least: int,
    most: int,
    idle: str,
    every: str,
    notice: str,
    grow_elastic: bool,
    up: str,
    down: str,
    node: str,
    name: str,
) -> None:
    """Adds and removes nodes until a signal comes."""
    if least > most:
        raise typer.BadParameter(f"{least} is above --max {most}", param_hint="--min")
    by_command = provider == "command"
    if [bool(up), bool(down)] != [by_command] * 2:
        raise typer.BadParameter("--provider command takes both --up and --down, local neither", param_hint="--up")
    limits = Limits(
        least=least,
        most=most,
        idle_s=_seconds(idle, "--idle"),
        notice_s=_seconds(notice, "--notice"),
        grow_elastic=grow_elastic,
    )
    pause_s = max(0.05, _seconds(every, "--every"))
    stated = _amounts(node)

    async def main(_: Interrupts) -> None:
        directory = cluster_to_grow(name) if not by_command else None
        local = LocalProvider(directory, running_plan(directory)[0], tell) if directory else None
        async with Client(wishes.controller or (local.plan.controller if local else None)) as client:
            source: Provider = local or CommandProvider(client, up, down, stated)
            scaler = Autoscaler(client, source, limits, tell, time.monotonic)
            tell(f"keeping {least} to {most} nodes at {client.address}")
            await scaler.run(lambda: _pause(pause_s, local))

    def ended() -> int:
        tell("Ended; the nodes stay as they are.")
        return 0

    run_locally(main, ended)


async def _pause(pause_s: float, local: LocalProvider | None) -> None:
    await asyncio.sleep(pause_s)
    if local is not None:
        local.check_running()


def _table(demands: Sequence[Demand]) -> Table:
    rows = [
        [
            entry.pool,
            str(entry.count),
            words.amounts(entry.shape),
            str(entry.optional_count or ""),
            words.age(entry.since_time),
            "a quota" if entry.quota_blocked else "room",
            words.labels(entry.node_selector),
            ", ".join(entry.jobs),
        ]
        for entry in demands
    ]
    columns = ["POOL", "WORKERS", "EACH", "OPTIONAL", "WAITING", "FOR", "LABELS", "JOBS"]
    return tables.table(columns, rows, right=("WORKERS", "OPTIONAL"))


def _seconds(text: str, option: str) -> float:
    with reading(option):
        return parse_duration_ms(text) / 1000


def _amounts(text: str) -> Resources | None:
    if not text:
        return None
    try:
        return Resources.parse(dict(part.split("=", 1) for part in text.split(",")))
    except (QuantityError, ValueError) as error:
        raise typer.BadParameter(f"{text!r}: {error}", param_hint="--node") from error
