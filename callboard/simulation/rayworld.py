"""The virtual Ray: a head with a session, raylets, and groups that book room on them.

As in Ray: a group whose raylets lack room stays pending, one whose raylet died stays around until it is removed, and
all are void when the head's session ends. A group that the controller forgot therefore shows: its successor on the
same devices never gets ready, and at the end it is still there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Bundle = tuple[str, int]
"""(Ray node id, GPU milli)."""


@dataclass(slots=True)
class RayGroup:
    """One placement group, pending or ready."""

    ray_id: str
    bundles: tuple[Bundle, ...]
    ready: bool = False


@dataclass(slots=True)
class RayWorld:
    """One Ray cluster.

    Attributes:
        session: of the head; empty while there is no head.
        raylets: Ray node id → GPU milli, of living raylets of this session.
        groups: (group id, attempt) → group; the name of a group in Ray is made of both.
        on_lost: called when the head's session ended.
    """

    session: str = ""
    raylets: dict[str, int] = field(default_factory=dict)
    groups: dict[tuple[str, int], RayGroup] = field(default_factory=dict)
    on_lost: Callable[[], None] = lambda: None
    _sessions: int = 0
    _ids: int = 0

    def start_head(self) -> str:
        """A new session; everything of an earlier one is void."""
        self.stop_head()
        self._sessions += 1
        self.session = f"session-{self._sessions}"
        return self.session

    def stop_head(self) -> None:
        """The head died."""
        if not self.session:
            return
        self.session = ""
        self.raylets.clear()
        self.groups.clear()
        self.on_lost()

    def add_raylet(self, gpu_milli: int) -> str:
        """A raylet joins; its Ray node id."""
        self._ids += 1
        ray_node_id = f"raylet-{self._ids}"
        self.raylets[ray_node_id] = gpu_milli
        return ray_node_id

    def drop_raylet(self, ray_node_id: str) -> None:
        """A raylet died. Groups with a bundle there are not ready any more, and stay."""
        self.raylets.pop(ray_node_id, None)
        for group in self.groups.values():
            if any(node == ray_node_id for node, _ in group.bundles):
                group.ready = False

    def find_or_make(self, name: tuple[str, int], bundles: tuple[Bundle, ...]) -> RayGroup:
        """The group of this name, made (pending) if there is none."""
        group = self.groups.get(name)
        if group is None:
            self._ids += 1
            group = self.groups[name] = RayGroup(f"pg{self._ids}", bundles)
        return group

    def try_place(self, name: tuple[str, int]) -> RayGroup | None:
        """The group if it is ready or can be made so now; None while it has no room."""
        group = self.groups.get(name)
        if group is None or group.ready:
            return group
        asked: dict[str, int] = {}
        for node, milli in group.bundles:
            asked[node] = asked.get(node, 0) + milli
        if any(
            node not in self.raylets or self._booked(node) + milli > self.raylets[node] for node, milli in asked.items()
        ):
            return None
        group.ready = True
        return group

    def remove(self, name: tuple[str, int], ray_id: str = "") -> None:
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
