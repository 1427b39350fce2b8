"""Clients go on through restarts of the controller as if nothing had happened. Real processes and sockets, no Ray."""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from callboard.client.client import Client
from callboard.client.sync import SyncClient
from callboard.v1.job_pb2 import JobState
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
