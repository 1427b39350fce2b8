"""One real cluster whose programs are killed and started again: controller, agent, Ray, and a driver that asks Ray."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from callboard.client.client import Client
from callboard.client.jobs import JobHandle
from tests.agents.conftest import assert_nothing_left, started_by
from tests.support.controller_process import ControllerProcess

WAIT_S = 90.0
"""For a job to get where it must: an agent's start with a new driver takes 2 to 6 s on two busy cores."""


@dataclass
class Site:
    """A cluster, and the knife."""

    controller: ControllerProcess
    client: Client
    folder: Path
    runtime: str
    agent: asyncio.subprocess.Process | None = None
    probe: asyncio.subprocess.Process | None = None

    @property
    def run_dir(self) -> Path:
        """Of the agent."""
        return self.folder / "n0"

    def recorded(self, role: str) -> list[int]:
        """Pids of what the agent started."""
        records = json.loads((self.run_dir / "processes.json").read_text())
        return [each["pid"] for each in records if each["role"] == role and each["pid"]]

    async def start_agent(self) -> None:
        """Start the agent, again or for the first time."""
        settings = {
            "node_id": "n0",
            "controller": self.controller.address,
            "runtime": self.runtime,
            "simulate_gpus": 2,
            "cpu_milli": 4000,
            "memory_bytes": 4 << 30,
            "run_dir": str(self.run_dir),
            "successor_s": 60,
        }
        if self.runtime == "ray":
            settings |= {"object_store_bytes": 100 << 20, "ray_head": True, "ray_port": 0}
        file = self.folder / "n0.json"
        file.write_text(json.dumps(settings))
        with (self.folder / "n0.log").open("ab") as log:
            self.agent = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "callboard.agents", str(file), stderr=log
            )

    async def settled(self) -> None:
        """The controller, which is new, has its node, policy and pool."""
        async with asyncio.timeout(60):
            async for event in self.client.watch(start_revision=1, types=["node."]):
                if event.state == "READY":
                    break
        await self.client.set_policy({"cancel_timeout": 0.4, "kill_timeout": 5})
        await self.client.ensure_pool("rlhf", nominal={"gpu": 2}, pg_pool={"max_dynamic": 2})

    async def groups_in_ray(self) -> set[str]:
        """Ids of the placement groups that Ray has."""
        return set(await self._ask("groups"))

    async def kill(self, who: str) -> None:
        """Kill programs of ours: agent, driver, controller, both (agent and controller)."""
        if who == "driver":
            for pid in self.recorded("driver"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if who in {"agent", "both"}:
            assert self.agent is not None
            self.agent.kill()
            await self.agent.wait()
        if who in {"controller", "both"}:
            await self.controller.kill()

    async def revive(self, who: str) -> None:
        """Start what was killed; a driver is its agent's to start."""
        if who in {"controller", "both"}:
            await self.controller.start()
        if who in {"agent", "both"}:
            await self.start_agent()

    async def submit(self, name: str, actor: str = "Plain", **fields: Any) -> JobHandle:
        """A job of one worker with one device; two of its pool's."""
        component = {
            "name": "w",
            "actor": f"tests.support.actors:{actor}",
            "resources": {"cpu": 1, "gpu": 2 if fields.pop("both", False) else 1},
            **fields.pop("component", {}),
        }
        return await self.client.submit({"name": name, "pool": "rlhf", "components": [component], **fields})

    async def call(self, job: JobHandle, value: int) -> int:
        """Call its worker over Ray."""
        (worker,) = job.workers()
        (answer,) = await self._ask("call", actor=worker.actor_name, method="echo", args=[value], times=1)
        return int(answer)

    async def _ask(self, what: str, **request: Any) -> Any:
        if self.probe is None:
            return []
        assert self.probe.stdin is not None
        assert self.probe.stdout is not None
        self.probe.stdin.write(json.dumps({"what": what, **request}).encode() + b"\n")
        return json.loads(await self.probe.stdout.readline())

    def workers(self) -> list[int]:
        """Pids of worker hosts that live, spares among them."""
        title = "ray::RayWorkerHost" if self.runtime == "ray" else "callboard.agents.host.worker_main"
        return [pid for pid in started_by(self.run_dir) if title in _command_line(pid)]

    async def assert_no_worker_but_spares(self) -> None:
        """Nothing of a job is left, in the process table and in the agent's book."""
        left = set(self.workers()) - set(self.recorded("spare"))
        assert self.recorded("worker") == []
        # One that is coming up is no spare yet.
        assert len(left) <= 1, f"worker processes {left} are left; Ray: {await self._ask('actor table')}"


def _command_line(pid: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return (Path("/proc") / str(pid) / "cmdline").read_text()
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Plain processes have no Ray driver that could be killed; and that a controller is killed alone is the same with
    Ray, which it doesn't touch: there it is killed with the agent."""
    items[:] = [item for item in items if not _repeats(item)]


def _repeats(item: pytest.Item) -> bool:
    given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return (given.get("who"), given.get("site")) in {("driver", "process"), ("controller", "ray")}


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["process", pytest.param("ray", marks=pytest.mark.ray)]
)
async def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """One cluster for a whole module; at the end everything leaves as asked and nothing is left."""
    folder = tmp_path_factory.mktemp("r")
    controller = ControllerProcess(folder / "state")
    async with controller, Client(controller.address) as client:
        site = Site(controller, client, folder, request.param)
        try:
            await _bring_up(site)
            yield site
            assert site.agent is not None
            site.agent.terminate()
            assert await site.agent.wait() == 0
            assert_nothing_left(site.run_dir)
        finally:
            if site.probe is not None:
                site.probe.kill()
                await site.probe.communicate()
            _end_what_is_left(site)


async def _bring_up(site: Site) -> None:
    await site.start_agent()
    await site.settled()
    if site.runtime != "ray":
        return
    address = (await site.client.stats()).ray_address
    site.probe = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.ray_probe", address, address.rsplit(":", 1)[0]),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(site.run_dir / "ray-token")},
    )
    assert site.probe.stdout is not None
    assert await site.probe.stdout.readline() == b'"ready"\n'


def _end_what_is_left(site: Site) -> None:
    if site.agent is not None and site.agent.returncode is None:
        with suppress(ProcessLookupError):
            site.agent.kill()
    for pid in started_by(site.run_dir):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
