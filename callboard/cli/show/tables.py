"""Tables of results: their columns, and the colour of each state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

STATE_STYLES: Mapping[str, str] = {
    "RUNNING": "green",
    "READY": "green",
    "SUCCEEDED": "green",
    "PENDING": "yellow",
    "STARTING": "cyan",
    "ASSIGNED": "cyan",
    "CREATING": "cyan",
    "NOMINATED": "cyan",
    "JOINING": "cyan",
    "PREEMPTING": "magenta",
    "STOPPING": "magenta",
    "RECOVERING": "magenta",
    "CORDONED": "yellow",
    "DRAINING": "yellow",
    "SUSPECT": "yellow",
    "BACKOFF": "yellow",
    "FAILED": "red",
    "LOST": "red",
    "QUARANTINED": "red",
    "CANCELLED": "dim",
    "STOPPED": "dim",
    "LEFT": "dim",
    "REMOVING": "dim",
}


_NAME_WIDTH = 32
"""Longer names are folded where the terminal is narrow."""


def state_text(state: str) -> Text:
    return Text(state, style=STATE_STYLES.get(state, ""))


def table(columns: Sequence[str], rows: Iterable[Sequence[RenderableType]], *, right: Sequence[str] = ()) -> Table:
    """A table without lines: easy to read, easy to cut.

    Args:
        rows: a cell per heading.
        right: headings of columns that are aligned to the right.
    """
    rows = list(rows)
    # What a row is called stays in one piece, to be copied; the rest gives way to it.
    longest = max((len(str(row[0])) for row in rows), default=0)
    built = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for number, column in enumerate(columns):
        whole = number == 0 and longest <= _NAME_WIDTH
        built.add_column(column, justify="right" if column in right else "left", overflow="fold", no_wrap=whole)
    for row in rows:
        built.add_row(*row)
    return built


def facts(pairs: Iterable[tuple[str, RenderableType]]) -> Table:
    """Names and values below each other."""
    built = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False, show_edge=False)
    built.add_column(style="bold")
    built.add_column(overflow="fold")
    for name, value in pairs:
        built.add_row(name, value)
    return built
