"""How does an agent stay in touch with its controller?"""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path
from typing import Any

import grpc
import pytest

from callboard.agents.agent import run_agent
from callboard.agents.options import AgentOptions
from callboard.v1 import agent_pb2
from tests.agents.conftest import StartAgent, is_gone, until_gone
from tests.support.fake_controller import FakeController, FakeSession, start_worker, stop_worker


async def alone(controller: FakeController, tmp_path: Path, **options: Any) -> int:
    """An agent that is expected to end by itself; its exit code."""
    settings = {"node_id": "n0", "controller": controller.address, "runtime": "process", **options}
    return await run_agent(AgentOptions(**settings, run_dir=str(tmp_path / "n0")))


async def restarted(controller: FakeController) -> FakeSession:
    """Every stream is cut, and the controller is back at the same port."""
    await controller.stop()
    await controller.start()
    return await controller.session("n0", len(controller.opened) + 1)


class TestOpening:
    async def test_hello_says_who_what_and_how(self, controller: FakeController, start_agent: StartAgent) -> None:
        session = await start_agent(labels={"gpu": "h100"}, rank=4, node_group="a", custom_milli={"worker_unit": 1000})
        hello = session.hello
        assert (hello.node_id, hello.rank, hello.node_group) == ("n0", 4, "a")
        assert hello.inventory.capacity.gpu_milli == 2000
        assert hello.inventory.capacity.custom_milli["worker_unit"] == 1000
        assert [device.id for device in hello.inventory.devices] == ["0", "1"]
        assert hello.inventory.simulated
        assert hello.runtime == agent_pb2.RUNTIME_PROCESS
        assert hello.pid == os.getpid()
        assert hello.epoch_seen == 0

    @pytest.mark.parametrize(
        "code",
        [
            grpc.StatusCode.ALREADY_EXISTS,
            grpc.StatusCode.FAILED_PRECONDITION,
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.UNAUTHENTICATED,
        ],
    )
    async def test_a_refusal_ends_the_agent_with_its_reason(
        self, controller: FakeController, tmp_path: Path, code: grpc.StatusCode, capsys: pytest.CaptureFixture[str]
    ) -> None:
        controller.refuse = (code, "rank 3 is taken by node n7")
        assert await alone(controller, tmp_path) == 2
        assert "rank 3 is taken by node n7" in capsys.readouterr().err
        assert not (tmp_path / "n0").exists()

    async def test_an_absent_controller_is_waited_for(
        self, controller: FakeController, start_agent: StartAgent
    ) -> None:
        await controller.stop()
        joining = asyncio.ensure_future(start_agent())
        await asyncio.sleep(0.3)  # A few attempts that find nobody.
        await controller.start()
        await joining

    async def test_ft_i1_a_controller_that_sends_no_message_is_tried_again(
        self, controller: FakeController, start_agent: StartAgent
    ) -> None:
        await controller.stop()
        opened = asyncio.Queue[None]()

        async def garbage(_requests: Any, context: Any) -> None:
            await context.write(b"\xff\xff")
            opened.put_nowait(None)
            await asyncio.Event().wait()

        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        handlers: dict[str, Any] = {"Session": grpc.stream_stream_rpc_method_handler(garbage)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("callboard.v1.AgentService", handlers),))
        server.add_insecure_port(controller.address)
        await server.start()
        joining = asyncio.ensure_future(start_agent())
        for _ in range(2):
            await opened.get()
        await server.stop(0)
        await controller.start()
        await joining

    async def test_gc_10_proxy_variables_do_not_capture_it(
        self, start_agent: StartAgent, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        await start_agent()

    async def test_gv_10_more_gpus_than_visible_never_join(
        self, controller: FakeController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2,3")
        assert await alone(controller, tmp_path, gpus=4) == 2
        assert not controller.opened


class TestReports:
    async def test_they_are_sent_again_until_acknowledged(self, controller: FakeController, agent: FakeSession) -> None:
        controller.acknowledge = False
        report = await controller.do(start_worker=start_worker("Plain"))
        await restarted(controller)
        again = await controller.report(report.command_id, 2)
        assert again == report, "the same id carries the same content"

        controller.acknowledge = True
        await restarted(controller)
        await controller.report(report.command_id, 3)
        await restarted(controller)
        marker = await controller.do(stop_worker=stop_worker(start_worker("Plain")))
        assert [each.report_id for each in controller.reports].count(report.report_id) == 3
        assert controller.reports[-1] == marker

    async def test_what_the_controller_knows_is_not_sent_again(
        self, controller: FakeController, agent: FakeSession
    ) -> None:
        controller.acknowledge = False
        report = await controller.do(start_worker=start_worker("Plain"))
        controller.welcome["known_report_ids"] = [report.report_id]
        await restarted(controller)
        await controller.do(stop_worker=stop_worker(start_worker("Plain")))
        assert [each.command_id for each in controller.reports].count(report.command_id) == 1


class TestCommands:
    async def test_a_repeated_command_gets_its_first_answer_and_does_nothing(
        self, controller: FakeController, agent: FakeSession
    ) -> None:
        command = start_worker("Plain")
        first = await controller.do(start_worker=command, command_id="once")
        await controller.command(start_worker=command, command_id="once")
        assert await controller.report("once", 2) == first
        assert not is_gone(first.worker_ready.pid)

    async def test_a_command_repeated_while_it_runs_is_answered_once(
        self, controller: FakeController, agent: FakeSession
    ) -> None:
        command = start_worker("Plain")
        for _ in range(3):
            await controller.command(start_worker=command, command_id="once")
        await controller.report("once")
        await controller.do(stop_worker=stop_worker(command))
        assert len([each for each in controller.reports if each.command_id == "once"]) == 1

    async def test_i9_a_command_of_an_older_term_is_refused(
        self, controller: FakeController, start_agent: StartAgent
    ) -> None:
        controller.term = 3
        await start_agent()
        command_id = await controller.command(start_worker=start_worker("Plain"), term=2)
        report = await controller.report(command_id)
        assert "term 2 is over, 3 is current" in report.command_refused.message

    async def test_an_action_it_does_not_know_is_refused(self, controller: FakeController, agent: FakeSession) -> None:
        report = await controller.do()
        assert "doesn't know" in report.command_refused.message


class TestReconnecting:
    async def test_workers_run_on_and_are_told_of(self, controller: FakeController, agent: FakeSession) -> None:
        ready = await controller.do(start_worker=start_worker("Plain"))
        session = await restarted(controller)
        (worker,) = session.hello.workers
        assert worker.state == agent_pb2.AGENT_WORKER_STATE_READY
        assert (worker.pid, worker.pid_start_ms) == (ready.worker_ready.pid, ready.worker_ready.pid_start_ms)
        assert session.hello.epoch_seen == 1
        assert session.hello.instance == agent.hello.instance
        assert not is_gone(worker.pid)

    async def test_what_is_not_kept_is_reaped_and_reported(
        self, controller: FakeController, agent: FakeSession
    ) -> None:
        ready = await controller.do(start_worker=start_worker("Hanging", entry="run", args_json='["gil"]'))
        controller.keep_all = False
        await restarted(controller)
        stopped = await controller.said("worker_stopped")
        assert stopped.outcome == agent_pb2.STOP_OUTCOME_KILLED
        assert "doesn't keep it" in stopped.detail
        assert is_gone(ready.worker_ready.pid)

    async def test_i9_a_welcome_from_the_past_is_not_believed(
        self, controller: FakeController, agent: FakeSession
    ) -> None:
        ready = await controller.do(start_worker=start_worker("Plain"))
        controller.epoch = itertools.repeat(1)  # type: ignore[assignment]
        controller.keep_all = False
        await controller.stop()
        before = len(controller.opened)
        await controller.start()
        await controller.session("n0", before + 3)  # Opened by the controller, dropped by the agent.
        assert not any(session.heartbeats for session in controller.opened[before:])
        assert not is_gone(ready.worker_ready.pid)
        controller.keep_all = True
        controller.epoch = itertools.count(len(controller.opened) + 1)
        await controller.until(lambda: any(session.heartbeats for session in controller.opened[before:]))
        assert not is_gone(ready.worker_ready.pid)

    async def test_heartbeats_carry_on(self, controller: FakeController, agent: FakeSession) -> None:
        await controller.until(lambda: len(agent.heartbeats) >= 3)
        assert [each.sequence for each in agent.heartbeats[:3]] == [1, 2, 3]


class TestLease:
    async def cut_off(
        self, controller: FakeController, start_agent: StartAgent, *, orphan_grace_ms: int
    ) -> tuple[int, int]:
        """The pids of a strict and a relaxed worker whose controller has gone silent."""
        controller.welcome |= {"lease_ms": 1_500, "orphan_grace_ms": orphan_grace_ms}
        await start_agent()
        strict = await controller.do(start_worker=start_worker("Plain", job="strict", strict=True))
        relaxed = await controller.do(start_worker=start_worker("Plain", job="relaxed"))
        await controller.stop()
        return strict.worker_ready.pid, relaxed.worker_ready.pid

    async def test_strict_workers_end_with_it_and_relaxed_ones_after_the_grace(
        self, controller: FakeController, start_agent: StartAgent
    ) -> None:
        strict, relaxed = await self.cut_off(controller, start_agent, orphan_grace_ms=600)
        await until_gone(strict)
        assert not is_gone(relaxed)
        await until_gone(relaxed)
        await controller.start()
        reports = [await controller.said("worker_stopped", number) for number in (1, 2)]
        assert [each.worker.job_id for each in reports] == ["strict", "relaxed"]
        assert "the lease ended" in reports[0].detail
        assert "away for too long" in reports[1].detail

    async def test_a_relaxed_worker_outlives_a_short_outage(
        self, controller: FakeController, start_agent: StartAgent
    ) -> None:
        strict, relaxed = await self.cut_off(controller, start_agent, orphan_grace_ms=60_000)
        await until_gone(strict)
        await controller.start()
        session = await controller.session("n0", 2)
        # The strict one may still be on its way out of the agent's books when the Hello is sent.
        assert relaxed in [worker.pid for worker in session.hello.workers]
        assert "the lease ended" in (await controller.said("worker_stopped")).detail
        assert not is_gone(relaxed)
