"""Programs written for SimpleScheduler, with another import line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from callboard.client.clusters import recorded_clusters
from callboard.compat import SimpleScheduler, SimpleTaskSpec
from callboard.compat.script_class import ScriptClass

EXAMPLE = Path(__file__).parents[2] / "examples" / "simple_scheduler.py"


def test_the_guide_of_simple_scheduler_reads_the_same_and_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CALLBOARD_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("CALLBOARD_CONTROLLER", raising=False)
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--runtime", "process"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    said: dict[str, Any] = {line["what"]: line["answer"] for line in lines}

    assert said["rollout-00"]["success"]
    assert said["rollout-01"]["success"]
    assert said["reward-00"] == {"success": True, "task_id": "reward-00", "preempted": []}, "a reserved group was idle"
    assert said["train-00"]["success"], "where that scheduler returned False"
    assert len(said["train-00"]["preempted"]) == 1
    assert not said["too-much"]["success"]
    assert "rlhf-pg-pool" in said["too-much"]["error"]
    assert said["too-much"]["unblock"]
    assert said["rollout-extra-00"]["success"]
    assert said["stats"]["total_preemptions"] == 2
    assert said["pg_pool_stats"]["rlhf-pg-pool"]["high_priority_pgs"] == 2
    assert said["complete"]["success"]
    assert said["delete_agent"]["success"]
    assert not said["no such task"]["success"]
    assert not list(recorded_clusters(tmp_path / "run")), "the cluster that it started has ended with it"


def test_a_class_of_the_script_is_made_again_from_its_text() -> None:
    source = "class Outer:\n    class Worker:\n        def __init__(self, n, *, m): self.sum = n + m\n"
    made: Any = ScriptClass(source, "Outer.Worker", [1], {"m": 2})
    assert made.sum == 3
    assert type(ScriptClass(source, "Outer.Worker", [1], {"m": 2})) is type(made), "one module for one text"


def test_a_setting_that_is_not_known_is_named() -> None:
    scheduler = SimpleScheduler("127.0.0.1:1")
    try:
        with pytest.raises(TypeError, match=r"cancel_timeuot is not a setting; the settings are .*cancel_timeout"):
            scheduler.configure_preemption(cancel_timeuot=0.5)
        with pytest.raises(TypeError, match="max_pgs is not a setting"):
            scheduler.ensure_pool("rlhf", {"cpu": 1.0}, pg_pool_config={"max_pgs": 2})
        with pytest.raises(TypeError, match="actor"):
            SimpleTaskSpec(task_id="t", pool="rlhf", actor=object, resources={})  # type: ignore[call-arg]
    finally:
        scheduler.shutdown()
