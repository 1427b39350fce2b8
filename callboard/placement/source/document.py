"""A document: a YAML text, a mapping or an OmegaConf config as one tree that is read piece by piece.

OmegaConf configs are resolved value by value, so that what nobody asks for may stay open.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs.located import path_of, shown, shown_text
from callboard.placement.source.diagnostics import Report, Where
from callboard.placement.source.tree import Budget, Items, Leaf, Table, Value
from callboard.placement.source.yaml_tree import YamlReader, composed_text


class Document:
    """An input that is read piece by piece: only what is asked for is looked at."""

    def __init__(self, reader: YamlReader | MappingReader, root: Any) -> None:
        self._reader = reader
        self._root = root

    def value(self, *path: str) -> Value | None:
        """What is at ``path``; None when nothing is."""
        return self._reader.at(self._root, path)


def open_document(source: object, report: Report) -> Document:
    """The document of a YAML text, a mapping or an OmegaConf config.

    Raises:
        InvalidInput: the text is no YAML, or ``source`` is not a mapping.
    """
    if isinstance(source, str):
        return Document(YamlReader(report), composed_text(source))
    if isinstance(source, Mapping):
        return Document(MappingReader(report), source)
    raise InvalidInput([Fault("", f"{shown(source)} is not a placement config; give a YAML text or a mapping")])


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
            parsed, problem = _item(parsed, name)
            if problem:
                raise InvalidInput([Fault(path_of(tuple(path[: depth + 1])), problem)])
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
        inner, problem = _item(parsed, name)
        return Leaf("", Where(path_of(place)), problem=problem) if problem else self._value(inner, place, depth)


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


def _item(parsed: Any, name: object) -> tuple[Any, str]:
    """A value of a mapping or list, and why OmegaConf can't resolve it; empty: it can. OmegaConf is never imported
    here: who has such a config has done so."""
    if type(parsed).__module__.partition(".")[0] != "omegaconf":
        return parsed[name], ""
    try:
        return parsed[name], ""
    except sys.modules["omegaconf"].errors.OmegaConfBaseException as error:
        return None, f"can't be resolved: {str(error).splitlines()[0]}"
