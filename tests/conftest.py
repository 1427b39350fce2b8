"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Give the next test the logs as this one found them: programs that run inside a test set up theirs."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
