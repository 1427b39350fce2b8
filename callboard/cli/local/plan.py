"""The plan of a cluster on this machine: addresses, ports and command lines, decided before anything starts.

Each cluster takes a block of loopback addresses of its own, 127.0.<block>.10 and up, one per node: Ray
replaces 127.0.0.1 by an interface's address (docs/agents.md), and two clusters don't meet.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from callboard.cli.local.ports import listening_in
from callboard.security.tokens import TOKEN_NAME

_FIRST_HOST = 10
MAX_NODES = 245
"""As many as a block of loopback addresses holds."""

PORTS_OF_A_NODE = 10
"""Ports in a block: a node's own Ray services take fewer, and neighbours never meet. (One port above the other per
node, as the rule 6380+n / 6381+n has it, makes each node's second port its neighbour's first.)"""


class NoFreeBlock(Exception):
    """Every block of loopback addresses is in use: 255 clusters run on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShape:
    """What one node consists of.

    Attributes:
        cpus: its CPUs, as text.
        memory: its memory, as text.
        gpus: number of its GPUs.
        node_group: its node group; empty: none.
    """

    cpus: str
    memory: str
    gpus: int
    node_group: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """A cluster to start.

    Attributes:
        name: its name on this machine.
        directory: where its files go.
        port: port of the controller on 127.0.0.1.
        agents: number of nodes.
        cpus: CPUs of each node, as text.
        memory: memory of each node, as text.
        gpus: GPUs of each node.
        shapes: instead of the last three: what each node consists of, by rank; one that is added later is as the last.
        roles: absolute path of a file with presets for the controller; empty: none.
        machine_gpus: ids of the GPUs that nodes are dealt, the first to node 0. Empty: every node has simulated GPUs
            of its own, numbered from 0.
        real_gpus: whether ``machine_gpus`` is hardware.
        resources: custom resources of each node, "NAME=N".
        interpreters: Python interpreters that jobs may name on each node, besides the agent's own.
        object_store: size of Ray's object store on each node, as text; empty: Ray's own choice.
        warm_spares: idle worker processes that each node keeps ready while work is about.
        runtime: "ray" or "process".
        ray_address: an existing Ray cluster to join; empty: the first node starts one.
        ray_port: port of Ray's GCS; 0: any free one.
        dashboard_port: port of Ray's dashboard; None: none is started.
        port_base: first port of the first node's block; node N has the N-th block. None: any free ports.
        block: which block of loopback addresses.
        metrics_open: its figures are shown to callers without the token, too.
        insecure: its controller asks for no token.
        detached: it outlives the program that starts it.
    """

    name: str
    directory: Path
    port: int = 7700
    agents: int = 3
    cpus: str = "3"
    memory: str = "4GiB"
    gpus: int = 2
    shapes: tuple[NodeShape, ...] = ()
    roles: str = ""
    machine_gpus: tuple[str, ...] = ()
    real_gpus: bool = False
    resources: tuple[str, ...] = ()
    interpreters: tuple[str, ...] = ()
    object_store: str = ""
    warm_spares: int = 1
    runtime: str = "ray"
    ray_address: str = ""
    ray_port: int = 0
    dashboard_port: int | None = None
    port_base: int | None = None
    block: int = 0
    metrics_open: bool = False
    insecure: bool = False
    detached: bool = False

    @property
    def controller(self) -> str:
        """The controller's address."""
        return f"127.0.0.1:{self.port}"

    @property
    def own_ray(self) -> bool:
        """Whether the cluster starts a Ray of its own."""
        return self.runtime == "ray" and not self.ray_address

    @property
    def token_path(self) -> Path:
        """File with the controller's token."""
        return self.directory / "controller" / TOKEN_NAME

    def node_id(self, rank: int) -> str:
        """Id of a node."""
        return f"node-{rank}"

    def node_ip(self, rank: int) -> str:
        """Address of a node's Ray services."""
        return f"127.0.{self.block}.{_FIRST_HOST + rank}"

    def shape(self, rank: int) -> NodeShape:
        """What a node consists of."""
        if self.shapes:
            return self.shapes[min(rank, len(self.shapes) - 1)]
        return NodeShape(cpus=self.cpus, memory=self.memory, gpus=self.gpus)

    @property
    def places(self) -> int:
        """How many nodes there can be at most: as many as get GPUs of their own."""
        if not self.machine_gpus:
            return MAX_NODES
        return next((rank for rank in range(MAX_NODES) if self._dealt(rank + 1) > len(self.machine_gpus)), MAX_NODES)

    def gpus_of(self, rank: int) -> tuple[str, ...]:
        """Ids of the GPUs that a node is dealt; empty: it has simulated ones of its own, or none."""
        return self.machine_gpus[self._dealt(rank) : self._dealt(rank + 1)]

    def _dealt(self, nodes: int) -> int:
        """GPUs of so many nodes of the lowest ranks."""
        return sum(self.shape(rank).gpus for rank in range(nodes)) if self.shapes else nodes * self.gpus

    def ports_of(self, rank: int) -> range:
        """Ports of a node's own Ray services; empty: any free ones."""
        if self.port_base is None:
            return range(0)
        first = self.port_base + rank * PORTS_OF_A_NODE
        return range(first, first + PORTS_OF_A_NODE)

    def environment_of(self, rank: int) -> dict[str, str]:
        """Variables that a node's agent gets beside our own."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus_of(rank))} if self.machine_gpus else {}

    def node_directory(self, rank: int) -> Path:
        """Where a node keeps its files. A short name: Ray's sockets lie below it, in 107 bytes."""
        return self.directory / f"n{rank}"

    def ray_token_path(self) -> str:
        """File with the token of the cluster's own Ray; empty: it has none."""
        return str(self.node_directory(0) / "ray-token") if self.own_ray else ""

    def log(self, program: str) -> Path:
        """File with the output of a program: "controller", "node-0"."""
        return self.directory / "logs" / f"{program}.log"

    def controller_arguments(self) -> list[str]:
        """Command line of the controller."""
        directory = self.directory / "controller"
        return [
            *("controller", "--listen", self.controller),
            *("--state-dir", str(directory), "--run-dir", str(directory)),
            *(("--roles", self.roles) if self.roles else ()),
            *(("--metrics-open",) if self.metrics_open else ()),
            *(("--insecure",) if self.insecure else ()),
            *self._common(),
        ]

    def agent_arguments(self, rank: int) -> list[str]:
        """Command line of a node's agent."""
        return [*self.added_arguments(rank), *self._common()]

    def added_arguments(self, rank: int) -> list[str]:
        """Command line of the agent of a node that joins later; whoever starts it says how long it lives."""
        shape = self.shape(rank)
        arguments = [
            *("agent", "--controller", self.controller),
            *("--node-id", self.node_id(rank), "--rank", str(rank), "--cluster", self.name),
            *("--cpus", shape.cpus, "--memory", shape.memory),
            *("--gpus" if self.real_gpus else "--simulate-gpus", str(shape.gpus)),
            *(("--node-group", shape.node_group) if shape.node_group else ()),
            *(part for resource in self.resources for part in ("--resource", resource)),
            *(part for path in self.interpreters for part in ("--interpreter", path)),
            *(("--object-store-memory", self.object_store) if self.object_store else ()),
            *("--warm-spares", str(self.warm_spares)),
            *("--runtime", self.runtime, "--run-dir", str(self.node_directory(rank))),
        ]
        if self.runtime == "ray":
            arguments += ["--node-ip", self.node_ip(rank)]
            if self.ray_address:
                arguments += ["--ray-address", self.ray_address]
            elif rank == 0:
                # Any free port unless stated: 6379 may be another cluster's.
                arguments += ["--ray-head", "--ray-port", str(self.ray_port)]
                if self.dashboard_port is not None:
                    arguments += ["--dashboard-port", str(self.dashboard_port)]
            if self.port_base is not None:
                arguments += ["--port-base", str(self.ports_of(rank).start)]
        return arguments

    def _common(self) -> list[str]:
        return [] if self.detached else ["--exit-with-parent", str(os.getpid())]


