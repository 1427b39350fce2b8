"""Parsed mappings as a tree; values whose text can't be known are marked.

OmegaConf configs are resolved value by value, so that what nobody asks for may stay open.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs.located import path_of, shown, shown_text
from callboard.placement.source.diagnostics import Report, Where
from callboard.placement.source.tree import Budget, Items, Leaf, Table, Value


class MappingReader:
    """Turns Python values into values of the tree."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._budget = Budget()

    def at(self, parsed: object, path: Sequence[str]) -> Value | None:
        """What is at ``path`` below ``parsed``."""
        for depth, key in enumerate(path):
            if not isinstance(parsed, Mapping):
                return None
            name = next((name for name in parsed if str(name) == key), None)
            if name is None:
                return None
            parsed = _inside(parsed, name, path_of(tuple(path[: depth + 1])))
        value = self._value(parsed, tuple(path), len(path))
        return None if isinstance(value, Leaf) and value.null else value

    def _value(self, parsed: object, place: tuple[str | int, ...], depth: int) -> Value:
        where = Where(path_of(place))
        self._budget.take(depth, where)
        if isinstance(parsed, Mapping):
            entries: dict[str, tuple[Leaf, Value]] = {}
            for name in parsed:
                leaf = _scalar(name, where)
                key = replace(leaf, where=Where(path_of((*place, leaf.text))))
                if key.text in entries:
                    self._report.fault(key.where, f"the key {shown_text(key.text)} occurs twice")
                    continue
                entries[key.text] = (key, self._inner(parsed, name, (*place, key.text), depth + 1))
            return Table(tuple(entries.values()), where)
        if isinstance(parsed, Sequence) and not isinstance(parsed, str | bytes):
            inner = [self._inner(parsed, index, (*place, index), depth + 1) for index in range(len(parsed))]
            return Items(tuple(inner), where)
        return _scalar(parsed, where)

    def _inner(self, parsed: Any, name: object, place: tuple[str | int, ...], depth: int) -> Value:
        """One value of a mapping or list. What OmegaConf can't resolve is told where it is read."""
        if not _is_omegaconf(parsed):
            return self._value(parsed[name], place, depth)
        try:
            inner = parsed[name]
        except sys.modules["omegaconf"].errors.OmegaConfBaseException as error:
            return Leaf("", Where(path_of(place)), problem=f"can't be resolved: {str(error).splitlines()[0]}")
        return self._value(inner, place, depth)


def _scalar(parsed: object, where: Where) -> Leaf:
    if parsed is None:
        return Leaf("", where, bare=True, null=True, value=None)
    if isinstance(parsed, str):
        return Leaf(parsed, where, value=parsed)
    if isinstance(parsed, bool):
        return Leaf(str(parsed).lower(), where, bare=True, lost=shown(parsed), value=parsed)
    if isinstance(parsed, int) and parsed.bit_length() <= 128:
        return Leaf(str(parsed), where, bare=True, value=parsed)
    if isinstance(parsed, float):
        return Leaf(repr(parsed), where, bare=True, lost=shown(parsed), value=parsed)
    return Leaf("", where, lost=shown(parsed), value=None)


def _inside(parsed: Mapping[object, object], name: object, field_path: str) -> object:
    """The value of ``name``. An OmegaConf config resolves it here, and nothing else, so the rest may be open."""
    with _resolving(parsed, field_path):
        return parsed[name]


def _is_omegaconf(parsed: object) -> bool:
    return type(parsed).__module__.partition(".")[0] == "omegaconf"


@contextmanager
def _resolving(parsed: object, field_path: str) -> Iterator[None]:
    """Turns OmegaConf's errors into faults. It is never imported here: who has such a config has done so."""
    if not _is_omegaconf(parsed):
        yield
        return
    try:
        yield
    except sys.modules["omegaconf"].errors.OmegaConfBaseException as error:
        raise InvalidInput([Fault(field_path, f"can't be resolved: {str(error).splitlines()[0]}")]) from error
