"""What does a worker need to live: its order, and what all workers of the node share?"""

from __future__ import annotations

from dataclasses import dataclass

from callboard.agents.endings import TreeEnder
from callboard.agents.framing import Json
from callboard.agents.interpreters import Interpreters
from callboard.agents.outbox import Outbox
from callboard.agents.run_dir import RunDir
from callboard.agents.runtime import Launch, Runtime
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


@dataclass(frozen=True)
class Site:
    """What all workers of a node share."""

    runtime: Runtime
    outbox: Outbox
    ender: TreeEnder
    interpreters: Interpreters
    run_dir: RunDir
