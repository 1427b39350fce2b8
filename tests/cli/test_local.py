"""Does a cluster on this machine come up, and go without a trace? With the real programs, without Ray."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from callboard import ClusterFailed, InvalidInput, NoResult, SyncClient
from callboard.agents.ray.ray_command import free_port
from callboard.agents.system.process_tree import send_signal
from callboard.cli.cluster.start_progress import StartProgress
from callboard.cli.local import ports
from callboard.cli.local.cluster import LocalCluster, PortTaken
from callboard.cli.local.plan import ClusterPlan
from callboard.security.processes import descendants, identify, process_table
from tests.cli.machine import Machine, programs, wait_for_line, wait_gone

ACTORS = "tests.support.actors"
PROBE = {"name": "train", "actor": "callboard.demo.probe:Probe", "resources": {"cpu": 1, "gpu": 1}}


def test_ctrl_c_ends_a_cluster_and_leaves_nothing(machine: Machine) -> None:
    up = machine.up()
    (record,) = machine.clusters()
    assert [entry.role for entry in record.processes] == ["up", "controller", "agent node-0", "agent node-1"]
    assert record.directory.stat().st_mode & 0o777 == 0o700
    status = machine.run("status", "-o", "json")
    assert [node["state"] for node in json.loads(status.stdout)["nodes"]] == ["READY", "READY"]
    up.send_signal(signal.SIGINT)
    output, _ = up.communicate(timeout=120)
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
    up.communicate(timeout=120)
    assert [process for record in records for process in programs(record) if process.is_running()] == []
    assert not machine.run_dir.exists()


def test_down_ends_a_controller_that_was_started_again_by_hand_as_status_advises(machine: Machine) -> None:
    machine.run("up", "--runtime", "process", "--agents", "1", "--port", str(free_port()), "--detach")
    (record,) = machine.clusters()
    controller = next(entry.process for entry in record.processes if entry.role == "controller")
    send_signal(controller, signal.SIGKILL)
    wait_gone([controller], 10)
    state_dir = str(record.directory / "controller")
    again = machine.start("controller", "--listen", record.controller, "--state-dir", state_dir, "--metrics", "none")
    wait_for_line(again, "listening")
    ended = machine.run("down", record.directory.name)
    assert ended.returncode == 0, ended.stderr
    assert again.wait(10) == 0
    assert not machine.run_dir.exists()


def test_a_second_ctrl_c_hurries(machine: Machine) -> None:
    up = machine.up("--agents", "1")
    (record,) = machine.clusters()
    agent = next(entry.process for entry in record.processes if entry.role == "agent node-0")
    os.kill(agent.pid, signal.SIGSTOP)
    up.send_signal(signal.SIGINT)
    wait_for_line(up, "stopping")
    with suppress(ProcessLookupError):
        os.kill(agent.pid, signal.SIGSTOP)  # woken to answer the polite request, it is stopped again
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=15)
    assert [process for process in programs(record) if process.is_running()] == []
    assert not machine.run_dir.exists()


def test_what_is_stopped_ends_with_its_cluster(machine: Machine, tmp_path: Path) -> None:
    """Stopped by SIGSTOP: a worker, what it started, its agent, the controller, and the `up` that watches over them.
    Each is woken to end in order."""
    machine.up("--agents", "1")
    (record,) = machine.clusters()
    child = tmp_path / "child"
    with SyncClient(record.controller) as client:
        client.ensure_pool("p", nominal={"cpu": 2})
        worker = {"name": "w", "actor": "tests.support.actors:Stubborn", "args": [str(child)], "resources": {"cpu": 1}}
        job = client.submit({"name": "train", "pool": "p", "components": [worker]})
        job.running(timeout=60)
    below = {process.pid: process for process in descendants(programs(record), process_table())}
    assert int(child.read_text()) in below
    for pid in [*below, *(entry.process.pid for entry in record.processes)]:
        os.kill(pid, signal.SIGSTOP)
    shown = machine.run("down", "-q")
    assert shown.returncode == 0, shown.stderr
    assert [process for process in (*below.values(), *programs(record)) if process.is_running()] == []
    assert not machine.run_dir.exists()


def test_a_killed_up_takes_its_programs_with_it_and_what_it_left_is_removed(machine: Machine) -> None:
    up = machine.up("--name", "killed", "--agents", "1")
    (record,) = machine.clusters()
    up.kill()
    wait_gone(programs(record), 30)
    up = machine.up("--name", "next", "--agents", "1")
    assert [left.name for left in machine.clusters()] == ["next"], "removed by the next one"
    assert not record.directory.exists()
    (record,) = machine.clusters()
    up.kill()
    for process in programs(record):
        send_signal(process, signal.SIGKILL)
    wait_gone(programs(record), 30)
    assert machine.run("down").returncode == 0, "or by `down`"
    assert not machine.run_dir.exists()


def test_down_ends_one_cluster_and_nothing_else(machine: Machine) -> None:
    """NJ-05: another cluster, and a stranger whose command line has the same words."""
    first, second = free_port(), free_port()
    for name, port in (("first", first), ("second", second)):
        shown = machine.run(
            *("up", "--runtime", "process", "--agents", "1", "--name", name, "--port", str(port), "--detach")
        )
        assert shown.returncode == 0, shown.stderr
    blocks = {record.block for record in machine.clusters()}
    assert blocks == {0}, "nothing of theirs listens in a block, so that somebody else's cluster might take the same"
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


def test_a_taken_port_is_named_before_anything_starts(machine: Machine) -> None:
    """NJ-04."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        shown = machine.run("up", "--runtime", "process", "--port", str(port))
        assert machine.clusters() == []
        assert shown.returncode == 1
        assert str(port) in shown.stderr
        shown = machine.run("controller", "--listen", f"127.0.0.1:{port}", "--state-dir", str(machine.run_dir / "s"))
        assert shown.returncode != 0
        assert str(port) in shown.stderr + shown.stdout


