"""A controller in this process, and its services."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from callboard.controller.logs import configure_logs
from callboard.controller.server import Controller
from tests.controller.support import Api, api_at, options_for, running


@pytest.fixture(autouse=True)
def quiet_logs() -> None:
    """Only what goes wrong is shown with a failed test."""
    configure_logs("console", "warning")


@pytest.fixture
async def controller(tmp_path: Path) -> AsyncIterator[Controller]:
    """A running controller with an empty state."""
    async with running(options_for(tmp_path)) as started:
        yield started


@pytest.fixture
async def api(controller: Controller) -> AsyncIterator[Api]:
    """Its services."""
    async with api_at(controller.address) as stubs:
        yield stubs
