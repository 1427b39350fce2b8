"""Does a cluster on this machine grow by the lowest free GPU, also when many add at once? With the real programs."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import typer

from callboard.agents.ray.ray_command import free_port
from callboard.cli.cluster.checks import deal_gpus
from callboard.cli.local.cluster import PortTaken
from callboard.cli.local.cluster_lock import LOCK_NAME
from callboard.cli.local.growth import _check_ports, running_workers
from callboard.cli.local.machine_gpus import MachineGpus, machine_gpus, shares
from callboard.cli.local.plan import PORTS_OF_A_NODE, ClusterPlan, read_plan, write_plan
from callboard.client.clusters import ClusterRecord
from callboard.demo.stage import settings
from callboard.model.inputs import job_spec
from callboard.model.specs import NO_PG_POOL, PoolSpec
from tests.cli.machine import Machine, programs, wait_for_line, wait_gone
from tests.scheduler.world import World
from tests.support.nvml_library import Gpu, Library, install

BASE = 20000 + os.getpid() % 20000


def small(machine: Machine, *arguments: str) -> tuple[subprocess.Popen[str], ClusterRecord]:
    """A cluster of two nodes, of plain processes, on a machine with four GPUs."""
    up = machine.up("--machine-gpus", "4", "--gpus-per-node", "1", "--warm-spares", "0", *arguments)
    (record,) = machine.clusters()
    return up, record


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, ClusterRecord]]:
    """A small cluster for tests that add nodes and end none of its own two, with ports from `BASE` on."""
    machine = Machine(tmp_path_factory.mktemp("lasting") / "run")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CALLBOARD_RUN_DIR", str(machine.run_dir))
            _, record = small(machine, "--port-base", str(BASE))
        yield machine, record
    finally:
        machine.clear()


@pytest.fixture
def standing(
    lasting: tuple[Machine, ClusterRecord], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Machine, ClusterRecord]]:
    """That cluster; nodes that the test adds are removed."""
    machine, record = lasting
    monkeypatch.setenv("CALLBOARD_RUN_DIR", str(machine.run_dir))
    yield machine, record
    for node in sorted(running_workers(record.directory))[2:]:
        removed = machine.run("remove-worker", node, "-q")
        assert removed.returncode == 0, removed.stderr
    assert sorted(running_workers(record.directory)) == ["node-0", "node-1"]


def gpus_of_nodes(machine: Machine, *arguments: str) -> dict[str, list[str]]:
    """Ids of the devices of every node that takes work."""
    import json

    shown = machine.run("node", "list", "-o", "json", *arguments)
    assert shown.returncode == 0, shown.stderr
    return {
        node["name"].removeprefix("nodes/"): [use["device"]["id"] for use in node["devices"]]
        for node in json.loads(shown.stdout)
        if node["state"] == "READY"
    }


def end_agent(record: ClusterRecord, node: str, number: signal.Signals = signal.SIGTERM) -> None:
    agent = running_workers(record.directory)[node]
    os.kill(agent.pid, number)
    wait_gone([agent], 20)


@contextmanager
def listening(host: str, port: int) -> Iterator[None]:
    with socket.socket() as taken:
        taken.bind((host, port))
        taken.listen()
        yield


class TestPlaces:
    def test_a_node_gets_the_lowest_free_gpu_also_after_a_middle_one_left(self, machine: Machine) -> None:
        up, record = small(machine)
        assert machine.run("add-worker", "-q").returncode == 0
        assert gpus_of_nodes(machine) == {"node-0": ["0"], "node-1": ["1"], "node-2": ["2"]}
        removed = machine.run("remove-worker", "node-1", "-o", "json")
        assert removed.stdout.split() == ["{", '"name":', '"nodes/node-1",', '"removed":', "true", "}"]
        assert "node-1" not in running_workers(record.directory)
        assert "node-1" not in machine.run("node", "list").stdout
        assert "LEFT" in machine.run("node", "list", "--all").stdout
        refused = machine.run("remove-worker", "node-0")
        assert refused.returncode == 2
        assert "node-0 can't be removed" in refused.stderr
        shown = machine.run("add-worker")
        assert shown.returncode == 0, shown.stderr
        assert "Node node-1 is READY on GPU 1" in shown.stderr
        assert gpus_of_nodes(machine) == {"node-0": ["0"], "node-1": ["1"], "node-2": ["2"]}
        end_agent(record, "node-1", signal.SIGKILL)
        assert "Node node-1 is READY on GPU 1" in machine.run("add-worker").stderr
        assert "Node node-3 is READY on GPU 3" in machine.run("add-worker").stderr
        assert up.poll() is None
        added = list(running_workers(record.directory).values())
        assert len(added) == 4
        assert machine.run("down").returncode == 0
        assert [process for process in added if process.is_running()] == []
        assert not machine.run_dir.exists()

    def test_a_gpu_that_a_stranger_of_this_machine_offers_is_taken(self, machine: Machine) -> None:
        _, record = small(machine)
        own = machine.start(
            *("agent", "--controller", record.controller, "--node-id", "own", "--runtime", "process"),
            *("--simulate-gpus", "3", "--run-dir", str(machine.run_dir.parent / "own"), "--log-format", "console"),
        )
        wait_for_line(own, "session_opened")
        shown = machine.run("add-worker")
        assert "Node node-3 is READY on GPU 3" in shown.stderr, "its rank, 2, and GPU 2 are the stranger's"
        own.send_signal(signal.SIGTERM)
        own.communicate(timeout=120)

    def test_more_nodes_than_gpus_are_refused_before_anything_starts(self, machine: Machine) -> None:
        shown = machine.run("up", "--agents", "3", "--machine-gpus", "2", "--gpus-per-node", "1")
        assert shown.returncode == 1
        assert "GPU 2 is not available" in shown.stderr
        assert "this machine has 2 simulated GPUs" in shown.stderr
        assert "3 nodes of 1 GPU would take 3; the ids of those that are there: 0, 1." in shown.stderr
        assert not machine.run_dir.exists()


class TestPorts:
    LISTENER = (
        "import socket, sys; s = socket.create_server(('0.0.0.0', 0)); print(s.getsockname()[1], flush=True);"
        "sys.stdin.read()"
    )

    @pytest.mark.parametrize(("left_by", "free"), [("n1", True), ("n10", False), ("", False)])
    def test_what_a_killed_agent_left_on_a_port_is_for_its_next_agent_to_take_over(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_by: str, free: bool
    ) -> None:
        """Ray's node goes on when its agent is killed, and listens on every address."""
        mark = {"CALLBOARD_AGENT": str(tmp_path / left_by)} if left_by else {}
        left = subprocess.Popen(
            [sys.executable, "-c", self.LISTENER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **mark},
        )
        with left:
            assert left.stdout is not None
            port = int(left.stdout.readline())
            monkeypatch.setattr("callboard.cli.local.growth.is_taken", lambda _, each: each == port)
            plan = ClusterPlan(name="c", directory=tmp_path, port_base=port - PORTS_OF_A_NODE, block=7)
            assert port in plan.ports_of(1)
            with nullcontext() if free else pytest.raises(PortTaken, match=str(port)):
                _check_ports(plan, 1)


