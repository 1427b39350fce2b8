"""What does an agent do with its workers? Real agents and processes, a controller that plays along."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from callboard.agents.system import process_tree, processes
from callboard.agents.system.process_tree import TreeEnd
from callboard.security.processes import ProcessId, identify
from callboard.v1 import agent_pb2
from tests.agents.conftest import StartAgent, is_gone, started_by
from tests.support.actors import wait_for_file
from tests.support.fake_controller import FakeController, FakeSession, start_worker, stop_worker

Outcome = agent_pb2.StopOutcome

pytestmark = pytest.mark.usefixtures("agent")

LONG_MS = 10 * 60 * 1000
"""A timeout that nothing may wait for: no test takes that long."""


async def ready(controller: FakeController, command: agent_pb2.StartWorker) -> agent_pb2.WorkerReady:
    report = await controller.do(start_worker=command)
    assert report.HasField("worker_ready"), report
    return report.worker_ready


async def stopped(controller: FakeController, command: agent_pb2.StartWorker, **stop: Any) -> agent_pb2.WorkerStopped:
    report = await controller.do(stop_worker=stop_worker(command, **stop))
    assert report.HasField("worker_stopped"), report
    return report.worker_stopped


def starting(actor: str, *args: object, **fields: Any) -> agent_pb2.StartWorker:
    return start_worker(actor, args_json=json.dumps(args), **fields)


class TestStart:
    async def test_ready_says_who_it_is_and_what_it_sees(self, controller: FakeController) -> None:
        worker = await ready(controller, starting("Plain", devices=("1", "0")))
        assert worker.visible_devices == "1,0"
        process = identify(worker.pid)
        assert process is not None
        assert worker.start_ms < 1000

    async def test_a_constructor_that_raises_reports_its_traceback_and_leaves_nothing(
        self, controller: FakeController, tmp_path: Path
    ) -> None:
        report = await controller.do(start_worker=starting("Broken"))
        failed = report.worker_start_failed
        assert failed.failure == agent_pb2.START_FAILURE_CONSTRUCTOR
        assert "no weights here" in failed.traceback
        assert started_by(tmp_path / "n0") == []

    async def test_one_that_is_not_ready_in_time_is_ended(self, controller: FakeController, tmp_path: Path) -> None:
        report = await controller.do(start_worker=starting("SlowToBuild", start_timeout_ms=400))
        assert report.worker_start_failed.failure == agent_pb2.START_FAILURE_DEADLINE
        assert started_by(tmp_path / "n0") == []

    async def test_one_that_dies_while_starting_says_how(self, controller: FakeController) -> None:
        report = await controller.do(start_worker=starting("DiesWhenBuilt"))
        failed = report.worker_start_failed
        assert failed.failure == agent_pb2.START_FAILURE_DIED
        assert "killed by signal 9 (SIGKILL)" in failed.message

    async def test_a_variable_of_the_scheduler_refuses_the_start(self, controller: FakeController) -> None:
        report = await controller.do(start_worker=starting("Plain", env={"CUDA_VISIBLE_DEVICES": "0,1"}))
        assert "CUDA_VISIBLE_DEVICES" in report.command_refused.message

    async def test_se_06_an_interpreter_that_is_not_listed_is_refused(self, controller: FakeController) -> None:
        report = await controller.do(start_worker=starting("Plain", interpreter="/bin/sh"))
        assert "allow-list" in report.command_refused.message

    async def test_a_device_is_never_given_twice(self, controller: FakeController) -> None:
        first = starting("Plain", devices=("1",))
        await ready(controller, first)
        report = await controller.do(start_worker=starting("Plain", job="other", devices=("1",)))
        assert report.worker_start_failed.failure == agent_pb2.START_FAILURE_HOST
        assert "held by job-1/main/0/g1" in report.worker_start_failed.message
        await stopped(controller, first)
        await ready(controller, starting("Plain", job="other", devices=("1",), generation=2))


class TestEntry:
    @pytest.mark.parametrize(("how", "succeeded"), [("returns", True), ("exits", True), ("raises", False)])
    async def test_its_end_is_reported(self, controller: FakeController, how: str, succeeded: bool) -> None:
        await ready(controller, starting("Entry", how, entry="run"))
        finished = await controller.said("worker_finished")
        assert finished.succeeded is succeeded
        assert ("the loss is nan" in finished.traceback) is (how == "raises")

    async def test_ready_is_reported_before_its_end(self, controller: FakeController) -> None:
        await ready(controller, starting("Entry", entry="run"))
        await controller.said("worker_finished")
        assert [each.WhichOneof("content") for each in controller.reports] == ["worker_ready", "worker_finished"]

    async def test_an_entry_that_is_missing_fails_the_start(self, controller: FakeController) -> None:
        report = await controller.do(start_worker=starting("Plain", entry="nothing"))
        assert report.worker_start_failed.failure == agent_pb2.START_FAILURE_CONSTRUCTOR


class TestStopLadder:
    async def test_a_cooperative_worker_leaves_its_checkpoint(self, controller: FakeController) -> None:
        command = starting("Yielding", entry="run")
        await ready(controller, command)
        end = await stopped(controller, command, cancel_timeout_ms=LONG_MS, checkpoint=True)
        assert end.outcome == agent_pb2.STOP_OUTCOME_COOPERATIVE
        assert int(end.checkpoint.data) >= 0

    async def test_a_checkpoint_may_be_an_address(self, controller: FakeController) -> None:
        command = starting("Yielding", "uri")
        await ready(controller, command)
        assert (await stopped(controller, command, checkpoint=True)).checkpoint.uri == "s3://bucket/key"

    @pytest.mark.parametrize("how", ["python", "sleep", "gil"])
    async def test_pc_10_busy_code_without_hooks_is_ended_at_once(self, controller: FakeController, how: str) -> None:
        command = starting("Busy", how, entry="run")
        worker = await ready(controller, command)
        end = await stopped(controller, command, cancel_timeout_ms=LONG_MS)
        assert end.outcome == agent_pb2.STOP_OUTCOME_KILLED
        assert is_gone(worker.pid)

    @pytest.mark.parametrize("how", ["python", "sleep", "gil"])
    async def test_pc_11_a_cancel_that_hangs_is_over_at_the_timeout(self, controller: FakeController, how: str) -> None:
        command = starting("Hanging", how, entry="run")
        worker = await ready(controller, command)
        end = await stopped(controller, command, cancel_timeout_ms=300, kill_timeout_ms=1000)
        assert end.outcome == agent_pb2.STOP_OUTCOME_KILLED
        assert end.detail == "cancel() took too long"
        assert end.took_ms >= 290
        assert is_gone(worker.pid)

    async def test_a_run_that_ignores_cancel_gets_the_whole_timeout(self, controller: FakeController) -> None:
        command = starting("QuickCancel", "sleep", entry="run")
        await ready(controller, command)
        end = await stopped(controller, command, cancel_timeout_ms=300)
        assert end.outcome == agent_pb2.STOP_OUTCOME_KILLED
        assert end.detail == "a call in flight took too long"
        assert end.took_ms >= 290

    async def test_a_cancel_that_raises_is_told(self, controller: FakeController) -> None:
        command = starting("BadCancel", "python")
        await ready(controller, command)
        end = await stopped(controller, command)
        assert end.outcome == agent_pb2.STOP_OUTCOME_KILLED
        assert "cancel() raised ValueError: can't" in end.detail

    async def test_pc_12_children_that_hide_go_too(self, controller: FakeController, tmp_path: Path) -> None:
        command = starting("Stubborn", str(tmp_path / "child"), entry="run")
        worker = await ready(controller, command)
        child = int(wait_for_file(str(tmp_path / "child")))
        assert not is_gone(child)
        end = await stopped(controller, command, cancel_timeout_ms=1000)
        assert end.outcome == agent_pb2.STOP_OUTCOME_KILLED
        assert is_gone(child)
        assert is_gone(worker.pid)

    async def test_stopped_comes_only_when_the_process_is_gone(self, controller: FakeController) -> None:
        """GV-04: a process that takes 300 ms to exit holds its device for as long."""
        command = starting("SlowToExit", devices=("1",), entry="run")
        worker = await ready(controller, command)
        end = await stopped(controller, command, cancel_timeout_ms=5000)
        assert end.outcome == agent_pb2.STOP_OUTCOME_COOPERATIVE
        assert end.took_ms >= 290
        assert is_gone(worker.pid)

    async def test_a_second_order_shortens_the_first_and_both_are_answered(self, controller: FakeController) -> None:
        command = starting("Hanging", "sleep", entry="run")
        await ready(controller, command)
        patient = await controller.command(stop_worker=stop_worker(command, cancel_timeout_ms=60_000))
        hasty = await controller.command(stop_worker=stop_worker(command, cancel_timeout_ms=100))
        for command_id in (patient, hasty):
            report = await controller.report(command_id)
            assert report.worker_stopped.outcome == agent_pb2.STOP_OUTCOME_KILLED

    async def test_a_worker_that_is_gone_is_gone_already(self, controller: FakeController) -> None:
        assert (await stopped(controller, starting("Plain"))).outcome == agent_pb2.STOP_OUTCOME_ALREADY_GONE

    @pytest.mark.parametrize("delay_ms", [0, 1, 5, 20, 100])
    async def test_pc_13_a_stop_right_after_the_start(
        self, controller: FakeController, tmp_path: Path, delay_ms: int
    ) -> None:
        for generation in range(1, 11):
            command = starting("SlowToBuild", generation=generation, devices=("1",))
            start = await controller.command(start_worker=command)
            await asyncio.sleep(delay_ms / 1000)  # The delays are the scenario's input.
            end = await stopped(controller, command)
            assert end.outcome == agent_pb2.STOP_OUTCOME_KILLED
            failed = (await controller.report(start)).worker_start_failed
            assert failed.failure == agent_pb2.START_FAILURE_STOPPED
            assert started_by(tmp_path / "n0") == []
        await ready(controller, starting("Plain", generation=99, devices=("1",)))

    @pytest.mark.slow
    async def test_gv_04_50_workers_one_after_another_on_one_device(self, controller: FakeController) -> None:
        last = 0
        for generation in range(1, 51):
            command = starting("Plain", generation=generation, devices=("1",))
            worker = await ready(controller, command)
            assert not last or is_gone(last)
            assert worker.visible_devices == "1"
            assert (await stopped(controller, command)).outcome == agent_pb2.STOP_OUTCOME_KILLED
            last = worker.pid

    async def test_pg_20_the_next_tenant_sees_nothing_of_the_last(
        self, controller: FakeController, tmp_path: Path
    ) -> None:
        first = starting("Stubborn", str(tmp_path / "child"), env={"X": "1"}, devices=("1",))
        one = await ready(controller, first)
        await stopped(controller, first)
        second = starting("DumpsEnvironment", str(tmp_path / "env"), job="job-2", devices=("1",), entry="run")
        two = await ready(controller, second)
        assert one.pid != two.pid
        await controller.said("worker_finished")
        assert "X" not in json.loads((tmp_path / "env").read_text())
        assert is_gone(int((tmp_path / "child").read_text()))


class TestDeath:
    async def test_a_worker_that_dies_alone_takes_its_tree_along(
        self, controller: FakeController, tmp_path: Path
    ) -> None:
        worker = await ready(controller, starting("Stubborn", str(tmp_path / "child")))
        child = int((tmp_path / "child").read_text())
        os.kill(worker.pid, signal.SIGKILL)
        dead = await controller.said("worker_exited")
        assert dead.message.startswith("killed by signal 9 (SIGKILL); usually the out-of-memory killer")
        assert not dead.quarantined
        assert is_gone(child)

    async def test_a_clean_exit_is_told_as_one(self, controller: FakeController) -> None:
        await ready(controller, starting("SlowToExit", entry="leave"))
        assert (await controller.said("worker_exited")).message.startswith("exit code 0; ")

    async def test_what_does_not_go_is_quarantined_and_reported_again(
        self, controller: FakeController, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A process in uninterruptible sleep can't be made here, so its like is: one that isn't gone at first."""
        still_there = True
        real_end = process_tree.end_tree

        def end_tree(roots: Iterable[ProcessId], **arguments: Any) -> TreeEnd:
            roots = tuple(roots)
            return TreeEnd(left=roots, killed=0) if still_there else real_end(roots, **arguments)

        monkeypatch.setattr(processes, "end_tree", end_tree)
        command = starting("Plain", devices=("1",))
        worker = await ready(controller, command)
        first = await stopped(controller, command)
        assert first.outcome == agent_pb2.STOP_OUTCOME_QUARANTINED
        assert str(worker.pid) in first.detail
        again = await stopped(controller, command)
        assert again.outcome == agent_pb2.STOP_OUTCOME_QUARANTINED
        other = await controller.do(start_worker=starting("Plain", job="other", devices=("1",)))
        assert other.HasField("worker_start_failed"), "never reused meanwhile"

        still_there = False
        last = await controller.said("worker_stopped", 3)
        assert last.outcome == agent_pb2.STOP_OUTCOME_KILLED
        assert is_gone(worker.pid)


