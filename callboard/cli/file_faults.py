"""Faults of a file as compilers show them: place, sentence, the line with a caret."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import typer
from rich.text import Text

from callboard.cli import screen
from callboard.cli.failing import BAD_INPUT, Failure, as_json
from callboard.cli.file_secrets import Span, secret_spans
from callboard.cli.options import wishes
from callboard.model.faults import Fault

_LONGEST = 160

# "is required": its subject is the field, which stands before it wherever no line is shown.
_WITHOUT_SUBJECT = re.compile(r"(?:is|has|needs|must|can't)\b")


def refuse(name: str, text: str, faults: Sequence[Fault]) -> NoReturn:
    """Shows every fault of a text and ends with 2."""
    console = screen.stderr()
    count = f"{len(faults)} faults" if len(faults) > 1 else "1 fault"
    if wishes.for_program:
        failure = Failure(
            f"{name} has {count}; nothing was done.", _said(faults[0]), "Correct them and try again.", BAD_INPUT
        )
        typer.echo(as_json(failure, faults=faults, file=name), err=True)
        raise typer.Exit(BAD_INPUT)
    for line in fault_lines(name, text, faults):
        console.print(line, soft_wrap=True)
    console.print(f"error: {name} has {count}; nothing was done.", style="bold red", markup=False, soft_wrap=True)
    raise typer.Exit(BAD_INPUT)


def warn(name: str, text: str, warnings: Iterable[Fault]) -> None:
    """Shows what is allowed and may not be meant."""
    for line in fault_lines(name, text, warnings, kind="warning"):
        screen.stderr().print(line, soft_wrap=True)


def name_of(file: Path) -> str:
    """What a file is called; "-" is the standard input."""
    return "input" if str(file) == "-" else str(file)


def fault_lines(name: str, text: str, faults: Iterable[Fault], *, kind: str = "error") -> Iterator[Text]:
    """Lines for the terminal.

    Args:
        name: what the file is called.
        text: its content.
        faults: what is wrong; those without a line are said without one.
        kind: ``error`` or ``warning``.
    """
    lines = text.splitlines()
    secrets: dict[int, list[Span]] | None = None
    style = "bold red" if kind == "error" else "yellow"
    for fault in faults:
        place = f"{name}:{fault.line}:{fault.column}" if fault.line else name
        yield Text.assemble((f"{place}: ", "bold"), (f"{kind}: ", style), _one_line(_said(fault)))
        if 1 <= fault.line <= len(lines):
            secrets = secret_spans(text) if secrets is None else secrets
            line = _without(lines[fault.line - 1], secrets.get(fault.line, ()))
            yield from _source(line, fault.line, fault.column, style)


def _said(fault: Fault) -> str:
    if not fault.field:
        return fault.message
    if not fault.line:
        return f"{fault.field}: {fault.message}"
    if not _WITHOUT_SUBJECT.match(fault.message):
        return fault.message
    # A missing key has the place of the mapping that it is missing in, so the place doesn't name it.
    key = fault.field if '"' in fault.field else fault.field.rpartition(".")[2]
    return f"{key} {fault.message}"


def _without(line: str, secrets: Iterable[Span]) -> str:
    """The line with stars for the values of variables, each as long as it is."""
    for start, end in secrets:
        line = line[:start] + "*" * len(line[start:end]) + line[end:]
    return line


def _source(line: str, number: int, column: int, style: str) -> Iterator[Text]:
    """The line, and a caret under the column. A long line is cut around it."""
    column = min(max(column, 1), len(line) + 1)
    start = 0 if column < _LONGEST - 20 else column - _LONGEST // 2
    cut = line[start : start + _LONGEST]
    # Tabs stay one column wide, and nothing in the file may steer the terminal.
    shown = "".join(char if char.isprintable() else " " for char in cut)
    margin = f"{number:>5} | "
    yield Text.assemble((margin, "dim"), shown)
    yield Text.assemble((" " * (len(margin) - 2) + "| ", "dim"), " " * (column - 1 - start), ("^", style))


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)