async def test_a_taken_port_of_the_dashboard_is_named_before_anything_starts(tmp_path: Path) -> None:
    """NJ-04: it listens on 127.0.0.1, and not where the nodes do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        plan = ClusterPlan(name="c", directory=tmp_path / "c", port=free_port(), dashboard_port=port, block=77)
        with StartProgress(1) as progress:
            cluster = LocalCluster(plan, progress, hurry=asyncio.Event())
            with pytest.raises(PortTaken, match=f"Port {port} on 127.0.0.1") as raised:
                await cluster.start(10)
    assert raised.value.failure.why == "It is the one for Ray's dashboard."
    assert not plan.directory.exists()


@pytest.mark.parametrize(
    ("starts_head", "installed", "said"),
    [
        (True, True, ""),
        (True, False, "There is no dashboard: it is not installed."),
        (False, True, "There is no dashboard: no head of Ray is started here, and only that has one."),
    ],
)
def test_a_dashboard_is_promised_only_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, starts_head: bool, installed: bool, said: str
) -> None:
    monkeypatch.setattr(ports, "has_dashboard", lambda: installed)
    told: list[str] = []
    port = ports.usable_port(8265, starts_head=starts_head, tell=told.append)
    assert (port is None) == bool(said) == bool(told)
    assert "".join(told).startswith(said)
    assert ports.usable_port(None, starts_head=starts_head, tell=told.append) is None
    assert len(told) == bool(said), "nobody asked"


def test_ft_g4_a_cluster_that_runs_already_is_named_as_such(machine: Machine) -> None:
    up = machine.up("--agents", "1")
    port = machine.clusters()[0].controller.rpartition(":")[2]
    for stated in (str(free_port()), port):
        shown = machine.run("up", "--runtime", "process", "--port", stated)
        assert shown.returncode == 1
        assert "is up already" in shown.stderr, "also where it holds the port that was asked for"
        assert "callboard down local" in shown.stderr
    shown = machine.run("up", "--runtime", "process", "--name", "other", "--port", port)
    assert shown.returncode == 1
    assert "the controller of cluster local listens there" in shown.stderr
    # What each of these was told to do ends it, although an `up` watches over it.
    assert machine.run("down", "local").returncode == 0
    output, _ = up.communicate(timeout=120)
    assert up.returncode == 0, output
    assert "error" not in output
    assert not machine.run_dir.exists()


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
    [
        ("--name", "a/b"),
        ("--cpus-per-node", "lots"),
        ("--memory-per-node", "4 bananas"),
        ("--agents", "0"),
        ("--resource", "robot=1", "--resource", "robot=2"),
        ("--resource", "robot=-1"),
        ("--ray-address", "10.0.0.1:6379", "--runtime", "process"),
        ("--page", "here"),
        ("--page", "127.0.0.1:99999"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(machine: Machine, arguments: tuple[str, ...]) -> None:
    shown = machine.run("up", *arguments)
    assert shown.returncode == 2
    assert arguments[0] in shown.stderr
    assert not machine.run_dir.exists()


class TestAClusterOfAProgram:
    """`local()` of a client: it starts a cluster, which ends with the client and with the program."""

    def test_it_takes_jobs_and_is_gone_when_the_client_is_closed(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CALLBOARD_RUN_DIR", str(machine.run_dir))
        with SyncClient.local(runtime="process", gpus_per_node=1) as cb:
            (record,) = machine.clusters()
            assert record.controller == cb.address
            job = cb.submit({"pool": "default", "name": "t", "components": [PROBE]})
            job.running(timeout=60)
            with pytest.raises(InvalidInput, match="job t has no component tarin; did you mean train"):
                job.workers("tarin")
            work = {"name": "w", "actor": f"{ACTORS}:Returns", "entry": "run", "workers": 2}
            fails = {"name": "f", "actor": f"{ACTORS}:Returns", "entry": "run", "kwargs": {"value": "x" * 70_000}}
            computed = cb.submit({"pool": "default", "name": "r", "components": [work]})
            assert computed.result(timeout=60) == {"w": [{"rank": 0, "value": 1.5}, {"rank": 1, "value": 1.5}]}
            large = cb.submit({"pool": "default", "name": "l", "components": [work, fails]})
            with pytest.raises(NoResult, match="job l has no result of f/0: its result has 70024 bytes as JSON"):
                large.result(timeout=60)
            job.complete()
            assert job.result(timeout=60) == {}, "no component has an entry"
        assert not [process for process in programs(record) if process.is_running()]
        assert not machine.run_dir.exists()

    def test_it_deals_out_the_gpus_of_the_machine(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        """Three nodes of one each: an equal share, of five that are simulated."""
        monkeypatch.setenv("CALLBOARD_RUN_DIR", str(machine.run_dir))
        with SyncClient.local(runtime="process", agents=3, machine_gpus=5) as cb:
            nodes = sorted(cb.list_nodes(), key=lambda node: node.rank)
            assert [[use.device.id for use in node.devices] for node in nodes] == [["0"], ["1"], ["2"]]

    def test_one_that_cannot_start_says_why_and_leaves_nothing(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CALLBOARD_RUN_DIR", str(machine.run_dir))
        with pytest.raises(ClusterFailed, match="--gpus-per-node"):
            SyncClient.local(runtime="process", gpus_per_node=100)
        with pytest.raises(ClusterFailed, match="2 nodes of 2 GPUs would take 4"):
            SyncClient.local(runtime="process", agents=2, gpus_per_node=2, machine_gpus=3)
        assert not machine.run_dir.exists()

    def test_it_ends_when_its_program_is_killed(self, machine: Machine) -> None:
        program = (
            "from callboard import SyncClient\nwith SyncClient.local(runtime='process') as cb:\n"
            "    print(cb.address, flush=True)\n    input()"
        )
        owner = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"CALLBOARD_RUN_DIR": str(machine.run_dir)},
        )
        assert owner.stdout is not None
        assert owner.stdout.readline()
        (record,) = machine.clusters()
        owner.kill()
        owner.communicate()
        wait_gone(programs(record), 30)
