"""YAML (and so JSON) as a mapping that remembers its lines and columns.

Duplicate keys are refused: plain YAML readers let the last one win, silently.

PyYAML and its marks, and not ruamel.yaml: 2000 jobs (227 KiB) take that 1.6 s of CPU to compose, PyYAML 0.9 s and
libyaml 0.1 s (load 14); and of 16 YAML files in examples and tests, loading and dumping changes the bytes of nine.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs.located import OddNumber, Place, path_of, shown_text

MAX_TEXT_BYTES = 4 << 20
"""Largest file."""

MAX_NODES = 200_000
"""Most values of a file, aliases counted each time they are used (ten lines of them can mean a thousand million)."""

MAX_DEPTH = 64
"""Deepest nesting of a file; constructor arguments have the same bound."""

# A composer recurses, libyaml's in C; this many openings would need a stack that nobody has.
_MAX_OPEN = 1000

_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")

_ODD_NUMBER = re.compile(r"[-+]?(?:0[0-9_]+|[0-9_]+(?::[0-9]+)+)")
"""An integer in base 8 or 60, where most who write it mean another."""

_POWER_OF_TEN = re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+")
"""A number such as 1e3, which is a text in YAML 1.1, and a number for OmegaConf and YAML 1.2."""

_LINE_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")
"""What ends a line for YAML."""

_UNCLOSED = "unexpected end of stream"

_USUALLY = tuple(
    (re.compile(said), usual)
    for said, usual in (
        (
            "mapping values are not allowed",
            "a text with ': ' in it or ':' at its end needs quotes; an indented key, a key without a value above it",
        ),
        ("sequence entries are not allowed", "the items of a list begin on lines of their own"),
        (
            "expected (<block end>|key|'-')",
            "this line is indented like none above it, or a text goes on behind its closing quote",
        ),
        ("a single document", "a file holds one: write each document into a file of its own, without ---"),
        ("<document start>", "the mapping above has ended: a bracket is too many, or a second document begins"),
        ("could not find expected ':'", "a key needs ': ' behind it, and a text of several lines needs quotes"),
        ("found undefined alias", "an alias repeats what an anchor (&) of that name marks above it in the same file"),
        ("alphabetic or numeric|cannot start|node content", "a text that begins with this character needs quotes"),
        (_UNCLOSED, "the quote that stands here is closed nowhere"),
        ("unknown escape", "in double quotes write two backslashes for one, or use single quotes"),
        ("expected ',' or", "a comma or a closing bracket is missing before this, or the quotes of a text"),
    )
)
"""What a reader of YAML says, and what usually lies behind it."""

Positions = dict[Place, tuple[int, int]]


class SourceMapping(dict[str, Any]):
    """A mapping that was read from a file; ``job_spec`` and its neighbours locate faults with it.

    Attributes:
        text: the whole file.
    """

    def __init__(self, values: dict[str, Any], positions: Positions, text: str = "") -> None:
        super().__init__(values)
        self._positions = positions
        self.text = text

    @classmethod
    def like(cls, other: SourceMapping, values: dict[str, Any]) -> SourceMapping:
        """Other values that stand where those of ``other`` do."""
        return cls(values, other._positions, other.text)

    def position(self, place: Place) -> tuple[int, int]:
        """Line and column, from 1, of ``place`` or of the nearest thing around it that was written."""
        found: Place = ()
        for part in place:
            # A number may be an item's index, or a key, which was noted as its text.
            inner = next((known for known in ((*found, part), (*found, str(part))) if known in self._positions), None)
            if inner is None:
                break
            found = inner
        return self._positions.get(found, (1, 1))


def composed(text: str, loader: type = yaml.SafeLoader) -> yaml.MappingNode:
    """The nodes of a YAML or JSON text, each with its marks.

    Args:
        loader: PyYAML's, for the tags and the speed that the caller needs.

    Raises:
        InvalidInput: no YAML, no mapping, several documents, too large or too deep; with line and column.
    """
    if len(text.encode("utf-8", "replace")) > MAX_TEXT_BYTES:
        raise InvalidInput([Fault("", f"the file is larger than {MAX_TEXT_BYTES} bytes")])
    if text.count("[") + text.count("{") > _MAX_OPEN and _flow_depth(text) > _MAX_OPEN:
        raise InvalidInput([Fault("", f"nested deeper than {MAX_DEPTH}")])
    with _refusing(text):
        node = yaml.compose(text, Loader=loader)
    if node is None:
        raise InvalidInput([Fault("", "the file is empty", 1, 1)])
    if not isinstance(node, yaml.MappingNode):
        what = "a list" if isinstance(node, yaml.SequenceNode) else shown_text(node.value)
        raise InvalidInput([Fault("", f"the file holds {what}, not a mapping", 1, 1)])
    return node


def read_yaml(text: str, *, ours: bool = True, odd: bool | None = None) -> SourceMapping:
    """The mapping that a YAML or JSON text holds.

    Args:
        ours: it is a file of callboard's, of whose numbers those that may be misread are marked as an
            :class:`OddNumber`; else a config of others, who read it themselves.
        odd: whether those are marked all the same; None: where it is ours.

    Raises:
        InvalidInput: what :func:`composed` refuses, a key twice, or too many values; with line and column.
    """
    reader = _Reader(ours, ours if odd is None else odd)
    node = composed(text)
    with _refusing(text):
        values = reader.value(node, ())
    if reader.faults:
        raise InvalidInput(reader.faults)
    return SourceMapping(values, reader.positions, text)


def why_unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Why the text of a file can't be had, as the end of a sentence."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text; save it as UTF-8"
    return error.strerror or str(error)


@contextmanager
def _refusing(text: str) -> Iterator[None]:
    """What PyYAML raises becomes a fault of the text."""
    try:
        yield
    except yaml.MarkedYAMLError as error:
        raise InvalidInput([_syntax_fault(error, text)]) from None
    except RecursionError:
        raise InvalidInput([Fault("", f"nested deeper than {MAX_DEPTH}")]) from None
    except InvalidInput:
        raise
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a lone surrogate
        said = Fault("", f"no YAML: {' '.join(str(error).split())[:200]}", 1, 1)
        raise InvalidInput([_unreadable(text) or said]) from None


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


class _Reader:
    """Turns nodes into values once, noting where each was and what is wrong."""

    def __init__(self, ours: bool, odd: bool) -> None:
        self._ours = ours
        self._odd = odd
        # Of scalars; no tag can name a Python object.
        self._constructor = yaml.constructor.SafeConstructor()
        self._seen = 0
        self.faults: list[Fault] = []
        self.positions: Positions = {}

    def value(self, node: yaml.Node, place: Place) -> Any:
        """What ``node`` stands for."""
        self._seen += 1
        if self._seen > MAX_NODES:
            raise _refused(node, f"more than {MAX_NODES} values")
        if len(place) > MAX_DEPTH:
            raise _refused(node, f"nested deeper than {MAX_DEPTH}")
        self.positions.setdefault(place, _position(node))
        if isinstance(node, yaml.CollectionNode) and node.tag not in _PLAIN_TAGS:
            raise _refused(node, f"the tag {node.tag} is not allowed")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*place, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[Any, Any]:
        own: dict[Any, Any] = {}
        merged: dict[Any, Any] = {}
        places: dict[Any, Place] = {}  # 1, 1.0 and true are one key, whose place is that of the first
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                merged = {**self._merged(value_node, place), **merged}
                continue
            key = self._scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if key is None or not isinstance(key, Hashable):
                self.faults.append(Fault(path_of(place), "a key is not a text", *_position(key_node)))
                continue
            inner = (*place, key if isinstance(key, str) else str(key))
            if key in own:
                first = self.positions[places[key]][0]
                said = shown_text(str(key))
                message = f"the key {said} occurs twice, first in line {first}"
                self.faults.append(Fault(path_of(inner), message, *_position(key_node)))
                continue
            self.positions[inner] = _position(key_node)
            places[key] = inner
            own[key] = self.value(value_node, inner)
        return {**merged, **own}

    def _merged(self, node: yaml.Node, place: Place) -> dict[Any, Any]:
        """What ``<<:`` brings in: of several mappings the first that has a key wins."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[Any, Any] = {}
        for source in sources:
            found = self.value(source, place)
            if not isinstance(found, dict):
                self.faults.append(Fault(path_of(place), "<< needs a mapping", *_position(source)))
                continue
            merged = {**found, **merged}
        return merged

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            value = self._constructor.construct_object(node)
        except (ValueError, OverflowError):  # the date 2024-13-01, an int of 5000 digits
            kind = node.tag.rpartition(":")[2]
            what = f"{shown_text(node.value)} can't be read as {'a date' if kind == 'timestamp' else kind}"
            raise _refused(node, f"{what}; put it in quotes if it is meant as a text") from None
        if not self._ours and node.style is None and _POWER_OF_TEN.fullmatch(node.value):
            return float(node.value)
        if self._odd and type(value) is int and _ODD_NUMBER.fullmatch(node.value):
            return OddNumber.of(node.value, value)
        return value


