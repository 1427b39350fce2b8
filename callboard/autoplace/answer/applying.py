"""A placement written into a user's own file: these lines change, and every other byte stays.

The places come from the YAML parser's marks, the changes are made in the text. A library that reads and writes whole
documents would keep comments too, but not line breaks, quotes, spaces, or how numbers and nulls are written. The result
is read again and compared with what was meant before anybody sees it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import yaml

from callboard.autoplace.problem.plan import PlacementValue
from callboard.model.faults import Fault, InvalidInput
from callboard.model.frozen import dataclass
from callboard.model.inputs import read_yaml

_BARE_PLACEMENT = re.compile(r"all|[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*", re.IGNORECASE)
_BARE_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
BYTE_ORDER_MARK = "\ufeff"
_YAML_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def section_text(
    num_nodes: int, placement: Mapping[str, PlacementValue], groups: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The ``cluster`` section to paste, as YAML, with the node groups that its placements name."""
    lines = ["cluster:", f"  num_nodes: {num_nodes}"]
    if groups:
        flow = (yaml.safe_dump(dict(group), default_flow_style=True, sort_keys=False, width=10**6) for group in groups)
        lines += ["  node_groups:", *(f"    - {group.strip()}" for group in flow)]
    lines.append("  component_placement:")
    lines += [f"    {_key(key)}: {_value(value)}" for key, value in placement.items()]
    return "\n".join(lines) + "\n"


def with_placement(text: str, num_nodes: int, placement: Mapping[str, PlacementValue]) -> str:
    """``text``, a YAML file, with this placement below ``cluster``; everything else is as it was, byte for byte.

    An entry whose components stay together keeps its line and gets its new value. Comments of an entry that goes, those
    right above it included, move to the entry that places its components now.

    Args:
        num_nodes: nodes of the cluster that the placement is for.
        placement: by component names joined with commas.

    Raises:
        InvalidInput: it is no YAML, or the section is what an alias elsewhere stands for, or written in a way that
            can't be changed.
    """
    before = read_yaml(text, ours=False)
    mark = BYTE_ORDER_MARK if text.startswith(BYTE_ORDER_MARK) else ""
    body = text.removeprefix(mark)
    root = yaml.compose(body, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode), "read_yaml refuses anything else"
    editor = _Editor(body, tuple(_aliases(body)))
    cluster = before.get("cluster")
    stated = cluster.get("component_placement") if isinstance(cluster, Mapping) else None
    _change(editor, root, num_nodes, placement, stated if isinstance(stated, Mapping) else {})
    after = mark + editor.result()
    _verify(before, after, num_nodes, placement)
    return after


@dataclass(slots=True)
class _Editor:
    """Replacements in a text, applied together.

    Attributes:
        aliases: where each ``*name`` stands. The parser gives such a value the place of its anchor.
    """

    text: str
    aliases: tuple[tuple[int, int], ...] = ()
    _edits: list[tuple[int, int, str]] = field(default_factory=list)

    def replace(self, start: int, end: int, new: str) -> None:
        """Characters ``start`` to ``end`` become ``new``, its lines ended as the one where it stands."""
        behind, before = self.text.find("\n", start), self.text.rfind("\n", 0, start)
        near = behind if behind >= 0 else before
        newline = "\r\n" if near > 0 and self.text[near - 1] == "\r" else "\n"
        self._edits.append((start, end, new.replace("\n", newline)))

    def result(self) -> str:
        """The text with every replacement."""
        text = self.text
        # From the end, and what is replaced before what is inserted in front of it.
        for start, end, new in sorted(self._edits, key=lambda edit: edit[:2], reverse=True):
            text = text[:start] + new + text[end:]
        return text

    def alias_of(self, entry: _Entry) -> tuple[int, int] | None:
        """Where the alias that is an entry's value stands; None: its value stands there itself."""
        key_end = entry.key.end_mark.index
        if entry.value.start_mark.index >= key_end:
            return None
        return next((start, end) for start, end in self.aliases if start >= key_end)

    def value_span(self, entry: _Entry) -> tuple[int, int]:
        """Where an entry's value stands."""
        return self.alias_of(entry) or (entry.value.start_mark.index, _end(entry.value))

    def line_start(self, index: int) -> int:
        """Where the line of a character begins."""
        return self.text.rfind("\n", 0, index) + 1

    def line_end(self, index: int) -> int:
        """Behind the line break of a character's line, or the end of the text."""
        found = self.text.find("\n", index)
        return len(self.text) if found < 0 else found + 1


@dataclass(frozen=True, slots=True)
class _Entry:
    key: yaml.ScalarNode
    value: yaml.Node

    @property
    def names(self) -> frozenset[str]:
        return _names(self.key.value)


