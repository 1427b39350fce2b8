"""Secrets in a file: values of variables, which a shown line of the file leaves out.

A fault is shown with the line that it is in, and terminals are recorded: a secret beside a mistake must not end up in
somebody's build log (SE-04).
"""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from callboard.model.faults import InvalidInput
from callboard.placement.source.yaml_tree import composed

Span = tuple[int, int]
"""First column and the one after the last, from 0."""


def secret_spans(text: str) -> dict[int, list[Span]]:
    """By line, from 1, the columns that hold values of variables; nothing of a text that is no YAML."""
    try:
        root = composed(text)
    except InvalidInput:
        return {}
    found: dict[int, list[Span]] = {}
    for node in _values(root):
        first, last = node.start_mark, node.end_mark
        for line in range(first.line, last.line + 1):
            start = first.column if line == first.line else 0
            end = last.column if line == last.line else 1 << 30
            found.setdefault(line + 1, []).append((start, end))
    return found


def _values(root: yaml.Node) -> Iterator[yaml.ScalarNode]:
    """Scalars that are values of variables: of node groups, and of the components of a job."""
    seen: set[tuple[int, bool]] = set()
    waiting = [(root, False), *((node, True) for node in _variables_of_components(root))]
    while waiting:
        node, secret = waiting.pop()
        if isinstance(node, yaml.ScalarNode):
            if secret:
                yield node
            continue
        if (id(node), secret) in seen:
            continue
        seen.add((id(node), secret))
        if isinstance(node, yaml.MappingNode):
            waiting.extend((value, secret or _text(key) == "env_vars") for key, value in node.value)
        else:
            waiting.extend((item, secret) for item in node.value)


def _variables_of_components(root: yaml.Node) -> Iterator[yaml.Node]:
    """``env`` elsewhere is the name of a component."""
    for components in _at(root, "components"):
        for component in components.value if isinstance(components, yaml.SequenceNode) else ():
            yield from _at(component, "env", "secret_env")


def _at(node: yaml.Node, *keys: str) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        yield from (value for key, value in node.value if _text(key) in keys)


def _text(key: yaml.Node) -> str | None:
    return key.value if isinstance(key, yaml.ScalarNode) else None
