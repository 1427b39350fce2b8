"""The order of a worker: what it needs to live, and what all workers of the node share."""

from __future__ import annotations

from dataclasses import dataclass, field

from callboard.agents.files.checkpoints import Checkpoints
from callboard.agents.files.output_store import OutputOf, Outputs
from callboard.agents.files.run_dir import RunDir
from callboard.agents.host.framing import Json
from callboard.agents.link.fence_keeper import FenceKeeper
from callboard.agents.link.lease import Lease
from callboard.agents.link.outbox import Outbox
from callboard.agents.packages import Packages
from callboard.agents.runtime import Launch, Runtime
from callboard.agents.system.memory_watch import MemoryWatch
from callboard.agents.system.processes import Processes
from callboard.agents.worker.interpreters import Interpreters
from callboard.agents.worker.ports import Ports
from callboard.agents.worker.spares import Spares
from callboard.v1 import agent_pb2


@dataclass(frozen=True)
class WorkerOrder:
    """A checked start command."""

    command_id: str
    command: agent_pb2.StartWorker
    launch: Launch
    plan: Json
    marker: str
    """"NAME=value" in the environment of everything the worker starts."""
    received_at: float
    """Loop time in seconds."""

    @property
    def output(self) -> OutputOf:
        """What its output is kept under."""
        return OutputOf.of(self.command)

    @property
    def why_cold(self) -> str:
        """Why no warm spare can do: what has to be there before a host's interpreter starts. Empty: one can."""
        if self.command.interpreter:
            return "it names an interpreter"
        if self.command.in_bundle:
            return "it runs inside its bundle"
        if self.launch.early:
            return f"{min(self.launch.early)} must be set before Python starts"
        return ""


@dataclass(frozen=True)
class Site:
    """What all workers of a node share."""

    runtime: Runtime
    outbox: Outbox
    processes: Processes
    interpreters: Interpreters
    run_dir: RunDir
    spares: Spares
    lease: Lease
    fence: FenceKeeper
    checkpoints: Checkpoints
    outputs: Outputs
    memory: MemoryWatch = field(default_factory=MemoryWatch)
    ports: Ports = field(default_factory=Ports)
    packages: Packages | None = None
    """None: no code can be had here."""
