"""Declarations of fields: what is written beside a field of a spec, and everything else follows from it.

A spec is a frozen dataclass. The type of a field that people or messages state carries a :class:`Kind` (its unit,
bounds and spelling) and, where its names differ from the usual ones, a :class:`Written`::

    grace_ms: Annotated[int, duration(0, DAY_MS)] | None = None

From that the readers of files and messages (:mod:`callboard.model.inputs.reading`, :mod:`callboard.wire.schema`), the
writers of both (:mod:`callboard.model.describe`, :mod:`callboard.wire.schema`) and the journal are derived. A field is
added in two places: here and in the proto, under the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

P = ParamSpec("P")
R = TypeVar("R")


def once(made: Callable[P, R]) -> Callable[P, R]:
    """``functools.cache`` with the types of the function, for what is made of a class when it is first needed."""
    return cache(made)  # type: ignore[return-value]  # classes are hashable, though mypy doubts it


class Form(StrEnum):
    """How a value lies in a message, where that isn't a plain field."""

    PLAIN = "PLAIN"
    EXACT = "EXACT"
    """An integer in the base unit that the name of the field ends with."""
    WORD = "WORD"
    JSON = "JSON"
    PAIRS = "PAIRS"
    """A map for a sorted tuple of pairs."""
    AMOUNTS = "AMOUNTS"
    SHAPES = "SHAPES"
    """A list of amounts."""
    QUOTA = "QUOTA"
    """Amounts, and beside them the names of those that are limited."""
    DEVICES = "DEVICES"
    RULES = "RULES"
    NAMES = "NAMES"
    """Names in a message of their own, so that none of them differs from "not stated"."""
    PART = "PART"
    PARTS = "PARTS"


class Secrecy(StrEnum):
    """Which values of variables are masked where they are shown (SE-04)."""

    NONE = "NONE"
    BY_NAME = "BY_NAME"
    ALL = "ALL"


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What a field may hold, and how it is written.

    Attributes:
        read: what people write → the value; raises ``Refused`` or ``Misfits``.
        show: the value → what people write.
        form: how messages carry it.
        unsaid: value that is not written, neither for people nor in messages.
        words: the enum that it is a word of.
        secrecy: which of its values are masked.
        part: the spec that it is, or that it is a list of.
        most: bound of such a list.
        what: example of such a list, for messages.
        whole: whether a part is described with its defaults.
    """

    read: Callable[[Any], Any] = lambda value: value
    show: Callable[[Any], Any] = lambda value: value
    form: Form = Form.PLAIN
    unsaid: Any = None
    words: type[StrEnum] | None = None
    secrecy: Secrecy = Secrecy.NONE
    part: type | None = None
    most: int = 0
    what: str = ""
    whole: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """Where a field is written, as far as its name doesn't say.

    Attributes:
        key: key that people write; with a dot: in a mapping of that name. None: the name without its unit.
        field: field of the message; None: the name.
        limited: field of the message with the names of what is limited.
        unsaid: in place of its kind's, unless it is ``...``.
        always: described even where it is the default.
        needed: must be stated where the mapping is that it is written in.
    """

    key: str | None = None
    field: str | None = None
    limited: str = ""
    unsaid: Any = ...
    always: bool = False
    needed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Declared:
    """One field, with everything that its declaration says."""

    name: str
    keys: tuple[str, ...]
    """Its key, and before it the key of the mapping that it is written in."""
    field: str
    kind: Kind
    default: Any
    """``MISSING`` for a field that must be stated."""
    written: Written

    @property
    def key(self) -> str:
        """Its key, with a dot behind that of the mapping that it is written in."""
        return ".".join(self.keys)


ANY = Kind()
"""Whatever it is."""


def part(spec: type, *, unsaid: Any = None, whole: bool = False) -> Kind:
    """A spec inside another."""
    return Kind(form=Form.PART, part=spec, unsaid=unsaid, whole=whole)


def parts(spec: type, most: int, what: str) -> Kind:
    """A list of at most ``most`` specs; described without their defaults."""
    return Kind(form=Form.PARTS, part=spec, most=most, what=what)


_SUFFIXES = {Form.EXACT: ("_ms", "_milli"), Form.JSON: ("_json",)}


@once
def declared_in(cls: type) -> tuple[Declared, ...]:
    """The fields of a class that say what they are, in its order. Others (``zero_resources``) belong to the program."""
    if is_dataclass(cls):
        defaults = {each.name: each.default for each in fields(cls)}
    else:
        defaults = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
    found = []
    for name, hint in get_type_hints(cls, include_extras=True).items():
        marks = _marks(hint)
        kind = next((mark for mark in marks if isinstance(mark, Kind)), None)
        if kind is None:
            continue
        written = next((mark for mark in marks if isinstance(mark, Written)), Written())
        key = written.key
        if key is None:
            suffix = next((end for end in _SUFFIXES.get(kind.form, ()) if name.endswith(end)), "")
            key = name.removesuffix(suffix)
        if written.unsaid is not ...:
            kind = replace(kind, unsaid=written.unsaid)
        found.append(
            Declared(name, tuple(key.split(".")), written.field or name, kind, defaults.get(name, MISSING), written)
        )
    return tuple(found)


def _marks(hint: Any) -> list[Any]:
    """What ``Annotated`` says of a type or of one side of ``… | None``, outermost first."""
    marks = list(getattr(hint, "__metadata__", ()))
    if marks:
        return marks + _marks(hint.__origin__)
    # A tuple's items are its kind's matter.
    return [mark for side in get_args(hint) for mark in _marks(side)] if type(None) in get_args(hint) else []
