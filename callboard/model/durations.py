"""Durations: milliseconds as integers, the texts people write for them, and pauses that grow from try to try."""

from __future__ import annotations

import re
from collections.abc import Callable
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


class Backoff:
    """Pauses that double from the first to the longest."""

    def __init__(
        self, first_s: float, longest_s: float, *, uniform: Callable[[float, float], float] | None = None
    ) -> None:
        """
        Args:
            first_s: the first pause, in seconds.
            longest_s: no pause is longer, in seconds.
            uniform: shortens each pause by up to half, by chance, so that those who lost the same peer at one time
                don't come back to it as one; None: pauses are as they are.
        """
        self._first_s = first_s
        self._longest_s = longest_s
        self._uniform = uniform
        self._next_s = first_s

    def next_s(self, longest_s: float | None = None) -> float:
        """The next pause, in seconds.

        Args:
            longest_s: another bound for this pause, because of how this try failed.
        """
        pause_s = min(self._next_s, self._longest_s if longest_s is None else longest_s)
        self._next_s = pause_s * 2
        return pause_s if self._uniform is None else pause_s * self._uniform(0.5, 1.0)

    def reset(self) -> None:
        """A try succeeded: the next pause is the first again."""
        self._next_s = self._first_s
