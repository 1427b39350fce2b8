"""Clients go on through restarts of the controller as if nothing had happened. Real processes and sockets, no Ray."""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import grpc
import pytest

from callboard.client.calls import methods
from callboard.client.calls.connection import Connection
from callboard.client.calls.methods import Method
from callboard.client.client import Client
from callboard.client.sync import SyncClient
from callboard.v1.job_pb2 import JobState
from tests.controller.support import options_for, running
from tests.support.controller_process import ControllerProcess
from tests.support.fake_agent import FakeAgent

CLIENTS = 30
ENDS = (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM, signal.SIGTERM, signal.SIGKILL)
BOUND_S = 240.0


def spec(name: str, **fields: object) -> dict[str, object]:
    return {
        "name": name,
        "pool": "p",
        "components": [{"name": "w", "actor": "pkg.mod:Class", "resources": {"cpu": 0.001}}],
        **fields,
    }


class Rounds:
    """How often each client went round, and a way to wait for more."""

    def __init__(self) -> None:
        self.done = dict.fromkeys(range(CLIENTS), 0)
        self.over = False
        self._changed = asyncio.Condition()

    async def one(self, number: int) -> None:
        self.done[number] += 1
        async with self._changed:
            self._changed.notify_all()

    async def one_more_each(self) -> None:
        before = dict(self.done)
        async with self._changed:
            await self._changed.wait_for(lambda: all(self.done[one] > before[one] for one in before))


async def reads(client: Client, _: str) -> None:
    await client.stats()
    await client.list_jobs()
    await client.list_events(newest=5)
    await client.validate(spec("never"))


async def submits(client: Client, name: str) -> None:
    """A job from its submit to its end, with both waits."""
    job = await client.submit(spec(name))
    await job.running(timeout=120)
    await job.explain()
    await job.cancel("enough")
    assert (await job.finished(timeout=120)).state == JobState.JOB_STATE_CANCELLED


async def changes(client: Client, name: str) -> None:
    """Calls that change something, removals among them."""
    await client.ensure_pool(name, nominal={"cpu": 1})
    assert (await client.update_pool({"name": name, "nominal": {"cpu": 2}})).spec.nominal.cpu_milli == 2000
    await client.delete_pool(name)
    await client.set_policy(await client.get_policy())


async def test_ft_f1_thirty_clients_see_only_successes_while_the_controller_is_restarted(tmp_path: Path) -> None:
    rounds = Rounds()
    seen: list[int] = []

    async def looped(number: int, address: str, act: Callable[[Client, str], Awaitable[None]]) -> None:
        async with Client(address) as client:
            for turn in itertools.count():
                if rounds.over:
                    return
                await act(client, f"c{number}-{turn}")
                await rounds.one(number)

    async def watched(address: str) -> None:
        async with Client(address) as client:
            async for event in client.watch(start_revision=1):
                seen.append(event.revision)
                if event.subject == "pools/last":
                    return

    errors: list[Exception] = []
    synchronous_turns = itertools.count()

    def synchronous(address: str) -> None:
        try:
            with SyncClient(address) as client:
                while not rounds.over:
                    client.submit(spec(f"sync-{next(synchronous_turns)}")).cancel()
                    client.stats()
        except Exception as error:  # noqa: BLE001 - shown by the test, whatever it is
            errors.append(error)

    async with asyncio.timeout(BOUND_S), ControllerProcess(tmp_path / "state") as controller:
        agent = FakeAgent(controller.address, cpu_milli=100_000)
        await agent.join()
        async with Client(controller.address) as client:
            await client.ensure_pool("p", nominal={"cpu": 100})
            kept = await client.submit(spec("kept", owner={"session": {"lease": "60s"}}))
            thread = threading.Thread(target=synchronous, args=(controller.address,))
            thread.start()
            async with asyncio.TaskGroup() as group:
                group.create_task(watched(controller.address))
                for number in range(CLIENTS):
                    group.create_task(looped(number, controller.address, (submits, reads, changes)[number % 3]))
                for end in ENDS:
                    await rounds.one_more_each()
                    controller.signal(end)
                    await controller.ended()
                    await controller.start()
                    await agent.join()
                await rounds.one_more_each()
                rounds.over = True
                await asyncio.to_thread(thread.join)
                await client.ensure_pool("last", nominal={"cpu": 1})
            assert errors == []
            assert next(synchronous_turns) > len(ENDS)
            assert (await kept.refresh()).state == JobState.JOB_STATE_RUNNING
            logged = [event.revision for event in await client.list_events(start_revision=1)]
            assert seen == logged[: len(seen)]
        await agent.cut()


