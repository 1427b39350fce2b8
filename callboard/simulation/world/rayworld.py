"""The virtual Ray: a head with a session, raylets, and groups that book room on them.

As in Ray: a group whose raylets lack room stays pending, one whose raylet died stays around until it is removed, and
all are void when the head's session ends; raylets of a session that ended and actors of a raylet that ended follow it a
moment later. A group that the controller forgot therefore shows: its successor on the same devices never gets ready,
and at the end it is still there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from callboard.simulation.world.machines import Tree

Bundle = tuple[str, int]
"""(Ray node id, GPU milli)."""


@dataclass(slots=True)
class RayGroup:
    """One placement group, pending or ready."""

    ray_id: str
    bundles: tuple[Bundle, ...]
    ready: bool = False


class Actor(Protocol):
    """The process of an actor."""

    tree: Tree

    @property
    def alive(self) -> bool:
        """Whether it lives."""

    async def up(self) -> None:
        """Return once it answers."""

    async def ask(self, method: str, argument: Any) -> Any:
        """Call a method of it."""

    def give_up(self) -> None:
        """Kill it."""


@dataclass(slots=True)
class Raylet:
    """A living raylet."""

    gpu_milli: int
    kill: Callable[[], None] = lambda: None


@dataclass(slots=True)
class RayWorld:
    """One Ray cluster.

    Attributes:
        address: of the head.
        session: of the head; empty while there is no head.
        raylets: by Ray's node id, of this session.
        actors: by name, of living raylets.
        killed: by name, actors that are dead for Ray; their processes may live.
        groups: by name.
    """

    address: str = ""
    session: str = ""
    raylets: dict[str, Raylet] = field(default_factory=dict)
    actors: dict[str, Actor] = field(default_factory=dict)
    killed: dict[str, Actor] = field(default_factory=dict)
    groups: dict[str, RayGroup] = field(default_factory=dict)
    _sessions: int = 0
    _ids: int = 0

    def start_head(self, address: str) -> str:
        """A new session; everything of an earlier one is void."""
        self.stop_head()
        self._sessions += 1
        self.session, self.address = f"session-{self._sessions}", address
        return self.session

    def stop_head(self) -> None:
        """The head died."""
        if not self.session:
            return
        self.session = ""
        self.groups.clear()
        self.killed.clear()
        raylets, self.raylets = self.raylets, {}
        for raylet in raylets.values():
            raylet.kill()

    def add_raylet(self, gpu_milli: int, kill: Callable[[], None] = lambda: None) -> str:
        """A raylet joins; its Ray node id."""
        self._ids += 1
        ray_node_id = f"raylet-{self._ids}"
        self.raylets[ray_node_id] = Raylet(gpu_milli, kill)
        return ray_node_id

    def drop_raylet(self, ray_node_id: str) -> None:
        """A raylet died. Groups with a bundle there are not ready any more, and stay."""
        self.raylets.pop(ray_node_id, None)
        for group in self.groups.values():
            if any(node == ray_node_id for node, _ in group.bundles):
                group.ready = False

    def find_or_make(self, name: str, bundles: tuple[Bundle, ...]) -> RayGroup:
        """The group of this name, made (pending) if there is none."""
        group = self.groups.get(name)
        if group is None:
            self._ids += 1
            group = self.groups[name] = RayGroup(f"pg{self._ids}", bundles)
        return group

    def try_place(self, name: str) -> RayGroup | None:
        """The group if it is ready or can be made so now; None while it has no room."""
        group = self.groups.get(name)
        if group is None or group.ready:
            return group
        asked: dict[str, int] = {}
        for node, milli in group.bundles:
            asked[node] = asked.get(node, 0) + milli
        if any(
            node not in self.raylets or self._booked(node) + milli > self.raylets[node].gpu_milli
            for node, milli in asked.items()
        ):
            return None
        group.ready = True
        return group

    def remove(self, name: str, ray_id: str = "") -> None:
        """Removes the group with this id, or without one the group of this name, if there is one."""
        if ray_id:
            self.groups = {each: group for each, group in self.groups.items() if group.ray_id != ray_id}
        else:
            self.groups.pop(name, None)

    def _booked(self, ray_node_id: str) -> int:
        return sum(
            milli
            for group in self.groups.values()
            if group.ready
            for node, milli in group.bundles
            if node == ray_node_id
        )
