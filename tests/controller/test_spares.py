"""How many warm spares is an agent told to keep, and when?"""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from callboard.controller.server import Controller
from callboard.controller.sessions.session import AgentSession
from callboard.controller.sessions.spares import SpareTargets
from callboard.model.quantities import Resources
from callboard.model.specs import PgPoolSpec, PoolSpec
from callboard.scheduler import Scheduler
from callboard.scheduler.records.events import NodeJoined, PoolCreated
from callboard.v1 import common_pb2, job_pb2, pool_pb2
from callboard.wire.errors import parse_error
from tests.controller.support import Api, job, pool
from tests.support.fake_agent import FakeAgent


async def told(agent: FakeAgent, targets: list[int]) -> None:
    """Waits until the agent was told exactly these."""
    await agent.until(lambda: len(agent.spare_targets) >= len(targets))
    assert agent.spare_targets == targets


async def test_none_while_no_work_is_about(controller: Controller, api: Api) -> None:
    async with FakeAgent(controller.address, warm_spares=2) as agent:
        await told(agent, [0])


async def test_the_nodes_setting_while_a_job_has_not_ended(controller: Controller, api: Api) -> None:
    await api.pools.CreatePool(pool(pg_pool=None))
    async with FakeAgent(controller.address, warm_spares=2) as agent:
        await api.submit(job("a"))
        await api.submit(job("b"))
        await told(agent, [0, 2])
        for name in ("a", "b"):
            await api.until_job(name, "RUNNING")
            await api.jobs.CancelJob(job_pb2.CancelJobRequest(name=f"jobs/{name}"))
            await api.until_job(name, "CANCELLED")
        await told(agent, [0, 2, 0])


async def test_a_reserved_group_has_them_before_its_first_job(controller: Controller, api: Api) -> None:
    async with FakeAgent(controller.address, warm_spares=1) as agent:
        reserved = common_pb2.Resources(cpu_milli=1000, gpu_milli=1000)
        spec = pool_pb2.PlacementGroupPool(reserved=[reserved])
        await api.pools.CreatePool(pool(pg_pool=spec))
        await told(agent, [0, 1])


async def test_one_that_joins_later_is_told_at_once(controller: Controller, api: Api) -> None:
    await api.pools.CreatePool(pool(pg_pool=None))
    async with FakeAgent(controller.address, "n0") as none:
        await api.submit(job("a"))
        async with FakeAgent(controller.address, "n1", warm_spares=3) as agent:
            await told(agent, [3])
            # What an earlier session was told isn't known to a new one.
            await agent.join()
            await told(agent, [3, 3])
        await none.heartbeat()
        assert none.spare_targets == [], "an agent that keeps none needn't hear of it"


async def test_an_impossible_number_is_refused(controller: Controller) -> None:
    agent = FakeAgent(controller.address, warm_spares=10**6)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await agent.join()
    await agent.cut()
    assert "warm_spares" in str(parse_error(caught.value))


class Walked(dict[str, AgentSession]):
    """Sessions that count how often somebody goes through all of them."""

    walks = 0

    def values(self) -> Any:
        self.walks += 1
        return super().values()


def test_nobody_goes_through_every_session_unless_what_is_about_changed() -> None:
    live, scheduler = Walked(), Scheduler()
    targets = SpareTargets(live, lambda: scheduler.state)
    targets.started([])
    for number in range(3):
        joined = NodeJoined(now_ms=1, node_id=f"n{number}", instance="a", capacity=Resources(), runtime="process")
        targets.publish(scheduler.handle(joined).events)
    assert live.walks == 1, "once: what agents were told before is not known"
    reserved = PgPoolSpec(enable=True, reserved=(Resources(cpu_milli=1),))
    targets.publish(scheduler.handle(PoolCreated(now_ms=1, spec=PoolSpec(name="p", pg_pool=reserved))).events)
    assert live.walks == 2, "a group that is to come is work"
