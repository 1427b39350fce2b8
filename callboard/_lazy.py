"""Public names of a package, each imported when it is first used (PEP 562).

A command that needs one name must not pay for the others: the client alone costs a tenth of a second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType


def public_names(by_module: Mapping[str, str]) -> Mapping[str, str]:
    """Public name → module that defines it, from module → names in one text."""
    return MappingProxyType({name: module for module, names in by_module.items() for name in names.split()})


def lazily(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package. Sets its `__all__`, too: what ``import *`` and ``help()`` go by.

    Args:
        package: its `__name__`.
        homes: public name → module that defines it.
    """
    names = vars(sys.modules[package])
    names.setdefault("__all__", []).extend(sorted(homes))

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        value: object = getattr(import_module(homes[name]), name)
        names[name] = value  # The next access finds it without coming here.
        return value

    def listed() -> list[str]:
        return sorted({*names, *homes})

    return find, listed
