"""Secrets of a worker: values of secret variables are masked in all that it tells (SE-04).

Guaranteed: in errors and in progress, and in what Python code prints through `sys.stdout` and `sys.stderr`, in one
piece. Not guaranteed: what native code and child processes write, and what a class prints in pieces or in a code of
its own. Standard library only: this runs in every worker.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO
from urllib.parse import quote

MASK = "********"

Hide = Callable[[str], str]
"""Makes a text fit to be told."""

_SHORTEST = 4
"""A shorter one would mask half of every text."""

_SHORTEST_LINE = 8
"""Of a secret of several lines, such as a private key, each is one by itself; a short one is an ordinary word."""


def hiding(secrets: Iterable[str]) -> Hide:
    """What masks these values, as they are and as `repr`, JSON and addresses write them.

    A text must be masked before it is cut: half a secret is not recognised, and tells the other half.
    """
    forms = {form for secret in secrets for form in _forms(secret)}
    longest_first = sorted(forms, key=lambda form: (-len(form), form))  # One may hold another.

    def hide(text: str) -> str:
        for form in longest_first:
            text = text.replace(form, MASK)
        return text

    return hide


def _forms(secret: str) -> Iterator[str]:
    lines = [line.strip() for line in secret.splitlines()]
    # A value from a file ends with a line's end, which is not always told along.
    for text in {secret, secret.strip(), *(line for line in lines if len(line) >= _SHORTEST_LINE)}:
        if len(text) < _SHORTEST:
            continue
        yield text
        yield from (
            repr(text)[1:-1],
            ascii(text)[1:-1],
            json.dumps(text)[1:-1],
            json.dumps(text, ensure_ascii=False)[1:-1],
        )
        yield from (quote(text, errors="replace"), quote(text, safe="", errors="replace"))


def hidden(value: Any, hide: Hide) -> Any:
    """A plain value, its texts masked. Numbers that JSON lacks become the texts that protobuf's JSON has for them."""
    match value:
        case str():
            return hide(value)
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case list() | tuple():
            return [hidden(each, hide) for each in value]
        case dict():
            return {hide(str(key)): hidden(each, hide) for key, each in value.items()}
        case _:
            return value


class HidingStream:
    """A text stream that masks what is written to it; all else is the stream's own."""

    def __init__(self, stream: TextIO, hide: Hide) -> None:
        self._stream = stream
        self._hide = hide

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the text, masked. Returns how much was asked for."""
        self._stream.write(self._hide(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)
