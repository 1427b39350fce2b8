"""What `callboard events` does."""

from __future__ import annotations

from collections.abc import Sequence

import yaml
from rich.text import Text

from callboard.cli import screen, words
from callboard.cli.options import Output
from callboard.cli.plain import plain
from callboard.cli.session import with_client
from callboard.client.client import Client
from callboard.v1.event_pb2 import Event


def show(*, follow: bool, last: int, types: Sequence[str], job: str, controller: str, output: Output) -> None:
    """Shows events, and goes on with ``follow``."""
    subject = f"jobs/{job}" if job else ""

    async def action(client: Client) -> None:
        events = await client.list_events(types=types, subject=subject, newest=last) if last else []
        if not events and not follow:
            screen.stderr().print(f"No such events at {client.address}.")
        if output is Output.JSON and not follow:
            screen.print_json([plain(event) for event in events])
            return
        for event in events:
            _print(event, output)
        if follow:
            start = events[-1].revision + 1 if events else 0
            async for event in client.watch(start_revision=start, types=types, subject=subject):
                _print(event, output)

    with_client(controller, action)


def _print(event: Event, output: Output) -> None:
    if output is Output.JSON:
        screen.print_json(plain(event), compact=True)
    elif output is Output.YAML:
        screen.print_yaml([plain(event)])
    else:
        screen.stdout().print(_line(event, wide=output is Output.WIDE), soft_wrap=True)


def _line(event: Event, *, wide: bool) -> Text:
    line = Text(f"{words.clock(event.time)}  ", style="dim")
    if wide:
        line.append(f"{event.revision:>6}  ", style="dim")
    line.append(f"{event.type:<26} ")
    line.append(f"{_subject(event.subject)}", style="bold")
    if event.state:
        line.append("  ").append_text(screen.state_text(event.state))
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
