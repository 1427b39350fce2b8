"""What `callboard job watch` does."""

from __future__ import annotations

import typer
from rich.live import Live

from callboard.cli.jobs import views as job_views
from callboard.cli.options import wishes
from callboard.cli.show import screen, words
from callboard.cli.show.failing import FAILED
from callboard.cli.show.session import connected
from callboard.cli.watch.events import print_event
from callboard.client.client import Client
from callboard.client.jobs import ENDED, JobHandle


@connected
async def watch(client: Client, name: str) -> None:
    """Follows a job until it ends; its outcome is the exit code."""
    job = await client.get_job(name)
    if not wishes.for_program and screen.stdout().is_terminal:
        await _draw(job, wide=wishes.wide)
    else:
        await _tell(job)
    if job.state != "SUCCEEDED":
        raise typer.Exit(FAILED)


async def _draw(job: JobHandle, *, wide: bool) -> None:
    """One picture that changes."""
    with Live(job_views.job_view(job.job, wide=wide), console=screen.stdout(), auto_refresh=False) as live:
        async for _ in job.events():
            live.update(job_views.job_view(await job.refresh(), wide=wide), refresh=True)


async def _tell(job: JobHandle) -> None:
    """A line where it stands, then one per event."""
    people = not wishes.for_program
    if job.state not in ENDED:
        if people:
            _say(job)
        async for event in job.events():
            print_event(event)
        await job.refresh()
    if people:
        _say(job)
        if job.job.traceback:
            screen.stdout().print(job.job.traceback.rstrip(), markup=False, soft_wrap=True)


def _say(job: JobHandle) -> None:
    reason = words.why(job.job)
    text = f"Job {job.name} is {job.state}" + (f": {reason}" if reason else ".")
    screen.stdout().print(text, markup=False, soft_wrap=True)
