"""What is a node's part in Ray? Its raylet, by the rules of ``callboard.agents.ray_membership``."""

from __future__ import annotations

from asyncio import TimerHandle as Timer
from collections.abc import Callable
from typing import Any, Protocol

from callboard.simulation.machines import Machine
from callboard.simulation.site import Site
from callboard.v1 import agent_pb2

SESSION_ENDED = "the Ray session ended"


class Tenant(Protocol):
    """The agent, as its raylet sees it."""

    site: Site
    machine: Machine

    def later(self, wait_ms: float, do: Callable[[], None]) -> Timer:
        """Does something in a while, if the agent still lives."""

    def say(self, command_id: str, **content: Any) -> None:
        """Reports something."""

    def beat_once(self) -> None:
        """Sends a heartbeat now."""

    def end_actors(self, message: str) -> None:
        """Every actor of the node is dead."""


class Membership:
    """The raylet of one agent's run, or Ray's head."""

    def __init__(self, agent: Tenant, *, is_head: bool) -> None:
        self.node = agent_pb2.RayNode()
        self.is_head = is_head
        self._agent = agent
        self._site = agent.site
        self._bootstrap: agent_pb2.RayBootstrap | None = None
        self._joining = False

    @property
    def up(self) -> bool:
        """Whether the node has a raylet."""
        return bool(self.node.ray_node_id)

    def start(self) -> None:
        """Brings up the head; other nodes wait to be told where it is."""
        if self.is_head:
            self._agent.later(self._site.chance.agents.randint(500, 1_500), self._start_head)

    def offer(self, bootstrap: agent_pb2.RayBootstrap) -> None:
        """Where Ray is."""
        self._bootstrap = bootstrap
        if not self.is_head and not self.up and not self._joining:
            self._joining = True
            self._agent.later(self._site.chance.agents.randint(300, 2_000), self._join)

    def died(self, message: str) -> None:
        """The raylet is gone, and every actor with it."""
        if not self.up:
            return
        self.drop()
        self._agent.say("", ray_node_exited=agent_pb2.RayNodeExited(message=message, head=self.is_head))
        self._agent.end_actors(message)
        self._agent.beat_once()
        wait_ms = self._site.chance.agents.randint(500, 5_000)
        self._agent.later(wait_ms, self._start_head if self.is_head else self._join)

    def drop(self) -> None:
        """Ends the raylet; with the head, everybody's."""
        if not self.up:
            return
        if self.is_head:
            self._site.ray.stop_head()
        else:
            self._site.ray.drop_raylet(self.node.ray_node_id)
        self.node = agent_pb2.RayNode()

    def notice(self) -> None:
        """Looks whether the session of the raylet still lives."""
        if self.up and self.node.session != self._site.ray.session:
            self.died(SESSION_ENDED)

    def _start_head(self) -> None:
        self._site.ray.start_head()
        self._become(head=True)

    def _join(self) -> None:
        self._joining = False
        if self.is_head or self.up or self._bootstrap is None:
            return
        if self._bootstrap.session != self._site.ray.session:
            # Nobody answers there; a new address comes when there is one.
            self._joining = True
            self._agent.later(2_000, self._join)
            return
        self._become(head=False)

    def _become(self, *, head: bool) -> None:
        ray_node_id = self._site.ray.add_raylet(self._agent.machine.gpus * 1_000)
        self.node = agent_pb2.RayNode(
            gcs_address="head:6379", session=self._site.ray.session, ray_node_id=ray_node_id, head=head
        )
        self._agent.beat_once()
