"""Durations: milliseconds as integers, and the texts people write for them."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from callboard.model.quantities import Number, QuantityError

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_TEXT = re.compile(rf"(?:{_PART.pattern})+")
_PLAIN = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_HOW = "write e.g. 500ms, 30s, 5m, 1h or a number of seconds"
_LONGEST_TEXT = 64


def parse_duration_ms(value: Number) -> int:
    """Milliseconds of ``"500ms"``, ``"30s"``, ``"5m"``, ``"1h30m"``, or of a number of seconds such as ``0.5``.

    Raises:
        QuantityError: no such duration, negative, not finite, or finer than a millisecond.
    """
    if isinstance(value, bool):
        raise QuantityError(f"{value!r} is not a duration; {_HOW}")
    if isinstance(value, str):
        text = value.strip()
        if len(text) > _LONGEST_TEXT or not (_PLAIN.fullmatch(text) or _TEXT.fullmatch(text)):
            raise QuantityError(f"{value[:_LONGEST_TEXT]!r} is not a duration; {_HOW}")
        if _PLAIN.fullmatch(text):
            text += "s"
        exact = sum((Decimal(digits) * _UNITS_MS[unit] for digits, unit in _PART.findall(text)), Decimal())
    else:
        try:
            # str() first: Decimal(0.1) is the binary neighbour of 0.1, Decimal("0.1") is what was meant.
            exact = Decimal(str(value)) * 1_000
        except InvalidOperation as error:
            raise QuantityError(f"{value!r} is not a duration; {_HOW}") from error
    if not exact.is_finite():
        raise QuantityError(f"{value!r} is not a finite duration")
    if exact < 0:
        raise QuantityError(f"{value!r} is negative; {_HOW}")
    if exact != exact.to_integral_value():
        raise QuantityError(f"{value!r} is finer than a millisecond")
    return int(exact)


def format_duration_ms(duration_ms: int) -> str:
    """The shortest exact text in one unit: ``300000`` → ``"5m"``, ``90000`` → ``"90s"``, ``1500`` → ``"1500ms"``."""
    if duration_ms == 0:
        return "0s"
    unit = next(unit for unit in ("d", "h", "m", "s", "ms") if duration_ms % _UNITS_MS[unit] == 0)
    return f"{duration_ms // _UNITS_MS[unit]}{unit}"
