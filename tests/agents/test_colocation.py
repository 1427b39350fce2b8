"""Do the members of a colocation group share a process and nothing else? Asked of a host in a plain process."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from callboard.agents.host.worker_host import WorkerHost
from callboard.agents.runtime import HostError
from callboard.agents.supplies.worker_env import PlanRefused, worker_plan
from callboard.agents.worker.process_runtime import HostedProcess
from callboard.agents.worker.progress import being_built
from callboard.v1 import agent_pb2
from tests.agents.test_worker_host import Host, call, environment_of, host, identity
from tests.support.fake_controller import start_worker

__all__ = ["host"]  # the fixture


def member(name: str, actor: str, *args: Any, limit: int = 10, **fields: Any) -> agent_pb2.WorkerMember:
    return agent_pb2.WorkerMember(
        name=name,
        actor=f"tests.support.group_actors:{actor}",
        args_json=json.dumps(args),
        max_concurrency=limit,
        **fields,
    )


class Held:
    """Is not constructed before it may be."""

    gate = threading.Event()

    def __init__(self) -> None:
        self.gate.wait(60)


TRAINER = member("trainer", "Trainer", limit=1, role="learner")


async def load_of(hosted: HostedProcess, name: str) -> dict[str, Any]:
    loads: list[dict[str, Any]] = (await hosted.control("ping"))["loads"]
    return next(load for load in loads if load["name"] == name)


async def until_in_flight(hosted: HostedProcess, name: str, count: int) -> None:
    while (await load_of(hosted, name))["in_flight"] != count:
        pass


class TestCalls:
    async def test_a_trainer_of_one_never_takes_two_steps_at_once_while_its_pool_serves_a_hundred(
        self, host: Host
    ) -> None:
        hosted, answer = await host(
            "Plain", component="training", members=[TRAINER, member("pool", "Pool", 100, limit=100)]
        )
        assert answer["ok"]
        steps = [asyncio.create_task(call(hosted, "trainer.step")) for _ in range(20)]
        # The pool's barrier opens only when all hundred are in at the same time.
        await asyncio.gather(*(call(hosted, "pool.put", number) for number in range(100)))
        await asyncio.gather(*steps)
        assert await call(hosted, "trainer.most") == 1
        assert await call(hosted, "pool.size") == 100

    async def test_a_busy_member_holds_up_no_other(self, host: Host) -> None:
        hosted, _ = await host("Plain", members=[TRAINER, member("pool", "Pool"), member("loop", "Loop")])
        step = asyncio.create_task(call(hosted, "trainer.step", True))
        waiting = asyncio.create_task(call(hosted, "trainer.step"))
        await until_in_flight(hosted, "trainer", 2)
        assert await call(hosted, "pool.put", 1) == 1
        assert await call(hosted, "loop.step") == "the loop's"
        assert await load_of(hosted, "trainer") == {"name": "trainer", "in_flight": 2, "limit": 1}
        assert not step.done()
        await hosted.control("cancel")
        assert await step == 1
        assert await waiting == 2

    async def test_similar_names_never_capture_each_other(self, host: Host) -> None:
        members = [member("a", "Pool"), member("a_b", "Trainer"), member("a.b", "Loop")]
        hosted, _ = await host("Plain", members=members)
        assert await call(hosted, "a.step") == "the pool's"
        assert await call(hosted, "a_b.step") == 1
        assert await call(hosted, "a.b.step") == "the loop's"

    async def test_a_role_is_an_address_too(self, host: Host) -> None:
        hosted, _ = await host("Plain", members=[TRAINER, member("pool", "Pool", role="trajectory_pool")])
        assert await call(hosted, "learner.step") == 1
        assert await call(hosted, "trajectory_pool.step") == "the pool's"

    @pytest.mark.parametrize("method", ["step", "train.step", "trainer", "trainers.step", ".step"])
    async def test_what_names_no_member_is_refused_with_their_names(self, host: Host, method: str) -> None:
        hosted, _ = await host("Plain", members=[TRAINER, member("pool", "Pool")])
        with pytest.raises(HostError, match="members are trainer, pool"):
            await call(hosted, method)

    async def test_private_methods_are_refused(self, host: Host) -> None:
        hosted, _ = await host("Plain", members=[TRAINER])
        with pytest.raises(HostError, match="not a public method"):
            await call(hosted, "trainer._lock")

    async def test_each_is_told_who_it_is(self, host: Host) -> None:
        hosted, _ = await host("Plain", component="training", members=[TRAINER, member("pool", "Pool")])
        component, group, _ = await call(hosted, "trainer.told")
        assert (component, group) == ("trainer", "training")


class TestHooks:
    async def test_cancel_reaches_every_member_while_a_step_is_busy(self, host: Host, tmp_path: Path) -> None:
        trace = tmp_path / "cancelled"
        hosted, answer = await host(
            "Plain",
            members=[TRAINER, member("pool", "Pool"), member("silent", "Silent")],
            env={"CANCELLED_FILE": str(trace)},
        )
        assert set(answer["hooks"]) == {"setup", "restore", "cancel", "checkpoint", "progress"}
        step = asyncio.create_task(call(hosted, "trainer.step", True))
        await until_in_flight(hosted, "trainer", 1)
        assert await hosted.control("cancel") == {"hook": True, "error": ""}
        assert await step == 1
        assert trace.read_text() == "pool\n"
        with pytest.raises(HostError, match="takes no more calls"):
            await call(hosted, "pool.size")

    async def test_checkpoint_and_restore_are_each_members_own(self, host: Host) -> None:
        members = [TRAINER, member("pool", "Pool"), member("silent", "Silent")]
        hosted, _ = await host("Plain", members=members)
        await call(hosted, "trainer.step")
        await call(hosted, "trainer.step")
        await call(hosted, "pool.put", 7)
        answer = await hosted.control("checkpoint", {"wait_s": 1, "take": True})
        assert not answer["error"]
        checkpoint = agent_pb2.Checkpoint(data=base64.b64decode(answer["data"]))
        second, _ = await host("Plain", members=members, generation=2, checkpoint=checkpoint)
        assert (await second.control("progress"))["progress"] == {"trainer": {"steps": 2}, "pool": {"items": 1}}

    async def test_what_is_too_large_together_is_named(self, host: Host) -> None:
        hosted, _ = await host("Plain", members=[member("left", "Heavy"), member("right", "Heavy")])
        answer = await hosted.control("checkpoint", {"wait_s": 0, "take": True})
        assert "the checkpoint of the group is" in answer["error"]
        assert "left" in answer["error"]

    async def test_an_error_names_the_member(self, host: Host) -> None:
        odd = agent_pb2.WorkerMember(
            name="odd", actor="tests.support.actors:Yielding", args_json='["odd"]', max_concurrency=1
        )
        hosted, _ = await host("Plain", members=[member("pool", "Pool"), odd])
        answer = await hosted.control("checkpoint", {"wait_s": 0, "take": True})
        assert answer["error"].startswith("odd: checkpoint() returned int")


class TestStart:
    async def test_a_failing_constructor_names_the_member(self, host: Host) -> None:
        broken = agent_pb2.WorkerMember(name="pool", actor="tests.support.actors:Broken", max_concurrency=1)
        _, answer = await host("Plain", members=[TRAINER, broken])
        assert answer["failure"] == "CONSTRUCTOR"
        assert answer["message"] == "pool: ValueError: no weights here"

    async def test_a_failing_import_names_the_member(self, host: Host) -> None:
        _, answer = await host("Plain", members=[TRAINER, member("sync", "Missing")])
        assert answer["failure"] == "IMPORT"
        assert answer["message"].startswith("sync: AttributeError")

    async def test_a_missing_entry_names_the_member(self, host: Host) -> None:
        _, answer = await host("Plain", members=[TRAINER, member("pool", "Pool", entry="main")])
        assert answer["message"].startswith("pool: AttributeError")

    async def test_one_that_holds_the_others_up_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for of_a_process in ("enter_environment", "become_subreaper"):
            monkeypatch.setattr(f"callboard.agents.host.worker_host.{of_a_process}", lambda *_, **__: None)
        held = agent_pb2.WorkerMember(name="slow", actor=f"{__name__}:Held", max_concurrency=1)
        command = start_worker("Plain", members=[TRAINER, held])
        here = WorkerHost()
        hosted: Any = SimpleNamespace(control=lambda method: getattr(here, method)())
        assigning = asyncio.create_task(here.assign(worker_plan(command, identity(), environment_of(command))))
        while await being_built(hosted) != "slow":
            assert not assigning.done()
        Held.gate.set()
        assert (await assigning)["ok"]
        assert await being_built(hosted) == ""

    def test_a_member_that_can_not_be_read_is_refused(self) -> None:
        command = start_worker("Plain", members=[TRAINER, agent_pb2.WorkerMember(name="x", actor="os")])
        with pytest.raises(PlanRefused, match=r"members\[1\].actor"):
            worker_plan(command, identity(), environment_of(command))


class TestEntries:
    async def test_all_must_end_well(self, host: Host) -> None:
        hosted, _ = await host(
            "Plain", members=[member("a", "Finishing", entry="run"), member("b", "Finishing", entry="run"), TRAINER]
        )
        assert await hosted.control("report") == {"succeeded": True, "traceback": ""}

    async def test_the_first_that_fails_is_named(self, host: Host) -> None:
        trainer = member("trainer", "Trainer", entry="step", limit=1)
        hosted, _ = await host("Plain", members=[member("b", "Finishing", "no luck", entry="run"), trainer])
        answer = await hosted.control("report")
        assert not answer["succeeded"]
        assert answer["traceback"].startswith("b: Traceback")
        assert "no luck" in answer["traceback"]


class TestSecrets:
    async def test_se_04_their_values_are_in_no_failure(self, host: Host) -> None:
        command: dict[str, Any] = {"env": {"DB": "hunter2x", "API_TOKEN": "abc123"}, "secret_names": ["DB"]}
        _, answer = await host("Plain", members=[member("c", "Careless")], **command)
        assert "can't log in with ******** and ********" in answer["message"]
        assert "abc123" not in str(answer)
        assert "hunter2x" not in str(answer)
