"""Does an old copy of a strict job stop itself when its lease is over, whatever became of its agent? (R5)

With plain processes; `test_ray` does the same on Ray. Leases are short here: what counts is who acts, not when.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from callboard.agents.files.lease_file import LEASE_FILE, HeardLease, LeaseFile, LeaseTerms, boot_s, read_lease
from tests.agents.conftest import is_gone, started_by, until_gone
from tests.agents.test_adoption import Lineage, recorded, told
from tests.support.fake_controller import FakeController, start_worker, stop_worker

LEASE_MS = 2_000
"""Far above the pauses of a busy machine, which a lease would take for silence."""


@pytest.fixture
async def node(controller: FakeController, tmp_path: Path) -> AsyncIterator[Lineage]:
    controller.welcome |= {"lease_ms": LEASE_MS, "heartbeat_ms": 100}
    lineage = Lineage(controller, tmp_path)
    yield lineage
    if lineage.agent is not None and lineage.agent.returncode is None:
        lineage.agent.send_signal(signal.SIGCONT)
        await lineage.kill()
    for pid in started_by(lineage.run_dir):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def fence_of(node: Lineage) -> int:
    (fence,) = recorded(node, "fence")
    return int(fence["pid"])


class TestTheAgentCannotAct:
    async def test_r5_strict_workers_end_themselves_while_their_agent_is_stopped(
        self, controller: FakeController, node: Lineage, tmp_path: Path
    ) -> None:
        await node.begin()
        hiding = start_worker("Stubborn", strict=True, args_json=json.dumps([str(tmp_path / "child")]))
        busy = start_worker("Busy", rank=1, generation=2, strict=True, entry="run", args_json='["gil"]')
        relaxed = start_worker("Plain", rank=2, generation=3)
        pids = [(await controller.do(start_worker=each)).worker_ready.pid for each in (hiding, busy, relaxed)]
        child = int((tmp_path / "child").read_text())
        assert node.agent is not None
        node.agent.send_signal(signal.SIGSTOP)
        for pid in (*pids[:2], child):
            await until_gone(pid)
        assert not is_gone(pids[2]), "a relaxed worker runs on"
        node.agent.send_signal(signal.SIGCONT)
        ended = [await controller.said("worker_stopped", which) for which in (1, 2)]
        assert {each.generation for each in ended} == {1, 2}
        assert all("the lease ended" in each.detail for each in ended)
        assert not [each for each in controller.reports if each.HasField("worker_exited")], "it is no failure of theirs"
        await node.leave()

    async def test_r5_strict_workers_end_themselves_when_their_agent_was_killed(
        self, controller: FakeController, node: Lineage
    ) -> None:
        await node.begin()
        strict = start_worker("Busy", strict=True, entry="run", args_json='["gil"]')
        relaxed = start_worker("Plain", rank=1, generation=2)
        pids = [(await controller.do(start_worker=each)).worker_ready.pid for each in (strict, relaxed)]
        fence = fence_of(node)
        await node.kill()
        await until_gone(pids[0])
        await until_gone(fence)
        assert not is_gone(pids[1])
        session = await node.begin()
        assert (2, "READY", pids[1]) in told(session)
        stopped = await controller.said("worker_stopped")
        assert stopped.generation == 1
        assert "the lease ended" in stopped.detail
        await node.leave()

    async def test_the_next_agent_has_no_more_time_than_the_last(
        self, controller: FakeController, node: Lineage
    ) -> None:
        await node.begin()
        strict = start_worker("Plain", strict=True)
        pid = (await controller.do(start_worker=strict)).worker_ready.pid
        await node.kill()
        await controller.stop()  # Nobody will welcome it.
        await node.start()
        await until_gone(pid)
        await controller.start()
        await controller.session("n0", 2)
        assert (await controller.said("worker_stopped")).detail.startswith("the lease ended")
        await node.leave()


class TestTheAgentActs:
    async def test_a_healthy_worker_that_holds_the_gil_for_longer_than_its_lease_lives_on(
        self, controller: FakeController, node: Lineage
    ) -> None:
        session = await node.begin()
        strict = start_worker("Busy", strict=True, entry="run", args_json='["gil"]')
        pid = (await controller.do(start_worker=strict)).worker_ready.pid
        beats = len(session.heartbeats) + 3 * LEASE_MS // 100
        await controller.until(lambda: len(session.heartbeats) >= beats)
        assert not is_gone(pid)
        await controller.do(stop_worker=stop_worker(strict))
        await node.leave()

    async def test_a_fence_that_dies_is_replaced(self, controller: FakeController, node: Lineage) -> None:
        await node.begin()
        pid = (await controller.do(start_worker=start_worker("Plain", strict=True))).worker_ready.pid
        first = fence_of(node)
        os.kill(first, signal.SIGKILL)

        def replaced() -> bool:
            return [each["pid"] for each in recorded(node, "fence") if each["pid"] != first] != []

        await controller.until(replaced)
        # A start waits until the new one watches.
        await controller.do(start_worker=start_worker("Plain", rank=1, generation=2, strict=True))
        assert node.agent is not None
        node.agent.send_signal(signal.SIGSTOP)
        await until_gone(pid)
        node.agent.send_signal(signal.SIGCONT)
        await node.leave()

    async def test_a_restarted_agent_puts_its_own_fence_in_place_of_the_old_one(
        self, controller: FakeController, node: Lineage
    ) -> None:
        controller.welcome |= {"lease_ms": 60_000}
        await node.begin()
        pid = (await controller.do(start_worker=start_worker("Plain", strict=True))).worker_ready.pid
        first = fence_of(node)
        await node.kill()
        assert told(await node.begin()) == [(1, "READY", pid)]
        assert is_gone(first)
        assert not is_gone(fence_of(node))
        await node.leave()

    async def test_without_strict_workers_there_is_no_fence(self, controller: FakeController, node: Lineage) -> None:
        await node.begin()
        await controller.do(start_worker=start_worker("Plain"))
        assert recorded(node, "fence") == []
        await node.leave()


class TestTheFile:
    def test_what_is_written_is_read(self, tmp_path: Path) -> None:
        assert read_lease(tmp_path) is None
        file = LeaseFile(tmp_path)
        assert read_lease(tmp_path) is None
        heard = HeardLease(float(int(boot_s())), LeaseTerms(15.0, 3600.0))
        file.write(heard)
        assert read_lease(tmp_path) == heard
        file.close()

    def test_one_of_before_the_machine_was_started_again_counts_for_nothing(self, tmp_path: Path) -> None:
        file = LeaseFile(tmp_path)
        file.write(HeardLease(boot_s() + 3600, LeaseTerms(15.0, 3600.0)))
        assert read_lease(tmp_path) is None
        file.close()

    def test_a_torn_one_is_not_believed(self, tmp_path: Path) -> None:
        file = LeaseFile(tmp_path)
        file.write(HeardLease(boot_s(), LeaseTerms(15.0, 3600.0)))
        with (tmp_path / LEASE_FILE).open("r+b") as half:
            half.write(b"\1\2\3\4")
        assert read_lease(tmp_path) is None
        file.close()
