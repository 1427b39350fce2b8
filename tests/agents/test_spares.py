"""Does a start take a warm spare, does a start without one say why, and is nothing of one left for another?"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from callboard.v1 import agent_pb2
from tests.agents.conftest import StartAgent, is_gone, started_by
from tests.support.fake_controller import FakeController, FakeSession, start_worker, stop_worker


def spares(run_dir: Path) -> list[int]:
    """Pids of the spares that are ready."""
    file = run_dir / "processes.json"
    records = json.loads(file.read_text()) if file.exists() else []
    return [each["pid"] for each in records if each["role"] == "spare" and each["pid"]]


class Node:
    """One agent with spares."""

    def __init__(self, controller: FakeController, session: FakeSession, run_dir: Path) -> None:
        self.controller = controller
        self.session = session
        self.run_dir = run_dir

    async def aim(self, count: int) -> None:
        """Tell the target."""
        await self.session.send(spare_target=agent_pb2.SpareTarget(count=count))

    async def has(self, count: int, *, other_than: tuple[int, ...] = ()) -> list[int]:
        """Wait until so many are ready. Every heartbeat (0.05 s) is an occasion to look."""
        ready: list[int] = []

        def found() -> bool:
            ready[:] = spares(self.run_dir)
            return len(ready) == count and not set(ready) & set(other_than)

        await self.controller.until(found)
        return ready

    async def start(self, actor: str, **fields: Any) -> agent_pb2.WorkerReady:
        """Start a worker."""
        report = await self.controller.do(start_worker=start_worker(actor, **fields))
        assert report.HasField("worker_ready"), report
        return report.worker_ready


def output_of(pid: int) -> Path:
    """Where a process writes."""
    return Path(f"/proc/{pid}/fd/1").readlink()


@pytest.fixture
async def node(controller: FakeController, start_agent: StartAgent, tmp_path: Path) -> Node:
    controller.welcome["heartbeat_ms"] = 50
    return Node(controller, await start_agent(warm_spares=2), tmp_path / "n0")


async def test_the_setting_is_told_and_none_is_made_before_it_is_asked_for(node: Node) -> None:
    assert node.session.hello.warm_spares == 2
    ready = await node.start("Plain")
    assert not ready.warm
    assert ready.cold_reason == "no spare ready"
    assert started_by(node.run_dir) == [ready.pid]


async def test_a_start_takes_one_and_it_is_made_again(node: Node) -> None:
    await node.aim(1)
    (spare,) = await node.has(1)
    ready = await node.start("Plain", devices=("1",))
    assert ready.warm
    assert not ready.cold_reason
    assert ready.pid == spare
    assert ready.visible_devices == "1"
    assert output_of(ready.pid).is_relative_to(node.run_dir / "output" / "job-1"), "its output is the worker's"
    (another,) = await node.has(1)
    assert another != spare


async def test_no_more_are_kept_than_the_node_is_set_to(node: Node) -> None:
    await node.aim(5)
    await node.has(2)
    await node.aim(1)
    await node.has(1)
    await node.aim(0)
    await node.has(0)
    assert started_by(node.run_dir) == []


async def test_two_starts_at_once_take_two(node: Node) -> None:
    await node.aim(2)
    waiting = await node.has(2)
    commands = [await node.controller.command(start_worker=start_worker("Plain", rank=rank)) for rank in (0, 1, 2)]
    ready = [(await node.controller.report(each)).worker_ready for each in commands]
    assert [each.warm for each in ready] == [True, True, False]
    assert {each.pid for each in ready[:2]} == set(waiting)


async def test_one_that_died_is_made_again(node: Node) -> None:
    await node.aim(1)
    (spare,) = await node.has(1)
    os.kill(spare, signal.SIGKILL)
    await node.has(1, other_than=(spare,))
    assert (await node.start("Plain")).warm


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"interpreter": sys.executable}, "it names an interpreter"),
        ({"in_bundle": True}, "it runs inside its bundle"),
        ({"env": {"LD_LIBRARY_PATH": "/opt/lib"}}, "LD_LIBRARY_PATH must be set before Python starts"),
        ({"env": {"PYTHONHASHSEED": "7"}}, "PYTHONHASHSEED must be set before Python starts"),
    ],
)
async def test_what_must_be_there_before_python_starts_cold(node: Node, fields: dict[str, Any], why: str) -> None:
    await node.aim(1)
    (spare,) = await node.has(1)
    ready = await node.start("Plain", **fields)
    assert not ready.warm
    assert ready.cold_reason == why
    assert spares(node.run_dir) == [spare]


async def test_what_the_agent_has_anyway_does_not_make_it_cold(
    controller: FakeController, start_agent: StartAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/lib")
    controller.welcome["heartbeat_ms"] = 50
    node = Node(controller, await start_agent(), tmp_path / "n0")
    await node.aim(1)
    await node.has(1)
    assert (await node.start("Plain", env={"LD_LIBRARY_PATH": "/opt/lib"}, pass_env=["LD_LIBRARY_PATH"])).warm


async def test_pg_20_a_warm_worker_is_used_once_and_the_next_sees_nothing_of_it(node: Node, tmp_path: Path) -> None:
    await node.aim(1)
    seen = []
    for generation, extra in ((1, {"MINE": "secret"}), (2, {})):
        await node.has(1)
        file = tmp_path / f"seen-{generation}"
        command = start_worker(
            "DumpsEnvironment",
            generation=generation,
            env=extra,
            entry="run",
            args_json=json.dumps([str(file)]),
            devices=(str(generation - 1),),
        )
        ready = (await node.controller.do(start_worker=command)).worker_ready
        assert ready.warm
        await node.controller.said("worker_finished", generation)
        seen.append((ready.pid, json.loads(file.read_text())))
        stopped = await node.controller.do(stop_worker=stop_worker(command))
        assert stopped.HasField("worker_stopped")
        assert is_gone(ready.pid)
    (first, its), (second, others) = seen
    assert first != second
    assert its["MINE"] == "secret"
    assert "MINE" not in others
    assert [its["CUDA_VISIBLE_DEVICES"], others["CUDA_VISIBLE_DEVICES"]] == ["0", "1"]
    assert others["CALLBOARD_WORKER"].endswith("/g2")


async def test_pc_12_children_of_a_warm_worker_that_hide_go_too(node: Node, tmp_path: Path) -> None:
    await node.aim(1)
    await node.has(1)
    command = start_worker("Stubborn", entry="run", args_json=json.dumps([str(tmp_path / "child")]))
    assert (await node.controller.do(start_worker=command)).worker_ready.warm
    child = int((tmp_path / "child").read_text())
    stopped = (await node.controller.do(stop_worker=stop_worker(command))).worker_stopped
    assert stopped.outcome == agent_pb2.STOP_OUTCOME_KILLED
    assert is_gone(child)


async def test_none_is_made_while_a_start_is_under_way(node: Node) -> None:
    slow = start_worker("SlowToBuild")
    start = await node.controller.command(start_worker=slow)
    await node.aim(1)
    await node.controller.until(lambda: len(node.session.heartbeats) > 5)
    assert spares(node.run_dir) == []
    await node.controller.do(stop_worker=stop_worker(slow))
    assert (await node.controller.report(start)).HasField("worker_start_failed")
    await node.has(1)
