"""A Ray cluster of two agents and a controller that tests drive, with another driver that asks Ray itself."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from callboard.v1 import agent_pb2, common_pb2, inspection_pb2
from tests.agents.conftest import assert_nothing_left
from tests.support import images
from tests.support.fake_controller import FakeController, start_worker, stop_worker

START_S = 60
"""For the whole cluster on two busy cores; 10 s when they aren't."""


@dataclass
class Probe:
    """Another driver of the same Ray cluster."""

    process: asyncio.subprocess.Process

    async def ask(self, what: str, **request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"what": what, **request}).encode() + b"\n")
        line = await self.process.stdout.readline()
        assert line, "the probe died"
        return json.loads(line)


@dataclass
class Cluster:
    controller: FakeController
    folder: Path
    nodes: dict[str, agent_pb2.RayNode]
    agents: dict[str, asyncio.subprocess.Process]
    probe: Probe

    async def start(self, actor: str, *args: object, node: str = "n1", **fields: Any) -> agent_pb2.StartWorker:
        """Start a worker and wait until it is ready."""
        command = start_worker(actor, args_json=json.dumps(args), **fields)
        report = await self.controller.do(node, start_worker=command)
        assert report.HasField("worker_ready"), report
        return command

    async def stop(self, command: agent_pb2.StartWorker, *, node: str = "n1", **stop: Any) -> agent_pb2.WorkerStopped:
        report = await self.controller.do(node, stop_worker=stop_worker(command, **stop))
        assert report.HasField("worker_stopped"), report
        return report.worker_stopped

    async def exit_of(self, command: agent_pb2.StartWorker) -> agent_pb2.WorkerExited:
        """What was told when the worker ended by itself."""

        def found() -> agent_pb2.WorkerExited | None:
            told = [each.worker_exited for each in self.controller.reports if each.HasField("worker_exited")]
            own = [each for each in told if each.worker == command.worker and each.generation == command.generation]
            return own[0] if own else None

        exited: agent_pb2.WorkerExited = await self.controller.until(found)
        return exited

    async def call(self, command: agent_pb2.StartWorker, method: str, *args: object, times: int = 1) -> list[Any]:
        """Call the worker as a trainer would: over Ray, past us."""
        key = command.worker
        actor = f"cb/{key.job_id}/{key.component}/{key.rank}/g{command.generation}"
        answers: list[Any] = await self.probe.ask("call", actor=actor, method=method, args=args, times=times)
        return answers

    def bundle(self, node: str, **resources: Any) -> agent_pb2.Bundle:
        return agent_pb2.Bundle(
            node_id=node, ray_node_id=self.nodes[node].ray_node_id, resources=common_pb2.Resources(**resources)
        )

    @asynccontextmanager
    async def group(self, name: str, *bundles: tuple[tuple[int, int], ...]) -> AsyncIterator[str]:
        """A placement group with these devices of n1, as its id in Ray; removed afterwards."""
        asked = [self.bundle("n1", gpu_milli=sum(milli for _, milli in each)) for each in bundles]
        for bundle, each in zip(asked, bundles, strict=True):
            bundle.devices.extend(common_pb2.DeviceShare(index=index, milli=milli) for index, milli in each)
        create = agent_pb2.CreatePlacementGroup(
            placement_group_id=name, attempt=1, timeout_ms=120_000, bundles=asked, certain_devices=True
        )
        report = await self.controller.do("n1", create_placement_group=create)
        assert report.HasField("placement_group_ready"), report
        ray_id = report.placement_group_ready.ray_placement_group_id
        try:
            yield ray_id
        finally:
            remove = agent_pb2.RemovePlacementGroup(placement_group_id=name, attempt=1, ray_placement_group_id=ray_id)
            await self.controller.do("n1", remove_placement_group=remove)

    @asynccontextmanager
    async def foreign(self, node: str) -> AsyncIterator[None]:
        """A GPU of a node is somebody else's."""
        assert await self.probe.ask("foreign hold", ray_node=self.nodes[node].ray_node_id)
        try:
            yield
        finally:
            await self.probe.ask("foreign release")

    async def told_in(self, group: str, bundle: int = 0, gpus: float = 1) -> Any:
        """What Ray tells a plain actor that it gives a bundle's devices to."""
        return await self.probe.ask("told in a bundle", group=group, bundle=bundle, gpus=gpus)

    def recorded(self, node: str, role: str) -> int:
        records = json.loads((self.folder / node / "processes.json").read_text())
        return next(int(each["pid"]) for each in records if each["role"] == role)


