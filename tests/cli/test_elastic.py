"""Does a training follow its cluster? The demonstration, and the workflows of the scripts, on real Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from callboard.agents.ray.ray_command import free_port
from callboard.cli.local.growth import running_workers
from callboard.cli.local.ports import listening_in
from callboard.client.clusters import ClusterRecord
from callboard.demo.elastic import ElasticResult
from callboard.demo.training import PASSES, TrainingActor
from callboard.demo.training_loop import Step, chart
from callboard.security.processes import marked, process_table
from examples import training_loop_with_autoscaling as example
from tests.cli.machine import ROOT, Machine, wait_for_line, wait_gone

START = str(ROOT / "scripts" / "start_ray_cluster.sh")
ADD = str(ROOT / "scripts" / "add_ray_worker.sh")
LOOP = str(ROOT / "examples" / "training_loop_with_autoscaling.py")

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports of the test's own, no Ray and no GPUs of others."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    base = 20000 + os.getpid() * 100 % 20000
    monkeypatch.setenv("CALLBOARD_PORT", str(free_port()))
    monkeypatch.setenv("CALLBOARD_RAY_PORT", str(base + 5000))
    monkeypatch.setenv("CALLBOARD_PORT_BASE", str(base))
    monkeypatch.setenv("CALLBOARD_DASHBOARD_PORT", str(base + 5001))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")


@pytest.fixture
def start(environment: None) -> Iterator[Start]:
    """Starts a program; what a failed test left of it is ended."""
    started: list[subprocess.Popen[str]] = []

    def call(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        started.append(process)
        return process

    yield call
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=120)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)


def ctrl_c(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGINT)
    try:
        output, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # with PYTHONFAULTHANDLER it says where each of its threads is
        output, _ = process.communicate(timeout=30)
        pytest.fail(f"Ctrl-C did not end it:\n{output[-6000:]}")
    return output


def check_nothing_left(machine: Machine, record: ClusterRecord) -> None:
    assert not machine.run_dir.exists()
    assert not marked(f"CALLBOARD_AGENT={machine.run_dir}/", process_table(), prefix=True)
    assert listening_in(f"127.0.{record.block}.0/24") == []


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demonstration_grows_loses_recovers_and_shrinks(run_dir: Path, start: Start) -> None:
    shown = run(sys.executable, "-m", "callboard.cli", "demo", "elastic", "--json", "--pace", "0.1")
    assert shown.returncode == 0, shown.stderr
    (line,) = shown.stdout.splitlines()
    seen = json.loads(line)
    assert seen.pop("steps") % 10 == 0
    assert seen == {
        "workers_start": 2,
        "workers_max": 3,
        "workers_end": 2,
        "joins": 1,
        "losses": 1,
        "recoveries": 1,
        "passed": True,
    }
    for told in (
        "🎯 DYNAMIC TRAINING LOOP STARTED",
        "🆕 Detected new worker: node-2 with 1.0 GPUs",
        "✅ Created placement group 3",
        "🎭 Spawned training actor 2 on node node-2",
        "🚀 Running training step 1 on ",  # One actor or two: the second may be there in time.
        "   - 3 actors trained",
        "💥 Lost training actor 1 on node node-1",
        "👋 Training actor 2 left node node-2",
        "📈 Total after 10 steps:",
        "Throughput, in actor steps per second:",
    ):
        assert told in shown.stderr, told
    assert shown.stderr.count("🆕 Detected new worker") == 3, "known nodes aren't detected again"
    assert not run_dir.exists()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_while_a_node_joins_leaves_nothing(machine: Machine, start: Start) -> None:
    """With a class of the user's own in place of the sample."""
    own = ("--actor", "tests.support.roles:Generator", "--role", "inference")
    demo = start(sys.executable, "-m", "callboard.cli", "demo", "elastic", "--pace", "0.1", *own)
    wait_for_line(demo, "Actor 0: generated 8 samples")
    wait_for_line(demo, "Adding a worker")
    (record,) = machine.clusters()
    wait_for_line(demo, "Running training step")
    ctrl_c(demo)
    assert demo.returncode == 130
    check_nothing_left(machine, record)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_start_with_workers_scale_up_reach_the_limit_lose_one_and_take_its_place(
    machine: Machine, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed's workflows, and its troubles: no GPU, no placement group, a node without a GPU."""
    monkeypatch.setenv("CALLBOARD_GPUS", "3")
    cluster = start(START, "1")
    wait_for_line(cluster, "Cluster ray is ready")
    (record,) = machine.clusters()
    loop = start(sys.executable, LOOP, "--pause", "0.2")
    wait_for_line(loop, "on 2 actors")

    added = run(ADD)
    assert "Node node-2 is READY on GPU 2: 1 CPU, 1 GPU" in added.stderr, added.stderr
    assert "1 worker_unit" in added.stderr
    wait_for_line(loop, "Detected new worker: node-2 with 1.0 GPUs")
    wait_for_line(loop, "Created placement group 3")
    wait_for_line(loop, "Spawned training actor 2 on node node-2")
    wait_for_line(loop, "on 3 actors")
    nodes = json.loads(machine.run("node", "list", "-o", "json").stdout)
    assert [use["device"]["id"] for node in nodes for use in node["devices"]] == ["0", "1", "2"]
    assert {int(node["capacity"]["custom_milli"]["worker_unit"]) for node in nodes} == {1000}
    refused = run(ADD)
    assert refused.returncode == 1
    assert "No GPU is left" in refused.stderr

    # A placement group that can't be had: used of total, and a remedy.
    file = machine.run_dir.parent / "another.json"
    component = {"name": "w", "actor": "tests.support.actors:Plain", "resources": {"cpu": 1, "gpu": 1}}
    file.write_text(json.dumps({"name": "another", "pool": "training", "components": [component]}))
    assert machine.run("job", "submit", str(file)).returncode == 0
    explained = machine.run("job", "explain", "another").stdout
    for said in ("node-0 lacks 1 GPU", "node-2 lacks 1 GPU", "What would unblock it", "1 more GPU on node-0"):
        assert said in explained, explained
    assert machine.run("node", "list").stdout.count("1/1 simulated") == 3, "used of total"
    assert machine.run("job", "cancel", "another").returncode == 0

    # A node in the middle is lost with all its processes; its place is taken again.
    agent = running_workers(record.directory)["node-1"]
    os.kill(agent.pid, signal.SIGTERM)
    wait_gone([agent], 30)
    wait_for_line(loop, "on 2 actors")
    assert "Node node-1 is READY on GPU 1" in run(ADD).stderr
    wait_for_line(loop, "Spawned training actor 1 on node node-1")
    wait_for_line(loop, "on 3 actors")

    bare = start(
        *(sys.executable, "-m", "callboard.cli", "agent", "--controller", record.controller, "--node-id", "bare"),
        *("--cpus", "1", "--memory", "1GiB", "--simulate-gpus", "0", "--node-ip", f"127.0.{record.block}.200"),
        *("--run-dir", str(machine.run_dir.parent / "bare")),
    )
    wait_for_line(loop, "bare joined without a GPU")
    bare.send_signal(signal.SIGTERM)
    bare.communicate(timeout=120)

    assert "Interrupted; the job has ended." in ctrl_c(loop)
    assert "nothing is left running" in ctrl_c(cluster)
    assert cluster.returncode == 0
    check_nothing_left(machine, record)


@pytest.mark.parametrize("actor", ["nocolon", "a.b:c d", ":Class", "pkg:"])
def test_what_is_no_class_is_refused_before_anything_starts(run_dir: Path, start: Start, actor: str) -> None:
    shown = run(sys.executable, "-m", "callboard.cli", "demo", "elastic", "--actor", actor)
    assert shown.returncode == 2
    assert "pkg.module:Class" in shown.stderr
    assert not run_dir.exists()


class TestTroubles:
    def test_no_cluster_says_how_to_start_one(self, run_dir: Path, start: Start) -> None:
        shown = run(ADD)
        assert shown.returncode == 4
        assert "scripts/start_ray_cluster.sh" in shown.stderr

    def test_a_gpu_that_is_not_there_is_named_with_those_that_are(
        self, run_dir: Path, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CALLBOARD_GPUS", "2")
        shown = run(START, "2")
        assert shown.returncode == 1
        assert "GPU 2 is not available" in shown.stderr
        assert "this machine has 2 simulated GPUs" in shown.stderr
        assert "the ids of those that are there: 0, 1." in shown.stderr
        assert not run_dir.exists()

    @pytest.mark.parametrize("number", ["-1", "two", "1.5", "99999"])
    def test_what_is_no_number_of_workers_is_refused(self, run_dir: Path, start: Start, number: str) -> None:
        shown = run(START, number)
        assert shown.returncode == 2
        assert "num_workers" in shown.stderr

    def test_arguments_of_the_adding_script_are_refused(self, run_dir: Path, start: Start) -> None:
        assert run(ADD, "3").returncode == 2


def installed(backend: str) -> bool:
    """Whether a training step can be made with it: PyTorch is no part of the locked environment."""
    return backend == "python" or find_spec(backend) is not None


class TestActor:
    @pytest.mark.parametrize("backend", [name for name in ("torch", "numpy", "python") if installed(name)])
    def test_it_learns(self, backend: str) -> None:
        actor = TrainingActor(backend)
        losses = [actor.train_step(number)["loss"] for number in range(1, 6)]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < losses[0] / 10
        assert actor.steps_done == 5

    @pytest.mark.parametrize("backend", [name for name in ("torch", "numpy") if installed(name)])
    def test_it_learns_the_same_by_hand(self, backend: str) -> None:
        losses = [TrainingActor(name).train_step(1)["loss"] for name in (backend, "python")]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        assert PASSES > 1

    @pytest.mark.parametrize("there", [name for name in ("torch", "numpy", "python") if installed(name)])
    def test_the_one_of_the_example_needs_nothing_that_is_not_installed(
        self, monkeypatch: pytest.MonkeyPatch, there: str
    ) -> None:
        monkeypatch.setattr(example, "find_spec", lambda name: name if name == there else None)
        actor = example.TrainingActor()
        losses = [float(actor.train_step(number)["message"].rpartition("=")[2]) for number in range(20)]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < losses[0]


class TestSummary:
    def test_the_chart_times_a_stretch_with_its_pauses(self) -> None:
        steps = [Step(number, 2, 2, 0.01, float(number)) for number in range(1, 12)]
        lines = chart(steps, rows=2)
        assert len(lines) == 2
        assert "2–6" in lines[0]
        assert " 2.0  2 actors" in lines[0]

    def test_a_chart_of_too_little_says_so(self) -> None:
        assert chart([Step(1, 1, 1, 0.1, 1.0)]) == ["  (too few steps)"]

    def test_a_result_without_checks_has_not_passed(self) -> None:
        result = ElasticResult()
        passed = [result.passed]
        for what, holds in (("a", True), ("b", False)):
            result.checks.append((what, holds))
            passed.append(result.passed)
        assert passed == [False, True, False]
        assert result.failures() == ["b"]
        assert result.as_plain()["passed"] is False
