"""Do jobs run where their placement texts say, and is every fault of a text told?"""

from __future__ import annotations

import asyncio
import contextlib
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
import yaml

from callboard.agents.system.processes import exited
from callboard.controller.searches import placements
from callboard.security.processes import ProcessId, identify
from callboard.v1 import agent_pb2, common_pb2, job_pb2, placement_pb2, placement_pb2_grpc
from callboard.wire.refusals import ErrorReason
from tests.controller.support import Api, api_at, job, options_for, pool, refusal_of, running
from tests.support.fake_agent import FakeAgent

TWO_GROUPS = """
runner: {task_type: embodied, api_key: not-to-be-kept}
cluster:
  num_nodes: 2
  component_placement:
    actor: {node_group: left, placement: 0-1}
    rollout: {node_group: right, placement: 0-1:0}
    env: {node_group: right, placement: "0:0-1"}
    agent: {node_group: node, placement: 1, visible: all}
  node_groups:
    - label: left
      node_ranks: 0
      env_configs:
        - node_ranks: 0
          env_vars: [{GLOO_SOCKET_IFNAME: eth0}, {MY_TOKEN: hidden}]
    - {label: right, node_ranks: 1}
"""


def placed_job(name: str, config: str, *components: str, **fields: Any) -> job_pb2.JobSpec:
    return job_pb2.JobSpec(
        name=name,
        pool="rlhf",
        components=[job_pb2.ComponentSpec(name=each, actor="pkg.workers:Worker") for each in components],
        placement_config=textwrap.dedent(config),
        **fields,
    )


def starts(*agents: FakeAgent) -> dict[tuple[str, int], agent_pb2.StartWorker]:
    found = [
        command.start_worker
        for agent in agents
        for command in agent.commands
        if command.WhichOneof("action") == "start_worker"
    ]
    return {(start.worker.component, start.worker.rank): start for start in found}


def held(start: agent_pb2.StartWorker) -> tuple[str, list[tuple[str, int]]]:
    return start.allocation.node_id, [(share.id, share.milli) for share in start.allocation.devices]


