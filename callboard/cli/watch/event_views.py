"""Events on the screen, a line each."""

from __future__ import annotations

import yaml
from rich.text import Text

from callboard.cli.options import Output, wishes
from callboard.cli.show import printing, screen, words
from callboard.cli.show.plain import plain
from callboard.v1.event_pb2 import Event


def print_event(event: Event) -> None:
    """Prints one event, complete in itself: others may follow."""
    if wishes.output is Output.JSON:
        printing.print_json(plain(event), compact=True)
    elif wishes.output is Output.YAML:
        printing.print_yaml([plain(event)])
    else:
        screen.stdout().print(event_line(event, wide=wishes.wide), soft_wrap=True)


def event_line(event: Event, *, wide: bool) -> Text:
    """One event as a line."""
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
