"""Do the programs do their work together? Controller and agents as real processes, without Ray."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from callboard.agents.ray.ray_command import free_port
from tests.cli.machine import Machine, wait_for_line


def test_a_job_runs_on_real_programs(machine: Machine, tmp_path: Path) -> None:
    machine.up()
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: first\npool: default\ncomponents:\n"
        "- {name: actor, actor: 'callboard.demo.workers:RLHFWorker', kwargs: {role: train},"
        " workers: 2, resources: {cpu: 1, gpu: 1}}\n"
    )
    assert machine.run("pool", "create", "default", "--cpu", "4").returncode == 0
    shown = machine.run("job", "submit", str(file), "--wait", "--timeout", "40")
    assert shown.returncode == 0, shown.stderr
    assert "2/2" in shown.stdout
    found = json.loads(machine.run("job", "get", "first", "-o", "json").stdout)
    assert [worker["visible_devices"] for worker in found["workers"]] == [
        worker["allocation"]["devices"][0]["id"] for worker in found["workers"]
    ]
    assert "first" in machine.run("status").stdout
    assert "job.running" in machine.run("events", "--job", "first").stdout
    assert machine.run("job", "cancel", "first", "--wait").returncode == 0
    assert "CANCELLED" in machine.run("job", "list", "--all").stdout


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
