"""Exact values: amounts in base units and JSON as text, as messages carry them.

The models read ``6`` as six CPUs and ``Exact(6000)`` as 6 000 milli-CPUs. The type says which, so no file and no
keyword argument can be taken for the other form.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exact:
    """An amount in its base unit: milli-units, bytes or milliseconds."""

    amount: int


@dataclass(frozen=True, slots=True, repr=False)
class JsonText:
    """A JSON document as text; no repr, for arguments may hold secrets."""

    text: str