class TestPlacedJobs:
    async def test_workers_start_on_the_nodes_and_devices_of_the_text(self, tmp_path: Path) -> None:
        async with running(options_for(tmp_path)) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool())
            async with FakeAgent(controller.address, "n0") as left, FakeAgent(controller.address, "n1") as right:
                await api.submit(placed_job("rl", TWO_GROUPS, "actor", "rollout", "env", "agent"))
                await api.until_job("rl", "RUNNING")
                started = starts(left, right)
        assert {key: held(start) for key, start in started.items()} == {
            ("actor", 0): ("n0", [("0", 1000)]),
            ("actor", 1): ("n0", [("1", 1000)]),
            ("rollout", 0): ("n1", [("0", 334), ("1", 1000)]),
            ("env", 0): ("n1", [("0", 333)]),
            ("env", 1): ("n1", [("0", 333)]),
            ("agent", 0): ("n1", []),
        }
        assert started["actor", 1].env == {"GLOO_SOCKET_IFNAME": "eth0", "MY_TOKEN": "hidden"}
        assert started["actor", 1].node_group == "left"
        assert started["agent", 0].observes_devices
        assert (started["env", 1].local_rank, started["env", 1].local_world_size, started["env", 1].world_size) == (
            1,
            2,
            2,
        )

    async def test_ft_e7_it_waits_for_its_nodes_and_for_a_restart_of_the_controller(self, tmp_path: Path) -> None:
        options = options_for(tmp_path)
        async with running(options) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool())
            async with FakeAgent(controller.address, "n0"):
                await api.submit(
                    placed_job("rl", TWO_GROUPS, "actor", "rollout", "env", "agent", wait_for_nodes_ms=600_000)
                )
                assert (await api.job("rl")).state == job_pb2.JOB_STATE_PENDING
        for file in options.state_dir.iterdir():
            if "secrets" not in file.name:
                assert b"hidden" not in file.read_bytes(), file
                assert b"not-to-be-kept" not in file.read_bytes(), file
        async with (
            running(options) as controller,
            api_at(controller.address) as api,
            FakeAgent(controller.address, "n0") as left,
            FakeAgent(controller.address, "n1") as right,
        ):
            await api.until_job("rl", "RUNNING")
            started = starts(left, right)
        assert held(started["actor", 1]) == ("n0", [("1", 1000)])
        assert started["actor", 1].env == {"GLOO_SOCKET_IFNAME": "eth0", "MY_TOKEN": "hidden"}
        assert held(started["rollout", 0])[0] == "n1"

    async def test_what_is_kept_has_the_placement_and_no_secret(self, tmp_path: Path) -> None:
        options = options_for(tmp_path)
        async with running(options) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool())
            async with FakeAgent(controller.address, "n0"), FakeAgent(controller.address, "n1"):
                await api.submit(placed_job("rl", TWO_GROUPS, "actor", "rollout", "env", "agent"))
                await api.until_job("rl", "RUNNING")
                spec = (await api.job("rl")).spec
        assert "node_group: left" in spec.placement_config
        assert "not-to-be-kept" not in spec.placement_config
        assert "hidden" not in str(spec)
        assert [place.node_id for place in spec.components[0].places] == ["n0", "n0"]
        for file in options.state_dir.iterdir():
            if "secrets" not in file.name:
                assert b"hidden" not in file.read_bytes(), file
                assert b"not-to-be-kept" not in file.read_bytes(), file

    async def test_places_and_their_variables_survive_a_restart(self, tmp_path: Path) -> None:
        options = options_for(tmp_path)
        async with running(options) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool())
            async with FakeAgent(controller.address, "n0"), FakeAgent(controller.address, "n1"):
                await api.submit(placed_job("rl", TWO_GROUPS, "actor", "rollout", "env", "agent"))
        async with running(options) as controller, api_at(controller.address):
            [spec] = [record.spec for record in controller.driver.state.specs.values()]
            assert dict(spec.components[0].places[1].env)["MY_TOKEN"] == "hidden"

    async def test_every_fault_is_told_with_its_line_and_column(self, tmp_path: Path) -> None:
        config = """\
        cluster:
          num_nodes: 1
          component_placement:
            actor: 0-2
            rollout: 1-0
            env: {placment: 0}
        """
        async with running(options_for(tmp_path)) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool())
            async with FakeAgent(controller.address, "n0"):
                refused = await refusal_of(
                    api.jobs.SubmitJob(
                        job_pb2.SubmitJobRequest(spec=placed_job("rl", config, "actor", "rollout", "env"))
                    )
                )
                assert not controller.driver.state.jobs
        assert refused.code == "INVALID_ARGUMENT"
        assert {fault.line for fault in refused.faults} == {4, 5, 6}
        assert all(fault.column for fault in refused.faults)
        assert any("placement" in fault.message and "placment" in fault.message for fault in refused.faults)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"workers": 3}, "states 3 workers, its placement makes 2"),
            ({"min_workers": 1, "max_workers": 2}, "number of workers is fixed"),
            ({"resources": common_pb2.Resources(gpu_milli=2000)}, "asks 2 GPU a worker"),
            ({"name": "actr"}, "places actor, but the job's components are actr"),
            ({"places": [common_pb2.WorkerPlace(node_id="n0")]}, "actor states places, and its placement gives others"),
        ],
    )
    async def test_what_the_job_says_otherwise_is_refused(
        self, tmp_path: Path, change: dict[str, Any], said: str
    ) -> None:
        spec = placed_job("rl", "cluster: {num_nodes: 1, component_placement: {actor: 0-1}}", "actor")
        spec.components[0].MergeFrom(job_pb2.ComponentSpec(**change))
        async with running(options_for(tmp_path)) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool())
            async with FakeAgent(controller.address, "n0"):
                refused = await refusal_of(api.jobs.SubmitJob(job_pb2.SubmitJobRequest(spec=spec)))
        assert any(said in fault.message for fault in refused.faults), refused

    async def test_what_a_job_says_of_itself_may_be_submitted_again(self, tmp_path: Path) -> None:
        spec = placed_job("rl", "cluster: {component_placement: {actor: 1, env: '0-1:0-3'}}", "actor", "env")
        async with running(options_for(tmp_path)) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool())
            async with FakeAgent(controller.address, "n0"):
                first = (await api.submit(spec)).spec
                again = job_pb2.JobSpec()
                again.CopyFrom(first)
                again.name = "again"
                second = (await api.submit(again)).spec
        assert [part.places for part in second.components] == [part.places for part in first.components]

    async def test_a_repeated_submit_is_the_first_job_though_a_node_joined_meanwhile(self, tmp_path: Path) -> None:
        spec = placed_job("rl", "cluster: {component_placement: {actor: all}}", "actor")
        async with running(options_for(tmp_path)) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool())
            async with FakeAgent(controller.address, "n0"):
                first = await api.submit(spec, request_id="r-1")
                async with FakeAgent(controller.address, "n1"):
                    again = await api.submit(spec, request_id="r-1")
                    assert again.uid == first.uid
                    assert len(again.spec.components[0].places) == 2
                    spec.placement_config = "cluster: {component_placement: {actor: 0}}"
                    refused = await refusal_of(
                        api.jobs.SubmitJob(job_pb2.SubmitJobRequest(spec=spec, request_id="r-1"))
                    )
        assert refused.reason.value == "REQUEST_ID_REUSED"

    async def test_a_plan_of_a_placed_job_is_told_without_starting_it(self, tmp_path: Path) -> None:
        spec = placed_job("rl", "cluster: {component_placement: {actor: 1}}", "actor")
        async with running(options_for(tmp_path)) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool())
            async with FakeAgent(controller.address, "n0"):
                answer = await api.jobs.SubmitJob(job_pb2.SubmitJobRequest(spec=spec, validate_only=True))
                assert not controller.driver.state.jobs
        [worker] = answer.plan.workers
        assert [share.id for share in worker.devices] == ["1"]