class TestAtOnce:
    @pytest.mark.timeout(300)
    def test_five_additions_at_once_get_a_gpu_each_or_are_told_that_none_is_left_and_who_has_them(
        self, machine: Machine
    ) -> None:
        _, record = small(machine, "--machine-gpus", "5")
        adding = [machine.start("add-worker", "--lock-pause", "0.2") for _ in range(5)]
        said = [process.communicate(timeout=120)[0] for process in adding]
        assert sorted(process.returncode for process in adding) == [0, 0, 0, 1, 1], said
        assert gpus_of_nodes(machine) == {f"node-{rank}": [str(rank)] for rank in range(5)}
        assert sum("No GPU is left" in text for text in said) == 2
        shown = machine.run("add-worker")
        assert shown.returncode == 1
        assert "No GPU is left" in shown.stderr
        assert "has 0, 1, 2, 3, 4. Taken: GPU 0 by node-0; GPU 1 by node-1; GPU 2 by node-2;" in shown.stderr
        assert len(running_workers(record.directory)) == 5

    def test_the_attempts_are_shown_and_the_failure_names_the_holder(
        self, standing: tuple[Machine, ClusterRecord]
    ) -> None:
        machine, record = standing
        with (record.directory / LOCK_NAME).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.truncate(0)
            lock.write("a test")
            lock.flush()
            shown = machine.run("add-worker", "--lock-pause", "0.01")
        assert shown.returncode == 1
        for number in range(1, 11):
            assert f"another addition is in progress, by a test (attempt {number}/10)" in shown.stderr
        assert "Failed to get the lock" in shown.stderr
        assert "held by a test" in shown.stderr
        assert machine.run("add-worker", "-q").returncode == 0, "the lock is free again"

    def test_a_holder_that_is_killed_keeps_nothing(self, standing: tuple[Machine, ClusterRecord]) -> None:
        machine, record = standing
        adding = machine.start("add-worker")
        wait_for_line(adding, "starting node-2")
        adding.kill()
        adding.communicate()
        assert "Node node-3 is READY" in machine.run("add-worker").stderr, "the agent it started runs, and keeps GPU 2"
        assert sorted(running_workers(record.directory)) == ["node-0", "node-1", "node-2", "node-3"]


