"""How a verb ends: its exit code, and a failure as what happened, why, and what to do.

Errors are types with fields; this is the edge where they become text (CONTRIBUTING.md). Here is the form alone, without
a client's errors (:mod:`callboard.cli.show.failures` puts those into words), for verbs that ask no controller.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from callboard.model.faults import Fault, InvalidInput
from callboard.model.frozen import dataclass

OK = 0
FAILED = 1
BAD_INPUT = 2
NO_PLAN = 3
UNREACHABLE = 4
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure in words.

    Attributes:
        what: what happened, one sentence.
        why: why, one sentence.
        remedy: what to do, one sentence.
    """

    what: str
    why: str
    remedy: str
    exit_code: int = FAILED


class CommandFailed(Exception):
    """A verb failed in a way that only it can put into words: those of a :class:`Failure`."""

    def __init__(self, what: str, why: str, remedy: str, exit_code: int = FAILED) -> None:
        super().__init__(what)
        self.failure = Failure(what, why, remedy, exit_code)


def lines(failure: Failure, controller: str) -> Iterator[str]:
    """The failure as lines of text."""
    yield f"error: {failure.what}"
    yield f"  why: {failure.why}"
    yield f"   do: {failure.remedy}"
    if controller:
        yield f"   at: controller {controller}"


def as_json(
    failure: Failure, *, controller: str = "", reason: str = "", faults: Iterable[Fault] = (), file: str = ""
) -> str:
    """The failure as one line of JSON, for programs that asked for JSON or YAML.

    Args:
        controller: the controller that was asked; empty: none.
        reason: the controller's reason, such as "NOT_FOUND"; empty: it has none.
        faults: fields of the input that are wrong.
        file: the file they are in; empty: none.
    """
    listed = [
        {"field": each.field, "message": each.message, "line": each.line, "column": each.column} for each in faults
    ]
    told = {
        "what": failure.what,
        "why": failure.why,
        "do": failure.remedy,
        "controller": controller,
        "reason": reason,
        "file": file,
        "faults": listed,
        "exit_code": failure.exit_code,
    }
    return json.dumps({"error": told}, ensure_ascii=False)


def of_faults(error: InvalidInput) -> Failure:
    """An input with faults, every one of them."""
    listed = "\n       ".join(str(fault) for fault in error.faults)
    return Failure("The input was refused; nothing was done.", listed, "Correct it and try again.", BAD_INPUT)
