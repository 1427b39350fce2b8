"""A real controller in this process and real agents with plain processes: what SDK and verbs are tested against."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from callboard.agents.host.worker_process import scratch_of
from callboard.agents.ray.ray_command import free_port
from callboard.agents.supplies.worker_env import AGENT_MARKER, WORKER_MARKER
from callboard.cli.main import app
from callboard.client.calls.job_calls import LIVE_STATES
from callboard.client.client import Client
from callboard.client.sync import SyncClient
from callboard.controller.options import ControllerOptions, Limits
from callboard.controller.server import Controller
from callboard.security.processes import marked, process_table

ROOT = Path(__file__).parents[2]

ACTOR = "tests.support.actors:Plain"


_MOVED = ("sh", "-c", 'while [ "$1" != -- ]; do echo $$ > "$1"; shift; done; shift; exec "$@"', "sh")
"""Moves itself into the control groups whose files are named before ``--``, and becomes the command behind it."""


def _agent(address: str, node_id: str, run_dir: Path, *more: str, gpus: int = 2, whole: bool = False) -> list[str]:
    """The command of an agent with simulated GPUs, which ends with this process; ``whole``: it offers all that it
    may use."""
    return [
        *(sys.executable, "-m", "callboard.cli", "agent", "--controller", address, "--node-id", node_id),
        *("--runtime", "process", *(() if whole else ("--cpus", "4", "--memory", "4GiB"))),
        *("--simulate-gpus", str(gpus), "--warm-spares", "0", *more),
        *("--run-dir", str(run_dir), "--log-level", "error", "--exit-with-parent", str(os.getpid())),
    ]


class RealCluster:
    """One controller and its agents.

    Attributes:
        address: of the controller.
        client: a client of it.
        controller: the controller, where it is in this process.
    """

    def __init__(self, directory: Path, address: str, client: Client, controller: Controller | None = None) -> None:
        self.address = address
        self.client = client
        self.controller = controller
        self._directory = directory
        self._agents: list[asyncio.subprocess.Process] = []
        self._agent_of: dict[str, asyncio.subprocess.Process] = {}
        self._killed: set[str] = set()

    async def add_node(
        self,
        node_id: str,
        *more: str,
        gpus: int = 2,
        variables: Mapping[str, str] | None = None,
        groups: Sequence[Path] = (),
    ) -> None:
        """Starts an agent with simulated GPUs and ``more`` options, and waits until it takes work; ``variables``: more
        for its own; ``groups``: it moves itself into these control groups first, and offers what they allow."""
        revision = (await self.client.stats()).revision
        if variables:
            # Linux takes a quarter of the stack's limit for a program's environment. For what this process starts from
            # now on: its own stack doesn't change.
            resource.setrlimit(resource.RLIMIT_STACK, (64 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        agent = await asyncio.create_subprocess_exec(
            *(*_MOVED, *map(str, groups), "--"),
            *_agent(self.address, node_id, self._directory / node_id, *more, gpus=gpus, whole=bool(groups)),
            cwd=ROOT,
            env={**os.environ, **(variables or {})},
        )
        self._agents.append(agent)
        self._agent_of[node_id] = agent
        async for event in self.client.watch(start_revision=revision + 1, types=["node."]):
            if event.subject == f"nodes/{node_id}" and event.state == "READY":
                return

    async def end_node(self, node_id: str) -> None:
        """Ends the agent of a node politely and waits for its end."""
        self._agent_of[node_id].terminate()
        assert await self._agent_of[node_id].wait() == 0

    @staticmethod
    def _kept_by(pid: int) -> set[Path]:
        """The folder of the worker that a process belongs to, if it has one."""
        with suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
            named = [each.partition("=")[2] for each in variables if each.startswith(f"{WORKER_MARKER}=")]
            return {folder for each in named if (folder := scratch_of(each)).exists()}
        return set()

    async def kill_node(self, node_id: str) -> None:
        """Kills the agent of a node and all that it hosts, as when the machine dies, with what its workers kept."""
        agent = self._agent_of[node_id]
        marker = f"{AGENT_MARKER}={self._directory / node_id}"
        self._killed.add(node_id)
        agent.kill()
        await agent.wait()
        hosted = marked(marker, process_table())
        kept = set().union(*(self._kept_by(process.pid) for process in hosted))
        for process in hosted:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        while marked(marker, process_table()):  # noqa: ASYNC110 - a process table tells nobody
            await asyncio.sleep(0.01)
        for folder in kept:
            await asyncio.to_thread(shutil.rmtree, folder)

    def processes(self) -> list[int]:
        """Living worker processes of every node, from the process table."""
        table = process_table()
        return [
            process.pid
            for folder in self._directory.iterdir()
            for process in marked(f"{AGENT_MARKER}={folder}", table)
            if not table[process.pid].gone
        ]

    async def stop_agents(self) -> None:
        """Ends the agents, and what they host."""
        for agent in self._agents:
            if agent.returncode is None:
                agent.terminate()
        for agent in self._agents:
            await agent.wait()
        assert all(agent.returncode == 0 for node, agent in self._agent_of.items() if node not in self._killed)


@asynccontextmanager
async def real_cluster(directory: Path, *nodes: str, ended_jobs: int = 1000, **more: int) -> AsyncIterator[RealCluster]:
    """A cluster with these nodes, whose controller remembers so many ended jobs and has these times."""
    (directory / "agents").mkdir()
    options = ControllerOptions(
        listen="127.0.0.1:0",
        state_dir=directory / "state",
        limits=Limits(ended_jobs=ended_jobs),
        stop_grace_ms=500,
        **more,  # type: ignore[arg-type]
    )
    controller = Controller(options)
    await controller.start()
    try:
        async with Client(controller.address) as client:
            cluster = RealCluster(directory / "agents", controller.address, client, controller)
            try:
                for node in nodes:
                    await cluster.add_node(node)
                yield cluster
            finally:
                await cluster.stop_agents()
    finally:
        await controller.stop()


@dataclass(frozen=True)
class Lasting:
    """A cluster of programs that outlives a test: a controller, its node ``n0`` and the pool ``rlhf``.

    Attributes:
        address: of the controller.
        directory: of the agents.
        variables: what programs need to find the controller.
    """

    address: str
    directory: Path
    variables: Mapping[str, str]

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[RealCluster]:
        """The cluster for one test, with a client of its own. Jobs that it leaves are ended.

        Raises:
            AssertionError: it changed more than jobs.
        """
        async with Client(self.address) as client:
            before = await self._beside_jobs(client)
            yield RealCluster(self.directory, self.address, client)
            for found in await client.list_jobs(states=LIVE_STATES):
                left = await client.get_job(found.uid)
                await left.cancel(grace=0)
                await left.finished(timeout=60)
            assert await self._beside_jobs(client) == before, "who changes pools, policy or nodes asks for `cluster`"

    @staticmethod
    async def _beside_jobs(client: Client) -> tuple[object, ...]:
        pools = [(pool.name, pool.spec) for pool in await client.list_pools()]
        return pools, await client.get_policy(), [(node.name, node.state) for node in await client.list_nodes()]


@contextmanager
def lasting_cluster(directory: Path) -> Iterator[Lasting]:
    """Starts such a cluster, and ends it."""
    token = directory / "state" / "token"
    variables = {"CALLBOARD_RUN_DIR": str(directory / "run"), "CALLBOARD_TOKEN_FILE": str(token)}
    address = f"127.0.0.1:{free_port()}"
    listen = ("--listen", address, "--state-dir", str(token.parent), "--stop-grace", "500ms")
    quiet = ("--page", "none", "--metrics", "none", "--log-level", "error")
    environment = {**os.environ, "CALLBOARD_RUN_DIR": str(directory / "run")}
    lines = (
        [sys.executable, "-m", "callboard.cli", "controller", *listen, *quiet],
        _agent(address, "n0", directory / "agents" / "n0"),
    )
    programs: list[subprocess.Popen[bytes]] = []
    try:
        programs.extend(subprocess.Popen(line, cwd=ROOT, env=environment) for line in lines)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CALLBOARD_RUN_DIR", str(directory / "run"))
            with SyncClient(address, retry=60) as client:
                client.ensure_pool("rlhf", nominal={"cpu": 8})
                for event in client.watch(start_revision=1, types=["node."]):
                    if event.state == "READY":
                        break
        yield Lasting(address, directory / "agents", variables)
    finally:
        for each in reversed(programs):
            each.terminate()
            assert each.wait(60) == 0


def job(name: str, actor: str = ACTOR, **component: Any) -> dict[str, Any]:
    stated = {"name": "w", "actor": actor, "resources": {"cpu": 1, "gpu": 2}} | component
    return {"name": name, "pool": "rlhf", "components": [stated]}


async def verb(cluster: RealCluster, *arguments: str) -> Result:
    """A command line, beside the loop of the controller."""
    line = [*arguments, "--controller", cluster.address]
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, line, env={"COLUMNS": "200", "NO_COLOR": "1"}))


async def program(cluster: RealCluster, *arguments: str) -> asyncio.subprocess.Process:
    """A command line in a process of its own, to run while others do."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "callboard.cli", *arguments, "--controller", cluster.address),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )


async def first_line(process: asyncio.subprocess.Process) -> str:
    """What it prints first."""
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()
