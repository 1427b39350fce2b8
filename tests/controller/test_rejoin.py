"""An agent that comes back: the same run, a later one, and Hellos of the past."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc
import grpc.aio

from callboard.controller.server import Controller
from callboard.scheduler.records.states import NodeState
from callboard.v1 import agent_pb2, common_pb2
from callboard.wire.refusals import ErrorReason
from tests.controller.support import Api, job, options_for, pool, refused_join, running
from tests.support.fake_agent import (
    FakeAgent,
    worker_ready,
    worker_stopped,
)


class TestTheSameAgentComesBack:
    async def test_one_that_knows_more_than_the_controller_is_told_to_start_afresh(
        self, controller: Controller
    ) -> None:
        agent = FakeAgent(controller.address)
        agent.welcome.epoch = 5  # of a state that was removed since
        error = await refused_join(agent)
        assert (error.code, error.reason) == ("FAILED_PRECONDITION", ErrorReason.WRONG_STATE)
        assert "Restart the agent" in error.message

    async def test_its_new_session_replaces_the_old(self, controller: Controller) -> None:
        first = FakeAgent(controller.address, "n1", instance="same")
        await first.join()
        second = FakeAgent(controller.address, "n1", instance="same")
        await second.join()
        assert (first.welcome.epoch, second.welcome.epoch) == (1, 2)
        assert second.welcome.rank == first.welcome.rank
        assert await first.over() is grpc.StatusCode.ALREADY_EXISTS
        await second.heartbeat()
        await first.cut()
        await second.cut()

    async def test_i4_a_hello_that_was_overtaken_on_its_way_is_not_believed(self, controller: Controller) -> None:
        later = FakeAgent(controller.address, "n1", instance="same")
        later.hello.number = 2
        await later.join()
        stuck = FakeAgent(controller.address, "n1", instance="same")
        stuck.hello.number = 1
        error = await refused_join(stuck)
        assert error.code == "UNAVAILABLE"
        assert "a later Hello" in error.message
        await later.heartbeat()
        assert controller.driver.state.nodes["n1"].epoch == 1
        await later.cut()

    async def test_i4_a_refused_agent_does_not_make_an_overtaken_hello_new(self, controller: Controller) -> None:
        later = FakeAgent(controller.address, "n1", instance="same")
        later.hello.number = 2
        await later.join()
        other = FakeAgent(controller.address, "n1", instance="other")
        other.hello.number = 7
        assert (await refused_join(other)).reason is ErrorReason.NODE_TAKEN
        stuck = FakeAgent(controller.address, "n1", instance="same")
        stuck.hello.number = 1
        assert "a later Hello" in (await refused_join(stuck)).message
        await later.heartbeat()
        assert controller.driver.state.nodes["n1"].epoch == 1
        await later.cut()

    async def test_i4_what_a_dead_run_has_sent_is_not_believed_while_its_successor_is_cut_off(
        self, controller: Controller, api: Api
    ) -> None:
        await api.pools.CreatePool(pool())
        successor = FakeAgent(controller.address, "n1", instance="second")
        successor.hello.number, successor.hello.clock_ms = 1, 1_800_000_030_000
        await successor.join()
        await api.submit(job("a", gpu=1000))
        await api.until_job("a", "RUNNING")
        await successor.cut()
        dead = FakeAgent(controller.address, "n1", instance="first")
        dead.hello.number, dead.hello.clock_ms = 4, 1_800_000_000_000
        # Refused for its clock, also where the server has not learned of the cut yet.
        assert "a Hello of a later run" in (await refused_join(dead)).message
        successor.hello.number = 2
        await successor.join()
        assert controller.driver.state.nodes["n1"].instance == "second"
        assert [worker.generation for worker in successor.welcome.keep] == list(successor.workers)
        assert len(successor.workers) == 1
        await successor.cut()

    async def test_i4_a_controller_that_was_started_again_believes_no_hello_of_the_past(self, tmp_path: Path) -> None:
        options = options_for(tmp_path)
        async with running(options) as controller:
            agent = FakeAgent(controller.address, "n1", instance="second")
            agent.hello.number, agent.hello.clock_ms = 3, 1_800_000_030_000
            await agent.join()
            await agent.cut()
        async with running(options) as controller:
            dead = FakeAgent(controller.address, "n1", instance="first")
            dead.hello.number, dead.hello.clock_ms = 14, 1_800_000_021_000
            assert "a Hello of a later run" in (await refused_join(dead)).message
            stuck = FakeAgent(controller.address, "n1", instance="second")
            stuck.hello.number, stuck.hello.clock_ms = 2, 1_800_000_029_000
            assert "a later Hello" in (await refused_join(stuck)).message
            assert controller.driver.state.nodes["n1"].epoch == 1
            latest = FakeAgent(controller.address, "n1", instance="second")
            latest.welcome.epoch = 1
            latest.hello.number, latest.hello.clock_ms = 4, 1_800_000_031_000
            await latest.join()
            assert latest.welcome.epoch == 2
            await latest.cut()

    async def test_i4_a_dead_run_is_not_believed_about_a_node_that_was_given_up(self, tmp_path: Path) -> None:
        async with running(options_for(tmp_path)) as controller:
            successor = FakeAgent(controller.address, "n1", instance="second")
            successor.hello.number, successor.hello.clock_ms = 1, 1_800_000_030_000
            await successor.join()
            await successor.cut()
            controller.sessions.lost("n1", 1, 30_000)
            while controller.driver.state.nodes["n1"].state is not NodeState.LOST:
                await controller.driver.read(lambda state: state.nodes["n1"].state)
                await asyncio.sleep(0)
            dead = FakeAgent(controller.address, "n1", instance="first")
            dead.hello.number, dead.hello.clock_ms = 4, 1_800_000_000_000
            assert "a Hello of a later run" in (await refused_join(dead)).message
            assert controller.driver.state.nodes["n1"].state is NodeState.LOST

    async def test_a_new_run_may_join_whose_clock_was_set_back_far(self, controller: Controller) -> None:
        first = FakeAgent(controller.address, "n1", instance="first")
        first.hello.number, first.hello.clock_ms = 1, 1_800_003_600_000
        await first.join()
        await first.cut()
        second = FakeAgent(controller.address, "n1", instance="second")
        second.hello.number, second.hello.clock_ms = 1, 1_800_000_000_000
        while not second.welcome.epoch:  # the server learns of the cut a moment later
            with contextlib.suppress(grpc.aio.AioRpcError):
                await second.join()
        assert second.welcome.epoch == 2
        await second.cut()

    async def test_another_run_may_once_the_stream_of_the_first_ended(self, controller: Controller) -> None:
        first = FakeAgent(controller.address, "n1")
        await first.join()
        await first.cut()
        second = FakeAgent(controller.address, "n1")
        while not second.welcome.epoch:  # the server learns of the cut a moment later
            with contextlib.suppress(grpc.aio.AioRpcError):
                await second.join()
        assert second.welcome.epoch == 2
        await second.cut()

    async def test_it_is_told_again_what_it_owes(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        agent = FakeAgent(controller.address, hold={"start_worker"})
        await agent.join()
        await api.submit(job("a", gpu=1000))
        start = await agent.command("start_worker")
        await agent.join()
        again = await agent.command("start_worker")
        assert again == start
        await agent.reported(worker_ready(again))
        await api.until_job("a", "RUNNING")
        await agent.join()
        assert agent.got("start_worker") == [start, again]
        await agent.cut()

    async def test_what_it_runs_and_nobody_wants_is_reaped_before_the_node_takes_work(
        self, controller: Controller, api: Api
    ) -> None:
        await api.pools.CreatePool(pool())
        agent = FakeAgent(controller.address, hold={"stop_worker"})
        agent.workers[77] = agent_pb2.WorkerReport(
            worker=common_pb2.WorkerKey(job_id="old", component="w", rank=0),
            generation=77,
            state=agent_pb2.AGENT_WORKER_STATE_READY,
            pid=4,
        )
        welcome = await agent.join()
        assert not welcome.keep
        stop = await agent.command("stop_worker")
        assert stop.stop_worker.generation == 77
        await api.submit(job("a"))
        await api.until_job("a", "PENDING")
        assert not agent.got("start_worker")
        await agent.reported(worker_stopped(stop))
        await api.until_job("a", "RUNNING")
        await agent.cut()

    async def test_what_goes_on_is_named_in_the_welcome(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        agent = FakeAgent(controller.address)
        await agent.join()
        await api.submit(job("a"))
        await api.until_job("a", "RUNNING")
        welcome = await agent.join()
        assert [ref.generation for ref in welcome.keep] == list(agent.workers)
        assert not agent.got("stop_worker")
        await agent.cut()