class TestProgress:
    async def test_nj_02_a_worker_that_answers_and_gets_nowhere_is_ended(
        self, controller: FakeController, tmp_path: Path
    ) -> None:
        await ready(controller, starting("Wedged", entry="run", progress_timeout_ms=200))
        exited = await controller.said("worker_exited")
        assert "no progress for 0.2 s" in exited.message
        assert "'steps': 0" in exited.message
        assert started_by(tmp_path / "n0") == []

    async def test_one_that_gets_on_is_left_alone_until_it_is_stuck(self, controller: FakeController) -> None:
        await ready(controller, starting("Wedged", 100, entry="run", progress_timeout_ms=500))
        exited = await controller.said("worker_exited")
        assert "'steps': 100" in exited.message

    @pytest.mark.parametrize(
        ("actor", "fields"),
        [
            ("Wedged", {"entry": "run"}),  # nobody asked for it
            ("Wedged", {"progress_timeout_ms": 100}),  # nothing is in flight
            ("Busy", {"entry": "run", "progress_timeout_ms": 100}),  # it has no progress()
        ],
    )
    async def test_nobody_is_ended_who_may_be_well(
        self, controller: FakeController, actor: str, fields: dict[str, Any]
    ) -> None:
        arguments = ("sleep",) if actor == "Busy" else ()
        quiet = starting(actor, *arguments, job="quiet", **fields)
        await ready(controller, quiet)
        # One that stalls beside it shows that the time has come and gone.
        await ready(controller, starting("Wedged", entry="run", progress_timeout_ms=400, generation=2))
        await controller.said("worker_exited")
        assert (await stopped(controller, quiet, cancel_timeout_ms=0)).outcome != Outcome.STOP_OUTCOME_ALREADY_GONE


