"""The plan of a cluster on this machine: addresses, ports and command lines, decided before anything starts.

Each cluster with Ray takes a block of loopback addresses of its own, 127.0.<block>.10 and up, one per node: Ray
replaces 127.0.0.1 by an interface's address (docs/agents.md), and two clusters don't meet.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from callboard.agents.options import AgentOptions
from callboard.cli.local.ports import listening_in
from callboard.controller.options import ControllerOptions
from callboard.model.frozen import dataclass
from callboard.model.options import as_declared, declared, option, option_of
from callboard.security.places import write_private
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
        node_group: its node group; empty: none.
    """

    cpus: str
    memory: str
    gpus: int
    node_group: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """A cluster to start: the options of `callboard up`, and what they come to on this machine."""

    directory: Path
    """Where its files go."""
    agents: int = option(3, "Nodes to start.", "--agents", "-n", metavar="N", bounds=(1, 64))
    gpus: int = option(2, "GPUs of each node.", "--gpus-per-node", metavar="N", bounds=(0, 64))
    cpus: str = option("3", "CPUs of each node for jobs.", "--cpus-per-node", metavar="N")
    memory: str = option("4GiB", "Memory of each node for jobs.", "--memory-per-node", metavar="SIZE")
    shapes: tuple[NodeShape, ...] = ()
    """Instead of the last three: what each node consists of, by rank; one that is added later is as the last."""
    roles: str = ""
    """Absolute path of a file with presets for the controller; empty: none."""
    machine_gpus: tuple[str, ...] = ()
    """Ids of the GPUs that nodes are dealt, the first to node 0. Empty: every node has simulated GPUs of its own,
    numbered from 0."""
    real_gpus: bool = False
    """Whether those are hardware."""
    warm_spares: int = as_declared(AgentOptions, "warm_spares")
    foreign_gpu_use: Literal["avoid", "warn", "ignore"] = as_declared(AgentOptions, "foreign_gpu_use")
    runtime: Literal["ray", "process"] = as_declared(AgentOptions, "runtime")
    resources: tuple[str, ...] = option(
        (), "Custom resource of each node; may be repeated.", "--resource", metavar="NAME=N"
    )
    interpreters: tuple[str, ...] = as_declared(AgentOptions, "interpreters")
    object_store: str = option(
        "",
        declared(AgentOptions)["object_store_bytes"].option.help,
        option_of(AgentOptions, "object_store_bytes"),
        metavar="SIZE",
        shown=False,
    )
    port: int = option(7700, "Port of the controller; 0: any free one.", metavar="PORT", bounds=(0, 65535))
    ray_port: int = option(0, "Port of Ray's head; 0: any free one.", metavar="PORT", bounds=(0, 65535))
    dashboard_port: int | None = option(
        None, "Start Ray's dashboard there, if installed.", metavar="PORT", bounds=(1, 65535)
    )
    port_base: int | None = option(
        None,
        "First port of the nodes' own Ray services, ten for each node. Default: any free ones.",
        metavar="PORT",
        bounds=(1024, 65535 - MAX_NODES * PORTS_OF_A_NODE),
    )
    ray_address: str = option("", "Join this Ray cluster instead of starting one.", metavar="HOST:PORT")
    block: int = 0
    """Which block of loopback addresses; 0: none, as its nodes have no Ray."""
    name: str = option("local", "Name of the cluster on this machine.", metavar="NAME")
    metrics_open: bool = as_declared(ControllerOptions, "metrics_open")
    page: str = as_declared(ControllerOptions, "page")
    page_open: bool = as_declared(ControllerOptions, "page_open")
    insecure: bool = as_declared(ControllerOptions, "insecure")
    detached: bool = False
    """It outlives the program that starts it."""

    @property
    def controller(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def own_ray(self) -> bool:
        return self.runtime == "ray" and not self.ray_address

    @property
    def token_path(self) -> Path:
        return self.directory / "controller" / TOKEN_NAME

    def node_id(self, rank: int) -> str:
        return f"node-{rank}"

    def node_ip(self, rank: int) -> str:
        return f"127.0.{self.block}.{_FIRST_HOST + rank}"

    def shape(self, rank: int) -> NodeShape:
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
        directory = self.directory / "controller"
        return [
            *("controller", "--listen", self.controller),
            *("--state-dir", str(directory), "--run-dir", str(directory)),
            *(("--roles", self.roles) if self.roles else ()),
            *(("--metrics-open",) if self.metrics_open else ()),
            *(("--page", self.page) if self.page else ()),
            *(("--page-open",) if self.page_open else ()),
            *(("--insecure",) if self.insecure else ()),
            *self._common(),
        ]

    def agent_arguments(self, rank: int) -> list[str]:
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
            *("--foreign-gpu-use", self.foreign_gpu_use),
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
    plain = asdict(plan) | {"directory": str(plan.directory)}
    write_private(plan.directory / PLAN_NAME, json.dumps(plain, indent=2), durable=False)


def read_plan(directory: Path) -> ClusterPlan | None:
    """The plan of the cluster in ``directory``; None: it was not made by `up`, or is gone."""
    try:
        plain = json.loads((directory / PLAN_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    lists = {name: tuple(plain.get(name, ())) for name in ("machine_gpus", "resources", "interpreters")}
    shapes = tuple(NodeShape(**shape) for shape in plain["shapes"])
    return ClusterPlan(**(plain | lists | {"directory": directory, "shapes": shapes}))
