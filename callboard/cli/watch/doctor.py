"""What `callboard doctor`, `version` and `ray-env` do: whether a cluster is as it should be, and where Ray finds it."""

from __future__ import annotations

import asyncio
import importlib.metadata
import platform
import shlex

import typer
from rich.text import Text

from callboard._version import __version__
from callboard.cli.jobs.pending import with_reasons
from callboard.cli.show import words
from callboard.cli.show.exits import FAILED
from callboard.cli.show.printing import show_result
from callboard.cli.show.verb_guard import connected, with_client
from callboard.cli.watch.views import findings_view, versions_view
from callboard.cli.watch.workers import inspected
from callboard.client.calls.cluster_calls import GONE
from callboard.client.client import Client, ray_of
from callboard.client.diagnosis import Evidence, diagnose
from callboard.v1.job_pb2 import Job

_RECENT_FAILURES = 20
"""Newest failed jobs whose story is looked at."""


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
        seen, silent = await inspected(client, here, foreign=True)
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


async def _repeated(client: Client, failed: list[Job]) -> frozenset[str]:
    """Uids of the failed jobs whose names later jobs have."""
    newest = await asyncio.gather(*(client.get_job(name) for name in sorted({job.spec.name for job in failed})))
    current = {handle.job.uid for handle in newest}
    return frozenset(job.uid for job in failed if job.uid not in current)


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


@connected
async def ray_env(client: Client) -> None:
    """Prints the variables by which Ray's own tools find the cluster."""
    address, token_path = ray_of(client.target, await client.stats())
    variables = {"RAY_ADDRESS": address}
    if token_path:
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token_path}
    lines = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())
    show_result(variables, lambda _: Text(lines, no_wrap=True, overflow="ignore"))
