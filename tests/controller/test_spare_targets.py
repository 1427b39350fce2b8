"""How many warm spares is an agent told to keep, and when?"""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from callboard.controller.server import Controller
from callboard.controller.sessions.session import AgentSession
from callboard.controller.sessions.spare_targets import SpareTargets, preloads_about, tell_spares
from callboard.model.quantities import Resources
from callboard.model.specs import PgPoolSpec, PoolSpec
from callboard.scheduler import Scheduler
from callboard.scheduler.records.events import NodeJoined, PoolCreated
from callboard.v1 import agent_pb2, common_pb2, event_pb2, job_pb2, node_pb2, pool_pb2
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


def spec(name: str, modules: tuple[str, ...], **fields: Any) -> PoolSpec:
    return PoolSpec(name=name, preload=modules, **fields)


def test_modules_of_pools_with_work_are_told_to_the_nodes_that_they_may_use() -> None:
    scheduler = Scheduler()
    for number, zone in enumerate("ab"):
        labels = (("zone", zone),)
        scheduler.handle(
            NodeJoined(
                now_ms=1, node_id=f"n{number}", instance="a", labels=labels, capacity=Resources(), runtime="process"
            )
        )
    busy = PgPoolSpec(enable=True, reserved=(Resources(cpu_milli=1),))
    for made in (
        spec("everywhere", ("torch",), pg_pool=busy),
        spec("here", ("jax",), pg_pool=busy, node_selector=(("zone", "b"),)),
        spec("idle", ("tensorflow",)),
    ):
        scheduler.handle(PoolCreated(now_ms=1, spec=made))
    assert [modules for _, modules in preloads_about(scheduler.state)] == [("torch",), ("jax",)]
    told_to = {}
    for node_id in ("n0", "n1"):
        session = Sent(node_id)
        tell_spares(session, scheduler.state)
        tell_spares(session, scheduler.state)
        (message,) = session.sent
        told_to[node_id] = [tuple(each.modules) for each in message.spare_target.preloads]
    assert told_to == {"n0": [("torch",)], "n1": [("torch",), ("jax",)]}


class Sent(AgentSession):
    """A session that keeps what it is sent."""

    def __init__(self, node_id: str) -> None:
        self.node_id, self.warm_spares, self.spare_target = node_id, 2, None
        self.sent: list[agent_pb2.SessionResponse] = []

    def send(self, message: agent_pb2.SessionResponse) -> None:
        self.sent.append(message)


async def test_what_a_node_refuses_is_shown_and_told_once(controller: Controller, api: Api) -> None:
    async with FakeAgent(controller.address, "n0") as agent:
        state = common_pb2.PreloadState(modules=["torch"], refused="`import torch` failed: no libcudart")
        for _ in range(2):
            await agent.heartbeat(preloads=agent_pb2.PreloadStates(states=[state]))
        node = (await api.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n0"))).node
        assert list(node.preloads) == [state]
        events = (await api.events.ListEvents(event_pb2.ListEventsRequest(page_size=1000))).events
        (refused,) = [event for event in events if event.type == "node.preload_refused"]
        assert refused.reason == "spares here do not import torch: `import torch` failed: no libcudart"


async def test_a_device_that_an_agent_reports_as_closed_takes_no_work_until_it_reports_otherwise(
    controller: Controller, api: Api
) -> None:
    """From its first message on: nothing is placed beside somebody's 70 GiB between its join and a heartbeat."""
    await api.pools.CreatePool(pool(pg_pool=None))
    foreign = common_pb2.DeviceProcess(pid=4711, user="alice", command="python", memory_bytes=70 << 30)
    closed = [
        common_pb2.DeviceState(index=index, used_memory_bytes=70 << 30, foreign=[foreign] * 20, closed="x" * 5_000)
        for index in range(4)
    ]
    open_ = [common_pb2.DeviceState(index=index) for index in range(4)]
    fake = FakeAgent(controller.address, "n0")
    fake.hello.devices.states.extend(closed)
    async with fake as agent:
        await api.submit(job("a"))
        await api.until_job("a", "PENDING")
        node = (await api.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n0"))).node
        assert node.devices, "the agent has some"
        for use in node.devices:
            assert use.state.foreign[0] == foreign
            assert len(use.state.foreign) == 8, "what an agent says is bounded"
            assert len(use.state.closed) <= 1_000
        await agent.heartbeat(devices=agent_pb2.DeviceStates(states=open_))
        await api.until_job("a", "RUNNING")


async def test_a_device_that_is_opened_by_hand_stays_open_while_the_same_is_said_of_it(
    controller: Controller, api: Api
) -> None:
    await api.pools.CreatePool(pool(pg_pool=None))

    def states(why: str) -> agent_pb2.DeviceStates:
        return agent_pb2.DeviceStates(states=[common_pb2.DeviceState(index=i, closed=why) for i in range(2)])

    async def node() -> node_pb2.Node:
        found: node_pb2.Node = (await api.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n0"))).node
        return found

    fake = FakeAgent(controller.address, "n0")
    fake.hello.devices.CopyFrom(states("python holds 70.0 GiB of its memory"))
    async with fake as agent:
        await api.submit(job("a"))
        await api.until_job("a", "PENDING")
        opening = node_pb2.UncordonNodeRequest(name="nodes/n0", devices=range(2))
        await api.nodes.UncordonNode(opening)
        await api.until_job("a", "RUNNING")
        await agent.heartbeat(devices=states("python holds 71.3 GiB of its memory"))
        shown = (await node()).devices[0]
        assert (shown.state.closed, shown.quarantined_milli) == ("", 0), "amounts change all the time"
        assert shown.state.warning == "opened by hand although python holds 71.3 GiB of its memory"
        await agent.heartbeat(devices=states("its driver reported Xid 79"))
        shown = (await node()).devices[1]
        assert shown.state.closed == "its driver reported Xid 79"
        events = (await api.events.ListEvents(event_pb2.ListEventsRequest(page_size=1000))).events
        assert any(each.reason == "GPU 1 takes no new work: its driver reported Xid 79" for each in events)