class Gate:
    """Holds compilations of texts until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.count = 0
        compiled = getattr(placements, name)

        def held(*arguments: Any) -> Any:
            self.count += 1
            self.begun.release()
            self.go.acquire()
            return compiled(*arguments)

        monkeypatch.setattr(placements, name, held)

    async def until_begun(self) -> None:
        await asyncio.to_thread(self.begun.acquire)


EVERYWHERE = "cluster: {num_nodes: 1, component_placement: {actor: 0-1}}"


class TestCompilingBesideTheLoop:
    @pytest.fixture
    def gate(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
        gate = Gate(monkeypatch, "place_job")
        yield gate
        gate.go.release(100)

    async def test_others_are_decided_while_a_text_is_compiled(self, tmp_path: Path, gate: Gate) -> None:
        async with running(options_for(tmp_path)) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool())
            async with FakeAgent(controller.address, "n0"):
                placed = asyncio.create_task(api.submit(placed_job("rl", EVERYWHERE, "actor")))
                await gate.until_begun()
                await api.submit(job("quick", gpu=0))
                await api.until_job("quick", "RUNNING")
                assert not placed.done()
                gate.go.release(100)
                await placed
                await api.until_job("rl", "RUNNING")

    @pytest.mark.parametrize("validate_only", [False, True])
    async def test_what_it_means_is_what_it_means_when_it_is_decided(
        self, tmp_path: Path, gate: Gate, validate_only: bool
    ) -> None:
        async with running(options_for(tmp_path)) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool())
            async with FakeAgent(controller.address, "n0", rank=1), contextlib.AsyncExitStack() as agents:
                request = job_pb2.SubmitJobRequest(
                    spec=placed_job("rl", EVERYWHERE, "actor"), validate_only=validate_only
                )
                placed = api.jobs.SubmitJob(request)
                await gate.until_begun()
                # Now this is the node of the lowest rank, which the text means.
                await agents.enter_async_context(FakeAgent(controller.address, "n9", rank=0))
                gate.go.release(100)
                answer = await placed
                if validate_only:
                    assert {worker.node_id for worker in answer.plan.workers} == {"n9"}
                else:
                    shown = await api.job("rl")
                    assert {worker.allocation.node_id for worker in shown.workers} == {"n9"}
        assert gate.count == 2

    async def test_a_placement_that_waited_for_nodes_is_compiled_beside_the_loop_against_those_that_are_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = Gate(monkeypatch, "on_nodes")
        text = "cluster: {num_nodes: 2, component_placement: {actor: 0-1}}"
        async with running(options_for(tmp_path)) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool())
            async with (
                FakeAgent(controller.address, "n1", gpus=1, rank=1) as agent,
                contextlib.AsyncExitStack() as agents,
            ):
                await api.submit(placed_job("rl", text, "actor", wait_for_nodes_ms=600_000))
                await agents.enter_async_context(FakeAgent(controller.address, "n2", gpus=1, rank=2))
                await gate.until_begun()
                await agent.heartbeat()
                await api.submit(job("quick"))
                await api.until_job("quick", "RUNNING")
                # Now the ranks of the text mean others.
                await agents.enter_async_context(FakeAgent(controller.address, "n0", gpus=1, rank=0))
                assert (await api.job("rl")).state == job_pb2.JOB_STATE_PENDING
                gate.go.release(100)
                await api.until_job("rl", "RUNNING")
                shown = await api.job("rl")
                assert {worker.allocation.node_id for worker in shown.workers} == {"n0", "n1"}
        assert gate.count >= 2

    async def test_a_repeated_request_that_overlaps_the_first_makes_one_job(self, tmp_path: Path, gate: Gate) -> None:
        async with running(options_for(tmp_path)) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool())
            async with FakeAgent(controller.address, "n0"):
                request = job_pb2.SubmitJobRequest(spec=placed_job("rl", EVERYWHERE, "actor"), request_id="r")
                calls = [api.jobs.SubmitJob(request) for _ in range(2)]
                await gate.until_begun()
                await gate.until_begun()
                gate.go.release(100)
                first, second = [await call for call in calls]
                assert first.job.uid == second.job.uid

    async def test_where_nodes_never_stand_still_the_sender_is_told_to_try_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(placements._Basis, "holds", lambda *_: False)
        async with running(options_for(tmp_path)) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool())
            async with FakeAgent(controller.address, "n0"):
                call = api.jobs.SubmitJob(job_pb2.SubmitJobRequest(spec=placed_job("rl", EVERYWHERE, "actor")))
                error = await refusal_of(call)
                assert (error.code, error.reason) == ("ABORTED", ErrorReason.INVENTORY_CHANGED)


class TestPlannedJobs:
    async def test_ap_16_a_plan_whose_inventory_has_changed_is_refused_and_nothing_starts(self, tmp_path: Path) -> None:
        async with running(options_for(tmp_path)) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool())
            async with FakeAgent(controller.address, "n0"):
                planned = controller.driver.state.meta.revision
                spec = placed_job(
                    "rl", "cluster: {component_placement: {actor: all}}", "actor", placement_revision=planned
                )
                async with FakeAgent(controller.address, "n1"):
                    refused = await refusal_of(api.jobs.SubmitJob(job_pb2.SubmitJobRequest(spec=spec)))
                    assert (refused.code, refused.reason.value) == ("ABORTED", "INVENTORY_CHANGED")
                    assert "n1 is READY" in refused.message
                    assert not controller.driver.state.jobs
                    spec.placement_revision = controller.driver.state.meta.revision
                    await api.submit(spec)


class TestResolving:
    async def resolve(self, api: Api, config: str) -> placement_pb2.ResolvePlacementResponse:
        stub = placement_pb2_grpc.PlacementServiceStub(api.channel)
        call: Any = stub.ResolvePlacement(placement_pb2.ResolvePlacementRequest(config=config))
        answer: placement_pb2.ResolvePlacementResponse = await call
        return answer

    async def test_a_text_is_resolved_against_the_visible_devices_of_the_nodes(self, tmp_path: Path) -> None:
        async with running(options_for(tmp_path)) as controller, api_at(controller.address) as api:
            agent = FakeAgent(controller.address, "n0", gpus=2)
            for device, name in zip(agent.hello.inventory.devices, ("1", "3"), strict=True):
                device.id = name
            async with agent:
                answer = await self.resolve(api, "cluster: {component_placement: {actor: '0-1:0-3'}}")
        [component] = answer.components
        assert [list(worker.visible_devices) for worker in component.workers] == [["1"], ["1"], ["3"], ["3"]]
        assert [worker.place.devices[0].milli for worker in component.workers] == [500] * 4
        assert answer.mode == "HYBRID"
        assert answer.revision > 0

    @pytest.mark.parametrize("config", ["", " ", "x" * (2 << 20)])
    async def test_no_text_or_too_much_is_refused(self, tmp_path: Path, config: str) -> None:
        async with running(options_for(tmp_path)) as controller, api_at(controller.address) as api:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await self.resolve(api, config)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


WORKFLOW = """
workflow:
  chunks: 8
  components:
    rollout: {seconds_by_gpus: {1: 40, 2: 20}}
    actor: {seconds_by_gpus: {1: 20, 2: 12}}
  edges: [[rollout, actor, stream]]