async def run_node(controller: FakeController, folder: Path, node: str, **options: Any) -> asyncio.subprocess.Process:
    settings = {
        "node_id": node,
        "controller": controller.address,
        "simulate_gpus": 2,
        "cpu_milli": 3000,
        "memory_bytes": 4 << 30,
        "object_store_bytes": 100 << 20,
        "run_dir": str(folder / node),
        "exit_with_parent": os.getpid(),
        **options,
    }
    file = folder / f"{node}.json"
    file.write_text(json.dumps(settings))
    log = (folder / f"{node}.log").open("ab")
    with log:
        return await asyncio.create_subprocess_exec(sys.executable, "-m", "callboard.agents", str(file), stderr=log)


async def joined(controller: FakeController, node: str, *, session: int = 1, after: str = "") -> agent_pb2.RayNode:
    """The node's part in Ray, once it has one (other than the one `after`)."""
    opened = await controller.session(node, session)

    def found() -> agent_pb2.RayNode | None:
        told = [opened.hello.ray, *(beat.ray for beat in opened.heartbeats)]
        return next((ray for ray in reversed(told) if ray.ray_node_id not in {"", after}), None)

    ray: agent_pb2.RayNode = await controller.until(found)
    return ray


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A controller, the head n0, and n1. Their containers, if any, come by a podman that keeps all beside them."""
    folder = tmp_path_factory.mktemp("ray")
    agents: dict[str, asyncio.subprocess.Process] = {}
    probes: list[asyncio.subprocess.Process] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}/bin", prepend=os.pathsep)
        for name, value in images.settings(folder / "podman", images.PACKAGES).items():
            patch.setenv(name, value)
        async with FakeController().serving() as controller:
            try:
                yield await _bring_up(controller, folder, agents, probes)
            finally:
                for probe in probes:
                    probe.kill()
                    await probe.communicate()
                # The head last: the others would lose their cluster.
                for node in reversed(agents):
                    if agents[node].returncode is None:
                        agents[node].terminate()
                codes = [await agent.wait() for agent in agents.values()]
    assert codes == [0, 0]
    for node in agents:
        assert_nothing_left(folder / node)


async def _bring_up(
    controller: FakeController,
    folder: Path,
    agents: dict[str, asyncio.subprocess.Process],
    probes: list[asyncio.subprocess.Process],
) -> Cluster:
    agents["n0"] = await run_node(controller, folder, "n0", ray_head=True, ray_port=0)
    head = await joined(controller, "n0")
    controller.welcome["ray_bootstrap"] = agent_pb2.RayBootstrap(
        gcs_address=head.gcs_address, auth_token=head.auth_token, session=head.session
    )
    agents["n1"] = await run_node(controller, folder, "n1")
    nodes = {"n0": head, "n1": await joined(controller, "n1")}
    probe = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.ray_probe",
        head.gcs_address,
        head.node_ip,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "n0" / "ray-token")},
    )
    probes.append(probe)
    assert probe.stdout is not None
    assert await probe.stdout.readline() == b'"ready"\n'
    return Cluster(controller, folder, nodes, agents, Probe(probe))


async def stores_seen(cluster: Cluster) -> dict[str, inspection_pb2.RayObjectStore]:
    """Object stores by Ray's id of their nodes, as n1 tells of them."""
    seen = await cluster.controller.inspect("n1", object_stores=True)
    assert not seen.unknown
    return {store.ray_node_id: store for store in seen.object_stores}
