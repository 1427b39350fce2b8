"""Which characters of a file are nobody's business? Values of variables, which a shown line of the file leaves out.

A fault is shown with the line that it is in, and terminals are recorded: a secret beside a mistake must not end up in
somebody's build log (SE-04).
"""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from callboard.model.faults import InvalidInput
from callboard.placement.source import composed

_KEYS = frozenset({"env_vars", "env", "secret_env"})
"""Keys whose values are variables: of a node group, and of a component of a job."""

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
    """Scalars below one of the keys, names of variables left out."""
    seen: set[tuple[int, bool]] = set()
    waiting = [(root, False)]
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
            waiting.extend((value, secret or key.value in _KEYS) for key, value in node.value if _is_text(key))
        else:
            waiting.extend((item, secret) for item in node.value)


def _is_text(key: yaml.Node) -> bool:
    return isinstance(key, yaml.ScalarNode)
