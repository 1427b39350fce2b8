"""Faults of an input: a list with their places, all of them at once."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from callboard.model.frozen import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of an input.

    Attributes:
        field: where, as a path from the top of the input: ``components[0].resources.gpu``.
        message: what was read, why it is wrong and what is allowed, as one sentence.
        line: line in the user's file, from 1; 0 where there is no file.
        column: column in the user's file, from 1; 0 where there is no file.
    """

    field: str
    message: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        place = f"{self.line}:{self.column}: " if self.line else ""
        return f"{place}{self.field}: {self.message}" if self.field else f"{place}{self.message}"


def guess(word: str, known: Collection[str]) -> str:
    """What may have been meant by an unknown word: "did you mean train?", or what there is."""
    near = difflib.get_close_matches(word[:80], known, n=1) or difflib.get_close_matches(word[:80].upper(), known, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known)) or 'none'}"


class InvalidInput(ValueError):
    """An input with faults; nothing of it was used.

    Attributes:
        faults: every fault that was found, in the order of the input.
    """

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(str(fault) for fault in self.faults))
