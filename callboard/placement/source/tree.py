"""The tree of what was written: texts, mappings and lists, each with its place, whichever form it had.

Scalars stay the text they were written as. YAML 1.1 reads ``1:0`` as 60, ``010`` as 8 and ``on`` as true; which of
these was meant can't be told from the result, so nothing is ever converted here.
"""

from __future__ import annotations

import re

from callboard.model.faults import Fault, InvalidInput
from callboard.model.frozen import dataclass
from callboard.model.inputs.located import shown_text
from callboard.placement.source.diagnostics import Where

MAX_VALUES = 200_000
"""Most values that are read of one input, aliases counted each time they are used."""

MAX_DEPTH = 32
"""Deepest nesting that is read."""

# What YAML 1.1 (PyYAML) or OmegaConf make of a bare scalar, other than its text.
NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"yes|no|true|false|on|off", re.IGNORECASE)
WHOLE = re.compile(r"0|-?[1-9][0-9]*")
_ODD_NUMBER = re.compile(
    r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]+|[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?"
    r"|[0-9][0-9_]*|(?:[0-9][0-9_]*)?\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+"
    r"|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))"
)
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:[Tt\s].*)?")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A scalar.

    Attributes:
        text: what was written; of a parsed mapping the text that gives this value.
        bare: written without quotes, or parsed from a number.
        null: it is nothing: empty, ``~`` or ``null``.
        lost: for a parsed value whose text can't be told: what it is now, for people. Empty: the text is right.
        problem: why there is no value at all, for people. Empty: there is one.
        value: the value as a program would read it: text, whole number, float, true, false or None.
    """

    text: str
    where: Where
    bare: bool = False
    null: bool = False
    lost: str = ""
    problem: str = ""
    value: str | int | float | bool | None = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A mapping, in the order written."""

    entries: tuple[tuple[Leaf, Value], ...]
    where: Where

    def get(self, key: str) -> Value | None:
        """The value of ``key``; None when it is not there, or says nothing."""
        found = next((value for name, value in self.entries if name.text == key), None)
        return None if isinstance(found, Leaf) and found.null else found


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    items: tuple[Value, ...]
    where: Where


Value = Leaf | Table | Items


def traps(text: str) -> str:
    """What another reader of YAML would take the bare ``text`` for; empty: for this text, or for a plain number."""
    if NULL.fullmatch(text):
        return "nothing"
    if _BOOL.fullmatch(text):
        return "true or false"
    if WHOLE.fullmatch(text):
        return ""
    if _ODD_NUMBER.fullmatch(text):
        return "a number written in another way"
    return "a date" if _DATE.fullmatch(text) else ""


def kind_of(value: Value) -> str:
    """``value`` for a message."""
    if isinstance(value, Table):
        return "a mapping"
    if isinstance(value, Items):
        return "a list"
    if value.problem:
        return f"what {value.problem}"
    return "nothing" if value.null else shown_text(value.text)


class Budget:
    """Counts values, so that a few aliases can't mean a thousand million."""

    def __init__(self) -> None:
        self.left = MAX_VALUES

    def take(self, depth: int, where: Where) -> None:
        """One value, at this depth.

        Raises:
            InvalidInput: there are too many, or it is too deep.
        """
        self.left -= 1
        if self.left < 0:
            raise InvalidInput([Fault(where.field, f"more than {MAX_VALUES} values", where.line, where.column)])
        if depth > MAX_DEPTH:
            raise InvalidInput([Fault(where.field, f"nested deeper than {MAX_DEPTH}", where.line, where.column)])