"""


class TestSearching:
    async def search(self, api: Api, config: str, **fields: Any) -> list[placement_pb2.SearchPlacementResponse]:
        stub = placement_pb2_grpc.PlacementServiceStub(api.channel)
        call: Any = stub.SearchPlacement(placement_pb2.SearchPlacementRequest(config=config, **fields))
        return [step async for step in call]

    async def test_the_best_plan_for_the_nodes_there_are_comes_last(self, tmp_path: Path) -> None:
        async with (
            running(options_for(tmp_path)) as controller,
            api_at(controller.address) as api,
            FakeAgent(controller.address, "n0", gpus=2),
        ):
            steps = await self.search(api, WORKFLOW)
        found = steps[-1].found
        assert found.status == "OPTIMAL"
        # Both in turn on two GPUs: 20 + 12 s; side by side rollout alone takes 40 s.
        assert found.iteration_seconds == pytest.approx(32)
        assert found.cluster_yaml.startswith("cluster:")
        assert {span.component for span in found.spans} == {"rollout", "actor"}
        assert found.revision > 0
        assert all(step.WhichOneof("step") == "progress" for step in steps[:-1])

    async def test_faults_of_the_config_are_told_with_their_places(self, tmp_path: Path) -> None:
        config = "runner: {task_type: reasoning}\nprofile_data: {actor_cost: nothing}\n"
        async with (
            running(options_for(tmp_path)) as controller,
            api_at(controller.address) as api,
            FakeAgent(controller.address, "n0", gpus=2),
        ):
            refused = await refusal_of(self.search(api, config))
        assert refused.code == "INVALID_ARGUMENT"
        assert refused.faults

    async def test_a_cancelled_search_leaves_no_process(self, tmp_path: Path) -> None:
        chain = {f"c{n}": {"seconds_by_gpus": {g: 100 / g + n for g in (1, 2, 3, 4, 6, 8)}} for n in range(16)}
        edges = [[f"c{n}", f"c{m}", "stream"] for n in range(16) for m in range(n + 1, 16) if (n * m) % 3 == 1]
        config = yaml.safe_dump({"workflow": {"chunks": 8, "components": chain, "edges": edges}})
        async with (
            running(options_for(tmp_path)) as controller,
            api_at(controller.address) as api,
            FakeAgent(controller.address, "n0", gpus=8),
            FakeAgent(controller.address, "n1", gpus=8),
        ):
            stub = placement_pb2_grpc.PlacementServiceStub(api.channel)
            request = placement_pb2.SearchPlacementRequest(config=config, time_limit_ms=600_000)
            call: Any = stub.SearchPlacement(request)
            first = await call.read()
            assert first.WhichOneof("step") == "progress"
            [child] = children("callboard.controller.searches.search_child")
            call.cancel()
            await exited(child)
            assert not children("callboard.controller.searches.search_child")


def children(module: str) -> list[ProcessId]:
    """Living processes of ours that run a module."""
    found = psutil.Process().children(recursive=True)
    living = [process for process in found if process.status() != psutil.STATUS_ZOMBIE]
    return [known for process in living if module in process.cmdline() and (known := identify(process.pid))]


ARMS = """
cluster:
  num_nodes: 1
  component_placement:
    env: {{node_group: arms, placement: {ranks}}}
  node_groups:
    - {{label: arms, node_ranks: 0, hardware: {{type: Franka}}}}
