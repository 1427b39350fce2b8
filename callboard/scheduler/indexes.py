"""How is a set of keys kept in step? One-to-many indexes in the order of insertion."""

from __future__ import annotations

from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


def add(index: dict[_K, dict[_V, None]], key: _K, member: _V) -> None:
    """Adds one entry to a one-to-many index."""
    members = index.get(key)
    if members is None:
        members = index[key] = {}
    members[member] = None


def remove(index: dict[_K, dict[_V, None]], key: _K, member: _V) -> None:
    """Takes one entry out; empty sets are taken out too, so that an index never outgrows its records."""
    members = index[key]
    del members[member]
    if not members:
        del index[key]


def mark(index: dict[_K, None], key: _K, *, wanted: bool) -> None:
    """Puts a key into a set, or takes it out."""
    if wanted:
        index[key] = None
    else:
        index.pop(key, None)
