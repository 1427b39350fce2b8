"""Names: one pattern for everything a person may name."""

from __future__ import annotations

import re

Labels = tuple[tuple[str, str], ...]
"""(key, value), sorted by key."""

NAME_PATTERN = r"[A-Za-z][A-Za-z0-9_.-]{0,62}"
"""Names of nodes, pools, jobs and components. No slash, space, percent or control character, so that a name
is safe in resource names, actor names, file names and log lines alike."""

LABEL_PATTERN = r"[A-Za-z0-9]([A-Za-z0-9_./-]{0,61}[A-Za-z0-9])?"
"""Label keys and values (the shape Kubernetes uses, with a slash allowed in keys)."""

ACTOR_PATTERN = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"
"""Import paths ``pkg.module:Class``."""

ENV_NAME_PATTERN = r"[A-Za-z_][A-Za-z0-9_]{0,254}"
"""Names of environment variables."""

OWN_RESOURCES = frozenset({"cpu", "gpu", "memory"})
"""Resources that every node states by other means; no custom one has such a name, however it is written."""

OWN_LABELS = frozenset({"node", "node_group"})
"""Labels that every node has, its id and its group: one that states them would pass for another."""

_NAME = re.compile(NAME_PATTERN)
_LABEL = re.compile(LABEL_PATTERN)
_ACTOR = re.compile(ACTOR_PATTERN)
_ENV_NAME = re.compile(ENV_NAME_PATTERN)


def is_name(text: str) -> bool:
    """Whether ``text`` may name a node, pool, job or component."""
    return _NAME.fullmatch(text) is not None


def is_custom_resource(text: str) -> bool:
    """Whether ``text`` may name a custom resource."""
    return is_name(text) and text.lower() not in OWN_RESOURCES


def is_label(text: str) -> bool:
    """Whether ``text`` may be a label key or value."""
    return _LABEL.fullmatch(text) is not None


def is_actor_path(text: str) -> bool:
    """Whether ``text`` is an import path ``pkg.module:Class``."""
    return len(text) <= 512 and _ACTOR.fullmatch(text) is not None


def is_env_name(text: str) -> bool:
    """Whether ``text`` may name an environment variable."""
    return _ENV_NAME.fullmatch(text) is not None
