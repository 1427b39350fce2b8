"""What did the user write, and where? YAML, mappings and OmegaConf configs as one tree of texts.

Scalars of a file stay the text they were written as. YAML 1.1 reads ``1:0`` as 60, ``010`` as 8 and ``on`` as true;
which of these was meant can't be told from the result, so nothing is ever converted here. In a mapping that somebody
parsed already, a value that can't be turned back into its text is marked as lost.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import yaml

from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs.located import path_of, shown, shown_text
from callboard.model.inputs.source import syntax_fault, unreadable
from callboard.placement.diagnostics import Report, Where

MAX_TEXT_BYTES = 4 << 20
"""Largest file."""

MAX_VALUES = 200_000
"""Most values that are read of one input, aliases counted each time they are used."""

MAX_INTERPOLATED = 65_536
"""Longest text that interpolations may grow to."""

MAX_DEPTH = 32
"""Deepest nesting that is read."""

# libyaml's composer recurses in C; this many openings would need a stack that nobody has.
_MAX_OPEN = 1000

_Loader: type = getattr(yaml, "CBaseLoader", yaml.BaseLoader)

# What YAML 1.1 (PyYAML) or OmegaConf make of a bare scalar, other than its text.
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"yes|no|true|false|on|off", re.IGNORECASE)
_WHOLE = re.compile(r"0|-?[1-9][0-9]*")
_ODD_NUMBER = re.compile(
    r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]+|[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?"
    r"|[0-9][0-9_]*|(?:[0-9][0-9_]*)?\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+"
    r"|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))"
)
_FLOAT = re.compile(r"-?[0-9]+\.[0-9]+(?:[eE][-+]?[0-9]{1,3})?")
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*)\}")
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:[Tt\s].*)?")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A scalar.

    Attributes:
        text: what was written; of a parsed mapping the text that gives this value.
        where: its place.
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
    if _NULL.fullmatch(text):
        return "nothing"
    if _BOOL.fullmatch(text):
        return "true or false"
    if _WHOLE.fullmatch(text):
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


class _Budget:
    """Counts values, so that a few aliases can't mean a thousand million."""

    def __init__(self) -> None:
        self.left = MAX_VALUES

    def take(self, depth: int, where: Where) -> None:
        self.left -= 1
        if self.left < 0:
            raise InvalidInput([Fault(where.field, f"more than {MAX_VALUES} values", where.line, where.column)])
        if depth > MAX_DEPTH:
            raise InvalidInput([Fault(where.field, f"nested deeper than {MAX_DEPTH}", where.line, where.column)])


class Document:
    """An input that is read piece by piece: only what is asked for is looked at."""

    def __init__(self, reader: _YamlReader | _MappingReader, root: Any) -> None:
        self._reader = reader
        self._root = root

    def value(self, *path: str) -> Value | None:
        """What is at ``path``; None when nothing is."""
        return self._reader.at(self._root, path)


def open_document(source: object, report: Report) -> Document:
    """The document of a YAML text, a mapping or an OmegaConf config.

    Raises:
        InvalidInput: the text is no YAML, or ``source`` is no mapping.
    """
    if isinstance(source, str):
        return Document(_YamlReader(report), composed(source))
    if isinstance(source, Mapping):
        return Document(_MappingReader(report), source)
    raise InvalidInput([Fault("", f"{shown(source)} is no placement config; give a YAML text or a mapping")])


def composed(text: str) -> yaml.Node:
    """The nodes of a YAML text.

    Raises:
        InvalidInput: it is no YAML, too large, too deep, or no mapping.
    """
    if len(text.encode("utf-8", "replace")) > MAX_TEXT_BYTES:
        raise InvalidInput([Fault("", f"the file is larger than {MAX_TEXT_BYTES} bytes")])
    if text.count("[") + text.count("{") > _MAX_OPEN and _flow_depth(text) > _MAX_OPEN:
        raise InvalidInput([Fault("", f"nested deeper than {_MAX_OPEN}")])
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise InvalidInput([syntax_fault(error, text)]) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a lone surrogate, which UTF-8 can't carry
        said = Fault("", f"no YAML: {' '.join(str(error).split())[:200]}", 1, 1)
        raise InvalidInput([unreadable(text) or said]) from None
    except RecursionError:
        raise InvalidInput([Fault("", f"nested deeper than {_MAX_OPEN}")]) from None
    if node is None:
        raise InvalidInput([Fault("", "the file is empty", 1, 1)])
    if not isinstance(node, yaml.MappingNode):
        what = "a list" if isinstance(node, yaml.SequenceNode) else shown_text(node.value)
        raise InvalidInput([Fault("", f"the file holds {what}, not a mapping", 1, 1)])
    return node


def _flow_depth(text: str) -> int:
    """An upper bound of the nesting of brackets: those in quotes count too."""
    deepest = depth = 0
    for char in text:
        if char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth = max(0, depth - 1)
    return deepest


class _YamlReader:
    """Turns YAML nodes into values."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._budget = _Budget()
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
        """``${a.b}`` as what stands there in the same file, as Hydra would; anything it can't tell stays as it is."""
        where = Where(leaf.where.field, leaf.where.line, leaf.where.column)
        whole = _REFERENCE.fullmatch(leaf.text)
        if whole is not None:
            found = self._referenced(whole[1])
            return leaf if found is None else replace(found, where=where)
        text = _REFERENCE.sub(self._text_of, leaf.text)
        return Leaf(text, where, value=text) if text != leaf.text and len(text) <= MAX_INTERPOLATED else leaf

    def _text_of(self, reference: re.Match[str]) -> str:
        found = self._referenced(reference[1])
        return found.text if isinstance(found, Leaf) and len(found.text) <= MAX_INTERPOLATED else reference[0]

    def _referenced(self, path: str) -> Value | None:
        if self._root is None or path in self._resolving:
            return None  # a circle
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
    null = _NULL.fullmatch(text) is not None
    return Leaf(text, where, bare=True, null=null, value=None if null else _value_of(text))


def _value_of(text: str) -> str | int | float | bool:
    """What a bare scalar is for a program: YAML 1.2's own forms alone, everything else is text."""
    if text in ("true", "True", "TRUE"):
        return True
    if text in ("false", "False", "FALSE"):
        return False
    if len(text) <= 40 and _WHOLE.fullmatch(text):
        return int(text)
    if len(text) <= 32 and _FLOAT.fullmatch(text):
        return float(text)
    return text


class _MappingReader:
    """Turns Python values into values of the tree."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._budget = _Budget()

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
