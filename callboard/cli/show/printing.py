"""Results on stdout: JSON or YAML for programs, without anything that only people need; else whatever people read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from callboard.cli.options import Output, wishes

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from rich.console import RenderableType


def print_json(value: Any, *, compact: bool = False) -> None:
    """``value`` as JSON on stdout; compact, or shown again and again: on one line."""
    indent = None if compact or wishes.watch else 2
    sys.stdout.write(json.dumps(value, indent=indent, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_yaml(value: Any) -> None:
    """``value`` as YAML on stdout."""
    import yaml  # noqa: PLC0415 - JSON needs none

    if wishes.watch:
        sys.stdout.write("---\n")
    sys.stdout.write(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100))
    sys.stdout.flush()


def print_data(value: Any) -> None:
    """``value`` as the program that reads it wants it."""
    (print_yaml if wishes.output is Output.YAML else print_json)(value)


def done(value: Message | Mapping[str, Any], text: str) -> None:
    """Tells what a write did.

    Args:
        value: what programs get: the object as it is now.
        text: what people get, unless they want quiet.
    """
    from callboard.cli.show import consoles  # noqa: PLC0415 - not every result is shown by it
    from callboard.cli.show.plain import plain  # noqa: PLC0415 - as above

    if wishes.for_program:
        print_data(value if isinstance(value, Mapping) else plain(value))
    elif not wishes.quiet:
        consoles.stderr().print(text)


def tell(text: str) -> None:
    """Says on stderr what happens, unless people want quiet."""
    from callboard.cli.show import consoles  # noqa: PLC0415 - as above

    if not wishes.quiet:
        consoles.stderr().print(text, soft_wrap=True)


def show_result(value: Any, picture: Callable[[bool], RenderableType], *, empty: str = "") -> None:
    """Prints a result.

    Args:
        picture: makes what people read; is told whether internal ids are wanted.
        empty: what people read on stderr instead where ``value`` is empty.
    """
    if wishes.for_program:
        print_data(value)
        return
    from callboard.cli.show import consoles  # noqa: PLC0415 - programs need none

    if value or not empty:
        consoles.stdout(wide=wishes.wide).print(picture(wishes.wide))
    else:
        consoles.stderr().print(empty)