class TestFailures:
    def test_without_a_cluster_it_says_how_to_start_one(self, machine: Machine) -> None:
        for arguments in ((), ("--name", "ray")):
            shown = machine.run("add-worker", *arguments)
            assert shown.returncode == 4
            assert "runs on this machine" in shown.stderr
            assert "scripts/start_ray_cluster.sh" in shown.stderr

    def test_of_two_clusters_one_must_be_named(self, machine: Machine) -> None:
        """And one whose nodes have GPUs of their own grows too."""
        small(machine, "--name", "first", "--agents", "1")
        machine.up("--name", "second", "--agents", "1")
        shown = machine.run("add-worker")
        assert shown.returncode == 2
        assert "first, second" in shown.stderr
        assert machine.run("add-worker", "-q", "--name", "second").returncode == 0
        (address,) = (each.controller for each in machine.clusters() if each.name == "second")
        assert gpus_of_nodes(machine, "--controller", address) == {"node-0": ["0", "1"], "node-1": ["0", "1"]}

    def test_a_controller_that_up_did_not_start_is_not_added_to(self, machine: Machine) -> None:
        controller = machine.start("controller", "--listen", "127.0.0.1:0", "--state-dir", str(machine.run_dir / "s"))
        wait_for_line(controller, "listening")
        shown = machine.run("add-worker")
        assert shown.returncode == 1
        assert "callboard agent --controller" in shown.stderr

    def test_a_taken_port_of_the_place_is_named(self, standing: tuple[Machine, ClusterRecord]) -> None:
        machine, record = standing
        host, port = f"127.0.{record.block}.12", BASE + 2 * PORTS_OF_A_NODE + 3
        with listening(host, port):
            shown = machine.run("add-worker")
        assert shown.returncode == 1
        assert f"Port {port} on {host} is in use" in shown.stderr
        assert "node-2" in shown.stderr
        assert sorted(running_workers(record.directory)) == ["node-0", "node-1"]

    def test_a_node_that_does_not_come_up_leaves_nothing(self, machine: Machine) -> None:
        _, record = small(machine)
        # A controller that stops answering after the place was chosen.
        adding = machine.start("add-worker", "--timeout", "2")
        wait_for_line(adding, "starting node-2")
        (controller,) = (entry.process for entry in record.processes if entry.role == "controller")
        os.kill(controller.pid, signal.SIGSTOP)
        said, _ = adding.communicate(timeout=120)
        os.kill(controller.pid, signal.SIGCONT)
        if adding.returncode != 0:  # It may have been faster than we.
            assert "not ready within 2 s" in said
            assert "node-2" not in running_workers(record.directory)

    def test_ctrl_c_takes_the_addition_back(self, standing: tuple[Machine, ClusterRecord]) -> None:
        machine, record = standing
        adding = machine.start("add-worker")
        wait_for_line(adding, "starting node-2")
        adding.send_signal(signal.SIGINT)
        adding.communicate(timeout=120)
        if adding.returncode != 0:
            assert adding.returncode == 130
            assert "node-2" not in running_workers(record.directory)


class TestEnds:
    def test_the_end_of_a_node_is_told_and_a_killed_up_takes_the_others_and_added_ones_with_it(
        self, machine: Machine
    ) -> None:
        up, record = small(machine)
        end_agent(record, "node-1")
        wait_for_line(up, "agent node-1 ended with exit code 0; the cluster goes on without it")
        assert up.poll() is None
        while list(gpus_of_nodes(machine)) != ["node-0"]:
            pass  # The controller hears of it at the same moment.
        assert machine.run("add-worker", "-q").returncode == 0
        everything = [*programs(record), *running_workers(record.directory).values()]
        up.kill()
        wait_gone(everything, 30)

    def test_a_detached_cluster_keeps_added_nodes_until_down(self, machine: Machine) -> None:
        shown = machine.run(
            *("up", "--runtime", "process", "--agents", "1", "--machine-gpus", "2", "--gpus-per-node", "1"),
            *("--port", str(free_port()), "--detach"),
        )
        assert shown.returncode == 0, shown.stderr
        assert "callboard down local" in shown.stdout
        (record,) = machine.clusters()
        assert all(process.is_running() for process in programs(record))
        assert machine.run("add-worker", "-q").returncode == 0
        agents = running_workers(record.directory)
        assert sorted(agents) == ["node-0", "node-1"]
        assert machine.run("down", "-q").returncode == 0
        assert [process for process in programs(record) if process.is_running()] == []
        assert [agent for agent in agents.values() if agent.is_running()] == []
        assert not machine.run_dir.exists()


