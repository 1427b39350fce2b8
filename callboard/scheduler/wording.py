"""How is an amount or a list said?"""

from __future__ import annotations

from collections.abc import Sequence

from callboard.model.quantities import MILLI, format_amount


def missing(resource: str, asked: int, have: int) -> str:
    return f"{format_amount(resource, asked - have)} {shown(resource)}"


def shown(resource: str) -> str:
    return resource.upper() if resource in ("cpu", "gpu") else resource


def change(resource: str, amount: int) -> str:
    if resource in ("cpu", "gpu") and amount % MILLI:
        return f"{amount}m"
    return format_amount(resource, amount)


def join(parts: Sequence[str]) -> str:
    shown = list(dict.fromkeys(parts))
    more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
    return "; ".join(shown[:5]) + more
