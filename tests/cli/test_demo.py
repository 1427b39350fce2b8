"""Does the main job run? The six acts on real Ray, and nothing is left, whenever it is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from callboard.cli.local.ports import listening_in
from callboard.demo.stage import FACTORS, Responsiveness, Setting
from callboard.demo.story import Verdict
from callboard.demo.workers import RLHFWorker
from callboard.model.inputs import job_spec, pool_spec
from callboard.model.quantities import Resources
from callboard.security.processes import marked, process_table

ROOT = Path(__file__).parents[2]


def demo(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "callboard.cli", "demo", "rlhf", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
    )


def block_of(run_dir: Path) -> str:
    (record,) = run_dir.glob("*/cluster.json")
    return f"127.0.{json.loads(record.read_text())['block']}.0/24"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_six_acts_pass_and_leave_nothing(run_dir: Path) -> None:
    process = demo("--json")
    output, story = process.communicate(timeout=280)
    assert process.returncode == 0, story
    (line,) = output.splitlines()
    acts = json.loads(line)["acts"]
    assert [act["passed"] for act in acts] == [True] * 6, acts
    assert acts[0]["figures"]["booked_in_ray"] == {"CPU": 7.0, "GPU": 4.0, "memory": float(6 << 30)}
    assert acts[2]["figures"]["victims"] == ["rollout-01"]
    assert acts[3]["figures"]["reuses"] == 1
    assert acts[4]["figures"]["get_stats_p99_ms"] > 0
    assert acts[5]["figures"]["left_on_machine"] == []
    assert "Act 6" in story
    assert not run_dir.exists()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_in_an_act_leaves_nothing(run_dir: Path) -> None:
    """In a late one, when jobs of every kind run and groups are kept; that of a cluster that starts: test_local."""
    moment = "Act 5"
    process = demo()
    assert process.stdout is not None
    told: list[str] = []
    for line in process.stdout:
        told.append(line)
        if line.startswith(moment):
            break
    assert process.poll() is None, f"{moment} was never played: {''.join(told)}"
    network = block_of(run_dir)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    assert not run_dir.exists()
    assert not marked(f"CALLBOARD_AGENT={run_dir}/", process_table(), prefix=True)
    assert listening_in(network) == []


@pytest.mark.parametrize("factor", FACTORS)
def test_everything_is_valid_at_every_scale(factor: str) -> None:
    setting = Setting(factor)
    pool = pool_spec(setting.pool())
    assert len(pool.pg_pool.reserved) == 2
    whole = job_spec(setting.everything_at_once("x")).ask()
    booked = setting.booked_in_ray()
    assert whole == Resources.of(
        cpu_milli=round(booked["CPU"] * 1000),
        gpu_milli=round(booked["GPU"] * 1000),
        memory_bytes=round(booked["memory"]),
    )


def test_a_verdict_without_checks_has_not_passed() -> None:
    verdict = Verdict("nothing was looked at")
    passed = [verdict.passed]
    for holds in (True, False):
        verdict.check(f"holds: {holds}", holds)
        passed.append(verdict.passed)
    assert passed == [False, True, False]
    assert verdict.failures() == ["holds: False"]


def test_a_percentile_of_nothing_is_no_good_news() -> None:
    measured = Responsiveness.__new__(Responsiveness)
    measured._times_ms = []
    assert measured.p99_ms == float("inf")
    measured._times_ms = [float(number) for number in range(100, 0, -1)]
    assert measured.p99_ms == 100.0


def test_a_worker_goes_on_from_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    first = RLHFWorker("train", step_s=0)
    assert first.run(5)["steps_done"] == 5
    first.cancel()
    assert first.run(1000)["steps_done"] == 5
    second = RLHFWorker("train", step_s=0)
    second.restore(first.checkpoint())
    answer = second.run(2)
    assert (answer["steps_done"], answer["resumed_from"], answer["visible_devices"]) == (7, 5, "3")
