"""Every text of an error, as it stands in the code: in one file, so that a change of one is read, and in plain English.

`UPDATE_DOCS=1 pytest tests/test_error_texts.py` writes tests/data/errors.txt anew.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from callboard.cli.show.failures import failure_of
from callboard.wire.refusals import CallError, ErrorReason, exception_for

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "data" / "errors.txt"

MADE_BY = re.compile(
    "Failure|CommandFailed|_?[Ff]ault|Misfit|Refused|Refusal|Reason|BadParameter|invalid|Finding|doom|_need|_refused|_fail|_bad|_no"
)
"""What makes texts of errors beside `raise`."""

NOT_FOR_USERS = ("simulation/", "v1/")

STUMBLES = (
    r"(?<!there )\bis no (?!longer|more\b)\w+",
    r"\ballowed (?:is|are):?\s",
    r"\bin vain\b",
    r"\bby when\b",
    r"\bfailed inside\b",
    r"\bas it was$",
    r"\bwhile work is about\b",
    r"\bwho must\b",
    r"\bwhoever\b",
    r"\bthereof\b|\bwherein\b|\bhereby\b",
)
"""Phrases that readers stumbled over."""


def template(node: ast.expr) -> str | None:
    """A text as it stands in the code: what is filled in stands in braces. None: it is no text."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=values):
            return "".join(
                str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"  # type: ignore[attr-defined]
                for part in values
            )
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = template(left), template(right)
            return None if None in parts else "".join(filter(None, parts))
        case ast.IfExp(body=body, orelse=orelse):
            return " | ".join(filter(None, (template(body), template(orelse)))) or None
        case _:
            return None


def calls(path: Path) -> Iterator[ast.Call]:
    """What makes an error in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield node.exc
        elif isinstance(node, ast.ClassDef) and "CommandFailed" in map(ast.unparse, node.bases):
            yield from (
                ast.copy_location(ast.Call(ast.Name("CommandFailed"), made.args, made.keywords), made)
                for made in ast.walk(node)
                if isinstance(made, ast.Call) and ast.unparse(made.func) == "super().__init__"
            )
        elif isinstance(node, ast.Call) and MADE_BY.fullmatch(ast.unparse(node.func).rpartition(".")[2]):
            yield node


@cache
def errors() -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Module, maker and texts of every error, by module and place."""
    found = {}
    for path in sorted((ROOT / "callboard").rglob("*.py")):
        module = path.relative_to(ROOT / "callboard").as_posix()
        if module.startswith(NOT_FOR_USERS):
            continue
        for call in calls(path):
            texts = [
                text for value in (*call.args, *(word.value for word in call.keywords)) if (text := template(value))
            ]
            texts = [" ".join(text.split()) for text in texts if len(text.split()) > 2]
            if texts:
                maker = ast.unparse(call.func).rpartition(".")[2].rpartition(")")[2] or "…"
                found[module, call.lineno, call.col_offset] = (module, maker, tuple(texts))
    return tuple(found[place] for place in sorted(found))


def golden() -> str:
    lines = ["# Every text of an error, by module. Made by tests/test_error_texts.py."]
    seen = ""
    for module, maker, texts in errors():
        if module != seen:
            lines += ["", f"## {module}"]
            seen = module
        lines.append(f"{maker}: {' / '.join(texts)}")
    return "\n".join(lines) + "\n"


def test_every_text_of_an_error_is_in_the_file() -> None:
    text = golden()
    if os.environ.get("UPDATE_DOCS"):
        GOLDEN.write_text(text)
    assert GOLDEN.read_text() == text, (
        "an error's text changed: read it, then UPDATE_DOCS=1 pytest tests/test_error_texts.py"
    )
    assert len(errors()) > 700


@pytest.mark.parametrize("stumble", STUMBLES)
def test_no_text_has_a_phrase_that_readers_stumbled_over(stumble: str) -> None:
    found = [
        f"{module}: {text}"
        for module, _, texts in errors()
        for text in texts
        if re.search(stumble, re.sub(r"\{[^}]*\}", "X", text), re.IGNORECASE)
    ]
    assert not found, "\n".join(found)


def test_a_failure_of_the_command_line_says_what_why_and_what_to_do() -> None:
    checked = 0
    for path in (ROOT / "callboard" / "cli").rglob("*.py"):
        for call in calls(path):
            if ast.unparse(call.func) not in ("Failure", "CommandFailed") or any(
                isinstance(part, ast.Starred) for part in call.args
            ):
                continue
            named = {word.arg: word.value for word in call.keywords}
            parts = [*call.args[:3], *(named[name] for name in ("what", "why", "remedy") if name in named)]
            assert len(parts) == 3, f"{path.name}:{call.lineno}"
            checked += 1
            for part in parts:
                for text in (template(part) or "X.").split(" | "):
                    assert text.strip(), f"{path.name}:{call.lineno} leaves a part empty"
            if what := template(parts[0]):
                assert re.match(r"[A-Z{`']", what), f"{path.name}:{call.lineno}: {what}"
            if do := template(parts[2]):
                assert do.rstrip()[-1] in ".:}`)", f"{path.name}:{call.lineno}: {do}"
    assert checked > 60


@pytest.mark.parametrize("reason", list(ErrorReason), ids=[reason.name for reason in ErrorReason])
def test_every_refusal_of_a_controller_is_shown_with_something_to_do(reason: ErrorReason) -> None:
    shown = failure_of(
        exception_for(CallError("UNKNOWN", reason=reason, message="pool research: 4 of 4 gpu used. Ask for less"))
    )
    assert shown.what
    assert shown.why
    assert re.match(r"[A-Z`]", shown.remedy), shown
    assert shown.remedy.endswith((".", ")")), shown
