"""Does a cluster on this machine come up, and go without a trace? With the real programs, without Ray."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from callboard.cli.local.ports import free_port
from callboard.client.clusters import ClusterRecord, recorded_clusters
from callboard.client.processes import ProcessId, identify

ROOT = Path(__file__).parents[2]
READY_S = 40


class Machine:
    """Command lines on this machine, with a run directory of the test's own."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts `callboard …`."""
        process = subprocess.Popen(
            [sys.executable, "-m", "callboard.cli", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs `callboard …` to its end."""
        return subprocess.run(
            [sys.executable, "-m", "callboard.cli", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )

    def up(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts a small cluster of plain processes and waits until it says that it is ready."""
        process = self.start("up", "--runtime", "process", "--agents", "2", "--port", str(free_port()), *arguments)
        wait_for_line(process, "is ready")
        return process

    def clusters(self) -> list[ClusterRecord]:
        """What is recorded."""
        return recorded_clusters(self.run_dir)

    def clear(self) -> None:
        """Ends what a failed test left."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for record in self.clusters():
            for entry in record.processes:
                if entry.process.is_running():
                    os.kill(entry.process.pid, signal.SIGKILL)


def wait_for_line(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return line
    raise AssertionError(f"{text!r} did not come: {''.join(seen)}")


def wait_gone(processes: list[ProcessId], within_s: float) -> None:
    """Waits on pidfds, as the program itself does."""
    import select

    deadline = time.monotonic() + within_s
    for process in processes:
        if not process.is_running():
            continue
        try:
            fd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        select.select([fd], [], [], max(deadline - time.monotonic(), 0))
        os.close(fd)
    assert [process for process in processes if process.is_running()] == []


@pytest.fixture
def machine(run_dir: Path) -> Iterator[Machine]:
    built = Machine(run_dir)
    yield built
    built.clear()


def programs(record: ClusterRecord) -> list[ProcessId]:
    return [entry.process for entry in record.processes if entry.role != "up"]


def test_ctrl_c_ends_a_cluster_and_leaves_nothing(machine: Machine) -> None:
    up = machine.up()
    (record,) = machine.clusters()
    assert [entry.role for entry in record.processes] == ["up", "controller", "agent node-0", "agent node-1"]
    assert record.directory.stat().st_mode & 0o777 == 0o700
    status = machine.run("status", "-o", "json")
    assert [node["state"] for node in json.loads(status.stdout)["nodes"]] == ["READY", "READY"]
    up.send_signal(signal.SIGINT)
    output, _ = up.communicate(timeout=40)
    assert up.returncode == 0
    assert "nothing is left" in output
    assert [process for process in programs(record) if process.is_running()] == []
    assert not machine.run_dir.exists()


@pytest.mark.parametrize("after", ["starting the controller", "starting the agents", "0 of 2 nodes ready"])
def test_sigterm_while_it_starts_leaves_nothing(machine: Machine, after: str) -> None:
    up = machine.start("up", "--runtime", "process", "--agents", "2", "--port", str(free_port()))
    wait_for_line(up, after)
    records = machine.clusters()
    up.send_signal(signal.SIGTERM)
    up.communicate(timeout=40)
    assert [process for record in records for process in programs(record) if process.is_running()] == []
    assert not machine.run_dir.exists()


def test_a_second_ctrl_c_hurries(machine: Machine) -> None:
    up = machine.up()
    (record,) = machine.clusters()
    agent = next(entry.process for entry in record.processes if entry.role == "agent node-1")
    os.kill(agent.pid, signal.SIGSTOP)  # It will never answer a polite request.
    up.send_signal(signal.SIGINT)
    wait_for_line(up, "stopping")
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=15)
    assert [process for process in programs(record) if process.is_running()] == []
    assert not machine.run_dir.exists()


def test_a_killed_up_takes_its_programs_with_it(machine: Machine) -> None:
    up = machine.up()
    (record,) = machine.clusters()
    up.kill()
    wait_gone(programs(record), 30)
    assert machine.run("down").returncode == 0
    assert not machine.run_dir.exists()


def test_down_ends_a_detached_cluster(machine: Machine) -> None:
    shown = machine.run("up", "--runtime", "process", "--agents", "1", "--port", str(free_port()), "--detach")
    assert shown.returncode == 0, shown.stderr
    assert "callboard down local" in shown.stdout
    (record,) = machine.clusters()
    assert all(process.is_running() for process in programs(record))
    assert machine.run("down", "-q").returncode == 0
    assert [process for process in programs(record) if process.is_running()] == []
    assert not machine.run_dir.exists()


def test_down_ends_one_cluster_and_nothing_else(machine: Machine) -> None:
    """NJ-05: another cluster, and a stranger whose command line has the same words."""
    first, second = free_port(), free_port()
    for name, port in (("first", first), ("second", second)):
        shown = machine.run(
            *("up", "--runtime", "process", "--agents", "1", "--name", name, "--port", str(port), "--detach")
        )
        assert shown.returncode == 0, shown.stderr
    stranger = subprocess.Popen(
        [sys.executable, "-c", "input()", "-m", "callboard.cli", "agent", "first"], stdin=subprocess.PIPE
    )
    known = identify(stranger.pid)
    assert known is not None
    ambiguous = machine.run("down")
    assert ambiguous.returncode == 2
    assert "first" in ambiguous.stderr
    assert "second" in ambiguous.stderr
    asked = machine.run("status")
    assert asked.returncode == 2, "two controllers run here, so which one is meant is not clear (MU-07)"
    assert machine.run("down", "first").returncode == 0
    (left,) = machine.clusters()
    assert left.name == "second"
    assert all(process.is_running() for process in programs(left))
    assert known.is_running()
    assert machine.run("status").returncode == 0
    assert machine.run("down", "--all").returncode == 0
    stranger.communicate(b"\n")


def test_a_taken_port_is_named_within_two_seconds(machine: Machine) -> None:
    """NJ-04."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        began = time.monotonic()
        shown = machine.run("up", "--runtime", "process", "--port", str(port))
        assert time.monotonic() - began < 2
        assert shown.returncode == 1
        assert str(port) in shown.stderr
        began = time.monotonic()
        shown = machine.run("controller", "--listen", f"127.0.0.1:{port}", "--state-dir", str(machine.run_dir / "s"))
        assert time.monotonic() - began < 2
        assert shown.returncode != 0
        assert str(port) in shown.stderr + shown.stdout


def test_a_second_cluster_of_one_name_is_refused(machine: Machine) -> None:
    machine.up()
    shown = machine.run("up", "--runtime", "process", "--port", str(free_port()))
    assert shown.returncode == 1
    assert "is up already" in shown.stderr
    assert "callboard down local" in shown.stderr


def test_an_agent_that_ends_is_reported_with_its_last_words(machine: Machine) -> None:
    shown = machine.run(
        "up", "--agents", "1", "--runtime", "ray", "--ray-address", "nonsense", "--port", str(free_port())
    )
    assert shown.returncode == 2
    assert "agent node-0" in shown.stderr
    assert "nonsense" in shown.stderr
    assert not machine.run_dir.exists()


def test_down_without_a_cluster_says_so(machine: Machine) -> None:
    shown = machine.run("down")
    assert shown.returncode == 1
    assert "callboard up" in shown.stderr


@pytest.mark.parametrize(
    "arguments",
    [("--name", "a/b"), ("--cpus-per-node", "lots"), ("--memory-per-node", "4 bananas"), ("--agents", "0")],
)
def test_bad_options_are_refused_before_anything_starts(machine: Machine, arguments: tuple[str, ...]) -> None:
    shown = machine.run("up", *arguments)
    assert shown.returncode == 2
    assert arguments[0] in shown.stderr
    assert not machine.run_dir.exists()


def test_a_job_runs_on_real_programs(machine: Machine, tmp_path: Path) -> None:
    machine.up()
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: first\npool: default\ncomponents:\n"
        "- {name: actor, actor: 'callboard.cli.demo.workers:RLHFWorker', kwargs: {role: train},"
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


def test_down_ends_a_cluster_that_an_up_watches_over(machine: Machine) -> None:
    up = machine.up()
    assert machine.run("down").returncode == 0
    output, _ = up.communicate(timeout=20)
    assert up.returncode == 0, output
    assert "error" not in output
    assert not machine.run_dir.exists()


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
    agent.communicate(timeout=30)
    assert agent.returncode == 0
    controller.send_signal(signal.SIGINT)
    controller.communicate(timeout=20)
    assert machine.clusters() == []