def _refused(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)


def _position(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _syntax_fault(error: yaml.MarkedYAMLError, text: str) -> Fault:
    """What a reader of YAML could not make sense of, and where; with what usually lies behind it."""
    problem = " ".join(part for part in (error.context, error.problem) if part)
    at_its_begin = _UNCLOSED in problem and error.context_mark is not None
    mark = error.context_mark if at_its_begin else error.problem_mark or error.context_mark
    if mark is None:
        return Fault("", f"no YAML: {problem}")
    lines = _LINE_BREAK.split(text)
    line = lines[mark.line] if mark.line < len(lines) else ""
    if line[mark.column : mark.column + 1] == "\t":
        problem += "; a tab stands here, and YAML indents with spaces"
    else:
        problem += next((f"; {usual}" for said, usual in _USUALLY if said.search(problem)), "")
    return Fault("", f"no YAML: {problem}", mark.line + 1, mark.column + 1)


def _unreadable(text: str) -> Fault | None:
    """The first character that no YAML may hold; None if there is none."""
    found = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if found is None:
        return None
    lines = _LINE_BREAK.split(text[: found.start()])
    message = (
        f"no YAML: the character {shown_text(found[0])} is not allowed in it; leave it out, or escape it in quotes"
    )
    return Fault("", message, len(lines), len(lines[-1]) + 1)
