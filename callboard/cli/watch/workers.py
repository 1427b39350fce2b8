"""What `callboard worker …` does."""

from __future__ import annotations

from callboard.cli.options import Output
from callboard.cli.show import screen, words
from callboard.cli.show.plain import plain
from callboard.cli.show.session import with_client
from callboard.cli.show.showing import show
from callboard.cli.watch.worker_views import worker_list
from callboard.client.client import Client


def show_list(*, job: str, node: str, controller: str, output: Output) -> None:
    """Lists workers."""

    async def action(client: Client) -> None:
        jobs = [(await client.get_job(job)).job] if job else await client.list_jobs(states=words.LIVE_STATES)
        found = [
            (owner, worker)
            for owner in sorted(jobs, key=lambda each: each.spec.name)
            for worker in owner.workers
            if node in ("", worker.allocation.node_id)
        ]
        if not found and output in (Output.TABLE, Output.WIDE):
            screen.stderr().print(f"No workers at {client.address}.")
            return
        value = [{"job": owner.spec.name, **plain(worker)} for owner, worker in found]
        show(value, output, lambda wide: worker_list(found, wide=wide))

    with_client(controller, action)
