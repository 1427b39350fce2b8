"""The machine below an agent: everything that its parts use and that isn't logic of their own.

`Machine` is what `node_agent.Agent` asks for; `ThisMachine` is the real one. The simulator has another, on which agents
run in virtual time.
"""

from __future__ import annotations

import os
import platform
import random
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

from callboard.agents.files.lease_file import HeardLease, LeaseFile, boot_s
from callboard.agents.files.output_store import OutputBounds, Outputs, OutputStore
from callboard.agents.files.run_dir import ENVIRONMENTS, PACKAGES, RunDir
from callboard.agents.link.exec_carrier import ExecCarrier
from callboard.agents.link.fence_keeper import FenceProgram, start_fence
from callboard.agents.link.output_sender import OutputSender
from callboard.agents.link.session import Connect, controller_channel, open_stream
from callboard.agents.options import AgentOptions
from callboard.agents.ray.ray_command import RayNodeSpec
from callboard.agents.ray.ray_driver_client import DriverProgram, start_driver
from callboard.agents.ray.ray_node import RayNode
from callboard.agents.supplies.containers import Containers
from callboard.agents.supplies.environments import Environments
from callboard.agents.supplies.package_cache import Packages
from callboard.agents.supplies.worker_env import AGENT_MARKER, build_environment
from callboard.agents.system.processes import MachineProcesses, Processes
from callboard.agents.worker.ports import Ports
from callboard.v1 import agent_pb2


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What an agent says of the machine that it runs on."""

    hostname: str
    pid: int
    python_version: str
    ray_version: str
    """Of the Ray that would be started; empty: there is none."""


class LeaseStore(Protocol):
    """Where the lease is written down for the fence and for the next agent."""

    def read(self) -> HeardLease | None:
        """What was written last; None when no session has begun since the machine was started."""

    def write(self, heard: HeardLease) -> None:
        """Write it down."""

    def close(self) -> None:
        """Write no more."""


class Sender(Protocol):
    """Sends what workers print to the controller."""

    def begin(self, ask: agent_pb2.ReadOutput) -> None:
        """Send what is asked for, beside everything else."""

    async def close(self) -> None:
        """Break off what is under way."""


class Machine(Protocol):
    """What the agent of one node stands on.

    Attributes:
        run_dir: records of what was started; they outlive the agent.
        packages: code that jobs bring along; None: none can be had.
        environments: Python environments that are built of it; None: none can be.
        containers: containers that workers run in; None: there are none.
        execs: runs programs in the environments of workers; None: none can be run.
        connect: opens a session's stream to the controller.
        environment: the agent's own variables.
    """

    run_dir: RunDir
    processes: Processes
    lease_file: LeaseStore
    ports: Ports
    outputs: Outputs
    packages: Packages | None
    environments: Environments | None
    containers: Containers | None
    sender: Sender
    execs: ExecCarrier | None
    connect: Connect
    facts: HostFacts
    environment: Mapping[str, str]

    async def start_ray_node(self, spec: RayNodeSpec) -> RayNode:
        """Start its part in a Ray cluster.

        Raises:
            RayNodeError: it doesn't come up; nothing of it is left.
        """

    async def start_driver(self, environment: Mapping[str, str]) -> DriverProgram:
        """Start a Ray driver."""

    async def start_fence(self, environment: Mapping[str, str]) -> FenceProgram:
        """Start a fence.

        Raises:
            OSError: there is no memory or no process left.
        """

    def boot_s(self) -> float:
        """Seconds since it was started, those it slept included."""

    def wall_ns(self) -> int:
        """Nanoseconds since 1970, as its clock shows."""

    def uniform(self, low: float, high: float) -> float:
        """Chance between two bounds."""

    def token_hex(self, size: int) -> str:
        """So many bytes that nobody can guess, in hex."""


class ThisMachine:
    """The machine that this process runs on."""

    boot_s = staticmethod(boot_s)
    wall_ns = staticmethod(time.time_ns)
    uniform = staticmethod(random.uniform)
    token_hex = staticmethod(secrets.token_hex)

    def __init__(self, options: AgentOptions, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.processes: Processes = MachineProcesses(f"{AGENT_MARKER}={run_dir.path}")
        self.lease_file: LeaseStore = LeaseFile(run_dir.path)
        self.ports = Ports()
        store = OutputStore(run_dir.output, OutputBounds(options.output_worker_bytes, options.output_bytes))
        self.outputs: Outputs = store
        dial = partial(controller_channel, options)
        self.sender: Sender = OutputSender(store, options.node_id, dial)
        self.execs: ExecCarrier | None = ExecCarrier(run_dir.sockets, dial)
        packages = Packages(run_dir.path / PACKAGES, dial)
        self.packages: Packages | None = packages
        own = build_environment(os.environ, run_dir.path)
        self.environments: Environments | None = Environments(
            run_dir.path / ENVIRONMENTS, packages, self.processes, own
        )
        self.connect: Connect = partial(open_stream, dial)
        self.facts = HostFacts(
            hostname=socket.gethostname(),
            pid=os.getpid(),
            python_version=platform.python_version(),
            ray_version=_ray_version() if options.runtime == "ray" else "",
        )
        token = options.ray_token_path
        of_ray = (run_dir.ray_temp, run_dir.ray_token, *([Path(token)] if token else []))
        self.containers: Containers | None = Containers(own, run_dir.sockets, self.facts.ray_version, of_ray)
        self.environment: Mapping[str, str] = dict(os.environ)

    async def start_ray_node(self, spec: RayNodeSpec) -> RayNode:
        return await RayNode.start(spec, self.processes)

    async def start_driver(self, environment: Mapping[str, str]) -> DriverProgram:
        return await start_driver(self.run_dir, environment)

    async def start_fence(self, environment: Mapping[str, str]) -> FenceProgram:
        return await start_fence(self.run_dir, environment)


def _ray_version() -> str:
    """Ray itself takes most of a second to import."""
    try:
        return version("ray")
    except PackageNotFoundError:
        return ""
