"""Does the example of roles run as its first lines say, with one actor where there would be three?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from callboard.agents.ray.ray_command import free_port

ROOT = Path(__file__).parents[2]

STRANGER = """
import ray
from ray.util.placement_group import placement_group
from callboard import SyncClient

class Stranger:
    def ping(self):
        return "here"

with SyncClient() as client:
    client.connect_ray()
    actor = ray.remote(Stranger).options(name="stranger", lifetime="detached", num_cpus=0).remote()
    assert ray.get(actor.ping.remote()) == "here"
    group = placement_group([{"CPU": 1}], name="strange-group", lifetime="detached")
    assert group.wait(30)
"""
"""A program that uses Ray beside callboard, and leaves something there."""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_framework_of_roles_on_real_ray(run_dir: Path) -> None:
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

    up = ("up", "--detach", "--agents", "1", "--gpus-per-node", "1", "--cpus-per-node", "8", "--port", str(free_port()))
    started = run("-m", "callboard.cli", *up)
    assert started.returncode == 0, started.stderr
    try:
        played = run("examples/nexrl_style.py")
        assert played.returncode == 0, played.stderr
        shown = run("-m", "callboard.cli", "doctor")
        assert shown.returncode == 0, shown.stdout
        strange = run("-c", STRANGER)
        assert strange.returncode == 0, strange.stderr
        shown = run("-m", "callboard.cli", "doctor", "-o", "json")
        found = {(each["kind"], each["what"].split(" (")[0]) for each in json.loads(shown.stdout)["findings"]}
        assert found == {
            ("foreign-actor", "Ray's actor stranger"),
            ("foreign-group", "Ray's placement group strange-group"),
        }
    finally:
        ended = run("-m", "callboard.cli", "down")
    assert ended.returncode == 0, ended.stderr
    assert "training/0 (trainer, trajectory_pool, weight_sync): cb/" in played.stdout
    assert "rollout; training: trainer, trajectory_pool, weight_sync; data_loader; validator" in played.stdout
    assert "6 components: Ray lists 5 actors, 1 for the three of training" in played.stdout
    assert "100 putters were in the pool at once, and never more than 1 step ran" in played.stdout
    assert "in the middle of a step, which ended as: cancelled" in played.stdout
    reached = "DataLoader, Rollout, Rollout, Trainer, TrajectoryPool, Validator, WeightSync"
    assert f"cancel() reached: {reached}" in played.stdout
    assert not run_dir.exists()
