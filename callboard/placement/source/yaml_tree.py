"""YAML texts as a tree, with ``<<`` merged and ``${…}`` replaced by what it refers to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import yaml

from callboard.model.inputs.located import path_of, shown_text
from callboard.model.inputs.source import composed
from callboard.placement.source.diagnostics import Report, Where
from callboard.placement.source.tree import NULL, WHOLE, Budget, Items, Leaf, Table, Value

MAX_INTERPOLATED = 65_536
"""Longest text that interpolations may grow to."""

_Loader: type = getattr(yaml, "CBaseLoader", yaml.BaseLoader)

_FLOAT = re.compile(r"-?[0-9]+\.[0-9]+(?:[eE][-+]?[0-9]{1,3})?")
_REFERENCE = re.compile(r"\$\{(\.*)([A-Za-z_][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*)\}")
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def composed_text(text: str) -> yaml.MappingNode:
    """The nodes of a YAML text whose scalars have no tags: they stay the text that was written.

    Raises:
        InvalidInput: it is no YAML, too large, too deep, or no mapping.
    """
    return composed(text, _Loader)


class YamlReader:
    """Turns YAML nodes into values."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._budget = Budget()
        # The same mapping is passed on the way to many values; what is wrong with it is told once.
        self._read: dict[int, list[tuple[Leaf, yaml.Node]]] = {}
        self._root: yaml.Node | None = None
        self._resolving: set[str] = set()

    def at(self, root: yaml.Node, path: Sequence[str]) -> Value | None:
        """What is at ``path`` below ``root``, which is the whole file."""
        self._root = root
        node, place = root, ""
        for depth, key in enumerate(path):
            if not isinstance(node, yaml.MappingNode):
                return None
            entries = self._entries(node, place, depth)
            found = next((value for name, value in entries if name.text == key), None)
            if found is None:
                return None
            node, place = found, _inner(place, key)
        value = self._value(node, place, len(path))
        return None if isinstance(value, Leaf) and value.null else value

    def _value(self, node: yaml.Node, place: str, depth: int) -> Value:
        where = _where(node, place)
        self._budget.take(depth, where)
        if isinstance(node, yaml.ScalarNode):
            return self._interpolated(_leaf(node, where)) if "${" in node.value else _leaf(node, where)
        if isinstance(node, yaml.SequenceNode):
            inner = [self._value(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(node.value)]
            return Items(tuple(inner), where)
        assert isinstance(node, yaml.MappingNode)
        entries = [
            (key, self._value(value, _inner(place, key.text), depth + 1))
            for key, value in self._entries(node, place, depth)
        ]
        return Table(tuple(entries), where)

    def _interpolated(self, leaf: Leaf) -> Value:
        """``${a.b}`` as what stands there in the same file, as Hydra would, ``${.b}`` beside it and ``${..b}`` one
        mapping out; anything it can't tell stays as it is."""
        place = leaf.where.field
        where = Where(place, leaf.where.line, leaf.where.column)
        whole = _REFERENCE.fullmatch(leaf.text)
        if whole is not None:
            found = self._referenced(_absolute(whole, place))
            return leaf if found is None else replace(found, where=where)
        text = _REFERENCE.sub(lambda reference: self._text_of(reference, place), leaf.text)
        return Leaf(text, where, value=text) if text != leaf.text and len(text) <= MAX_INTERPOLATED else leaf

    def _text_of(self, reference: re.Match[str], place: str) -> str:
        found = self._referenced(_absolute(reference, place))
        return found.text if isinstance(found, Leaf) and len(found.text) <= MAX_INTERPOLATED else reference[0]

    def _referenced(self, path: str) -> Value | None:
        if self._root is None or not path or path in self._resolving:
            return None  # nowhere, or a circle
        self._resolving.add(path)
        try:
            return self.at(self._root, path.split("."))
        finally:
            self._resolving.discard(path)

    def _entries(self, node: yaml.MappingNode, place: str, depth: int) -> list[tuple[Leaf, yaml.Node]]:
        """Keys and values, with what ``<<`` brings in; a key twice is a fault, whichever reader one has."""
        found = self._read.get(id(node))
        if found is None:
            found = self._read[id(node)] = self._read_entries(node, place, depth)
        else:
            self._budget.take(depth, _where(node, place))
        return found

    def _read_entries(self, node: yaml.MappingNode, place: str, depth: int) -> list[tuple[Leaf, yaml.Node]]:
        own: dict[str, tuple[Leaf, yaml.Node]] = {}
        merged: dict[str, tuple[Leaf, yaml.Node]] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._report.fault(_where(key_node, place), "a key is a mapping or a list, not a text")
                continue
            where = _where(key_node, _inner(place, key_node.value))
            self._budget.take(depth, where)
            key = _leaf(key_node, where)
            if key.bare and key.text == "<<":
                for name, entry in self._merged(value_node, place, depth).items():
                    merged.setdefault(name, entry)
            elif key.text in own:
                first = own[key.text][0].where.line
                self._report.fault(key.where, f"the key {shown_text(key.text)} occurs twice, first in line {first}")
            else:
                own[key.text] = (key, value_node)
        return [*own.values(), *(entry for name, entry in merged.items() if name not in own)]

    def _merged(self, node: yaml.Node, place: str, depth: int) -> dict[str, tuple[Leaf, yaml.Node]]:
        found: dict[str, tuple[Leaf, yaml.Node]] = {}
        for source in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(source, yaml.MappingNode):
                self._report.fault(_where(source, place), "<< needs a mapping")
                continue
            self._budget.take(depth + 1, _where(source, place))
            for key, value in self._entries(source, place, depth + 1):
                found.setdefault(key.text, (key, value))
        return found


def _absolute(reference: re.Match[str], place: str) -> str:
    """The path that is referred to at ``place``; empty: there is none, or a key on the way is no plain word."""
    out, path = len(reference[1]), reference[2]
    if not out:
        return path
    around = place.split(".")
    if "[" in place or out > len(around):
        return ""
    return ".".join((*around[: len(around) - out], path))


def _inner(place: str, key: str) -> str:
    """The path of a key inside the path ``place``, as :func:`path_of` writes it."""
    if not _PLAIN_KEY.fullmatch(key):
        return place + path_of((key,))
    return f"{place}.{key}" if place else key


def _where(node: yaml.Node, place: str) -> Where:
    mark = node.start_mark
    line, column = mark.line, mark.column
    if not isinstance(node, yaml.ScalarNode):
        return Where(place, line + 1, column + 1)
    end = node.end_mark
    quotes = 1 if node.style in ("'", '"') else 0
    exact = end.line == line and end.column - column == len(node.value) + 2 * quotes
    return Where(place, line + 1, column + 1 + (quotes if exact else 0), exact)


def _leaf(node: yaml.ScalarNode, where: Where) -> Leaf:
    text = node.value
    if node.style:  # quoted, or a block
        return Leaf(text, where, value=text)
    null = NULL.fullmatch(text) is not None
    return Leaf(text, where, bare=True, null=null, value=None if null else _value_of(text))


def _value_of(text: str) -> str | int | float | bool:
    """What a bare scalar is for a program: YAML 1.2's own forms alone, everything else is text."""
    if text in ("true", "True", "TRUE"):
        return True
    if text in ("false", "False", "FALSE"):
        return False
    if len(text) <= 40 and WHOLE.fullmatch(text):
        return int(text)
    if len(text) <= 32 and _FLOAT.fullmatch(text):
        return float(text)
    return text
