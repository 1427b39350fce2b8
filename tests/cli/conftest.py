"""The command line against a controller that answers as a test says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from callboard.cli.main import app
from callboard.controller.logs import configure_logs
from tests.cli.cluster import Lasting, RealCluster, lasting_cluster, real_cluster
from tests.cli.machine import Machine
from tests.support.fake_api import FakeApi, ThreadedApi

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory of the test's own, a wide screen, and no controller in the environment."""
    directory = tmp_path / "run"
    monkeypatch.setenv("CALLBOARD_RUN_DIR", str(directory))
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("CALLBOARD_CONTROLLER", raising=False)
    return directory


@pytest.fixture
def api() -> Iterator[FakeApi]:
    """A controller."""
    with ThreadedApi() as fake:
        yield fake


@pytest.fixture
def run(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line against the controller."""
    monkeypatch.setenv("CALLBOARD_CONTROLLER", api.address)

    def call(*arguments: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(app, list(arguments), input=stdin)

    return call


@pytest.fixture
def machine(run_dir: Path) -> Iterator[Machine]:
    """Command lines on this machine."""
    built = Machine(run_dir)
    yield built
    built.clear()


@pytest.fixture
async def bare(tmp_path: Path) -> AsyncIterator[RealCluster]:
    """A controller without nodes."""
    configure_logs("console", "error")
    async with real_cluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
async def cluster(bare: RealCluster) -> RealCluster:
    """A controller, a node, and a pool."""
    await bare.add_node("n0")
    await bare.client.ensure_pool("rlhf", nominal={"cpu": 8})
    return bare


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lasting]:
    """The cluster of a module's tests that change nothing but jobs."""
    with lasting_cluster(tmp_path_factory.mktemp("lasting")) as cluster:
        yield cluster


@pytest.fixture
async def shared(lasting: Lasting, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RealCluster]:
    """Of a module's cluster what `cluster` is, for a test that changes nothing but jobs: its jobs end with it."""
    for name, value in lasting.variables.items():
        monkeypatch.setenv(name, value)
    async with lasting.lent() as cluster:
        yield cluster
