"""The order of a worker: as it came, as it is written down for the next agent, what is made ready
for it on the node (the code and the Python environment of its job), and what all workers of a node share.

The record holds no environment, no arguments and no checkpoint to restore: those come again with the start command,
should the worker still need them, and secrets stay out of files.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from callboard.agents.files.checkpoints import Checkpoints
from callboard.agents.files.output_store import OutputOf, Outputs
from callboard.agents.files.run_dir import RunDir, Started
from callboard.agents.host.framing import Json
from callboard.agents.host.worker_output import STDERR
from callboard.agents.link.fence_keeper import FenceKeeper
from callboard.agents.link.lease import Lease
from callboard.agents.link.outbox import Outbox
from callboard.agents.runtime import HostError, Launch, Runtime
from callboard.agents.supplies.containers import Containers
from callboard.agents.supplies.environments import Environment, EnvironmentFailed, Environments
from callboard.agents.supplies.interpreters import Interpreters
from callboard.agents.supplies.package_cache import Packages
from callboard.agents.system.processes import Processes
from callboard.agents.worker.ports import Ports
from callboard.agents.worker.preloads import Wish
from callboard.agents.worker.spares import Spares
from callboard.agents.worker.verdict import MemoryWatch
from callboard.model.specs import PROGRAM
from callboard.security.processes import ProcessId
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
        if self.command.container and self.command.actor != PROGRAM:
            return "it runs in a container"
        if self.command.environment and self.command.actor != PROGRAM:
            return "it has a Python environment of its own"
        if self.command.in_bundle:
            return "it runs inside its bundle"
        if self.launch.early:
            return f"{min(self.launch.early)} must be set before Python starts"
        return ""

    @property
    def is_supplied(self) -> bool:
        """Whether something is brought or built before its host comes up, which may take as long as that does."""
        return bool(self.command.environment or (self.command.container and self.command.actor != PROGRAM))

    @property
    def wish(self) -> Wish | None:
        """What a spare should have imported already; None: nothing."""
        if not self.command.preload:
            return None
        secrets = frozenset(self.plan["secrets"])
        code = tuple(each for each in (self.plan["working_dir"], *self.plan["py_modules"]) if each)
        return Wish(tuple(self.command.preload), self.launch.variables, secrets, code)


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
    environments: Environments | None = None
    """None: no Python environments are built here."""
    containers: Containers | None = None
    """None: there are none."""


_KEPT = (
    "worker",
    "generation",
    "attempt",
    "allocation",
    "ray_placement_group_id",
    "entry",
    "interpreter",
    "environment",
    "container",
    "actor",
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


async def prepare(order: WorkerOrder, site: Site, tell: Callable[[str], None]) -> WorkerOrder:
    """Puts the code of a worker where its plan says, and has its environment built.

    Args:
        tell: is told what a long wait is for, as the end of a sentence.

    Returns:
        The order, for the environment.

    Raises:
        HostError: it can't be had, or holds what no package may hold.
    """
    command, plan = order.command, order.plan
    if not plan:
        return order
    if command.container:
        assert site.containers is not None, "a node without containers was asked for one"
        order = await _contained(order, site.containers, tell)
    code = [(command.working_dir, plan["working_dir"])] if command.working_dir else []
    for package, folder in (*code, *zip(command.py_modules, plan["py_modules"], strict=True)):
        assert site.packages is not None, "a node without packages was given code"
        await site.packages.unpack(package, Path(folder))
    if not command.environment:
        return order
    assert site.environments is not None, "a node without environments was asked for one"
    try:
        # Long, and mostly waiting: spares are made meanwhile.
        with site.spares.resting():
            found = await site.environments.get(command.environment, tell)
    except EnvironmentFailed as error:
        if not error.log:
            raise
        with (Path(plan["output"]) / STDERR).open("a", encoding="utf-8") as output:
            output.write(f"{error.log}\n")
        job = plan["context"]["job_name"]
        raise HostError(f"{error}. The end of its log: `callboard job logs {job}`") from error
    return _within(order, found)


async def _contained(order: WorkerOrder, containers: Containers, tell: Callable[[str], None]) -> WorkerOrder:
    """The order of a worker whose work is done in a container."""
    command, plan, launch = order.command, order.plan, order.launch
    if command.actor == PROGRAM:
        within = containers.command(command, plan, order.marker)
        variables = {**plan["env"], **containers.of_runtime()}
        return replace(order, plan={**plan, "env": variables, "kwargs": {**plan["kwargs"], "within": within}})
    within = containers.host(command, plan, tuple(launch.early), order.marker)
    await containers.check(command.container, tell)
    marker = dict([order.marker.split("=", 1)])
    launch = replace(launch, within=within, variables={**launch.early, **containers.of_runtime(), **marker})
    return replace(order, launch=launch, plan={**plan, "env": containers.variables(plan, command), "contained": True})


def tidy(order: WorkerOrder, site: Site) -> None:
    """What was made for a worker that is gone, and isn't part of its output, goes too."""
    if order.command.container and site.containers is not None:
        site.containers.forget(order.marker)


def _within(order: WorkerOrder, found: Environment) -> WorkerOrder:
    """The order of a worker that runs in an environment."""
    path = os.pathsep.join((str(found.folder / "bin"), order.plan["env"].get("PATH", os.defpath)))
    seen = {**found.variables, "PATH": path}
    if order.command.actor == PROGRAM:
        # What hosts it is the node's own, and may be a spare; the program alone runs in the environment.
        return replace(order, plan={**order.plan, "env": {**order.plan["env"], **seen}})
    early = {**found.variables, **found.base}
    launch = replace(
        order.launch,
        interpreter=found.python,
        variables={**order.launch.variables, **seen, **early},
        early={**order.launch.early, **early},
    )
    return replace(order, launch=launch, plan={**order.plan, "env": {**order.plan["env"], **seen, **early}})
