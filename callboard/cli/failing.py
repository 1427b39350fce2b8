"""Failures shown to people: what happened, why, what to do, and the exit code.

Errors are types with fields; this is the edge where they become text (CONTRIBUTING.md). Here is the form alone, without
a client's errors (:mod:`callboard.cli.failures` puts those into words), for verbs that ask no controller.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from callboard.model.faults import InvalidInput

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
        exit_code: exit code of the program.
    """

    what: str
    why: str
    remedy: str
    exit_code: int = FAILED


class CommandFailed(Exception):
    """A verb failed in a way that only it can put into words."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.what)
        self.failure = failure


def lines(failure: Failure, controller: str) -> Iterator[str]:
    """The failure as lines of text."""
    yield f"error: {failure.what}"
    yield f"  why: {failure.why}"
    yield f"   do: {failure.remedy}"
    if controller:
        yield f"   at: controller {controller}"


def of_faults(error: InvalidInput) -> Failure:
    """An input with faults, every one of them."""
    listed = "\n       ".join(str(fault) for fault in error.faults)
    return Failure("The input was refused; nothing was done.", listed, "Correct it and try again.", BAD_INPUT)
