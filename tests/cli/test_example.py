"""Does the example run as its first lines say?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from callboard.agents.ray.ray_command import free_port

ROOT = Path(__file__).parents[2]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_six_acts_through_the_sdk(run_dir: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment["PYTHONPATH"] = str(ROOT)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )

    started = run("-m", "callboard.cli", "up", "--detach", "--port", str(free_port()))
    assert started.returncode == 0, started.stderr
    try:
        played = run("examples/rlhf_pg_pool.py")
        assert played.returncode == 0, played.stderr
        assert "rollout-01 yielded in" in played.stdout
        assert "used again 1 times; preemptions 2" in played.stdout
        assert "jobs left: 0" in played.stdout
    finally:
        ended = run("-m", "callboard.cli", "down")
    assert ended.returncode == 0, ended.stderr
    assert not run_dir.exists()
