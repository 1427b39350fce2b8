"""Showing a result: as data for programs, else as whatever people read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import Message
from rich.console import RenderableType

from callboard.cli.options import Output, wishes
from callboard.cli.show import printing, screen
from callboard.cli.show.plain import plain


def done(value: Message | Mapping[str, Any], text: str, *, quiet: bool) -> None:
    """Tells what a write did.

    Args:
        value: what programs get: the object as it is now.
        text: what people get.
        quiet: people get nothing.
    """
    if wishes.for_program:
        show(plain(value) if isinstance(value, Message) else value, wishes.output, lambda _: "")
    elif not quiet:
        screen.stderr().print(text, markup=False)


def show(value: Any, output: Output, picture: Callable[[bool], RenderableType]) -> None:
    """Prints a result.

    Args:
        value: the result as plain values.
        output: how it is wanted.
        picture: makes what people read; is told whether internal ids are wanted.
    """
    if output is Output.JSON:
        printing.print_json(value)
    elif output is Output.YAML:
        printing.print_yaml(value)
    else:
        wide = output is Output.WIDE
        screen.stdout(wide=wide).print(picture(wide))
