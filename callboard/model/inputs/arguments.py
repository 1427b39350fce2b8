"""Constructor arguments: what JSON says the same way everywhere, up to 1 MiB.

They stay text on the way to the worker: ``google.protobuf.Struct`` would turn 4 into 4.0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Annotated, Any

from callboard.model.inputs.located import Misfit, Place, Refused, raise_any, shown
from callboard.model.inputs.scalars import JsonText
from callboard.model.schema import Form, Kind

MAX_ARGUMENTS_BYTES = 1 << 20
"""Largest ``args_json`` or ``kwargs_json``."""

MAX_DEPTH = 64
"""Deepest nesting of constructor arguments."""

_MOST_BITS = 4096  # Python itself refuses to read or write ints of more than 4300 digits


def arguments(kind: type[list[Any] | dict[str, Any]]) -> Kind:
    """Constructor arguments, plain values or :class:`JsonText`, as JSON text. Text from a message stays as it is."""
    what = "a list" if kind is list else "a mapping"

    def read(value: object) -> str:
        if isinstance(value, JsonText):
            written, parsed = value.text, _parsed_json(value.text)
        else:
            written, parsed = "", value
        if not isinstance(parsed, list | tuple if kind is list else dict):
            raise Refused(f"{shown(parsed)} is not {what}; write {'[1, two]' if kind is list else '{lr: 0.1}'}")
        misfits = list(_unfit(parsed, ()))
        raise_any(misfits)
        written = written or json.dumps(parsed, separators=(",", ":"), allow_nan=False)
        size_bytes = len(written.encode())
        if size_bytes > MAX_ARGUMENTS_BYTES:
            raise Refused(f"{size_bytes} bytes of JSON are too many; {MAX_ARGUMENTS_BYTES} are allowed")
        return written

    return Kind(read, show=json.loads, form=Form.JSON)


def _parsed_json(written: str) -> object:
    if len(written) > MAX_ARGUMENTS_BYTES:
        raise Refused(f"{len(written)} characters of JSON are too many; {MAX_ARGUMENTS_BYTES} bytes are allowed")
    try:
        found: object = json.loads(written, object_pairs_hook=_distinct)
    except RecursionError:
        raise Refused(f"the JSON is nested deeper than {MAX_DEPTH}") from None
    except json.JSONDecodeError as error:
        raise Refused(f"no JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    return found


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Refused("a key of the JSON occurs twice in one object")
    return found


def _unfit(value: object, place: Place) -> Iterator[Misfit]:
    """What JSON can't say the same way everywhere."""
    if len(place) > MAX_DEPTH:
        yield Misfit(place[:8], f"nested deeper than {MAX_DEPTH}")
    elif isinstance(value, float) and not math.isfinite(value):
        yield Misfit(place, f"{value} is not a finite number; JSON has no such value")
    elif isinstance(value, str):
        if any("\ud800" <= char <= "\udfff" for char in value):
            yield Misfit(place, "the text has half of a surrogate pair, which no message can carry")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _unfit(item, (*place, index))
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str):
                yield from _unfit(item, (*place, key))
            else:
                yield Misfit(place, f"the key {shown(key)} is not a text")
    elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
        yield Misfit(place, "the number has too many digits")
    elif not (value is None or isinstance(value, bool | int | float)):
        yield Misfit(
            place, f"{shown(value)} is not a JSON value; use null, true, false, numbers, texts, lists, mappings"
        )


ArgsJson = Annotated[str, arguments(list)]
KwargsJson = Annotated[str, arguments(dict)]
