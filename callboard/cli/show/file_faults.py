"""The faults of a file as people read them, each with its line, in which values that may be secret are left out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import typer
import yaml
from rich.text import Text

from callboard.cli.options import wishes
from callboard.cli.show import consoles
from callboard.cli.show.exits import BAD_INPUT, Failure, as_json
from callboard.model.faults import Fault, InvalidInput
from callboard.placement.source.yaml_tree import composed_text

_LONGEST = 160

# "is required": its subject is the field, which stands before it wherever no line is shown.
_WITHOUT_SUBJECT = re.compile(r"(?:is|has|needs|must|can't|differs|names no|names a|places|runs|says)\b")


def refuse(name: str, text: str, faults: Sequence[Fault]) -> NoReturn:
    """Shows every fault of a text and ends with 2."""
    console = consoles.stderr()
    count = f"{len(faults)} faults" if len(faults) > 1 else "1 fault"
    if wishes.for_program:
        failure = Failure(
            f"{name} has {count}; nothing was done.", _said(faults[0]), "Correct them and try again.", BAD_INPUT
        )
        typer.echo(as_json(failure, faults=faults, file=name), err=True)
        raise typer.Exit(BAD_INPUT)
    for line in fault_lines(name, text, faults):
        console.print(line, soft_wrap=True)
    console.print(f"error: {name} has {count}; nothing was done.", style="bold red", soft_wrap=True)
    raise typer.Exit(BAD_INPUT)


def warn(name: str, text: str, warnings: Iterable[Fault]) -> None:
    """Shows what is allowed and may not be meant."""
    for line in fault_lines(name, text, warnings, kind="warning"):
        consoles.stderr().print(line, soft_wrap=True)


def name_of(file: Path) -> str:
    """What a file is called; "-" is the standard input."""
    return "input" if str(file) == "-" else str(file)


def fault_lines(name: str, text: str, faults: Iterable[Fault], *, kind: str = "error") -> Iterator[Text]:
    """Lines for the terminal.

    Args:
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
    shown = _one_line(cut)
    margin = f"{number:>5} | "
    yield Text.assemble((margin, "dim"), shown)
    yield Text.assemble((" " * (len(margin) - 2) + "| ", "dim"), " " * (column - 1 - start), ("^", style))


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


Span = tuple[int, int]
"""First column and the one after the last, from 0."""


def secret_spans(text: str) -> dict[int, list[Span]]:
    """By line, from 1, the columns that hold values of variables; nothing of a text that is no YAML."""
    try:
        root = composed_text(text)
    except InvalidInput:
        return {}
    found: dict[int, list[Span]] = {}
    for node in _values(root):
        first, last = node.start_mark, node.end_mark
        for line in range(first.line, last.line + 1):
            start = first.column if line == first.line else 0
            end = last.column if line == last.line else 1 << 30
            found.setdefault(line + 1, []).append((start, end))
    return found


def _values(root: yaml.Node) -> Iterator[yaml.ScalarNode]:
    """Scalars that are values of variables: of node groups, and of the components of a job."""
    seen: set[tuple[int, bool]] = set()
    waiting = [(root, False), *((node, True) for node in _variables_of_components(root))]
    while waiting:
        node, secret = waiting.pop()
        if isinstance(node, yaml.ScalarNode):
            if secret:
                yield node
            continue
        if (id(node), secret) in seen:
            continue
        seen.add((id(node), secret))
        if isinstance(node, yaml.MappingNode):
            waiting.extend((value, secret or _text(key) == "env_vars") for key, value in node.value)
        else:
            waiting.extend((item, secret) for item in node.value)


def _variables_of_components(root: yaml.Node) -> Iterator[yaml.Node]:
    """``env`` elsewhere is the name of a component."""
    for components in _at(root, "components"):
        for component in components.value if isinstance(components, yaml.SequenceNode) else ():
            yield from _at(component, "env", "secret_env")


def _at(node: yaml.Node, *keys: str) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        yield from (value for key, value in node.value if _text(key) in keys)


def _text(key: yaml.Node) -> str | None:
    return key.value if isinstance(key, yaml.ScalarNode) else None
