"""The two consoles: results on stdout, everything else on stderr, and how wide each is.

NO_COLOR and a missing terminal are honoured by rich itself. Without a terminal nothing is cut to 80
columns: whoever reads a pipe wants whole lines.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_WIDTH_OF_PIPES = 200
_WIDTH_OF_WIDE = 400

_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters but tab and line feed, and those that turn the direction of writing."""


def stdout(*, wide: bool = False) -> Console:
    """Where results go; ``wide``: nothing is folded, long lines are the terminal's business."""
    return _console(stderr=False, width=_WIDTH_OF_WIDE if wide else None)


def stderr() -> Console:
    """Where progress and errors go."""
    return _console(stderr=True)


def _console(*, stderr: bool, width: int | None = None) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    if width is None and not stream.isatty() and "COLUMNS" not in os.environ:
        width = _WIDTH_OF_PIPES
    # No markup: names and reasons come from jobs and agents, and may hold brackets of their own.
    return _Console(stderr=stderr, width=width, highlight=False, soft_wrap=False, emoji=False, markup=False)


class _Console(Console):
    """A console on which a text can do nothing but be read: what would steer the terminal is shown as a sign."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The pieces of what is shown."""
        for segment in super().render(renderable, options):
            if segment.control or not _STEERING.search(segment.text):
                yield segment
            else:
                yield Segment(_STEERING.sub("\N{REPLACEMENT CHARACTER}", segment.text), segment.style)
