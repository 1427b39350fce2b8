"""When a node falls silent, and when its Ray restarts: what is believed, and what waits until it is proved?"""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from callboard.controller.server import Controller
from callboard.scheduler.records.states import NodeState
from callboard.v1 import agent_pb2, common_pb2, job_pb2, node_pb2, pool_pb2, scheduler_pb2
from tests.controller.support import Api, all_done, api_at, job, options_for, pool, quick_policy, running
from tests.support.fake_agent import (
    FakeAgent,
)

TOKEN = "ray-token-that-must-not-leak"


def ghosts_of(controller: Controller) -> tuple[int, ...]:
    """Generations that the node still runs and nobody wants."""
    return controller.driver.state.nodes["n0"].ghosts


class TestSilence:
    async def test_a_cut_stream_is_no_goodbye(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        agent = FakeAgent(controller.address)
        await agent.join()
        await api.submit(job("a"))
        await api.until_job("a", "RUNNING")
        await agent.cut()
        assert (await api.job("a")).state == job_pb2.JOB_STATE_RUNNING
        assert controller.driver.state.nodes["n0"].state is NodeState.READY

    async def test_a_goodbye_is_one(self, controller: Controller, api: Api) -> None:
        async with FakeAgent(controller.address) as agent:
            assert await agent.goodbye("maintenance") is grpc.StatusCode.OK
            response = await api.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n0"))
            assert response.node.state == node_pb2.NODE_STATE_LEFT
            assert response.node.state_reason == "maintenance"

    async def test_a_leaving_node_takes_nothing_new(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address) as agent:
            await agent.heartbeat(leaving=True)
            told = await api.until(lambda event: event.subject == "nodes/n0" and event.state == "SUSPECT")
            assert told.reason == "its agent leaves; nothing new is placed there"
            await agent.heartbeat(leaving=True)
            await api.submit(job("a"))
            assert (await api.job("a")).state == job_pb2.JOB_STATE_PENDING
            assert controller.driver.state.nodes["n0"].state is NodeState.SUSPECT

    async def test_a_silent_node_is_suspected_then_given_up_and_may_come_back(self, tmp_path: Path) -> None:
        options = options_for(tmp_path, heartbeat_ms=20, lease_ms=1_000)
        async with running(options) as controller, api_at(controller.address) as api:
            controller.sessions.liveness.margin_ms = 0
            await api.scheduler.SetPolicy(scheduler_pb2.SetPolicyRequest(policy=quick_policy(kill_ms=1)))
            await api.pools.CreatePool(pool())
            agent = FakeAgent(controller.address)
            await agent.join()
            await api.submit(job("a"))
            await api.until(lambda event: event.subject == "nodes/n0" and event.state == "SUSPECT")
            await agent.heartbeat()
            suspected = await api.until(lambda event: event.subject == "nodes/n0" and event.reason == "heard of again")
            lost = await api.until(
                lambda event: event.subject == "nodes/n0" and event.state == "LOST", start=suspected.revision
            )
            assert "not heard of for" in lost.reason
            assert await agent.over() is grpc.StatusCode.UNAVAILABLE
            agent.workers.clear()  # it ended them with its lease
            assert (await agent.join()).epoch == 2
            beating = asyncio.create_task(agent.beat(0.02))
            await api.until_job("a", "RUNNING", start=lost.revision)
            beating.cancel()
            await all_done(beating)
            await agent.cut()

    async def test_i4_a_node_that_comes_back_with_lost_workers_takes_work_once_they_are_gone(
        self, tmp_path: Path
    ) -> None:
        options = options_for(tmp_path, heartbeat_ms=20, lease_ms=100)
        async with running(options) as controller, api_at(controller.address) as api:
            controller.sessions.liveness.margin_ms = 0
            await api.scheduler.SetPolicy(scheduler_pb2.SetPolicyRequest(policy=quick_policy(kill_ms=1)))
            await api.pools.CreatePool(pool())
            agent = FakeAgent(controller.address)
            await agent.join()
            await api.submit(job("a"))
            lost = await api.until(lambda event: event.subject == "nodes/n0" and event.state == "LOST")
            await agent.over()
            agent.hold.add("stop_worker")
            await agent.join()
            beating = asyncio.create_task(agent.beat(0.02))
            stop = await agent.command("stop_worker")
            assert stop.stop_worker.generation == 1
            assert ghosts_of(controller) == (1,)
            await agent.reported(agent.obey(stop))
            assert ghosts_of(controller) == ()
            await api.until_job("a", "RUNNING", start=lost.revision)
            beating.cancel()
            await all_done(beating)
            await agent.cut()


class TestRay:
    def head(self, session: str = "s1") -> agent_pb2.RayNode:
        return agent_pb2.RayNode(
            gcs_address="10.0.0.1:6379",
            session=session,
            ray_node_id="aa",
            head=True,
            auth_token=TOKEN,
            node_ip="10.0.0.1",
        )

    async def test_every_agent_learns_where_it_is_whoever_comes_first(self, controller: Controller) -> None:
        early = FakeAgent(controller.address, "n1", runtime=agent_pb2.RUNTIME_RAY)
        await early.join()
        assert not early.welcome.HasField("ray_bootstrap")
        head = FakeAgent(controller.address, "n0", runtime=agent_pb2.RUNTIME_RAY, ray=self.head())
        await head.join()
        await early.until(lambda: bool(early.bootstraps))
        late = FakeAgent(controller.address, "n2", runtime=agent_pb2.RUNTIME_RAY)
        await late.join()
        expected = agent_pb2.RayBootstrap(gcs_address="10.0.0.1:6379", auth_token=TOKEN, session="s1", head_node="n0")
        assert early.bootstraps == [expected]
        assert late.welcome.ray_bootstrap == expected
        for agent in (early, head, late):
            await agent.cut()

    async def test_its_token_is_in_no_file(self, controller: Controller) -> None:
        async with FakeAgent(controller.address, "n0", runtime=agent_pb2.RUNTIME_RAY, ray=self.head()) as head:
            await head.heartbeat(ray=self.head())
            holders = [
                path.name for path in controller.options.state_dir.iterdir() if TOKEN.encode() in path.read_bytes()
            ]
            assert not holders
            assert TOKEN not in repr(controller.sessions.ray)
            assert TOKEN not in repr(list(controller.driver.state.records()))

    async def test_a_node_is_ready_when_its_part_in_ray_is_up(self, controller: Controller, api: Api) -> None:
        async with FakeAgent(controller.address, "n0", runtime=agent_pb2.RUNTIME_RAY) as agent:
            assert controller.driver.state.nodes["n0"].state is NodeState.JOINING
            await agent.heartbeat(ray=self.head())
            await api.until(lambda event: event.type == "node.ready")
            response = await api.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n0"))
            assert (response.node.address, response.node.ray_head) == ("10.0.0.1", True)
            stats = (await api.scheduler.GetStats(scheduler_pb2.GetStatsRequest())).stats
            assert stats.ray_address == "10.0.0.1:6379"

    async def test_workers_are_told_the_address_of_rank_0s_node(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address, "n0", runtime=agent_pb2.RUNTIME_RAY, ray=self.head()) as agent:
            await api.submit(job("a"))
            create = await agent.command("create_placement_group")
            assert [bundle.ray_node_id for bundle in create.create_placement_group.bundles] == ["aa"]
            start = (await agent.command("start_worker")).start_worker
            assert start.master_address == "10.0.0.1"
            assert 20_000 <= start.master_port < 30_000

    async def test_a_raylet_that_died_takes_its_node_out(self, controller: Controller, api: Api) -> None:
        async with FakeAgent(controller.address, "n0", runtime=agent_pb2.RUNTIME_RAY, ray=self.head()) as agent:
            await agent.reported(agent_pb2.Report(ray_node_exited=agent_pb2.RayNodeExited(message="killed", head=True)))
            assert controller.driver.state.nodes["n0"].state is NodeState.JOINING
            assert controller.sessions.ray.bootstrap is None

    @pytest.mark.parametrize("learned", ["from a heartbeat", "when its agent is back"])
    async def test_a_new_ray_session_voids_the_groups_of_the_old(
        self, controller: Controller, api: Api, learned: str
    ) -> None:
        reserved = pool_pb2.PlacementGroupPool(reserved=[common_pb2.Resources(cpu_milli=1000)])
        await api.pools.CreatePool(pool(pg_pool=reserved))
        async with FakeAgent(controller.address, "n0", runtime=agent_pb2.RUNTIME_RAY, ray=self.head()) as agent:
            ready = await api.until(lambda event: event.type == "group.ready")
            await agent.heartbeat(ray=self.head())
            assert controller.driver.state.groups["pg-1"].ray_session == "s1"
            agent.hello.ray.CopyFrom(self.head("s2"))
            if learned == "from a heartbeat":
                await agent.heartbeat(ray=agent.hello.ray)
            else:
                await agent.join()
            await api.until(lambda event: event.subject == "placementGroups/pg-1" and event.state == "REMOVING")
            again = await api.until(lambda event: event.type == "group.ready", start=ready.revision + 1)
            group_id = again.subject.removeprefix("placementGroups/")
            assert controller.driver.state.groups[group_id].ray_session == "s2"
            assert controller.sessions.ray.bootstrap is not None
            assert controller.sessions.ray.bootstrap.session == "s2"
