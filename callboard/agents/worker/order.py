"""The order of a worker: as it came, as it is written down for the next agent, and what all workers of a node share.

The record holds no environment, no arguments and no checkpoint to restore: those come again with the start command,
should the worker still need them, and secrets stay out of files.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from callboard.agents.files.checkpoints import Checkpoints
from callboard.agents.files.output_store import OutputOf, Outputs
from callboard.agents.files.run_dir import RunDir, Started
from callboard.agents.host.framing import Json
from callboard.agents.link.fence_keeper import FenceKeeper
from callboard.agents.link.lease import Lease
from callboard.agents.link.outbox import Outbox
from callboard.agents.packages import Packages
from callboard.agents.runtime import Launch, Runtime
from callboard.agents.system.memory_watch import MemoryWatch
from callboard.agents.system.process_tree import ProcessId
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


_KEPT = (
    "worker",
    "generation",
    "attempt",
    "allocation",
    "ray_placement_group_id",
    "entry",
    "interpreter",
    "start_timeout_ms",
    "job_name",
    "in_bundle",
    "strict",
    "stop_signal",
)
"""Fields of the start command that a worker's later life depends on."""


class Stage(StrEnum):
    """How far a worker had come."""

    LAUNCHING = "launching"
    """Its host may be there or not: it is launched, again or anew, when its start command comes again."""
    HOSTED = "hosted"
    """Its host is there; whether it got its assignment is asked by assigning again."""
    READY = "ready"
    ENDING = "ending"
    """Its tree was being ended and may be stopped half-way: it can't go on."""


@dataclass(frozen=True)
class WorkerRecord:
    """One worker as it is written down."""

    command_id: str
    command: agent_pb2.StartWorker
    stage: Stage
    process: ProcessId | None = None
    address: str = ""
    hooks: frozenset[str] = frozenset()
    told: Mapping[str, Json] = field(default_factory=dict)
    """Fields of WorkerReady that are known only once."""
    ports: Mapping[str, Json] = field(default_factory=dict)
    """The ports it was given, as `Ports.facts` says."""
    marker: str = ""
    """"NAME=value" in the environment of everything it starts."""


def write_record(name: str, record: WorkerRecord) -> Started:
    """As the run directory keeps it."""
    slim = agent_pb2.StartWorker()
    for each in _KEPT:
        value = getattr(record.command, each)
        if isinstance(value, (str, int)):
            setattr(slim, each, value)
        else:
            getattr(slim, each).CopyFrom(value)
    facts = {
        "command_id": record.command_id,
        "command": base64.b64encode(slim.SerializeToString()).decode(),
        "stage": record.stage.value,
        "address": record.address,
        "hooks": sorted(record.hooks),
        "told": dict(record.told),
        "ports": dict(record.ports),
        # For the fence, which knows no messages.
        "strict": record.command.strict,
        "marker": record.marker,
    }
    return Started("worker", record.process, name, facts)


def read_record(started: Started) -> WorkerRecord:
    """What `write_record` wrote."""
    facts = started.facts
    return WorkerRecord(
        command_id=facts["command_id"],
        command=agent_pb2.StartWorker.FromString(base64.b64decode(facts["command"])),
        stage=Stage(facts["stage"]),
        process=started.process,
        address=facts["address"],
        hooks=frozenset(facts["hooks"]),
        told=facts["told"],
        ports=facts.get("ports", {}),  # not written before there were any
    )
