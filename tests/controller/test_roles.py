"""What does the controller make of roles, groups, secrets and reported gauges?"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from callboard.controller.server import Controller
from callboard.controller.services.job_gauges import FORGOTTEN_AFTER_MS, GaugeBoard, gauges_of
from callboard.model.faults import InvalidInput
from callboard.v1 import agent_pb2, inspection_pb2, job_pb2, node_pb2
from tests.controller.support import Api, api_at, options_for, pool, refusal_of, running
from tests.support.fake_agent import FakeAgent

HIDDEN = ("hunter2-env", "hunter2-declared", "hunter2-plain")


def member(name: str, **fields: Any) -> job_pb2.ComponentSpec:
    return job_pb2.ComponentSpec(name=name, actor="pkg:Class", colocation_group="training", **fields)


def training(name: str = "train") -> job_pb2.JobSpec:
    return job_pb2.JobSpec(
        name=name,
        pool="rlhf",
        components=[
            member("trainer", role="trainer", env={"HF_TOKEN": HIDDEN[0]}, entry="run"),
            member("pool", role="trajectory_pool", secret_env={"DB_URL": HIDDEN[1]}, args_json="[7]"),
        ],
    )


class TestGroups:
    async def test_one_worker_gets_every_member(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address, cpu_milli=8000) as agent:
            shown = await api.submit(training())
            start = (await agent.command("start_worker")).start_worker
            assert [(each.name, each.role, each.entry, each.max_concurrency) for each in start.members] == [
                ("trainer", "trainer", "run", 1),
                ("pool", "trajectory_pool", "", 100),
            ]
            assert start.members[1].args_json == "[7]"
            assert start.worker.component == "training"
            assert start.allocation.resources.cpu_milli == 4000
            assert dict(start.env) == {"HF_TOKEN": HIDDEN[0], "DB_URL": HIDDEN[1]}
            assert list(start.secret_names) == ["DB_URL"]
            assert [component.name for component in shown.spec.components] == ["trainer", "pool"]
            assert shown.spec.components[0].resources.gpu_milli == 1000

    async def test_asking_again_with_one_request_id_is_the_same_job(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address, cpu_milli=8000):
            first = await api.submit(training(), request_id="r1")
            assert (await api.submit(training(), request_id="r1")).uid == first.uid


class TestSecrets:
    async def test_se_04_those_of_members_survive_a_restart_outside_the_journal(self, tmp_path: Path) -> None:
        options = options_for(tmp_path, reconcile_grace_ms=0)
        async with running(options) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool())
            await api.submit(_waiting(training()))
        for file in (tmp_path / "state").iterdir():
            if file.is_file():
                content = await asyncio.to_thread(file.read_bytes)
                assert not [value for value in HIDDEN if value.encode() in content], file
        async with running(options) as controller, api_at(controller.address) as api:
            shown = await api.job("train")
            assert not [value for value in HIDDEN if value in str(shown)]
            async with FakeAgent(controller.address, cpu_milli=8000) as agent:
                start = (await agent.command("start_worker")).start_worker
                assert dict(start.env) == {"HF_TOKEN": HIDDEN[0], "DB_URL": HIDDEN[1]}


def _waiting(spec: job_pb2.JobSpec) -> job_pb2.JobSpec:
    """A job that waits for nodes that will come."""
    spec.wait_for_nodes_ms = 600_000
    return spec


class TestGauges:
    def test_the_newest_counts_until_it_is_old(self) -> None:
        board = GaugeBoard()
        assert board.note("u", {"a": 1000, "b": 2000}, 0) == (("a", 1000), ("b", 2000))
        assert board.note("u", {"a": 3000}, 10) == (("a", 3000), ("b", 2000))
        assert board.of("u", FORGOTTEN_AFTER_MS + 5) == {"a": 3.0}
        assert board.note("u", {}, FORGOTTEN_AFTER_MS + 10) == ()
        board.note("gone", {"a": 1}, 0)
        board.keep_only({"u": None})
        assert board.of("gone", 0) == {}

    def test_a_job_has_so_many_and_no_more(self) -> None:
        board = GaugeBoard()
        board.note("u", {f"g{number}": 1 for number in range(60)}, 0)
        with pytest.raises(InvalidInput, match="64 are allowed"):
            board.note("u", {f"h{number}": 1 for number in range(10)}, 1)
        assert len(board.of("u", 1)) == 60

    def test_values_are_thousandths_and_bounded(self) -> None:
        assert gauges_of({"a": 0.0005, "b": 1.7e308, "c": -1e300}) == {"a": 0, "b": 10**12, "c": -(10**12)}
        with pytest.raises(InvalidInput) as caught:
            gauges_of({"a b": 1, "c": float("inf")})
        assert len(caught.value.faults) == 2


class TestInspection:
    async def test_an_agents_answer_is_handed_on(self, controller: Controller, api: Api) -> None:
        async with FakeAgent(controller.address) as agent:
            asked = asyncio.ensure_future(
                api.nodes.InspectNode(
                    node_pb2.InspectNodeRequest(name="nodes/n0", ask=inspection_pb2.InspectionAsk(environment=True))
                )
            )
            await agent.until(lambda: bool(agent.inquiries))
            (inquiry,) = agent.inquiries
            assert inquiry.ask.environment
            seen = inspection_pb2.NodeInspection(unknown=["nothing to see"])
            await agent.say(inquiry_answer=agent_pb2.InquiryAnswer(inquiry_id="other", inspection=seen))
            await agent.say(inquiry_answer=agent_pb2.InquiryAnswer(inquiry_id=inquiry.inquiry_id, inspection=seen))
            assert (await asked).inspection == seen

    async def test_an_agent_that_leaves_meanwhile_is_told(self, controller: Controller, api: Api) -> None:
        agent = FakeAgent(controller.address)
        await agent.join()
        asked = asyncio.ensure_future(api.nodes.InspectNode(node_pb2.InspectNodeRequest(name="nodes/n0")))
        await agent.until(lambda: bool(agent.inquiries))
        await agent.cut()
        error = await refusal_of(asked)
        assert error.code == "UNAVAILABLE"
        assert "left; try again" in str(error)
        assert "is not connected" in str(
            await refusal_of(api.nodes.InspectNode(node_pb2.InspectNodeRequest(name="nodes/n0")))
        )

    async def test_an_unknown_node_is_not_found(self, api: Api) -> None:
        error = await refusal_of(api.nodes.InspectNode(node_pb2.InspectNodeRequest(name="nodes/nowhere")))
        assert "there is no node nowhere" in str(error)
