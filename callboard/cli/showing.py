"""Showing a result: as data for programs, else as whatever people read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import RenderableType

from callboard.cli import printing, screen
from callboard.cli.options import Output


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
