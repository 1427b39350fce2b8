"""What `callboard top`, `worker` and `job env` do: workers, and what their nodes see of them now."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from rich.console import RenderableType
from rich.live import Live

from callboard.cli.options import wishes
from callboard.cli.show import consoles, words
from callboard.cli.show.plain import plain
from callboard.cli.show.printing import show_result
from callboard.cli.show.verb_guard import connected
from callboard.cli.watch.views import environment_view, top_view, worker_list
from callboard.client.client import Client
from callboard.v1.inspection_pb2 import NodeInspection
from callboard.v1.job_pb2 import Job
from callboard.wire.refusals import CallboardError


@connected
async def top(client: Client, *, job: str, once: bool, interval_s: float) -> None:
    """Shows loads, once or until Ctrl-C."""
    if wishes.for_program:
        jobs, seen, silent = await _loads(client, job)
        show_result(_plain_top(jobs, seen, silent), lambda _: "")
        return
    console = consoles.stdout(wide=wishes.wide)
    if once or not console.is_terminal:
        console.print(top_view(*await _loads(client, job)))
        return
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while True:
            picture: RenderableType = top_view(*await _loads(client, job))
            live.update(picture, refresh=True)
            await asyncio.sleep(interval_s)


@connected
async def environment(client: Client, name: str, *, component: str, rank: int) -> None:
    """Shows the variables of a job's workers, secret values masked."""
    job = (await client.get_job(name)).job
    chosen = [
        worker
        for worker in job.workers
        if component in ("", worker.key.component, *worker.members)
        and rank in (-1, worker.key.rank)
        and words.may_run(worker)
    ]
    here = {worker.allocation.node_id for worker in chosen if worker.allocation.node_id}
    one: dict[str, Any] = {"component": component, "rank": None if rank < 0 else rank}
    seen, silent = await inspected(client, sorted(here), job=job.uid, environment=True, **one)
    untold = [f"{node_id}: {text}" for node_id, inspection in seen.items() for text in inspection.unknown]
    if wishes.for_program:
        untold += [f"{node_id} could not be asked: {why}" for node_id, why in silent.items()]
    for text in untold:
        consoles.stderr().print(text, soft_wrap=True)
    variables = {
        (look.worker.component, look.worker.rank, look.generation): dict(look.environment)
        for inspection in seen.values()
        for look in inspection.workers
    }
    found = [
        (worker, variables.get((worker.key.component, worker.key.rank, worker.generation), {})) for worker in chosen
    ]
    value = [
        {"component": worker.key.component, "rank": worker.key.rank, "environment": dict(sorted(known.items()))}
        for worker, known in found
        if known
    ]
    show_result(value, lambda _: environment_view(job, found, silent))


async def _loads(client: Client, name: str) -> tuple[list[Job], dict[str, NodeInspection], dict[str, str]]:
    jobs = [(await client.get_job(name)).job] if name else await client.list_jobs(states=words.LIVE_STATES)
    jobs.sort(key=lambda job: job.spec.name)
    workers = [worker for job in jobs for worker in job.workers if words.may_run(worker)]
    here = {worker.allocation.node_id for worker in workers if worker.allocation.node_id}
    seen, silent = await inspected(client, sorted(here), job=jobs[0].uid if name else "")
    return jobs, seen, silent


async def inspected(
    client: Client, node_ids: Iterable[str], **ask: Any
) -> tuple[dict[str, NodeInspection], dict[str, str]]:
    """What each node sees, and why some could not be asked."""
    seen: dict[str, NodeInspection] = {}
    silent: dict[str, str] = {}

    async def one(node_id: str) -> None:
        try:
            seen[node_id] = await client.inspect_node(node_id, **ask)
        except CallboardError as error:
            silent[node_id] = str(error)

    await asyncio.gather(*(one(node_id) for node_id in node_ids))
    return {node_id: seen[node_id] for node_id in sorted(seen)}, dict(sorted(silent.items()))


def _plain_top(jobs: list[Job], seen: dict[str, NodeInspection], silent: dict[str, str]) -> dict[str, Any]:
    names = {job.uid: job.spec.name for job in jobs}
    return {
        "workers": [
            {"job": names[look.worker.job_id], "node": node_id, **plain(look)}
            for node_id, inspection in seen.items()
            for look in inspection.workers
            if look.worker.job_id in names
        ],
        "devices": [
            {"node": node_id, **plain(load)} for node_id, inspection in seen.items() for load in inspection.device_loads
        ],
        "gauges": {job.spec.name: dict(sorted(job.gauges.items())) for job in jobs if job.gauges},
        "silent": silent,
    }


@connected
async def list_workers(client: Client, *, job: str, node: str) -> None:
    found = await client.list_workers(job=job, node=node)
    value = [{"job": owner.spec.name, **plain(worker)} for owner, worker in found]
    show_result(value, lambda wide: worker_list(found, wide=wide), empty=f"No workers at {client.address}.")
