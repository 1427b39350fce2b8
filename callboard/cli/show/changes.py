"""Changes of single fields on the command line: KEY=VALUE, with dots into what lies below."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from callboard.cli.show.exits import BAD_INPUT, CommandFailed
from callboard.model.faults import InvalidInput
from callboard.model.inputs import read_yaml

Change = tuple[tuple[str, ...], Any]
"""Path of a field, and its new value."""


def is_file(changes: Sequence[str]) -> bool:
    """Whether the only argument names a file and not a field."""
    return len(changes) == 1 and "=" not in changes[0]


def read_changes(changes: Iterable[str], example: str = "nominal.cpu=8") -> list[Change]:
    """The changes that arguments such as ``example`` ask for.

    Raises:
        CommandFailed: one is no change, or changes what another one does.
    """
    found = dict[tuple[str, ...], Any]()
    for text in changes:
        path, value = _read(text, example)
        if path in found:
            name = ".".join(path)
            raise CommandFailed(
                f"{name} is changed twice.", "One value can't be two.", f"State {name} once.", BAD_INPUT
            )
        found[path] = value
    return list(found.items())


def changed(mapping: Mapping[str, Any], changes: Iterable[Change]) -> dict[str, Any]:
    """A copy of ``mapping`` with the changes; null takes a field away."""
    result = copy.deepcopy(dict(mapping))
    for path, value in changes:
        holder = result
        for name in path[:-1]:
            below = holder.get(name)
            holder[name] = dict(below) if isinstance(below, Mapping) else {}
            holder = holder[name]
        if value is None:
            holder.pop(path[-1], None)
        else:
            holder[path[-1]] = value
    return result


def _read(text: str, example: str) -> Change:
    name, equals, value = text.partition("=")
    path = tuple(name.split("."))
    if not equals or not all(path):
        raise CommandFailed(
            f"{text!r} is neither a change nor the only file.",
            "A change reads KEY=VALUE.",
            f"Write for example {example}.",
            BAD_INPUT,
        )
    try:
        # As what stands below a key of a file, so that it is refused where that is.
        return path, read_yaml("value:\n" + textwrap.indent(value, "  "))["value"]
    except InvalidInput as error:
        raise CommandFailed(
            f"The value of {name} can't be read.",
            f"{error.faults[0].message}.",
            "Write it as YAML, for example [a, b].",
            BAD_INPUT,
        ) from error
