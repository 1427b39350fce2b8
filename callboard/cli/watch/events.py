"""What `callboard events`, `audit` and `job watch` do; events are a line each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
import yaml
from rich.live import Live
from rich.text import Text

from callboard.cli.jobs import views as job_views
from callboard.cli.options import Output, wishes
from callboard.cli.show import consoles, printing, tables, words
from callboard.cli.show.exits import FAILED
from callboard.cli.show.plain import plain
from callboard.cli.show.verb_guard import connected, with_client
from callboard.client.client import Client
from callboard.client.jobs import ENDED, JobHandle
from callboard.v1.event_pb2 import Event


def show(*, follow: bool, last: int, types: Sequence[str], job: str) -> None:
    """Shows events, and goes on with ``follow``."""
    subject = f"jobs/{job}" if job else ""

    async def action(client: Client) -> None:
        events = await client.list_events(types=types, subject=subject, newest=last) if last else []
        if not events and not follow:
            consoles.stderr().print(f"No such events at {client.address}.")
        if wishes.output is Output.JSON and not follow:
            printing.print_json([plain(event) for event in events])
            return
        for event in events:
            print_event(event)
        if follow:
            start = events[-1].revision + 1 if events else 0
            async for event in client.watch(start_revision=start, types=types, subject=subject):
                print_event(event)

    with_client(action)


@connected
async def show_audit(client: Client, *, last: int, who: str) -> None:
    entries = (await client.audit(last=last, who=who))[::-1]
    if wishes.for_program:
        printing.print_data([plain(each) for each in entries])
        return
    columns = ["TIME", "WHO", "ROLE", "METHOD", "SUBJECT", "RESULT", "FROM"]
    rows: list[list[Any]] = [
        [
            words.clock(each.time),
            each.who,
            each.role,
            each.method,
            each.subject,
            f"{each.code}: {each.why}" if each.why else each.code,
            each.peer,
        ]
        for each in entries
    ]
    consoles.stdout().print(tables.table(columns, rows))


def print_event(event: Event) -> None:
    """Prints one event, complete in itself: others may follow."""
    if wishes.output is Output.JSON:
        printing.print_json(plain(event), compact=True)
    elif wishes.output is Output.YAML:
        printing.print_yaml([plain(event)])
    else:
        consoles.stdout().print(event_line(event, wide=wishes.wide), soft_wrap=True)


def event_line(event: Event, *, wide: bool) -> Text:
    """One event as a line."""
    line = Text(f"{words.clock(event.time)}  ", style="dim")
    if wide:
        line.append(f"{event.revision:>6}  ", style="dim")
    line.append(f"{event.type:<26} ")
    line.append(f"{_subject(event.subject)}", style="bold")
    if event.state:
        line.append("  ").append_text(tables.state_text(event.state))
    if event.reason:
        line.append(f"  {event.reason}")
    if wide:
        facts = yaml.safe_dump(dict(event.facts), default_flow_style=True, width=10_000).strip() if event.facts else ""
        line.append(f"  {event.cause} {facts}", style="dim")
    return line


def _subject(subject: str) -> str:
    """ "jobs/train/workers/actor/0" → "train/actor/0": the collection is clear from the type."""
    _, _, rest = subject.partition("/")
    return rest.replace("/workers/", "/") or subject


@connected
async def watch(client: Client, name: str) -> None:
    """Follows a job until it ends; its outcome is the exit code."""
    job = await client.get_job(name)
    if not wishes.for_program and consoles.stdout().is_terminal:
        await _draw(job, wide=wishes.wide)
    else:
        await _tell(job)
    if job.state != "SUCCEEDED":
        raise typer.Exit(FAILED)


async def _draw(job: JobHandle, *, wide: bool) -> None:
    """One picture that changes."""
    with Live(job_views.job_view(job.job, wide=wide), console=consoles.stdout(), auto_refresh=False) as live:
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
            consoles.stdout().print(job.job.traceback.rstrip(), soft_wrap=True)


def _say(job: JobHandle) -> None:
    reason = words.why(job.job)
    text = f"Job {job.name} is {job.state}" + (f": {reason}" if reason else ".")
    consoles.stdout().print(text, soft_wrap=True)