def network_of(block: int) -> str:
    """The loopback addresses of a block."""
    return f"127.0.{block}.0/24"


def free_block(taken: Iterable[int]) -> int:
    """A block of loopback addresses that no cluster has.

    Args:
        taken: blocks of clusters that are recorded; those of other users show by what listens there.
    """
    used = set(taken)
    # Block 0 is everybody's. Two that start at the same moment begin their search at different places.
    first = os.getpid() % 255
    for step in range(255):
        block = 1 + (first + step) % 255
        if block not in used and not listening_in(network_of(block)):
            return block
    raise NoFreeBlock


PLAN_NAME = "plan.json"


def write_plan(plan: ClusterPlan) -> None:
    """Writes the plan into the directory of its cluster; a reader sees all of it or nothing."""
    temporary = plan.directory / f"{PLAN_NAME}.new"
    temporary.write_text(json.dumps(asdict(plan) | {"directory": str(plan.directory)}, indent=2), encoding="utf-8")
    temporary.replace(plan.directory / PLAN_NAME)


def read_plan(directory: Path) -> ClusterPlan | None:
    """The plan of the cluster in ``directory``; None: it was not made by `up`, or is gone."""
    try:
        plain = json.loads((directory / PLAN_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    lists = {name: tuple(plain.get(name, ())) for name in ("machine_gpus", "resources", "interpreters")}
    shapes = tuple(NodeShape(**shape) for shape in plain["shapes"])
    return ClusterPlan(**(plain | lists | {"directory": directory, "shapes": shapes}))
