"""Located faults: faults with their place, before they are turned into text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from callboard.model.frozen import dataclass

T = TypeVar("T")

Place = tuple[str | int, ...]
"""Keys and indices from the top of an input: ``("components", 0, "resources", "gpu")``."""

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_LONGEST_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Misfit:
    """One fault: its place, relative to what was validated, and one sentence."""

    place: Place
    message: str


class Refused(ValueError):
    """A value is refused; the text says what was read and what is allowed."""


class OddNumber(int):
    """A number that YAML reads in another base than people do: ``1:30`` is 90 and ``010`` is 8.

    Attributes:
        written: the text in the file.
    """

    written = ""

    @classmethod
    def of(cls, written: str, value: int) -> OddNumber:
        """What was ``written``, which YAML reads as ``value``."""
        made = cls(value)
        made.written = written
        return made

    @property
    def why(self) -> str:
        """Why nobody takes it."""
        base = "pairs in base 60" if ":" in self.written else "a number with a leading 0 in base 8"
        return f"{self.written} is {int(self)} here, for YAML reads {base}; write {int(self)} if that is meant"


class Misfits(ValueError):
    """Several faults of one value, for validators that look into it."""

    def __init__(self, found: Sequence[Misfit]) -> None:
        super().__init__("; ".join(misfit.message for misfit in found))
        self.found = tuple(found)


def each(place: str | int, read: Callable[[Any], T], value: object, misfits: list[Misfit]) -> T | None:
    """``value`` as ``read`` reads it, or None with its faults added to ``misfits``, placed at ``place``."""
    try:
        return read(value)
    except Misfits as error:
        misfits.extend(Misfit((place, *misfit.place), misfit.message) for misfit in error.found)
    except ValueError as error:
        misfits.append(Misfit((place,), str(error)))
    return None


def raise_any(misfits: list[Misfit]) -> None:
    """Raises :class:`Misfits` if there are some."""
    if misfits:
        raise Misfits(misfits)


def path_of(place: Place) -> str:
    """``("labels", "a.b")`` → ``labels["a.b"]``; ``("components", 0, "name")`` → ``components[0].name``."""
    text = ""
    for part in place:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _PLAIN_KEY.fullmatch(part):
            text += f".{part}" if text else part
        else:
            text += "[" + shown_text(part, quote='"') + "]"
    return text


def shown(value: object) -> str:
    """What was read, for a message: short, on one line, with its kind where the value alone would not tell."""
    if isinstance(value, str):
        return shown_text(value)
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"{str(value).lower()} (true or false)"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of many digits"  # str() of a very large int raises
    if isinstance(value, int | float):
        return str(value)
    return f"a {type(value).__name__}"


def shown_text(text: str, *, quote: str = "'") -> str:
    """``text`` quoted, with control characters escaped and the middle left out when it is long."""
    if len(text) > _LONGEST_SHOWN:
        text = f"{text[:40]}…{text[-10:]}"
    escaped = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return f"{quote}{escaped}{quote}"


def order_in(source: object, place: Place) -> tuple[int, ...]:
    """Sort key of ``place`` by the order in which ``source`` was written."""
    order: list[int] = []
    for part in place:
        if isinstance(source, Mapping) and part in source:
            order.append(list(source).index(part))
            source = source[part]
        elif isinstance(source, list | tuple) and isinstance(part, int) and part < len(source):
            order.append(part)
            source = source[part]
        else:
            break
    return tuple(order)


def as_mapping(value: Any) -> Any:
    """A request of the SDK as its mapping; anything else as it is."""
    to_mapping = getattr(value, "to_mapping", None)
    return to_mapping() if callable(to_mapping) else value
