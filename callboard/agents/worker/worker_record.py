"""The record of a worker: what the next agent must know to go on with it.

No environment, no arguments, no checkpoint to restore: those come again with the start command, should the worker still
need them, and secrets stay out of files.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from callboard.agents.files.run_dir import Started
from callboard.agents.host.framing import Json
from callboard.agents.system.process_tree import ProcessId
from callboard.v1 import agent_pb2

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
    """The ports it was given, as :class:`callboard.agents.worker.ports.Ports` says."""
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
