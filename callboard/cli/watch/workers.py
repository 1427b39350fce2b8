"""What `callboard worker …` does."""

from __future__ import annotations

from callboard.cli.show.plain import plain
from callboard.cli.show.printing import show_result
from callboard.cli.show.session import connected
from callboard.cli.watch.worker_views import worker_list
from callboard.client.client import Client


@connected
async def show_list(client: Client, *, job: str, node: str) -> None:
    """Lists workers."""
    found = await client.list_workers(job=job, node=node)
    value = [{"job": owner.spec.name, **plain(worker)} for owner, worker in found]
    show_result(value, lambda wide: worker_list(found, wide=wide), empty=f"No workers at {client.address}.")
