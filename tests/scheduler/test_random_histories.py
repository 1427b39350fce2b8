"""Whatever happens in whatever order, the invariants hold and nothing is left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scheduler.histories import run

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("block", range(10))
def test_whatever_happens_the_invariants_hold_and_nothing_is_left(block: int) -> None:
    for seed in range(block * 12, block * 12 + 12):
        run(seed)


@pytest.mark.parametrize("block", range(4))
def test_they_hold_too_where_jobs_name_nodes_and_devices(block: int) -> None:
    for seed in range(block * 12, block * 12 + 12):
        run(seed, placed=True)


def starts(python: str) -> bool:
    """Whether an interpreter runs at all: version managers leave names on the path that don't."""
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def digest_with(python: str, hash_seed: str) -> str:
    command = [python, "-m", "tests.scheduler.histories", "3", "7", "11", "19"]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return ran.stdout


def test_the_same_history_gives_the_same_bytes_under_any_hash_seed_and_python() -> None:
    expected = digest_with(sys.executable, "0")
    others = [python for minor in (11, 12, 13) if (python := shutil.which(f"python3.{minor}")) and starts(python)]
    assert {digest_with(python, seed) for python in [sys.executable, *others] for seed in ("1", "4711")} == {expected}