class LosingAnswers(Connection):
    """A connection that loses the first answer of every call that may be made twice: all that was done is done."""

    lost: ClassVar[list[str]] = []
    renewed: ClassVar[asyncio.Event]

    async def _call_once(self, method: Any, request: Any, timeout_s: float) -> Any:
        response = await super()._call_once(method, request, timeout_s)
        key = f"{method.path} {request}"
        if key not in self.lost and method.may_repeat(request):
            self.lost.append(key)
            if method is methods.RENEW_JOBS:
                self.renewed.set()
            raise grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata(), "")
        return response


async def test_ft_f1_what_is_done_twice_is_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of the SDK that changes something, each with its first answer lost."""
    monkeypatch.setattr("callboard.client.client.Connection", LosingAnswers)
    monkeypatch.setattr(LosingAnswers, "lost", [])
    monkeypatch.setattr(LosingAnswers, "renewed", asyncio.Event(), raising=False)
    async with (
        running(options_for(tmp_path)) as controller,
        FakeAgent(controller.address, "n1", cpu_milli=8000) as agent,
        Client(controller.address) as client,
    ):
        kept = {"pg_pool": {"max_dynamic": 8}}
        assert (await client.create_pool({"name": "p", **kept, "nominal": {"cpu": 4}})).name == "pools/p"
        assert (await client.ensure_pool("p", nominal={"cpu": 4}, **kept)).name == "pools/p"
        assert (await client.update_pool({"name": "p", **kept, "nominal": {"cpu": 8}})).spec.nominal.cpu_milli == 8000
        await client.set_policy(await client.get_policy())
        code = tmp_path / "code"
        code.mkdir()
        (code / "mod.py").write_text("X = 1\n")
        elastic = {"name": "w", "actor": "mod:X", "min_workers": 1, "max_workers": 3, "working_dir": str(code)}
        job = await client.submit(spec("elastic", components=[elastic]))
        await job.running(timeout=20)
        assert (await job.scale("w", 2)).spec.name == "elastic"
        await job.report({"load": 1.0})
        await job.complete("done")
        assert (await job.finished(timeout=20)).state == JobState.JOB_STATE_SUCCEEDED
        other = await client.submit(spec("other", owner={"session": {"lease": "3s"}}))
        await LosingAnswers.renewed.wait()
        await other.running(timeout=20)
        await other.cancel("enough", grace="1s")
        assert (await other.finished(timeout=20)).state == JobState.JOB_STATE_CANCELLED
        for group in await client.list_placement_groups():
            await client.delete_placement_group(group.name.split("/")[1], when_free=True)
        await client.cordon_node("n1")
        await client.uncordon_node("n1")
        await client.drain_node("n1", within="5s")
        await client.delete_pool("p", force=True)
        await agent.goodbye()
        await client.remove_node("n1")
        assert await client.list_nodes() == []
        assert len(await client.list_jobs()) == 2
        made = {"pool.created": 1, "pool.updated": 1, "job.pending": 2, "job.scaled": 1, "node.draining": 1}
        kinds = [event.type for event in await client.list_events(start_revision=1)]
        assert {kind: kinds.count(kind) for kind in made} == made, Counter(kinds)
    paths = {key.split()[0] for key in LosingAnswers.lost}
    changing = {
        method.path
        for method in vars(methods).values()
        if isinstance(method, Method) and method.repeatable and not _READS.match(method.path.split("/")[1])
    }
    assert changing - paths == set()


_READS = re.compile("Get|List|Watch|Read|Explain|Inspect")
