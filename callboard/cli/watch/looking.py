"""What `callboard top`, `doctor`, `worker` and `job env` do: nodes are asked what they see now."""

from __future__ import annotations

import asyncio
import importlib.metadata
import platform
import shlex
from collections.abc import Iterable
from typing import Any

import typer
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from callboard._version import __version__
from callboard.cli.jobs.pending import with_reasons
from callboard.cli.options import wishes
from callboard.cli.show import consoles, words
from callboard.cli.show.exits import FAILED
from callboard.cli.show.plain import plain
from callboard.cli.show.printing import show_result
from callboard.cli.show.session import connected, with_client
from callboard.cli.watch.looking_views import environment_view, findings_view, top_view, versions_view, worker_list
from callboard.client.calls.cluster_calls import GONE
from callboard.client.client import Client, ray_of
from callboard.client.diagnosis import Evidence, diagnose
from callboard.v1.inspection_pb2 import NodeInspection
from callboard.v1.job_pb2 import Job
from callboard.wire.refusals import CallboardError

_RECENT_FAILURES = 20
"""Newest failed jobs whose story is looked at."""


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


def version(*, check: bool) -> None:
    """Shows the version here; with ``check`` those of the whole cluster, and ends with 1 if some don't fit together."""
    own = {
        "program": "this command",
        "callboard": __version__,
        "python": platform.python_version(),
        "ray": _installed("ray"),
    }

    async def action(client: Client) -> int:
        stats, nodes = await asyncio.gather(client.stats(), client.list_nodes())
        rows = [own, {"program": f"controller {client.address}", "callboard": stats.version, "python": "", "ray": ""}]
        rows += [
            {
                "program": f"agent {words.node_id(node)}",
                "callboard": node.version,
                "python": node.python_version,
                "ray": node.ray_version,
            }
            for node in nodes
            if node.state not in GONE
        ]
        differ = [
            f"{name}: {', '.join(sorted(found))}"
            for name, found in {
                "callboard": {row["callboard"] or "an older one that does not say" for row in rows},
                "Ray": {row["ray"] for row in rows if row["ray"]},
                "Python": {".".join(row["python"].split(".")[:2]) for row in rows if row["python"]},
            }.items()
            if len(found) > 1
        ]
        value = {"fits": not differ, "differ": differ, "programs": rows}
        show_result(value, lambda _: versions_view(rows, differ))
        return len(differ)

    if not check:
        show_result(own, lambda _: Text(f"callboard {__version__}"))
    elif with_client(action):
        raise typer.Exit(FAILED)


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def doctor() -> None:
    """Shows findings; ends with 1 if there are some."""

    async def action(client: Client) -> int:
        nodes, jobs, failed, groups = await asyncio.gather(
            client.list_nodes(),
            client.list_jobs(states=words.LIVE_STATES),
            client.list_jobs(states=["FAILED"]),
            client.list_placement_groups(),
        )
        here = [words.node_id(node) for node in nodes if node.state not in GONE]
        seen, silent = await _inspected(client, here, foreign=True)
        failed = failed[:_RECENT_FAILURES]
        repeated = await _repeated(client, failed)
        jobs = [*(await with_reasons(client, jobs)), *failed]
        found = diagnose(Evidence(nodes, jobs, groups, seen, silent, repeated))
        value = {
            "healthy": not found,
            "findings": [
                {"kind": each.kind, "subject": each.subject, "what": each.what, "remedy": each.remedy} for each in found
            ],
        }
        show_result(value, lambda _: findings_view(client.address, len(here), found))
        return len(found)

    if with_client(action):
        raise typer.Exit(FAILED)


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
    seen, silent = await _inspected(client, sorted(here), job=job.uid, environment=True, **one)
    untold = [f"{node_id}: {text}" for node_id, inspection in seen.items() for text in inspection.unknown]
    if wishes.for_program:
        untold += [f"{node_id} could not be asked: {why}" for node_id, why in silent.items()]
    for text in untold:
        consoles.stderr().print(text, markup=False, soft_wrap=True)
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


@connected
async def ray_env(client: Client) -> None:
    """Prints the variables by which Ray's own tools find the cluster."""
    address, token_path = ray_of(client.target, await client.stats())
    variables = {"RAY_ADDRESS": address}
    if token_path:
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token_path}
    lines = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())
    show_result(variables, lambda _: Text(lines, no_wrap=True, overflow="ignore"))


async def _repeated(client: Client, failed: list[Job]) -> frozenset[str]:
    """Uids of the failed jobs whose names later jobs have."""
    newest = await asyncio.gather(*(client.get_job(name) for name in sorted({job.spec.name for job in failed})))
    current = {handle.job.uid for handle in newest}
    return frozenset(job.uid for job in failed if job.uid not in current)


async def _loads(client: Client, name: str) -> tuple[list[Job], dict[str, NodeInspection], dict[str, str]]:
    jobs = [(await client.get_job(name)).job] if name else await client.list_jobs(states=words.LIVE_STATES)
    jobs.sort(key=lambda job: job.spec.name)
    workers = [worker for job in jobs for worker in job.workers if words.may_run(worker)]
    here = {worker.allocation.node_id for worker in workers if worker.allocation.node_id}
    seen, silent = await _inspected(client, sorted(here), job=jobs[0].uid if name else "")
    return jobs, seen, silent


async def _inspected(
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
