"""Do the programs do their work together? Controller and agents as real processes, without Ray."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from callboard.agents.ray.ray_command import free_port
from tests.cli.machine import Machine, wait_for_line


def test_jobs_run_on_real_programs_and_what_was_decided_is_decided_again_alike(
    machine: Machine, tmp_path: Path
) -> None:
    machine.up()
    assert machine.run("pool", "create", "default", "--cpu", "4").returncode == 0
    assert "2/2" in submitted(machine, tmp_path / "first.yaml", workers=2, priority=1)
    found = json.loads(machine.run("job", "get", "first", "-o", "json").stdout)
    assert [worker["visible_devices"] for worker in found["workers"]] == [
        worker["allocation"]["devices"][0]["id"] for worker in found["workers"]
    ]
    assert "first" in machine.run("status").stdout
    assert "job.running" in machine.run("events", "--job", "first").stdout
    assert "3/3" in submitted(machine, tmp_path / "second.yaml", workers=3, priority=9)
    assert machine.run("node", "drain", "node-0", "--wait").returncode == 0
    (record,) = machine.clusters()
    state_dir = str(record.directory / "controller")
    replayed = json.loads(machine.run("replay", state_dir, "-o", "json").stdout)
    assert replayed["differing"] == 0
    assert replayed["decisions"] == len(replayed["steps"])
    assert {"ControllerStarted", "NodeJoined", "WorkerStarted", "WorkerStopped", "NodeDrained"} <= {
        step["event"] for step in replayed["steps"]
    }
    revisions = [step["revision"] for step in replayed["steps"] if step["event"] == "JobSubmitted"]
    shown = machine.run("replay", state_dir, "--explain", str(revisions[-1]))
    assert "first yields by rule SAME_POOL: the same pool and priority gap 8" in shown.stdout
    assert machine.run("job", "cancel", "first", "--wait").returncode == 0
    assert "CANCELLED" in machine.run("job", "list", "--all").stdout


def submitted(machine: Machine, file: Path, *, workers: int, priority: int) -> str:
    """What is shown of a job that runs, which is called like its file."""
    file.write_text(
        f"name: {file.stem}\npool: default\npriority: {priority}\ncomponents:\n"
        "- {name: actor, actor: 'callboard.demo.workers:RLHFWorker', kwargs: {role: train},"
        f" workers: {workers}, resources: {{cpu: 1, gpu: 1}}}}\n"
    )
    shown = machine.run("job", "submit", str(file), "--wait", "--timeout", "40")
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def test_a_controller_by_itself_is_found_and_joined(machine: Machine) -> None:
    port = free_port()
    state = machine.run_dir.parent / "state"
    controller = machine.start("controller", "--listen", f"127.0.0.1:{port}", "--state-dir", str(state))
    agent = machine.start(
        *("agent", "--controller", f"127.0.0.1:{port}", "--node-id", "n7", "--runtime", "process", "--cpus", "2"),
        *("--simulate-gpus", "1", "--label", "zone=a", "--run-dir", str(machine.run_dir.parent / "n7")),
    )
    wait_for_line(controller, "listen")
    wait_for_line(machine.start("events", "--follow", "--type", "node."), "READY")
    (node,) = json.loads(machine.run("node", "list", "-o", "json").stdout)
    assert node["name"] == "nodes/n7"
    assert node["labels"] == {"zone": "a"}
    agent.send_signal(signal.SIGTERM)
    agent.communicate(timeout=120)
    assert agent.returncode == 0
    controller.send_signal(signal.SIGINT)
    controller.communicate(timeout=120)
    assert machine.clusters() == []