class TestPlan:
    def plan(self, directory: Path, **fields: object) -> ClusterPlan:
        stated: dict[str, object] = {"machine_gpus": ("3", "5", "7"), "gpus": 1, "port_base": 6400, "runtime": "ray"}
        return ClusterPlan(name="x", directory=directory, **{**stated, **fields})  # type: ignore[arg-type]

    def test_blocks_of_ports_never_meet(self, tmp_path: Path) -> None:
        plan = self.plan(tmp_path)
        ports = [port for rank in range(3) for port in plan.ports_of(rank)]
        assert (ports[0], ports[10], len(set(ports))) == (6400, 6410, 30)
        assert "6410" in plan.agent_arguments(1)

    def test_a_node_sees_its_share_of_the_gpus_and_no_other(self, tmp_path: Path) -> None:
        plan = self.plan(tmp_path, machine_gpus=("3", "5", "7", "9", "11"), gpus=2)
        assert plan.places == 2
        assert [plan.environment_of(rank)["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)] == ["3,5", "7,9"]
        assert "--simulate-gpus" in plan.agent_arguments(0)
        assert "--simulate-gpus" not in self.plan(tmp_path, real_gpus=True).agent_arguments(0)

    def test_a_plan_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        plan = self.plan(tmp_path, resources=("worker_unit=1",))
        write_plan(plan)
        assert read_plan(tmp_path) == plan
        assert read_plan(tmp_path / "nowhere") is None

    @pytest.mark.parametrize(
        ("found", "asked", "stated", "given"),
        [
            (1, (3, 2), (), (1, 1)),
            (2, (3, 2), (), (2, 1)),
            (8, (3, 2), (), (3, 2)),
            (8, (2, 2), ("agents",), (2, 4)),
            (1, (2, 2), ("agents",), (2, 1)),
            (4, (3, 4), ("gpus_per_node",), (1, 4)),
            (1, (3, 4), ("gpus_per_node",), (1, 4)),
            (1, (3, 0), ("gpus_per_node",), (3, 0)),
            (1, (2, 2), ("agents", "gpus_per_node"), (2, 2)),
        ],
    )
    def test_what_is_not_stated_follows_from_the_gpus_of_the_machine(
        self, found: int, asked: tuple[int, int], stated: tuple[str, ...], given: tuple[int, int]
    ) -> None:
        assert shares(found, agents=asked[0], gpus=asked[1], stated=stated) == given

    @pytest.mark.parametrize(
        ("cards", "nodes", "factor"), [(1, (1, 1), "0.25"), (2, (2, 1), "0.5"), (4, (3, 1), "0.5"), (8, (3, 2), "1")]
    )
    def test_the_demonstration_fits_the_real_cards_of_a_machine(
        self, monkeypatch: pytest.MonkeyPatch, cards: int, nodes: tuple[int, int], factor: str
    ) -> None:
        """As `callboard demo rlhf --machine-gpus auto` counts and scales: nodes of 3 CPUs, 4 GiB and their cards."""
        install(monkeypatch, Library([Gpu(f"GPU-{n}", bus_id=f"00000000:0{n}:00.0") for n in range(cards)]))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        found, agents, gpus = deal_gpus("auto", (), agents=3, gpus=2, stated=())
        assert (found, (agents, gpus)) == (MachineGpus(tuple(map(str, range(cards))), real=True), nodes)
        world = World({f"n{n}": {"cpu": 3, "memory": "4GiB", "gpu": gpus} for n in range(agents)})
        world.pool(PoolSpec(name="rehearsal", pg_pool=NO_PG_POOL))
        for setting in settings():
            spec = job_spec(setting.everything_at_once("rehearsal"))
            if world.what_if(spec).verdict == "START":
                break
        assert setting.factor == factor

    def test_gpus_are_those_stated_the_real_ones_or_eight_simulated(self) -> None:
        assert machine_gpus("") == MachineGpus((), real=False)
        assert machine_gpus("2") == MachineGpus(("0", "1"), real=False)
        for text in ("0", "-1", "many", "²"):
            with pytest.raises(typer.BadParameter):
                machine_gpus(text)
        with pytest.raises(typer.BadParameter):
            machine_gpus("auto", {"CUDA_VISIBLE_DEVICES": "1,1"})
        assert machine_gpus("auto", {"CUDA_VISIBLE_DEVICES": ""}) == MachineGpus(
            tuple(str(index) for index in range(8)), real=False
        )
