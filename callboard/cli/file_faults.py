"""What is wrong in which line? Faults of a file as compilers show them: place, sentence, the line with a caret."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.text import Text

from callboard.cli.file_secrets import Span, secret_spans
from callboard.model.faults import Fault

_LONGEST = 160


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
        said = fault.message if fault.line or not fault.field else f"{fault.field}: {fault.message}"
        yield Text.assemble((f"{place}: ", "bold"), (f"{kind}: ", style), _one_line(said))
        if 1 <= fault.line <= len(lines):
            secrets = secret_spans(text) if secrets is None else secrets
            line = _without(lines[fault.line - 1], secrets.get(fault.line, ()))
            yield from _source(line, fault.line, fault.column, style)


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
