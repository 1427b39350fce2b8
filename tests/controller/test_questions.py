"""What takes long is worked out beside the loop: others are served meanwhile, and the answer is that of its moment."""

from __future__ import annotations

import asyncio
import gc
import random
import sqlite3
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest
from google.protobuf.message_factory import GetMessageClass

from callboard.controller.journal.state_dir import JOURNAL_NAME, StoreFailed
from callboard.controller.loop import questions
from callboard.controller.server import SERVICES, Controller
from callboard.controller.views import stats
from callboard.scheduler import Refusal
from callboard.scheduler.account import explain as explaining
from callboard.scheduler.handlers import passes, requests
from callboard.scheduler.records.events import JobCancelled, NodeCordoned
from callboard.scheduler.state.invariants import whole
from callboard.security.caller_roles import ROLES, Role
from callboard.security.gate import changes
from callboard.v1 import job_pb2, policy_pb2, pool_pb2, scheduler_pb2
from callboard.wire.refusals import LimitReached
from tests.controller.support import Api, api_at, job, options_for, pool, refusal_of, running
from tests.controller.test_driver import FakeJournal, driving, join, make_pool, submit
from tests.support.fake_agent import FakeAgent


class Held:
    """Functions that wait where they are called beside the loop, until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.begun, self.go = threading.Semaphore(0), threading.Event()

    def hold(self, module: Any, name: str) -> None:
        real = getattr(module, name)

        def held(*arguments: Any, **fields: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                self.begun.release()
                self.go.wait()
            return real(*arguments, **fields)

        self._monkeypatch.setattr(module, name, held)

    async def until_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, timeout=20), "it is not worked out beside the loop"


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(monkeypatch)
    yield held
    held.go.set()


def explained(api: Api) -> Any:
    return api.jobs.ExplainJob(job_pb2.ExplainJobRequest(name="jobs/waits"))


def read(api: Api) -> Any:
    return api.jobs.GetJob(job_pb2.GetJobRequest(name="jobs/waits"))


def checked(api: Api) -> Any:
    return api.jobs.SubmitJob(job_pb2.SubmitJobRequest(spec=job("what", gpu=1000), validate_only=True))


def demanded(api: Api) -> Any:
    return api.scheduler.GetDemand(scheduler_pb2.GetDemandRequest())


def refused(api: Api) -> Any:
    return refusal_of(api.jobs.SubmitJob(job_pb2.SubmitJobRequest(spec=job("large", gpu=5000))))


def beyond_quota(api: Api) -> Any:
    return refusal_of(api.jobs.SubmitJob(job_pb2.SubmitJobRequest(spec=job("large", gpu=9000, pool="small"))))


def tried_pool(api: Api) -> Any:
    request = pool_pb2.CreatePoolRequest(pool_id="other", spec=pool().spec, validate_only=True)
    return api.pools.CreatePool(request)


def tried_policy(api: Api) -> Any:
    return api.scheduler.SetPolicy(scheduler_pb2.SetPolicyRequest(validate_only=True))


@pytest.mark.parametrize(
    ("ask", "where", "name"),
    [
        (explained, explaining, "explain"),
        (read, explaining, "explain"),
        (checked, explaining, "explain"),
        (demanded, stats, "demand"),
        (refused, requests, "unschedulable"),
        (beyond_quota, requests, "unschedulable"),
        (tried_pool, passes, "run"),
        (tried_policy, passes, "run"),
    ],
)
async def test_heartbeats_are_answered_and_jobs_start_while_somebody_asks_what_takes_long(
    tmp_path: Path, held: Held, ask: Callable[[Api], Any], where: Any, name: str
) -> None:
    async with running(options_for(tmp_path)) as controller, api_at(controller.address) as api:
        await others_are_served(controller, api, held, asking=(ask, where, name))


async def others_are_served(controller: Controller, api: Api, held: Held, *, asking: tuple[Any, Any, str]) -> None:
    ask, where, name = asking
    await api.pools.CreatePool(pool())
    await api.pools.CreatePool(pool("small", gpu=1000))
    async with FakeAgent(controller.address, "n1", gpus=1) as agent:
        await api.submit(job("runs", gpu=1000))
        await api.until_job("runs", "RUNNING")
        await api.submit(job("waits", gpu=1000))
        held.hold(where, name)
        answer = asyncio.ensure_future(ask(api))
        await held.until_begun()
        await agent.heartbeat()
        await api.submit(job("quick"))
        await api.until_job("quick", "RUNNING")
        assert not answer.done()
        held.go.set()
        await answer


async def test_the_answer_is_that_of_the_moment_of_the_question(controller: Controller, api: Api, held: Held) -> None:
    await api.pools.CreatePool(pool())
    async with FakeAgent(controller.address, "n1", gpus=1):
        await api.submit(job("runs", gpu=1000))
        await api.until_job("runs", "RUNNING")
        await api.submit(job("waits", gpu=1000))
        held.hold(explaining, "explain")
        first = asyncio.ensure_future(explained(api))
        await held.until_begun()
        await api.jobs.CompleteJob(job_pb2.CompleteJobRequest(name="jobs/runs"))
        await api.until_job("waits", "RUNNING")
        second = asyncio.ensure_future(explained(api))
        held.go.set()
        assert (await first).explanation.verdict == "WAIT"
        assert (await second).explanation.verdict == "NONE"


async def test_a_refusal_has_its_whole_account_when_it_is_told(controller: Controller, api: Api) -> None:
    await api.pools.CreatePool(pool(gpu=20_000))
    async with FakeAgent(controller.address, "n1", gpus=1):
        refusal = await refused(api)
    assert "n1 lacks 4 GPU" in refusal.message
    assert refusal.metadata["unblock.0"] == "4 more GPU on n1"


@pytest.mark.parametrize("followed", [3, 100_000], ids=["a copy that is made again and again", "one that follows"])
async def test_the_copy_is_what_the_live_one_is_whatever_came_in_between(
    monkeypatch: pytest.MonkeyPatch, followed: int
) -> None:
    monkeypatch.setattr(questions, "MOST_FOLLOWED", followed)
    chance = random.Random(followed)
    async with driving(FakeJournal()) as (driver, _):
        await make_pool(driver)
        for step in range(60):
            match chance.randrange(4):
                case 0:
                    await join(driver, f"n{chance.randrange(3)}")
                case 1 if driver.state.jobs:
                    uid = chance.choice(sorted(driver.state.jobs))
                    await driver.ask(
                        lambda now_ms, cause, uid=uid: JobCancelled(now_ms=now_ms, cause=cause, uid=uid),
                        lambda _: None,
                        source="test",
                    )
                case 2 if driver.state.nodes:
                    node_id = chance.choice(sorted(driver.state.nodes))
                    with_it = chance.random() < 0.5
                    await driver.ask(
                        lambda now_ms, cause, node_id=node_id, with_it=with_it: NodeCordoned(
                            now_ms=now_ms, cause=cause, node_id=node_id, cordoned=with_it
                        ),
                        lambda _: None,
                        source="test",
                    )
                case _ if driver.state.nodes:
                    await submit(driver, f"j{step}")
                case _:
                    await join(driver, "n0")
            if chance.random() < 0.7:
                expected = deepcopy(whole(driver.state))
                asked = asyncio.ensure_future(driver.question(lambda scheduler: whole(scheduler.state)))
                await asyncio.sleep(0)
                if driver.state.nodes:
                    await submit(driver, f"late{step}")  # what comes after the question is no part of the answer
                assert await asked == expected
                for uid in list(driver.state.jobs)[:1]:  # a question leaves no trace in the copy either
                    cancelled = JobCancelled(now_ms=driver.now_ms(), uid=uid)
                    await driver.question(lambda scheduler, event=cancelled: scheduler.rehearse(event))  # type: ignore[misc]


async def test_a_question_that_ends_an_iteration_by_a_defect_is_answered_too() -> None:
    async with driving(FakeJournal()) as (driver, _):
        with pytest.raises(RuntimeError, match="StopIteration"):
            await driver.question(lambda _: next(iter(())))


async def test_whoever_stops_waiting_for_an_answer_leaves_no_defect_in_the_log() -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    async with driving(FakeJournal()) as (driver, _):
        go = threading.Event()
        first = asyncio.ensure_future(driver.question(lambda _: go.wait(20)))
        second = asyncio.ensure_future(driver.question(lambda _: None))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait({second})
        go.set()
        await first
        assert await driver.question(lambda _: "after it") == "after it"
    del second
    gc.collect()  # asyncio tells of errors that nobody read when they are collected
    assert not told


async def test_what_was_never_journaled_is_not_told_though_the_journal_works_again() -> None:
    journal = FakeJournal()
    async with driving(journal) as (driver, told):
        await make_pool(driver)
        await join(driver)
        journal.gate.clear()
        lost = asyncio.ensure_future(submit(driver, "lost"))
        await journal.waiting.wait()
        asked = asyncio.ensure_future(driver.question(lambda scheduler: len(scheduler.state.jobs)))
        await asyncio.sleep(0)
        journal.failure = StoreFailed(Path("journal"), "is full", "Free some room.")
        journal.gate.set()
        await told.until("outage")
        journal.failure = None
        with pytest.raises(Exception, match="journal"):
            await lost
        await told.until("started after 0 events")
        try:
            assert await asked == 0
        except Exception as error:  # noqa: BLE001 - asked again while it did not work
            assert "journal" in str(error)  # noqa: PT017


async def test_too_many_questions_are_refused_and_a_refusal_without_room_comes_without_its_account() -> None:
    async with driving(FakeJournal()) as (driver, _):
        await make_pool(driver)
        go = threading.Event()
        waiting = [asyncio.ensure_future(driver.question(lambda _: go.wait(20))) for _ in range(questions.MOST_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(LimitReached, match="questions wait"):
            await driver.question(lambda _: None)
        with pytest.raises(Refusal, match="could ever hold"):
            await submit(driver, "nowhere")
        go.set()
        await asyncio.gather(*waiting, return_exceptions=True)


METHODS = {
    method.name: (f"/{service.full_name}/{method.name}", method)
    for module in SERVICES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}

READS = sorted(name for name, (path, _) in METHODS.items() if not changes(name) and ROLES[path] != {Role.AGENT})
"""What people and programs may call that changes nothing; agents carry output and packages by methods of their own."""

TRIALS = sorted(name for name, (_, method) in METHODS.items() if "validate_only" in method.input_type.fields_by_name)

WORKFLOW = "workflow: {chunks: 2, components: {a: {seconds_by_gpus: {1: 4}}}, edges: []}"
PLACES = "cluster: {component_placement: {a: all}}"

ASKED: dict[str, list[dict[str, Any]]] = {
    "ResolvePlacement": [{"config": PLACES}],
    "SearchPlacement": [{"config": WORKFLOW}],
    "Watch": [{"start_revision": 1}],
    "SubmitJob": [
        {"spec": job("starts", cpu=100)},
        {"spec": job("preempts", gpu=1000, priority_milli=9000)},
        {"spec": job("lingers", gpu=1000)},
        {"spec": job("runs")},
        {"spec": job("never", gpu=5000)},
    ],
    "CreatePool": [{"pool_id": "other", "spec": pool().spec}, {"pool_id": "rlhf", "spec": pool(gpu=1).spec}],
    "UpdatePool": [
        {"name": "pools/rlhf", "spec": pool(gpu=1000).spec},
        {"name": "pools/rlhf", "spec": pool(stop_policy=pool_pb2.STOP_POLICY_HOLD_AND_DRAIN).spec},
        {"name": "pools/nowhere", "spec": pool().spec},
    ],
    "SetPolicy": [{"policy": policy_pb2.PreemptionPolicy(min_runtime_ms=5_000)}, {}],
}
"""Fields of requests, beside the name of something that is there."""


def named(controller: Controller) -> dict[str, str]:
    """Of each service the name of something that is there."""
    (group,) = list(controller.driver.state.groups)[:1]
    return {
        "JobService": "jobs/waits",
        "NodeService": "nodes/n1",
        "PoolService": "pools/rlhf",
        "PlacementGroupService": f"placementGroups/{group}",
    }


def kept(controller: Controller) -> tuple[object, ...]:
    """All that a decision could depend on, and every row of the journal."""
    scheduler = controller.driver.scheduler
    with sqlite3.connect(f"file:{controller.options.state_dir / JOURNAL_NAME}?mode=ro", uri=True) as journal:
        tables = [name for (name,) in journal.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = {name: journal.execute(f"SELECT * FROM {name}").fetchall() for name in tables}
    assert rows["log"], tables
    return deepcopy(whole(scheduler.state)), scheduler.next_wake_ms(), rows


async def one_call(api: Api, agent: FakeAgent, name: str, fields: dict[str, Any]) -> str:
    """Calls a method; what became of it. What only an agent can answer is waited for until it is asked."""
    (path, method), channel = METHODS[name], cast("Any", api.channel)
    request = GetMessageClass(method.input_type)(**fields).SerializeToString()
    asked = len(agent.inquiries) + len(agent.reads)
    if method.server_streaming:
        stream = channel.unary_stream(path)(request)
        call = asyncio.ensure_future(stream.read())
    else:
        stream = channel.unary_unary(path)(request)
        call = asyncio.ensure_future(stream)
    if name in ("InspectNode", "ReadJobOutput"):
        await agent.until(lambda: len(agent.inquiries) + len(agent.reads) > asked)
        stream.cancel()
    try:
        await call
    except asyncio.CancelledError:
        return "OK"
    except grpc.aio.AioRpcError as error:
        return error.code().name
    stream.cancel()
    return "OK"


async def test_no_read_and_no_trial_leaves_a_trace_in_the_state_or_the_journal(tmp_path: Path) -> None:
    assert len(READS) > 15
    assert len(TRIALS) == 4
    refused = dict.fromkeys(READS + TRIALS, 0)
    async with running(options_for(tmp_path)) as controller, api_at(controller.address) as api:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address, "n1", gpus=1) as agent:
            await api.submit(job("runs", gpu=1000))
            await api.until_job("runs", "RUNNING")
            await api.submit(job("waits", gpu=1000))
            await controller.driver.journaled()
            names = named(controller) | {"runs": "jobs/runs"}
            before = kept(controller)
            for name in READS + TRIALS:
                path, method = METHODS[name]
                known = method.input_type.fields_by_name
                about = {"name": names[path.split("/")[1].rpartition(".")[2]]} if "name" in known else {}
                if name == "ReadJobOutput":
                    about = {"name": names["runs"]}
                trial = {"validate_only": True} if name in TRIALS else {}
                for fields in ASKED.get(name, [{}]):
                    code = await one_call(api, agent, name, about | fields | trial)
                    refused[name] += code != "OK"
                    await controller.driver.journaled()
                    assert kept(controller) == before, f"{name} {fields} ({code})"
    # What was refused: a name that is taken, a job that no node holds, a pool that is not there.
    assert {name: count for name, count in refused.items() if count} == {
        "SubmitJob": 2,
        "CreatePool": 1,
        "UpdatePool": 1,
    }