class TestGenerations:
    async def test_an_older_stop_changes_nothing(self, controller: FakeController) -> None:
        current = starting("Plain", generation=5)
        worker = await ready(controller, current)
        old = starting("Plain", generation=4)
        assert (await stopped(controller, old)).outcome == agent_pb2.STOP_OUTCOME_ALREADY_GONE
        assert not is_gone(worker.pid)

    @pytest.mark.parametrize("generation", [4, 5])
    async def test_a_start_that_is_not_newer_is_refused(self, controller: FakeController, generation: int) -> None:
        worker = await ready(controller, starting("Plain", generation=5))
        report = await controller.do(start_worker=starting("Plain", generation=generation))
        assert "not newer than 5" in report.command_refused.message
        assert not is_gone(worker.pid)

    async def test_a_start_that_was_stopped_before_it_came_is_refused(self, controller: FakeController) -> None:
        command = starting("Plain", generation=5)
        await stopped(controller, command)
        report = await controller.do(start_worker=command)
        assert report.HasField("command_refused")

    async def test_a_newer_start_ends_the_older_one_first(self, controller: FakeController) -> None:
        old = await ready(controller, starting("Hanging", "gil", entry="run", devices=("1",)))
        new = await ready(controller, starting("Plain", generation=2, devices=("1",)))
        assert is_gone(old.pid)
        assert not is_gone(new.pid)
        assert (await controller.said("worker_stopped")).generation == 1


