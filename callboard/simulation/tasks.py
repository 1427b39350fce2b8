"""Which placement groups is an agent making or removing? The rules of ``callboard.agents.groups``."""

from __future__ import annotations

from asyncio import TimerHandle as Timer
from collections.abc import Callable
from typing import Any, Protocol

from callboard.simulation.options import Fault
from callboard.simulation.rayworld import Bundle
from callboard.simulation.site import Site
from callboard.v1 import agent_pb2

Name = tuple[str, int]


class Speaker(Protocol):
    """The agent, as its groups see it."""

    site: Site

    @property
    def ray(self) -> agent_pb2.RayNode:
        """The node's part in Ray."""

    def later(self, wait_ms: float, do: Callable[[], None]) -> Timer:
        """Does something in a while, if the agent still lives."""

    def say(self, command_id: str, **content: Any) -> None:
        """Reports something."""


class GroupTasks:
    """Creations and removals under way."""

    def __init__(self, agent: Speaker) -> None:
        self._agent = agent
        self._site = agent.site
        self._making: dict[str, tuple[str, Name]] = {}

    def create(self, command_id: str, command: agent_pb2.CreatePlacementGroup) -> None:
        """Makes a group; a report answers the command."""
        name = (command.placement_group_id, command.attempt)
        self._making[name[0]] = (command_id, name)
        bundles = tuple((bundle.ray_node_id, bundle.resources.gpu_milli) for bundle in command.bundles)
        until_ms = self._site.timeline.now_ms + command.timeout_ms
        wait_ms = self._site.chance.ray.randint(20, 600)
        if self._site.strikes(Fault.RAY, 0.02):
            self._site.count("group creation failed")
            self._agent.later(wait_ms, lambda: self._failed(command_id, name, "Ray raised"))
            return
        if self._site.strikes(Fault.RAY, 0.01):
            wait_ms = command.timeout_ms + 10_000
        self._agent.later(5, lambda: self._book(command_id, name, bundles))
        self._agent.later(max(10, wait_ms), lambda: self._poll(command_id, name, until_ms))

    def remove(self, command_id: str, command: agent_pb2.RemovePlacementGroup) -> None:
        """Removes a group; a report answers the command once it is gone."""
        name = (command.placement_group_id, command.attempt)
        ray_id = command.ray_placement_group_id
        self._agent.later(self._site.chance.ray.randint(20, 300), lambda: self._unbook(command_id, name, ray_id))

    def _book(self, command_id: str, name: Name, bundles: tuple[Bundle, ...]) -> None:
        if not self._is_making(command_id, name):
            return
        if not self._in_ray():
            self._failed(command_id, name, "this node is in no Ray cluster")
            return
        self._site.ray.find_or_make(name, bundles)

    def _poll(self, command_id: str, name: Name, until_ms: int) -> None:
        if not self._is_making(command_id, name):
            return
        if not self._in_ray() or name not in self._site.ray.groups:
            self._failed(command_id, name, "its Ray session ended, or it was removed")
            return
        if self._site.timeline.now_ms >= until_ms:
            self._failed(command_id, name, "not ready in time")
            return
        group = self._site.ray.try_place(name)
        if group is None:
            wait_ms = min(300, max(1, until_ms - self._site.timeline.now_ms))
            self._agent.later(wait_ms, lambda: self._poll(command_id, name, until_ms))
            return
        del self._making[name[0]]
        ready = agent_pb2.PlacementGroupReady(
            placement_group_id=name[0],
            attempt=name[1],
            ray_placement_group_id=group.ray_id,
            ray_session=self._site.ray.session,
        )
        self._agent.say(command_id, placement_group_ready=ready)

    def _failed(self, command_id: str, name: Name, why: str) -> None:
        if not self._is_making(command_id, name):
            return
        del self._making[name[0]]
        self._site.ray.remove(name)
        failed = agent_pb2.PlacementGroupFailed(placement_group_id=name[0], attempt=name[1], message=why)
        self._agent.say(command_id, placement_group_failed=failed)

    def _unbook(self, command_id: str, name: Name, ray_id: str) -> None:
        if not self._in_ray():
            # However long that takes: without Ray nobody can say that the group is gone.
            self._agent.later(1_000, lambda: self._unbook(command_id, name, ray_id))
            return
        self._site.ray.remove(name, ray_id)
        making = self._making.get(name[0])
        if making is not None and making[1] == name:
            self._failed(making[0], name, "removed while it was made")
        self._agent.say(command_id, placement_group_removed=agent_pb2.PlacementGroupRemoved(placement_group_id=name[0]))

    def _is_making(self, command_id: str, name: Name) -> bool:
        return self._making.get(name[0]) == (command_id, name)

    def _in_ray(self) -> bool:
        session = self._site.ray.session
        return bool(session) and self._agent.ray.session == session
