"""A run directory of the test's own, and no token in the environment."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "run"
    monkeypatch.setenv("CALLBOARD_RUN_DIR", str(directory))
    for variable in ("CALLBOARD_CONTROLLER", "CALLBOARD_TOKEN", "CALLBOARD_TOKEN_FILE"):
        monkeypatch.delenv(variable, raising=False)
    return directory
