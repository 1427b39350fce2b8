"""What holds for every test: which may run at one time (`scripts/test` uses xdist), and what it leaves behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.hookimpl(tryfirst=True)  # Before xdist reads the groups.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give every test its group; the tests of a group run in one process, one after the other.

    All tests with real Ray are one group, the first: it is the longest, and two clusters at one time would need
    twice the memory and find each other's ports and processes. The other files are a group each, because their
    tests share fixtures.
    """
    if not hasattr(config, "workerinput"):
        return
    on_ray = [item for item in items if item.get_closest_marker("ray")]
    others = [item for item in items if not item.get_closest_marker("ray")]
    for item in on_ray:
        item.add_marker(pytest.mark.xdist_group("ray"))
    for item in others:
        item.add_marker(pytest.mark.xdist_group(str(item.path)))
    items[:] = on_ray + others


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Give the next test the logs as this one found them: programs that run inside a test set up theirs."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
