"""Does an agent go on with what an earlier one of its node left, and does it end what it can't go on with?

R4, with plain processes: the first agent is killed at some moment, the second one starts on the same run directory, and
the controller sends what it is owed again, under the same ids.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from callboard.agents.host import worker_main
from callboard.agents.host.framing import Requests
from callboard.agents.host.worker_lanes import MainThread
from callboard.v1 import agent_pb2
from tests.agents.conftest import assert_nothing_left, cluster_of, is_gone, started_by, until_gone
from tests.support.fake_controller import FakeController, FakeSession, start_worker, stop_worker


class Lineage:
    """Agents of one node, one after the other."""

    def __init__(self, controller: FakeController, folder: Path) -> None:
        self.controller = controller
        self.run_dir = folder / "n0"
        self.agent: asyncio.subprocess.Process | None = None
        self.count = 0
        self._options = folder / "options.json"
        self._log = folder / "agents.log"

    async def begin(self, **options: Any) -> FakeSession:
        """Start the next agent; returns its session."""
        await self.start(**options)
        return await self.controller.session("n0", self.count)

    async def start(self, **options: Any) -> None:
        """Start the next agent."""
        settings = {
            "node_id": "n0",
            "controller": self.controller.address,
            "runtime": "process",
            "cluster": cluster_of(self.run_dir),
            "simulate_gpus": 2,
            "run_dir": str(self.run_dir),
            "successor_s": 60,
            **options,
        }
        self._options.write_text(json.dumps(settings))
        with self._log.open("ab") as log:
            self.agent = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "callboard.agents", str(self._options), stderr=log
            )
        self.count += 1

    async def kill(self) -> None:
        """Kill the agent, nothing else."""
        assert self.agent is not None
        self.agent.kill()
        await self.agent.wait()

    async def leave(self) -> None:
        """The last agent leaves, and with it everything."""
        assert self.agent is not None
        self.agent.terminate()
        assert await self.agent.wait() == 0
        assert_nothing_left(self.run_dir)


@pytest.fixture
async def node(controller: FakeController, tmp_path: Path) -> AsyncIterator[Lineage]:
    lineage = Lineage(controller, tmp_path)
    yield lineage
    if lineage.agent is not None and lineage.agent.returncode is None:
        await lineage.kill()
    for pid in started_by(lineage.run_dir):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def told(session: FakeSession) -> list[tuple[int, str, int]]:
    """Workers in a Hello: generation, state, pid."""
    name = agent_pb2.AgentWorkerState.Name
    return [
        (each.generation, name(each.state).removeprefix("AGENT_WORKER_STATE_"), each.pid)
        for each in session.hello.workers
    ]


class TestReady:
    async def test_it_runs_on_and_is_told_of(self, controller: FakeController, node: Lineage) -> None:
        await node.begin()
        command = start_worker("Yielding", entry="run", devices=("1",))
        ready = (await controller.do(start_worker=command)).worker_ready
        await node.kill()
        session = await node.begin()
        assert told(session) == [(1, "READY", ready.pid)]
        assert session.hello.workers[0].pid_start_ms == ready.pid_start_ms
        stop = stop_worker(command, cancel_timeout_ms=5000, checkpoint=True)
        stopped = (await controller.do(stop_worker=stop)).worker_stopped
        assert stopped.outcome == agent_pb2.STOP_OUTCOME_COOPERATIVE
        assert stopped.checkpoint.data
        assert is_gone(ready.pid)
        await node.leave()

    async def test_a_start_whose_answer_was_lost_is_answered_again(
        self, controller: FakeController, node: Lineage
    ) -> None:
        await node.begin()
        command = start_worker("Plain", devices=("0",))
        first = await controller.report(await controller.command(command_id="c-start", start_worker=command))
        await node.kill()
        await node.begin()
        await controller.command(command_id="c-start", start_worker=command)
        again = await controller.report("c-start", 2)
        assert again.report_id != first.report_id
        assert again.worker_ready == first.worker_ready
        await node.leave()

    async def test_its_device_is_still_taken(self, controller: FakeController, node: Lineage) -> None:
        await node.begin()
        await controller.do(start_worker=start_worker("Plain", devices=("1",)))
        await node.kill()
        await node.begin()
        report = await controller.do(start_worker=start_worker("Plain", rank=1, generation=2, devices=("1",)))
        assert "still held by" in report.worker_start_failed.message
        await node.leave()

    async def test_one_that_holds_the_gil_and_one_with_a_hidden_child_go_on_and_end_whole(
        self, controller: FakeController, node: Lineage, tmp_path: Path
    ) -> None:
        await node.begin()
        busy = start_worker("Busy", entry="run", args_json='["gil"]')
        stubborn = start_worker("Stubborn", rank=1, generation=2, args_json=json.dumps([str(tmp_path / "child")]))
        pids = [(await controller.do(start_worker=each)).worker_ready.pid for each in (busy, stubborn)]
        child = int((tmp_path / "child").read_text())
        await node.kill()
        assert [pid for _, _, pid in told(await node.begin())] == pids
        assert not is_gone(child)
        for each in (busy, stubborn):
            stopped = (await controller.do(stop_worker=stop_worker(each))).worker_stopped
            assert stopped.outcome == agent_pb2.STOP_OUTCOME_KILLED
        assert all(is_gone(pid) for pid in (*pids, child))
        await node.leave()

    async def test_the_end_of_its_entry_is_told_whoever_is_there(
        self, controller: FakeController, node: Lineage
    ) -> None:
        await node.begin()
        command = start_worker("Yielding", entry="run")
        await controller.do(start_worker=command)
        await node.kill()
        await node.begin()
        await controller.do(stop_worker=stop_worker(command, cancel_timeout_ms=5000))
        assert (await controller.said("worker_finished")).succeeded
        await node.leave()

    async def test_one_that_died_meanwhile_is_reported_with_its_tree_gone(
        self, controller: FakeController, node: Lineage, tmp_path: Path
    ) -> None:
        await node.begin()
        command = start_worker("Stubborn", args_json=json.dumps([str(tmp_path / "child")]))
        ready = (await controller.do(start_worker=command)).worker_ready
        child = int((tmp_path / "child").read_text())
        await node.kill()
        os.kill(ready.pid, signal.SIGKILL)
        await until_gone(ready.pid)
        await node.begin()
        dead = await controller.said("worker_exited")
        assert dead.generation == 1
        assert not dead.quarantined
        assert is_gone(child)
        await node.leave()

    async def test_what_is_not_kept_is_reaped(self, controller: FakeController, node: Lineage) -> None:
        await node.begin()
        ready = (await controller.do(start_worker=start_worker("Plain"))).worker_ready
        await node.kill()
        controller.keep_all = False
        await node.begin()
        stopped = await controller.said("worker_stopped")
        assert "keep" in stopped.detail
        assert is_gone(ready.pid)
        await node.leave()

    async def test_it_is_found_by_the_agent_after_the_next_too(self, controller: FakeController, node: Lineage) -> None:
        await node.begin()
        ready = (await controller.do(start_worker=start_worker("Plain"))).worker_ready
        for _ in range(3):
            await node.kill()
            assert told(await node.begin()) == [(1, "READY", ready.pid)]
        await node.leave()


class TestStarting:
    async def test_r4_one_that_was_still_recorded_as_the_spare_that_it_was_goes_on(
        self, controller: FakeController, node: Lineage
    ) -> None:
        """The agent was killed between the record of the worker and the end of that of the spare."""
        await node.begin()
        ready = (await controller.do(start_worker=start_worker("Plain"))).worker_ready
        await node.kill()
        file = node.run_dir / "processes.json"
        records = json.loads(file.read_text())
        (worker,) = (each for each in records if each["role"] == "worker")
        spare = worker | {"role": "spare", "name": "spare/n0/x-1", "facts": {"address": worker["facts"]["address"]}}
        file.write_text(json.dumps([spare, *records]))
        assert told(await node.begin()) == [(1, "READY", ready.pid)]
        assert not is_gone(ready.pid)
        assert recorded(node, "spare") == []
        await node.leave()

    async def test_one_that_is_being_built_is_finished(self, controller: FakeController, node: Lineage) -> None:
        await node.begin()
        command = start_worker("SlowToBuild", args_json="[0.4]")
        await controller.command(command_id="c-start", start_worker=command)
        pid = await hosted(node)
        await node.kill()
        assert told(await node.begin()) == [(1, "STARTING", pid)]
        await controller.command(command_id="c-start", start_worker=command)
        report = await controller.report("c-start")
        assert report.worker_ready.pid == pid
        await node.leave()

    async def test_one_that_is_to_stop_instead_stops(self, controller: FakeController, node: Lineage) -> None:
        await node.begin()
        command = start_worker("SlowToBuild")
        await controller.command(command_id="c-start", start_worker=command)
        pid = await hosted(node)
        await node.kill()
        await node.begin()
        stopped = (await controller.do(stop_worker=stop_worker(command))).worker_stopped
        assert stopped.outcome == agent_pb2.STOP_OUTCOME_KILLED
        assert is_gone(pid)
        await node.leave()

    @pytest.mark.parametrize("delay_ms", [0, 5, 20, 60, 120, 200])
    async def test_at_any_moment_of_a_start(self, controller: FakeController, node: Lineage, delay_ms: int) -> None:
        await node.begin()
        command = start_worker("Plain", devices=("1",))
        await controller.command(command_id="c-start", start_worker=command)
        await asyncio.sleep(delay_ms / 1000)  # The delays are the scenario's input.
        await node.kill()
        answered = [each for each in controller.reports if each.command_id == "c-start"]
        await node.begin()
        if not answered:
            await controller.command(command_id="c-start", start_worker=command)
        report = await controller.report("c-start")
        assert report.HasField("worker_ready"), report
        assert started_by(node.run_dir) == [report.worker_ready.pid]
        stopped = (await controller.do(stop_worker=stop_worker(command))).worker_stopped
        assert stopped.outcome == agent_pb2.STOP_OUTCOME_KILLED
        await node.leave()


class TestStopping:
    @pytest.mark.parametrize("actor", ["Hanging", "Yielding", "Plain"])
    @pytest.mark.parametrize("delay_ms", [0, 10, 60])
    async def test_at_any_moment_of_a_stop(
        self, controller: FakeController, node: Lineage, actor: str, delay_ms: int
    ) -> None:
        await node.begin()
        arguments = {"Hanging": '["sleep"]'}.get(actor, "[]")
        command = start_worker(actor, devices=("1",), entry="" if actor == "Plain" else "run", args_json=arguments)
        ready = (await controller.do(start_worker=command)).worker_ready
        stop = stop_worker(command, cancel_timeout_ms=400)
        await controller.command(command_id="c-stop", stop_worker=stop)
        await asyncio.sleep(delay_ms / 1000)  # The delays are the scenario's input.
        await node.kill()
        answered = [each for each in controller.reports if each.command_id == "c-stop"]
        await node.begin()
        if not answered:
            await controller.command(command_id="c-stop", stop_worker=stop)
        stopped = (await controller.report("c-stop")).worker_stopped
        assert stopped.outcome != agent_pb2.STOP_OUTCOME_QUARANTINED
        assert is_gone(ready.pid)
        # The device is free at once.
        report = await controller.do(start_worker=start_worker("Plain", rank=1, generation=2, devices=("1",)))
        assert report.HasField("worker_ready"), report
        await node.leave()


class TestCheckpoints:
    """What a worker left before it was killed is told, whichever agent is there to tell it."""

    async def stopped_and_killed(
        self, controller: FakeController, node: Lineage, kind: str = "bytes"
    ) -> tuple[agent_pb2.StopWorker, agent_pb2.Checkpoint]:
        """The agent is killed when the worker is gone and the controller has acknowledged nothing."""
        await node.begin()
        command = start_worker("Yielding", entry="run", devices=("1",), args_json=json.dumps([kind]))
        await controller.do(start_worker=command)
        controller.acknowledge = False
        stop = stop_worker(command, cancel_timeout_ms=5000, checkpoint=True)
        await controller.command(command_id="c-stop", stop_worker=stop)
        stopped = (await controller.report("c-stop")).worker_stopped
        assert stopped.HasField("checkpoint")
        await node.kill()
        controller.acknowledge = True
        return stop, stopped.checkpoint

    @pytest.mark.parametrize("kind", ["bytes", "uri"])
    async def test_the_next_agent_answers_the_owed_stop_with_it(
        self, controller: FakeController, node: Lineage, kind: str
    ) -> None:
        stop, checkpoint = await self.stopped_and_killed(controller, node, kind)
        (file,) = (node.run_dir / "checkpoints").iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
        await node.begin()
        await controller.command(command_id="c-stop", stop_worker=stop)
        again = (await controller.report("c-stop", 2)).worker_stopped
        assert again.outcome == agent_pb2.STOP_OUTCOME_COOPERATIVE
        assert again.checkpoint == checkpoint
        await controller.until(lambda: recorded(node, "checkpoint") == [])
        assert list((node.run_dir / "checkpoints").iterdir()) == []
        await node.leave()

    async def test_one_that_was_killed_before_it_was_crossed_out_is_no_crash(
        self, controller: FakeController, node: Lineage
    ) -> None:
        await node.begin()
        command = start_worker("Yielding", entry="run", devices=("1",))
        await controller.do(start_worker=command)
        (ready,) = recorded(node, "worker")
        stop = stop_worker(command, cancel_timeout_ms=5000, checkpoint=True)
        controller.acknowledge = False
        first = (await controller.do(stop_worker=stop)).worker_stopped
        await node.kill()
        # What the record says between the kill of the worker and its proof.
        records = json.loads((node.run_dir / "processes.json").read_text())
        records.append(ready | {"facts": ready["facts"] | {"stage": "ending"}})
        (node.run_dir / "processes.json").write_text(json.dumps(records))
        controller.acknowledge = True
        session = await node.begin()
        assert [state for _, state, _ in told(session)] == ["STOPPING"]
        again = await controller.said("worker_stopped", 2)
        assert again.checkpoint == first.checkpoint
        assert not [each for each in controller.reports if each.HasField("worker_exited")]
        await controller.until(lambda: recorded(node, "checkpoint") == [])
        await node.leave()

    async def test_it_outlives_several_agents(self, controller: FakeController, node: Lineage) -> None:
        stop, checkpoint = await self.stopped_and_killed(controller, node)
        for _ in range(2):
            await node.begin()
            await node.kill()
        await node.begin()
        assert (await controller.do(stop_worker=stop)).worker_stopped.checkpoint == checkpoint
        await node.leave()

    async def test_of_an_acknowledged_one_nothing_is_kept(self, controller: FakeController, node: Lineage) -> None:
        await node.begin()
        command = start_worker("Yielding", entry="run")
        await controller.do(start_worker=command)
        stop = stop_worker(command, cancel_timeout_ms=5000, checkpoint=True)
        assert (await controller.do(stop_worker=stop)).worker_stopped.HasField("checkpoint")
        await controller.until(lambda: recorded(node, "checkpoint") == [])
        await node.leave()


class TestOthers:
    async def test_spares_go_on(self, controller: FakeController, node: Lineage) -> None:
        controller.welcome["heartbeat_ms"] = 50
        session = await node.begin()
        await session.send(spare_target=agent_pb2.SpareTarget(count=1))
        await controller.until(lambda: spare_pids(node))
        (spare,) = spare_pids(node)
        await node.kill()
        await node.begin()
        assert spare_pids(node) == [spare]
        ready = (await controller.do(start_worker=start_worker("Plain"))).worker_ready
        assert ready.warm
        assert ready.pid == spare
        await node.leave()

    async def test_spares_with_modules_are_ended_and_made_anew(self, controller: FakeController, node: Lineage) -> None:
        """Under which variables they imported is in no record, because values may be secret."""
        controller.welcome["heartbeat_ms"] = 50
        target = agent_pb2.SpareTarget(count=1, preloads=[agent_pb2.Preload(modules=["wave"])])
        await (await node.begin()).send(spare_target=target)
        await controller.until(lambda: len(spare_pids(node)) == 2)
        old = next(each["pid"] for each in recorded(node, "spare") if each["facts"].get("preload"))
        await node.kill()
        await (await node.begin()).send(spare_target=target)
        await controller.until(lambda: len(spare_pids(node)) == 2 and old not in spare_pids(node))
        assert is_gone(old)
        assert (await controller.do(start_worker=start_worker("Plain", preload=["wave"]))).worker_ready.preloaded
        await node.leave()

    async def test_nothing_goes_on_under_another_cluster_name(self, controller: FakeController, node: Lineage) -> None:
        await node.begin()
        ready = (await controller.do(start_worker=start_worker("Plain"))).worker_ready
        await node.kill()
        session = await node.begin(cluster="another")
        assert is_gone(ready.pid)
        assert told(session) == []
        await node.leave()

    async def test_what_is_marked_but_not_recorded_is_ended_first(
        self, controller: FakeController, node: Lineage
    ) -> None:
        await node.begin()
        ready = (await controller.do(start_worker=start_worker("Plain"))).worker_ready
        await node.kill()
        (node.run_dir / "processes.json").unlink()
        session = await node.begin()
        assert is_gone(ready.pid)
        assert told(session) == []
        await node.leave()

    async def test_without_a_successor_they_end_by_themselves(self, controller: FakeController, node: Lineage) -> None:
        await node.begin(successor_s=0.1)
        ready = (await controller.do(start_worker=start_worker("Plain"))).worker_ready
        await node.kill()
        await until_gone(ready.pid)
        await node.begin()
        assert (await controller.said("worker_exited")).generation == 1
        await node.leave()

    async def test_one_whose_first_agent_never_came_waits_for_the_next_as_long_as_any(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_main, "_FIRST_AGENT_S", 0.0)
        path = str(tmp_path / "host")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        server = worker_main._Server(MainThread())
        serving = asyncio.create_task(server.serve(listener.detach(), 60))
        await asyncio.wait([serving], timeout=0.1)  # The first agent was killed before it connected.
        assert not serving.done()
        requests = Requests(*await asyncio.open_unix_connection(path))
        await requests.ask("ping")
        requests.close()
        await server._until(lambda: server._agents == 0, None)
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


def recorded(node: Lineage, role: str) -> list[dict[str, Any]]:
    """What the node's agent wrote down."""
    file = node.run_dir / "processes.json"
    return [each for each in json.loads(file.read_text()) if each["role"] == role] if file.exists() else []


def spare_pids(node: Lineage) -> list[int]:
    """Spares that are ready."""
    return [each["pid"] for each in recorded(node, "spare") if each["pid"]]


async def hosted(node: Lineage) -> int:
    """The pid of the only worker, once its host is up; looked at with every heartbeat."""

    def found() -> int:
        return next((each["pid"] for each in recorded(node, "worker")), 0)

    pid: int = await node.controller.until(found)
    return pid
