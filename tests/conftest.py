"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import structlog

if TYPE_CHECKING:
    from tests.support.postgres import Postgres

# Whoever runs the tests may have logged in somewhere.
os.environ["CALLBOARD_CONTEXT"] = "none"


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Give the next test the logs as this one found them: programs that run inside a test set up theirs."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A real PostgreSQL, started with the first test that needs one."""
    from tests.support.postgres import Postgres  # its library need not be there for other tests

    server = Postgres()
    yield server
    server.close()


@pytest.fixture
def postgres_url(postgres: Postgres) -> str:
    """An empty database of it."""
    return postgres.url(postgres.new_database())
