"""A controller that answers as a test says, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from callboard.client.client import Client
from tests.support.fake_api import FakeApi


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory of the test's own, so that clusters of this machine are not found."""
    directory = tmp_path / "run"
    monkeypatch.setenv("CALLBOARD_RUN_DIR", str(directory))
    monkeypatch.delenv("CALLBOARD_CONTROLLER", raising=False)
    return directory


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    """A controller."""
    fake = FakeApi()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def client(api: FakeApi) -> AsyncIterator[Client]:
    """A client of it that is quick to give up."""
    async with Client(api.address, timeout=10, retry=5) as connected:
        yield connected
