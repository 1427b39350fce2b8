"""The code that a component names: directories and files of this machine until they have travelled, packages then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from callboard.model.inputs.scalars import PACKAGE
from callboard.model.inputs.source import SourceMapping

Keys = tuple[str | int, ...]
"""Where something stands in a component: ("working_dir",), ("py_modules", 0), ("env", "uv")."""

_TRAVEL = ("requirements", "uv")
"""Environments that are made of files; one of conda is on the nodes."""

_STAND_IN = f"package:{0:064}"


def code_of(component: Mapping[str, Any]) -> list[tuple[Keys, str]]:
    """What a component names that isn't a package yet: where, and its path."""
    found: list[tuple[Keys, Any]] = [(("working_dir",), component.get("working_dir"))]
    modules = component.get("py_modules")
    if isinstance(modules, list | tuple):
        found += [(("py_modules", index), each) for index, each in enumerate(modules)]
    for key in ("env", "environment"):
        value = component.get(key)
        if isinstance(value, Mapping):
            found += [((key, kind), value.get(kind)) for kind in _TRAVEL]
    return [(keys, path) for keys, path in found if path and isinstance(path, str) and not PACKAGE.fullmatch(path)]


def with_packages(component: Mapping[str, Any], packages: Sequence[str]) -> dict[str, Any]:
    """The component with packages in place of what :func:`code_of` finds, in that order."""
    changed = dict(component)
    for (keys, _), package in zip(code_of(component), packages, strict=True):
        key, *part = keys
        if not part:
            changed[str(key)] = package
        elif isinstance(part[0], int):
            changed[str(key)] = [package if index == part[0] else each for index, each in enumerate(changed[str(key)])]
        else:
            changed[str(key)] = {**changed[str(key)], part[0]: package}
    return changed


def as_if_sent(source: SourceMapping) -> SourceMapping:
    """A job with a stand-in for each package that a submit would make and send: for who only reads it."""
    parts = source.get("components")
    if not isinstance(parts, list):
        return source
    named = [len(code_of(part)) if isinstance(part, Mapping) else 0 for part in parts]
    replaced = [with_packages(part, [_STAND_IN] * n) if n else part for part, n in zip(parts, named, strict=True)]
    return SourceMapping.like(source, {**source, "components": replaced})
