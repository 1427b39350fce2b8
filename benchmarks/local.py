"""A cluster of this machine for measurements: real controller, one agent, real Ray, simulated GPUs; gone afterwards."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from callboard.cli.local.cluster import LocalCluster
from callboard.cli.local.plan import ClusterPlan, free_block
from callboard.client.client import Client
from callboard.client.workers import connect_ray
from callboard.v1.node_pb2 import Node

START_S = 120.0
_LOOK_S = 0.01
"""Between looks at what has no event for a client: whether a spare is up."""


class Quiet:
    """An observer that says nothing."""

    def step(self, text: str) -> None:
        """Something begins."""

    def nodes(self, nodes: Sequence[Node]) -> None:
        """The nodes as they are now."""


@dataclass(frozen=True)
class Local:
    """The cluster while it is up."""

    plan: ClusterPlan
    client: Client

    def recorded(self, rank: int = 0) -> list[dict[str, object]]:
        """What the agent of a node has started."""
        found: list[dict[str, object]] = json.loads((self.plan.node_directory(rank) / "processes.json").read_text())
        return found

    async def spare_ready(self) -> None:
        """Returns once the node has a spare."""
        while not any(each["role"] == "spare" and each["pid"] for each in self.recorded()):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)


@asynccontextmanager
async def local_cluster(
    *,
    gpus: int = 2,
    cpus: str = "8",
    memory: str = "8GiB",
    warm_spares: int = 1,
    runtime: Literal["ray", "process"] = "ray",
    machine_gpus: Sequence[str] = (),
) -> AsyncIterator[Local]:
    """Starts it, connects this process to its Ray, and ends all of it.

    Args:
        gpus: simulated GPUs of the node, unless there are ``machine_gpus``.
        cpus: of the node.
        memory: of the node.
        warm_spares: spares that the node keeps.
        runtime: "ray" or "process".
        machine_gpus: ids of real GPUs, which become the node's.
    """
    with tempfile.TemporaryDirectory(prefix="cb", dir="/tmp") as folder:
        plan = ClusterPlan(
            name="bench",
            directory=Path(folder) / "b",
            port=_free_port(),
            agents=1,
            cpus=cpus,
            memory=memory,
            gpus=len(machine_gpus) or gpus,
            machine_gpus=tuple(machine_gpus),
            real_gpus=bool(machine_gpus),
            warm_spares=warm_spares,
            runtime=runtime,
            block=free_block(()),
        )
        cluster = LocalCluster(plan, Quiet(), hurry=asyncio.Event())
        try:
            await cluster.start(START_S)
            async with Client(plan.controller) as client:
                if runtime == "ray":
                    address = (await client.stats()).ray_address
                    connect_ray(address, token_path=plan.ray_token_path(), node_ip=plan.node_ip(0))
                yield Local(plan, client)
        finally:
            # Before the cluster goes: Ray ends a driver whose cluster is gone, with all that it had still to say.
            if "ray" in sys.modules:
                sys.modules["ray"].shutdown()
            await cluster.stop()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
