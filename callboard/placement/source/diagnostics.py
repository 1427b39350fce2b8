"""Diagnostics: every fault of a placement in one run, each with its place and the words that mend it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TypedDict, Unpack

from callboard.model.faults import Fault, InvalidInput
from callboard.model.frozen import dataclass

MAX_FAULTS = 100
"""Most faults told at once."""


@dataclass(frozen=True, slots=True)
class Diagnostic(Fault):
    """A fault or a warning of a placement; ``message`` alone says everything, the rest is for programs.

    Attributes:
        component: component that is concerned; empty: none.
        segment: the segment of its placement text; empty: the whole.
        segment_column: column of the segment, or of the part of it that is wrong, in the placement text, from 1;
            0: no part of a placement text.
        nearest: the nearest thing that exists, such as a known key; empty: nothing is near.
    """

    component: str = ""
    segment: str = ""
    segment_column: int = 0
    read: str = ""
    allowed: str = ""
    nearest: str = ""


class _More(TypedDict, total=False):
    """What a diagnostic says beside its message."""

    segment: str
    segment_column: int
    read: str
    allowed: str
    nearest: str


@dataclass(frozen=True, slots=True)
class Where:
    """A place in what the user wrote.

    Attributes:
        field: path from the top of the input.
        line: line in the file, from 1; 0: there is no file.
        column: column in the file, from 1; 0: there is no file.
        exact: whether column + n is where the n-th character of the text at this place stands.
        component: component that is concerned; empty: none.
    """

    field: str = ""
    line: int = 0
    column: int = 0
    exact: bool = False
    component: str = ""

    def at(self, offset: int) -> Where:
        """The place ``offset`` characters into the text here."""
        if not offset or not self.exact or not self.line:
            return self
        return Where(self.field, self.line, self.column + offset, self.exact, self.component)

    def of(self, component: str) -> Where:
        """The same place, for a component."""
        return Where(self.field, self.line, self.column, self.exact, component)


def parts_of(text: str, where: Where) -> Iterator[tuple[str, Where]]:
    """What stands between the commas of the text at ``where``, without blanks around it, each with its place."""
    start = 0
    for part in text.split(","):
        yield part.strip(), where.at(start + len(part) - len(part.lstrip()))
        start += len(part) + 1


class Report:
    """Collects faults and warnings in the order they are found."""

    def __init__(self) -> None:
        self.faults: list[Diagnostic] = []
        self.warnings: list[Diagnostic] = []

    def fault(self, where: Where, message: str, **more: Unpack[_More]) -> None:
        """Notes a fault at ``where``; ``message`` is a sentence without its end, the rest as in :class:`Diagnostic`."""
        self.faults.append(_diagnostic(where, message, **more))

    def warn(self, where: Where, message: str) -> None:
        """Notes something that is allowed and may not be meant."""
        warning = _diagnostic(where, message)
        if warning not in self.warnings:
            self.warnings.append(warning)

    def raise_any(self) -> None:
        """Raises what was found.

        Raises:
            InvalidInput: there are faults.
        """
        if self.faults:
            raise InvalidInput(capped(self.faults))


def capped(faults: Iterable[Fault]) -> list[Fault]:
    """The faults in the order of the file, the first :data:`MAX_FAULTS` of them."""
    ordered = sorted(dict.fromkeys(faults), key=lambda fault: (fault.line, fault.column))
    if len(ordered) <= MAX_FAULTS:
        return list(ordered)
    return [*ordered[:MAX_FAULTS], Fault("", f"and {len(ordered) - MAX_FAULTS} more faults")]


_ELSEWHERE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("gpu", "gpus"), ("placement", "accelerators")),
        **dict.fromkeys(("rank", "ranks"), ("placement", "node_ranks")),
        **dict.fromkeys(("gpu_model", "gpu_type"), ("accelerator_type",)),
        "name": ("label", "node_id"),
        "nodes": ("node_ranks",),
        "group": ("node_group", "label"),
        "python": ("python_interpreter_path",),
        "env": ("env_vars",),
    }
)
"""Words that people use where the language has others, however alike they are to a third: gpu is no cpu."""


def nearest_of(read: str, known: Iterable[str]) -> str:
    """The known word that ``read`` most likely means; empty: none is near."""
    words = list(known)
    if elsewhere := next((word for word in _ELSEWHERE.get(read.lower(), ()) if word in words), ""):
        return elsewhere
    folded = {word.lower().replace("-", "_"): word for word in words}
    found = difflib.get_close_matches(read[:80].lower().replace("-", "_"), list(folded), n=1)
    return folded[found[0]] if found else ""


def unknown(kind: str, read: str, known: Iterable[str], shown: str) -> tuple[str, str]:
    """The sentence about an unknown key or label, and the nearest known one."""
    words = list(known)
    near = nearest_of(read, words)
    if near:
        return f"unknown {kind} {shown}; did you mean {near}?", near
    listed = ", ".join(words[:20]) + (f" and {len(words) - 20} more" if len(words) > 20 else "")
    return f"unknown {kind} {shown}; known are {listed or 'none'}", ""


def _diagnostic(where: Where, message: str, **more: Unpack[_More]) -> Diagnostic:
    said = f"component {where.component}: " if where.component else ""
    if segment := more.get("segment"):
        said += f"segment '{segment}' (column {more['segment_column']}): "
    return Diagnostic(where.field, said + message, where.line, where.column, component=where.component, **more)