async def test_placement_groups_of_plain_processes_exist_only_in_the_ledger(controller: FakeController) -> None:
    create = agent_pb2.CreatePlacementGroup(placement_group_id="pg-1", attempt=1, timeout_ms=1000)
    report = await controller.do(create_placement_group=create)
    assert report.placement_group_ready.ray_placement_group_id == ""
    remove = agent_pb2.RemovePlacementGroup(placement_group_id="pg-1")
    assert (await controller.do(remove_placement_group=remove)).placement_group_removed.placement_group_id == "pg-1"


async def test_two_agents_on_one_machine_end_only_their_own(
    controller: FakeController, start_agent: StartAgent, agent: FakeSession
) -> None:
    """NJ-05, and an unrelated process whose command line has the same words."""
    await start_agent("n1")
    unrelated = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import time; time.sleep(1000)", "-m", "callboard.agents.host.worker_main"
    )
    mine = await controller.do("n0", start_worker=starting("Plain"))
    theirs = await controller.do("n1", start_worker=starting("Plain", rank=1))
    await controller.do("n0", stop_worker=stop_worker(starting("Plain")))
    assert is_gone(mine.worker_ready.pid)
    assert not is_gone(theirs.worker_ready.pid)
    assert unrelated.returncode is None
    unrelated.kill()
    await unrelated.wait()