"""


class TestDeclaredHardware:
    async def test_two_jobs_never_hold_one_robot(self, tmp_path: Path) -> None:
        async with running(options_for(tmp_path)) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool())
            async with FakeAgent(controller.address, "n0", gpus=0, hardware=["Franka", "ZED", "Franka"]) as agent:
                first = placed_job("first", ARMS.format(ranks=1), "env")
                await api.submit(first)
                await api.until_job("first", "RUNNING")
                await api.submit(placed_job("beside", ARMS.format(ranks=0), "env"))
                await api.until_job("beside", "RUNNING")
                await api.submit(placed_job("both", ARMS.format(ranks="0-1"), "env"))
                await api.until_job("both", "PENDING")
                explained = (await api.jobs.ExplainJob(job_pb2.ExplainJobRequest(name="jobs/both"))).explanation
                said = [reason.message for reason in explained.reasons]
                assert "env/0 must have 1 of Franka/0 on n0, of which 0 is free; beside uses it" in said
                assert "env/1 must have 1 of Franka/1 on n0, of which 0 is free; first uses it" in said
                assert {"free 1 of Franka/0 on n0", "free 1 of Franka/1 on n0"} <= set(explained.unblock)
                for name in ("first", "beside"):
                    await api.jobs.CancelJob(job_pb2.CancelJobRequest(name=f"jobs/{name}"))
                await api.until_job("both", "RUNNING")
                amounts = [start.allocation.resources.custom_milli for start in starts(agent).values()]
                assert dict(amounts[-1]) == {"Franka/1": 1000}

    async def test_workers_that_share_a_robot_have_parts_of_it(self, tmp_path: Path) -> None:
        async with running(options_for(tmp_path)) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool())
            async with FakeAgent(controller.address, "n0", gpus=0, hardware=["Franka"]):
                await api.submit(placed_job("three", ARMS.format(ranks="0:0-2"), "env"))
                await api.until_job("three", "RUNNING")
                running_job = await api.job("three")
                held = [dict(each.allocation.resources.custom_milli) for each in running_job.workers]
                assert held == [{"Franka/0": milli} for milli in (334, 333, 333)], "all of it together"
                (place, *_) = running_job.spec.components[0].places
                assert dict(place.hardware_milli) == {"Franka/0": 334}

    async def test_what_only_a_config_declares_is_nobodys_to_book(self, tmp_path: Path) -> None:
        own = ARMS.format(ranks=0).replace("{type: Franka}", "{type: Franka, configs: [{node_rank: 0, ip: 10.0.0.1}]}")
        async with running(options_for(tmp_path)) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool())
            async with FakeAgent(controller.address, "n0", gpus=0):
                for name in ("one", "two"):
                    await api.submit(placed_job(name, own, "env"))
                    await api.until_job(name, "RUNNING")
