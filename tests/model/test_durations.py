"""How long? Texts and numbers, exact to the millisecond."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard.model.durations import format_duration_ms, parse_duration_ms
from callboard.model.quantities import QuantityError


@given(st.integers(0, 10**12))
def test_what_is_written_is_read_again(duration_ms: int) -> None:
    assert parse_duration_ms(format_duration_ms(duration_ms)) == duration_ms


@pytest.mark.parametrize(
    ("text", "ms"),
    [("1.5s", 1500), ("0.5m", 30_000), ("1d", 86_400_000), ("1h5m", 3_900_000), (0.1, 100)],
)
def test_parts_and_decimals(text: Any, ms: int) -> None:
    assert parse_duration_ms(text) == ms


@pytest.mark.parametrize("text", ["", "s", "1x", "1 s 2", "-1s", "1s\n2s", "0.0001s", True, -1, float("nan")])
def test_what_is_no_duration(text: Any) -> None:
    with pytest.raises(QuantityError):
        parse_duration_ms(text)
