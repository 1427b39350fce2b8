"""How is a frozen record changed? By making another one, fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from callboard.model.frozen import evolver
from callboard.scheduler.records import RECORD_TYPES, Record

_Evolving = TypeVar("_Evolving", bound=Record)

_EVOLVERS: Mapping[type, Callable[[Any, dict[str, Any]], Any]] = {cls: evolver(cls) for cls in RECORD_TYPES}


def evolve(record: _Evolving, **changes: Any) -> _Evolving:
    """The record with some fields changed: what ``dataclasses.replace`` gives, at a tenth of its cost."""
    evolved: _Evolving = _EVOLVERS[type(record)](record, changes)
    return evolved
