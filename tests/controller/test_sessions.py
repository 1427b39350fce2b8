"""The agents' streams: who may join, what is said twice, late or by the wrong one, and what silence means."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from callboard.controller.convert.commands import command_message
from callboard.controller.server import Controller
from callboard.model.specs import Fencing
from callboard.scheduler import Outcome, Scheduler, check_invariants
from callboard.scheduler.records.commands import Command, CreateGroup, RemoveGroup, StartWorker, StopWorker
from callboard.scheduler.records.events import Event, Tick
from callboard.scheduler.records.node_record import RayInfo
from callboard.scheduler.records.states import NodeState
from callboard.security.dialing import open_channel
from callboard.v1 import agent_pb2, common_pb2, job_pb2, node_pb2, scheduler_pb2
from callboard.wire.refusals import ErrorReason
from tests.controller.support import Api, api_at, job, options_for, pool, refused_join, running
from tests.scheduler.histories import History, run
from tests.scheduler.world import World
from tests.support.fake_agent import (
    FakeAgent,
    group_ready,
    refused,
    start_failed,
    worker_exited,
    worker_ready,
    worker_stopped,
)

TOKEN = "ray-token-that-must-not-leak"


def setting(path: str, value: Any) -> Callable[[Any], None]:
    """A change that sets one field of a Hello."""
    *parents, name = path.split(".")

    def change(hello: Any) -> None:
        target = hello
        for parent in parents:
            target = target[int(parent)] if parent.isdigit() else getattr(target, parent)
        setattr(target, name, value)

    return change


CLAIMS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a thousand million GPUs": (setting("inventory.capacity.gpu_milli", 10**12), "inventory.capacity.gpu_milli"),
    "negative GPUs": (setting("inventory.capacity.gpu_milli", -1000), "inventory.capacity.gpu_milli"),
    "more GPUs than devices": (setting("inventory.capacity.gpu_milli", 3000), "inventory.capacity.gpu_milli"),
    "negative CPUs": (setting("inventory.capacity.cpu_milli", -1), "inventory.capacity.cpu_milli"),
    "too much memory": (setting("inventory.capacity.memory_bytes", 1 << 62), "inventory.capacity.memory_bytes"),
    "a strange resource": (
        lambda hello: hello.inventory.capacity.custom_milli.update({"a/b": 1}),
        "inventory.capacity.custom_milli",
    ),
    "one device twice": (setting("inventory.devices.1.id", "0"), "inventory.devices"),
    "indexes with a gap": (setting("inventory.devices.1.index", 7), "inventory.devices"),
    "a device without id": (setting("inventory.devices.1.id", ""), "inventory.devices"),
    "two devices in one id": (setting("inventory.devices.1.id", "1,0"), "inventory.devices"),
    "a relative interpreter": (lambda hello: hello.inventory.interpreters.append("python"), "inventory.interpreters"),
    "no variable's name": (setting("inventory.visibility_variable", "A=B"), "inventory.visibility_variable"),
    "a strange label": (lambda hello: hello.labels.update({"a b": "c"}), "labels"),
    "another node's label": (lambda hello: hello.labels.update({"node": "n2"}), "labels"),
    "GPUs as a custom resource": (
        lambda hello: hello.inventory.capacity.custom_milli.update({"gpu": 4000}),
        "inventory.capacity.custom_milli",
    ),
    "a negative rank": (setting("rank", -1), "rank"),
    "no instance": (setting("instance", ""), "instance"),
    "no runtime": (setting("runtime", 0), "runtime"),
    "a strange group": (setting("node_group", "a/b"), "node_group"),
}


class TestWhoMayJoin:
    async def test_a_node_is_ready_once_its_agent_is_welcome(self, controller: Controller, api: Api) -> None:
        async with FakeAgent(controller.address, "n1", labels={"zone": "a"}) as agent:
            assert agent.welcome.epoch == 1
            assert agent.welcome.term == 1
            assert agent.welcome.lease_ms == 15_000
            response = await api.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n1"))
            assert response.node.state == node_pb2.NODE_STATE_READY
            assert dict(response.node.labels) == {"zone": "a"}

    async def test_another_minor_version_may_not(self, controller: Controller) -> None:
        agent = FakeAgent(controller.address)
        agent.hello.version = "9.9.0"
        error = await refused_join(agent)
        assert (error.code, error.reason) == ("FAILED_PRECONDITION", ErrorReason.VERSION_MISMATCH)
        assert "9.9.0" in error.message

    @pytest.mark.parametrize(
        ("ray", "python", "words"),
        [
            ("2.9.0", "3.11.9", ["Ray 2.9.0", "Ray 2.60.0", "n1 has", "on n0"]),
            ("2.60.0", "3.12.1", ["Python 3.12.1", "Python 3.11.9", "n1 has", "on n0"]),
        ],
    )
    async def test_ft_g6_another_ray_or_minor_version_of_python_may_not(
        self, controller: Controller, ray: str, python: str, words: list[str]
    ) -> None:
        first, second = (FakeAgent(controller.address, name, runtime=agent_pb2.RUNTIME_RAY) for name in ("n0", "n1"))
        first.hello.ray_version, first.hello.python_version = "2.60.0", "3.11.9"
        second.hello.ray_version, second.hello.python_version = ray, python
        async with first:
            error = await refused_join(second)
            assert (error.code, error.reason) == ("FAILED_PRECONDITION", ErrorReason.VERSION_MISMATCH)
            assert [text for text in words if text not in error.message] == []
            second.hello.runtime = agent_pb2.RUNTIME_PROCESS
            async with second:
                assert list(second.welcome.warnings) == [], "plain processes have no part in it"
            await first.goodbye()
        second.hello.runtime = agent_pb2.RUNTIME_RAY
        second.hello.instance = "another"
        async with second:
            assert list(second.welcome.warnings) == [], "nobody is there to be compared with"

    async def test_ft_g6_another_patch_is_a_warning(self, controller: Controller, api: Api) -> None:
        first, second = (FakeAgent(controller.address, name, runtime=agent_pb2.RUNTIME_RAY) for name in ("n0", "n1"))
        first.hello.ray_version, first.hello.python_version = "2.60.0", "3.11.9"
        second.hello.ray_version, second.hello.python_version = "2.60.0", "3.11.4"
        own = second.hello.version
        second.hello.version = f"{own.rpartition('.')[0]}.999"
        async with first, second:
            assert list(first.welcome.warnings) == []
            assert list(second.welcome.warnings) == [
                f"the agent of n1 is callboard {second.hello.version}, the controller {own}",
                "n1 has Python 3.11.4, n0 has 3.11.9",
            ]
            node = (await api.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n1"))).node
            assert (node.ray_version, node.python_version) == ("2.60.0", "3.11.4")

    async def test_ft_c1_what_keeps_a_node_out_of_ray_is_shown_until_it_is_in(
        self, controller: Controller, api: Api
    ) -> None:
        async def seen() -> node_pb2.Node:
            response: node_pb2.GetNodeResponse = await api.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n0"))
            return response.node

        fault = common_pb2.RayFault(
            code=common_pb2.RAY_FAULT_CODE_FILES, message="disk\n" + "x" * 100_000, permanent=True
        )
        future = common_pb2.RayFault.FromString(bytes([8, 99]))
        assert future.code not in common_pb2.RayFaultCode.values()
        async with FakeAgent(controller.address, "n0", runtime=agent_pb2.RUNTIME_RAY) as agent:
            await agent.heartbeat(ray=agent_pb2.RayNode(fault=fault))
            node = await seen()
            assert node.state == node_pb2.NODE_STATE_JOINING
            assert (node.ray_fault.code, node.ray_fault.permanent) == (common_pb2.RAY_FAULT_CODE_FILES, True)
            assert node.state_reason == node.ray_fault.message == "disk " + "x" * 995
            await agent.heartbeat(ray=agent_pb2.RayNode(fault=future))
            assert (await seen()).ray_fault.code == common_pb2.RAY_FAULT_CODE_START_FAILED
            await agent.heartbeat(ray=agent_pb2.RayNode(gcs_address="h:1", session="s", ray_node_id="ab", fault=fault))
            node = await seen()
            assert (node.state, node.HasField("ray_fault")) == (node_pb2.NODE_STATE_READY, False)
            await agent.heartbeat(ray=agent_pb2.RayNode(fault=fault))
            await agent.goodbye("the disk is full")
        node = await seen()
        assert (node.state, node.state_reason) == (node_pb2.NODE_STATE_LEFT, "the disk is full")
        assert node.HasField("ray_fault"), "why it left stays to be seen"

    async def test_ft_c1_agents_hear_who_starts_the_head_and_that_nobody_does(self, controller: Controller) -> None:
        head = FakeAgent(controller.address, "n0", runtime=agent_pb2.RUNTIME_RAY, ray=agent_pb2.RayNode(head=True))
        async with FakeAgent(controller.address, "n1", runtime=agent_pb2.RUNTIME_RAY) as waiting:
            assert not waiting.welcome.ray_bootstrap.head_node
            async with head:
                await waiting.until(lambda: [each.head_node for each in waiting.bootstraps] == ["n0"])
                async with FakeAgent(controller.address, "n2", runtime=agent_pb2.RUNTIME_RAY) as late:
                    assert late.welcome.ray_bootstrap.head_node == "n0"
                await head.goodbye("its port is taken")
            await waiting.until(lambda: [each.head_node for each in waiting.bootstraps] == ["n0", ""])

    async def test_another_patch_version_may(self, controller: Controller) -> None:
        agent = FakeAgent(controller.address)
        major, minor, *_ = agent.hello.version.split(".")
        agent.hello.version = f"{major}.{minor}.999"
        await agent.join()
        await agent.cut()

    @pytest.mark.parametrize("node_id", ["", "../../x", "a/b", "a\n", "x" * 300, "🚀", "%s", "__proto__", "1st"])
    async def test_se_05_strange_names_may_not(self, controller: Controller, node_id: str) -> None:
        error = await refused_join(FakeAgent(controller.address, node_id))
        assert (error.code, error.reason) == ("INVALID_ARGUMENT", ErrorReason.INVALID_FIELD)
        assert [fault.field for fault in error.faults] == ["node_id"]

    @pytest.mark.parametrize("claim", CLAIMS)
    async def test_se_07_impossible_claims_may_not(self, controller: Controller, claim: str) -> None:
        change, field = CLAIMS[claim]
        agent = FakeAgent(controller.address)
        change(agent.hello)
        error = await refused_join(agent)
        assert (error.code, error.reason) == ("INVALID_ARGUMENT", ErrorReason.INVALID_FIELD)
        assert field in [fault.field for fault in error.faults]
        assert not controller.driver.state.nodes

    async def test_a_stream_must_open_with_a_hello(self, controller: Controller) -> None:
        agent = FakeAgent(controller.address)
        async with open_channel(controller.address) as channel:
            call = agent_pb2_grpc_session(channel)
            await call.write(agent_pb2.SessionRequest(heartbeat=agent_pb2.Heartbeat(sequence=1)))
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert agent.node_id not in controller.driver.state.nodes

    async def test_nj_01_a_second_agent_with_a_live_node_id_may_not(self, controller: Controller) -> None:
        async with FakeAgent(controller.address, "n1") as first:
            error = await refused_join(FakeAgent(controller.address, "n1"))
            assert (error.code, error.reason) == ("ALREADY_EXISTS", ErrorReason.NODE_TAKEN)
            await first.heartbeat()  # the first goes on

    async def test_nj_01_two_at_the_same_moment_are_one(self, controller: Controller) -> None:
        agents = [FakeAgent(controller.address, "n1") for _ in range(5)]
        results = await asyncio.gather(*[agent.join() for agent in agents], return_exceptions=True)
        assert sum(not isinstance(result, BaseException) for result in results) == 1
        for agent in agents:
            await agent.cut()

    async def test_nj_01_the_same_devices_under_another_node_id_may_not(self, controller: Controller, api: Api) -> None:
        async with FakeAgent(controller.address, "n1", uuids=["GPU-a", "GPU-b"]):
            error = await refused_join(FakeAgent(controller.address, "n2", gpus=1, uuids=["GPU-b"]))
            assert (error.code, error.reason) == ("ALREADY_EXISTS", ErrorReason.NODE_TAKEN)
            assert "GPU-b" in error.message
            stats = (await api.scheduler.GetStats(scheduler_pb2.GetStatsRequest())).stats
            assert stats.capacity.gpu_milli == 2000

    async def test_nj_13_ranks(self, controller: Controller, api: Api) -> None:
        async with (
            FakeAgent(controller.address, "n1", rank=1) as first,
            FakeAgent(controller.address, "n0") as unset,
        ):
            assert first.welcome.rank == 1
            assert unset.welcome.rank == 0  # the lowest free one
            error = await refused_join(FakeAgent(controller.address, "n2", rank=1))
            assert error.reason is ErrorReason.NODE_TAKEN
            assert "rank 1 belongs to node n1" in error.message
            nodes = (await api.nodes.ListNodes(node_pb2.ListNodesRequest())).nodes
            assert [node.name for node in nodes] == ["nodes/n0", "nodes/n1"]


def agent_pb2_grpc_session(channel: grpc.aio.Channel) -> Any:
    from callboard.v1 import agent_pb2_grpc

    return agent_pb2_grpc.AgentServiceStub(channel).Session()


class TestReports:
    async def test_they_are_acknowledged_once_journaled(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address, hold={"start_worker"}) as agent:
            await api.submit(job("a"))
            start = await agent.command("start_worker")
            report_id = await agent.reported(worker_ready(start))
            assert (await api.job("a")).state == job_pb2.JOB_STATE_RUNNING
            await agent.join()
            assert report_id in agent.welcome.known_report_ids

    async def test_ql_11_twice_changes_nothing(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address, hold={"start_worker", "stop_worker"}) as agent:
            await api.submit(job("a", gpu=1000))
            start = await agent.command("start_worker")
            same = worker_ready(start)
            same.report_id = "the-same"
            for _ in range(3):
                await agent.reported(same)
            await agent.reported(worker_ready(start))  # and once more under another id
            stats = (await api.scheduler.GetStats(scheduler_pb2.GetStatsRequest())).stats
            assert stats.used.gpu_milli == 1000
            await api.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/a"))
            stop = await agent.command("stop_worker")
            await agent.reported(worker_stopped(stop))
            revision = (await api.until_job("a", "CANCELLED")).revision
            await agent.reported(worker_stopped(stop))
            await agent.reported(worker_ready(start))  # late, and in the wrong order
            await agent.reported(worker_exited(start))
            await agent.reported(start_failed(start))
            stats = (await api.scheduler.GetStats(scheduler_pb2.GetStatsRequest())).stats
            assert stats.used.gpu_milli == 0
            assert stats.revision == revision
            check_invariants(controller.driver.state)

    async def test_ql_11_swapped_changes_nothing_twice(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address, hold={"start_worker", "stop_worker"}) as agent:
            await api.submit(job("a", gpu=1000))
            start = await agent.command("start_worker")
            await api.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/a"))
            stop = await agent.command("stop_worker")
            await agent.reported(worker_stopped(stop))
            await agent.reported(worker_ready(start))
            await api.until_job("a", "CANCELLED")
            stats = (await api.scheduler.GetStats(scheduler_pb2.GetStatsRequest())).stats
            assert stats.used == common_pb2.Resources()
            check_invariants(controller.driver.state)

    async def test_unknown_ones_are_acknowledged_and_change_nothing(self, controller: Controller, api: Api) -> None:
        async with FakeAgent(controller.address) as agent:
            before = (await api.scheduler.GetStats(scheduler_pb2.GetStatsRequest())).stats.revision
            nobody = agent_pb2.Command(start_worker=agent_pb2.StartWorker(generation=999))
            await agent.reported(worker_ready(nobody))
            await agent.reported(agent_pb2.Report())
            unmade = agent_pb2.CreatePlacementGroup(placement_group_id="pg-9", attempt=1)
            await agent.reported(group_ready(agent_pb2.Command(create_placement_group=unmade)))
            assert (await api.scheduler.GetStats(scheduler_pb2.GetStatsRequest())).stats.revision == before

    async def test_one_without_an_id_ends_the_stream(self, controller: Controller) -> None:
        async with FakeAgent(controller.address) as agent:
            await agent.say(report=agent_pb2.Report())
            assert await agent.over() is grpc.StatusCode.INVALID_ARGUMENT

    async def test_an_old_session_is_not_listened_to(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        old = FakeAgent(controller.address, "n1", instance="same", hold={"start_worker"})
        await old.join()
        await api.submit(job("a"))
        await old.command("start_worker")
        new = FakeAgent(controller.address, "n1", instance="same", hold={"start_worker"})
        await new.join()
        session = controller.sessions.live["n1"]
        assert session.epoch == new.welcome.epoch
        # What is still under way from the old stream: it is read no further.
        assert await old.over() is grpc.StatusCode.ALREADY_EXISTS
        assert (await api.job("a")).state == job_pb2.JOB_STATE_STARTING
        await new.reported(worker_ready(await new.command("start_worker")))
        await api.until_job("a", "RUNNING")
        await old.cut()
        await new.cut()

    async def test_a_failed_start_says_whose_fault_it_was(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address, hold={"start_worker"}) as agent:
            await api.submit(job("a"))
            report = start_failed(
                await agent.command("start_worker"), agent_pb2.START_FAILURE_CONSTRUCTOR, "ValueError: no"
            )
            report.worker_start_failed.traceback = "Traceback …\nValueError: no"
            await agent.reported(report)
            await api.until_job("a", "FAILED")
            assert "ValueError: no" in (await api.job("a")).traceback

    async def test_too_large_a_checkpoint_is_not_kept(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address, hold={"stop_worker"}) as agent:
            await api.submit(job("a"))
            await api.until_job("a", "RUNNING")
            await api.jobs.PreemptJob(job_pb2.PreemptJobRequest(name="jobs/a"))
            stop = await agent.command("stop_worker")
            large = agent_pb2.Checkpoint(data=b"x" * ((1 << 20) + 1))
            await agent.reported(worker_stopped(stop, agent_pb2.STOP_OUTCOME_COOPERATIVE, checkpoint=large))
            assert not controller.driver.state.checkpoints


class TestRefusedCommands:
    async def test_a_refused_start_is_a_failed_start(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address, hold={"start_worker"}) as agent:
            await api.submit(job("a"))
            await agent.reported(refused(await agent.command("start_worker"), "unknown interpreter"))
            event = await api.until(lambda event: "unknown interpreter" in event.reason)
            assert event.subject.startswith("jobs/a")

    async def test_pg_05_a_removal_stays_owed_until_it_succeeds(self, tmp_path: Path) -> None:
        async with running(options_for(tmp_path)) as controller, api_at(controller.address) as api:
            controller.agents.resend_first_s = 0.001
            await api.pools.CreatePool(pool())
            async with FakeAgent(controller.address, hold={"remove_placement_group"}) as agent:
                await api.submit(job("a"))
                await api.until_job("a", "RUNNING")
                await api.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/a", destroy_placement_groups=True))
                for _ in range(7):
                    remove = await agent.command("remove_placement_group")
                    agent.acked.clear()
                    # An agent answers a repeated command with its first report.
                    await agent.reported(refused(remove, "UNAVAILABLE", report_id="the-first"))
                    groups = controller.driver.state.groups
                    assert [group.state.value for group in groups.values()] == ["REMOVING"]
                remove = await agent.command("remove_placement_group")
                await agent.reported(agent.obey(remove))
                await api.until(lambda event: event.type == "group.removed")
                assert not controller.driver.state.groups


class TestOneAgentDelaysNoOther:
    async def test_r7_one_that_does_not_read_is_cut_off(self, tmp_path: Path) -> None:
        from callboard.controller.options import Limits

        options = options_for(tmp_path, limits=Limits(session_queue=50))
        async with running(options) as controller, api_at(controller.address) as api:
            stuck = FakeAgent(controller.address, "stuck")
            async with FakeAgent(controller.address, "good") as good:
                await stuck.join()
                assert stuck._reader is not None
                stuck._reader.cancel()  # from here on it reads nothing
                big = agent_pb2.RayBootstrap(gcs_address="x" * 200_000)
                session = controller.sessions.live["stuck"]
                while not session.closed:
                    session.send(agent_pb2.SessionResponse(ray_bootstrap=big))
                    await good.heartbeat()
                assert (await api.scheduler.GetStats(scheduler_pb2.GetStatsRequest())).stats.nodes
            await stuck.cut()


class TestCommands:
    def test_a_command_carries_all_it_needs_from_when_it_was_decided(self) -> None:
        world = World({}, auto=False)
        world.join("n1", 1, address="n1.before")
        world.pool()
        world.submit("a", fencing=Fencing.STRICT, ttl_after_finished_ms=0)
        (create,) = world.held
        world.answer(lambda command: command is create)
        (start,) = [command for command in world.held if isinstance(command, StartWorker)]
        # In the same batch its job ends and is forgotten, and its node comes back as another.
        world.cancel("a")
        world.answer(lambda command: command is not start)
        world.tick(10)
        world.join(
            "n1",
            1,
            node_group="other",
            address="n1.after",
            ray=RayInfo(gcs_address="h:1", session="t", ray_node_id="new"),
        )
        assert not world.state.jobs
        sent = command_message(start, 7).command
        assert (sent.term, sent.start_worker.job_name, sent.start_worker.node_group) == (7, "a", "")
        assert sent.start_worker.strict, "or a copy of it would outlive its lease"
        assert sent.start_worker.master_address == "n1.before"
        made = command_message(create, 7).command.create_placement_group
        assert [bundle.ray_node_id for bundle in made.bundles] == ["ray-n1"]

    def test_of_whatever_kind_it_is_its_message_is_the_same_when_everything_has_moved_on(self) -> None:
        at_once: list[tuple[Command, bytes]] = []

        class Sending(Scheduler):
            def handle(self, event: Event) -> Outcome:
                outcome = super().handle(event)
                at_once.extend((each, command_message(each, 7).SerializeToString()) for each in outcome.commands)
                return outcome

        class Sent(World):
            make_scheduler = Sending

        class Told(History):
            world_type = Sent

        for seed in range(3):
            run(seed, kind=Told)
        assert {type(command) for command, _ in at_once} >= {StartWorker, StopWorker, CreateGroup, RemoveGroup}
        for command, sent in at_once:
            assert command_message(command, 7).SerializeToString() == sent


async def test_a_goodbye_counts_though_its_stream_ends_before_it_is_decided(controller: Controller) -> None:
    agent = FakeAgent(controller.address, "n1")
    await agent.join()
    session = controller.sessions.live["n1"]
    said = asyncio.create_task(controller.agents._goodbye(session, "leaves"))
    await asyncio.sleep(0)
    said.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await said
    assert await controller.driver.ask(_nothing_new, lambda _: True, source="test")
    assert controller.driver.state.nodes["n1"].state is NodeState.LEFT
    await agent.cut()


def _nothing_new(now_ms: int, cause: str) -> Tick:
    return Tick(now_ms=now_ms, cause=cause)