def _change(
    editor: _Editor, root: Any, num_nodes: int, placement: Mapping[str, PlacementValue], stated: Mapping[str, Any]
) -> None:
    cluster = _child(root, "cluster")
    if cluster is None:
        end = len(editor.text)
        gap = "" if editor.text.endswith("\n") else "\n"
        editor.replace(end, end, f"{gap}\n{section_text(num_nodes, placement)}")
        return
    if not isinstance(cluster.value, yaml.MappingNode):
        raise _refused("cluster", "it is not a mapping")
    nodes = _child(cluster.value, "num_nodes")
    if nodes is not None and nodes.value.value != str(num_nodes):
        editor.replace(*editor.value_span(nodes), str(num_nodes))
    current = _child(cluster.value, "component_placement")
    if current is None:
        _insert_section(editor, cluster, placement)
    elif (alias := editor.alias_of(current)) is not None:
        editor.replace(*alias, _flow(placement))
    elif isinstance(current.value, yaml.MappingNode) and not current.value.flow_style and current.value.value:
        _merge_block(editor, current.value, placement, stated)
    else:
        flow = cluster.value.flow_style or isinstance(current.value, yaml.MappingNode)
        start, end = current.value.start_mark.index, current.value.end_mark.index
        if flow:
            _lift_comments(editor, current)
            editor.replace(start, end, _flow(placement))
        else:  # Nothing was stated.
            key_end = current.key.end_mark.index
            indent = " " * (current.key.start_mark.column + 2)
            editor.replace(key_end, max(end, key_end), ":" + _block(placement, indent))


def _insert_section(editor: _Editor, cluster: _Entry, placement: Mapping[str, PlacementValue]) -> None:
    inner = cluster.value
    assert isinstance(inner, yaml.MappingNode)
    if inner.flow_style:
        last = inner.end_mark.index - 1
        behind = editor.text[editor.value_span(_Entry(*inner.value[-1]))[1] : last] if inner.value else ","
        comma = "" if "," in re.sub(r"#[^\n]*", "", behind) else ", "
        editor.replace(last, last, f"{comma}component_placement: {_flow(placement)}")
        return
    indent = " " * inner.value[0][0].start_mark.column
    at = editor.line_end(_end(inner))
    gap = "" if editor.text[:at].endswith("\n") else "\n"
    editor.replace(at, at, f"{gap}{indent}component_placement:{_block(placement, indent + '  ')}\n")


def _lift_comments(editor: _Editor, entry: _Entry) -> None:
    """The comments inside a flow mapping that is rewritten move to lines of their own above it."""
    text = editor.text[entry.key.start_mark.index : entry.value.end_mark.index]
    at = editor.line_start(entry.key.start_mark.index)
    line = editor.text[at : entry.key.start_mark.index]
    indent = line[: len(line) - len(line.lstrip())]
    comments = list(_comments(text, _inside(entry)))
    if comments:
        editor.replace(at, at, "".join(f"{indent}{comment}\n" for comment in comments))


def _merge_block(
    editor: _Editor, node: yaml.MappingNode, placement: Mapping[str, PlacementValue], stated: Mapping[str, Any]
) -> None:
    """Entries that stay get their new value in place; the others go, and new ones come where the first of them was."""
    old = [_Entry(key, value) for key, value in node.value]
    if any(entry.key.tag.endswith(":merge") for entry in old):
        raise _refused("cluster.component_placement", "it merges another mapping (<<)")
    wanted = {_names(key): (key, value) for key, value in placement.items()}
    kept = [entry for entry in old if entry.names in wanted]
    gone = [entry for entry in old if entry.names not in wanted]
    new = {key: value for names, (key, value) in wanted.items() if names not in {entry.names for entry in kept}}
    for entry in kept:
        value = wanted[entry.names][1]
        # Compared as it was read: what is right already may be written in a way that only looks different.
        if _comparable(stated.get(entry.key.value)) != _comparable(value):
            start, end = editor.value_span(entry)
            between = editor.text[entry.key.end_mark.index : start]
            if "\n" in between and "#" not in between:
                # A mapping below its key gives way to a text beside it.
                start = entry.key.end_mark.index + between.index(":") + 1
                editor.replace(start, end, f" {_value(value)}")
            else:
                editor.replace(start, end, _value(value))
    indent = " " * old[0].key.start_mark.column
    spans = {entry: (_with_lead(editor, entry), editor.line_end(editor.value_span(entry)[1])) for entry in gone}
    said = {
        entry: list(_comments(editor.text[slice(*spans[entry])], _inside(entry, spans[entry][0]))) for entry in gone
    }
    lines = []
    for key, value in new.items():
        described = [entry for entry in said if entry.names & _names(key)]
        lines += [comment for entry in described for comment in said.pop(entry)]
        lines.append(f"{_key(key)}: {_value(value)}")
    at = min((start for start, _ in spans.values()), default=editor.line_start(old[0].key.start_mark.index))
    editor.replace(at, at, "".join(f"{indent}{line}\n" for line in lines))
    for entry, span in spans.items():
        # What describes a component that has no place any more stays, by its name: the next entry is another's.
        orphans = [f"{indent}# {entry.key.value}: {comment.lstrip('# ')}\n" for comment in said.get(entry, ())]
        editor.replace(*span, "".join(orphans))


