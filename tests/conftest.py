"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import structlog

# Whoever runs the tests may have logged in somewhere.
os.environ["CALLBOARD_CONTEXT"] = "none"


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Give the next test the logs as this one found them: programs that run inside a test set up theirs."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
