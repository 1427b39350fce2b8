"""Declared hardware as an amount: "Franka/1" is the second Franka of its node.

A piece is a resource of its node like any other, with one unit of it, so two jobs never hold one robot. The names
can't be those of custom resources, which have no slash (:func:`callboard.model.names.is_name`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from callboard.model.quantities import MILLI, Resources


def piece_name(hardware_type: str, position: int) -> str:
    """Name of a piece.

    Args:
        hardware_type: its type, as its node declares it.
        position: which of the node's pieces of that type, from 0.
    """
    return f"{hardware_type}/{position}"


def is_piece(resource: str) -> bool:
    """Whether a resource is a piece of declared hardware; Ray knows nothing of those."""
    return "/" in resource


def pieces(types: Iterable[str]) -> Resources:
    """One unit of every piece of a node that declares hardware of these types, in the order declared."""
    seen: Counter[str] = Counter()
    custom: dict[str, int] = {}
    for hardware_type in types:
        custom[piece_name(hardware_type, seen[hardware_type])] = MILLI
        seen[hardware_type] += 1
    return Resources.of(custom=custom)
