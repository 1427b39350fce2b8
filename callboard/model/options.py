"""Options of a program: each is declared once, with the field of a dataclass that it sets.

The end of a field's name is its unit (``lease_ms``, ``memory_bytes``): it says how the option is read, and written as a
default. Nothing here knows a command line; :mod:`callboard.cli.options` makes one of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from callboard.model.durations import format_duration_ms, parse_duration_ms
from callboard.model.frozen import dataclass
from callboard.model.quantities import format_memory, format_milli, parse_memory, parse_milli


class OptionError(ValueError):
    """An option that can't be used as given.

    Attributes:
        option: its name as on the command line, or of the field.
        why: what is wrong and what to do, as sentences.
    """

    def __init__(self, option: str, why: str) -> None:
        super().__init__(f"{option}: {why}")
        self.option = option
        self.why = why


class Unit(NamedTuple):
    """How an amount is read and written, and what the help calls it."""

    read: Callable[[str], Any]
    write: Callable[[Any], str]
    metavar: str


UNITS = MappingProxyType(
    {
        "ms": Unit(parse_duration_ms, format_duration_ms, "TIME"),
        "s": Unit(lambda text: parse_duration_ms(text) / 1000, lambda s: format_duration_ms(round(s * 1000)), "TIME"),
        "bytes": Unit(parse_memory, format_memory, "SIZE"),
        "milli": Unit(parse_milli, format_milli, "N"),
    }
)
_BARE = re.compile(f"_({'|'.join(UNITS)})$")


@dataclass(frozen=True, slots=True)
class Option:
    """What a command line says of a field.

    Attributes:
        help: one sentence; empty: whoever offers it says more of it.
        flags: how it is written; none: as the field's name without its unit.
        metavar: what its value is called; empty: as the unit says.
        bounds: lowest and highest number.
        written: default as it is written, of a text that whoever offers the option reads; None: the field's default.
        shown: whether the help shows the default.
        hidden: it is for programs, and not in the help.
    """

    help: str = ""
    flags: tuple[str, ...] = ()
    metavar: str = ""
    bounds: tuple[int | None, int | None] = (None, None)
    written: str | None = None
    shown: bool = True
    hidden: bool = False


def option(default: Any, help: str = "", *flags: str, **says: Any) -> Any:  # noqa: A002 - as Option calls it
    """A field of a dataclass with its default, or what makes it, and its option; the rest as for :class:`Option`."""
    metadata = {"option": Option(help, flags, **says)}
    return (
        field(default_factory=default, metadata=metadata)
        if callable(default)
        else field(default=default, metadata=metadata)
    )


@dataclass(frozen=True, slots=True)
class Declared:
    """A field with its option.

    Attributes:
        default: of the field; None where it has none, or makes one.
    """

    name: str
    kind: Any
    option: Option
    default: Any

    @property
    def unit(self) -> Unit | None:
        """Its unit, if its name ends in one."""
        return UNITS.get(self.name.rpartition("_")[2]) if "_" in self.name else None

    @property
    def flags(self) -> tuple[str, ...]:
        """How it is written."""
        return self.option.flags or (f"--{_BARE.sub('', self.name).replace('_', '-')}",)


@cache
def declared(kind: type) -> Mapping[str, Declared]:
    """The options of a dataclass by field, in its order; a field that declares none has one without help."""
    names = vars(sys.modules[kind.__module__])
    found = {}
    for each in fields(kind):
        says = each.metadata.get("option", Option())
        # One type at a time: those of fields without help need not be imported.
        of_field = eval(str(each.type), dict(names)) if says.help else None  # noqa: S307 - the class says so itself
        found[each.name] = Declared(each.name, of_field, says, None if each.default is MISSING else each.default)
    return MappingProxyType(found)


def as_declared(kind: type, field_name: str) -> Any:
    """A field with the default and the option of another dataclass's field."""
    one = declared(kind)[field_name]
    return field(default=one.default, metadata={"option": one.option})


def option_of(kind: type, field_name: str) -> str:
    """The option that sets a field of a dataclass."""
    return declared(kind)[field_name].flags[0]
