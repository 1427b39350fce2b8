"""The agent's end of a session with the controller: what it is asked, and what it tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from callboard.v1 import agent_pb2, inspection_pb2


class SessionHandler(Protocol):
    """What a session is about."""

    def hello(self, epoch_seen: int) -> agent_pb2.Hello:
        """Who the agent is and what runs here, at this moment."""

    def ray_node(self) -> agent_pb2.RayNode | None:
        """The node's part in Ray, if it changed since it was last asked for in this session."""

    def welcomed(self, welcome: agent_pb2.Welcome) -> None:
        """A session began."""

    def command(self, command: agent_pb2.Command) -> None:
        """Something to do."""

    def ray_bootstrap(self, bootstrap: agent_pb2.RayBootstrap) -> None:
        """Where to find Ray."""

    def spare_target(self, count: int) -> None:
        """How many warm spares to keep."""

    def read_output(self, ask: agent_pb2.ReadOutput) -> None:
        """Send output of workers."""

    def forget_jobs(self, jobs: Sequence[str]) -> None:
        """Jobs were forgotten: their output may go."""

    async def inspect(self, ask: inspection_pb2.InspectionAsk) -> inspection_pb2.NodeInspection:
        """What the node sees now."""