def _with_lead(editor: _Editor, entry: _Entry) -> int:
    """Where an entry begins with the comments right above it, which describe it."""
    start = editor.line_start(entry.key.start_mark.index)
    while start:
        above = editor.line_start(start - 1)
        if not editor.text[above:start].lstrip().startswith("#"):
            break
        start = above
    return start


def _comments(text: str, scalars: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """Comments of the lines that go, scalars left out: a quoted text may hold a hash."""
    for match in re.finditer(r"(?:^|(?<=\s))#[^\n]*", text):
        if not any(start <= match.start() < end for start, end in scalars):
            yield match.group().rstrip()


def _inside(entry: _Entry, origin: int | None = None) -> tuple[tuple[int, int], ...]:
    origin = entry.key.start_mark.index if origin is None else origin
    return tuple(
        (node.start_mark.index - origin, node.end_mark.index - origin) for node in (entry.key, *_scalars(entry.value))
    )


def _scalars(node: yaml.Node) -> Iterator[yaml.ScalarNode]:
    if isinstance(node, yaml.ScalarNode):
        yield node
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _scalars(key)
            yield from _scalars(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _scalars(item)


def _aliases(text: str) -> Iterator[tuple[int, int]]:
    """Where each alias stands, in order."""
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        if isinstance(token, yaml.AliasToken):
            yield token.start_mark.index, token.end_mark.index


def _child(node: yaml.Node, name: str) -> _Entry | None:
    if not isinstance(node, yaml.MappingNode):
        return None
    return next((_Entry(key, value) for key, value in node.value if key.value == name), None)


def _end(node: yaml.Node) -> int:
    """Where a node's own text ends: the parser's mark of a block lies behind the comments that follow it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    index: int = node.end_mark.index
    return index


def _comparable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _comparable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(item) for item in value]
    return str(value)


def _verify(before: Mapping[str, Any], text: str, num_nodes: int, placement: Mapping[str, PlacementValue]) -> None:
    """The changed text says what was meant, and nothing else changed."""
    try:
        after = read_yaml(text, ours=False)
    except InvalidInput as error:
        raise _refused("cluster.component_placement", f"the changed file could not be read ({error})") from error
    cluster = after.get("cluster")
    written = cluster.get("component_placement") if isinstance(cluster, Mapping) else None
    found = {_names(str(key)): _comparable(value) for key, value in (written or {}).items()}
    meant = {_names(key): _comparable(value) for key, value in placement.items()}
    if found != meant or _rest(before) != _rest(after):
        raise _refused("cluster.component_placement", "an anchor or alias ties it to something else")
    if isinstance(cluster, Mapping) and cluster.get("num_nodes", num_nodes) != num_nodes:
        raise _refused("cluster.num_nodes", "it is not a plain number")


def _rest(config: Mapping[str, Any]) -> Any:
    """Everything but what is changed; by its text, since NaN never equals itself."""
    cluster = config.get("cluster")
    inner = cluster if isinstance(cluster, Mapping) else {}
    others = {key: value for key, value in config.items() if key != "cluster"}
    own = {key: value for key, value in inner.items() if key not in ("num_nodes", "component_placement")}
    return repr(sorted(map(repr, others.items()))), repr(sorted(map(repr, own.items())))


def _names(key: str) -> frozenset[str]:
    return frozenset(name.strip() for name in key.split(","))


def _block(placement: Mapping[str, PlacementValue], indent: str) -> str:
    return "".join(f"\n{indent}{_key(key)}: {_value(value)}" for key, value in placement.items())


def _flow(placement: Mapping[str, PlacementValue]) -> str:
    return "{" + ", ".join(f"{_quoted(key)}: {_value(value, flow=True)}" for key, value in placement.items()) + "}"


def _key(key: str) -> str:
    return key if all(_is_bare(name.strip()) for name in key.split(",")) else _double(key)


def _value(value: Any, *, flow: bool = False) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quoted(str(key))}: {_value(item, flow=True)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item, flow=True) for item in value) + "]"
    text = str(value)
    if _BARE_PLACEMENT.fullmatch(text) and not (flow and "," in text):
        # A bare number is a rank; a label that looks like one must stay text.
        return text if not text.isdigit() or not isinstance(value, str) or not flow else _double(text)
    return _quoted(text)


def _quoted(text: str) -> str:
    return text if _is_bare(text) else _double(text)


def _is_bare(text: str) -> bool:
    return _BARE_WORD.fullmatch(text) is not None and text.lower() not in _YAML_WORDS


def _double(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _refused(where: str, why: str) -> InvalidInput:
    return InvalidInput([Fault(where, f"can't be changed in place: {why}; paste the section")])
