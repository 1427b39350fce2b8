"""Which assignment did a quick search miss? Every one is tried, up to a bound."""

from __future__ import annotations

from collections.abc import Sequence

from callboard.model.quantities import Resources, total
from callboard.model.specs import Labels, Strategy
from callboard.scheduler.node_record import DeviceShare
from callboard.scheduler.rooms import NodeFilter, emptiness
from callboard.scheduler.view import Room

EXACT_TRIES = 5_000
"""Most workers placed for trial in one exhaustive search: without a bound one odd job would stop the scheduler for
minutes (10 different workers on 9 free GPUs: 9! orders). About 50 ms."""


def may_hold(rooms: Sequence[Room], asks: Sequence[Resources]) -> bool:
    """Whether nodes could hold some workers as far as a glance tells: each finds room when alone, and all together ask
    for no more than is free. Most searches that fail would fail here."""
    wanted = total(asks)
    if sum(max(0, room.cpu_milli) for room in rooms) < wanted.cpu_milli:
        return False
    if sum(max(0, room.memory_bytes) for room in rooms) < wanted.memory_bytes:
        return False
    if sum(max(0, free) for room in rooms for free in room.device_milli) < wanted.gpu_milli:
        return False
    return all(any(room.fits(ask) for room in rooms) for ask in dict.fromkeys(asks))


class Exhaustive:
    """Every assignment, in rank order, until one is complete: of equal asks only those in order, of nodes with equal
    room only the first, of a node's devices one for each amount that is free. Gives up after :data:`EXACT_TRIES`."""

    def __init__(
        self,
        rooms: Sequence[Room],
        asks: Sequence[Resources],
        strategy: Strategy,
        selectors: Sequence[Labels] = (),
    ) -> None:
        """
        Args:
            selectors: labels that the node of each ask must have; empty: any node will do for all.
        """
        self._rooms = rooms
        self._asks = asks
        self._selectors = selectors or [()] * len(asks)
        filters = {selector: NodeFilter(selector) for selector in self._selectors}
        self._admits = {
            selector: frozenset(room.node.node_id for room in rooms if wanted.admits(room.node))
            for selector, wanted in filters.items()
        }
        self._strategy = strategy
        self._tries = EXACT_TRIES
        self._starts: list[int] = []
        self.placed: list[tuple[Room, tuple[DeviceShare, ...]]] = []

    def place(self, i: int = 0) -> bool:
        """Places the asks from the ``i``-th on; their room stays taken if all find some."""
        if i == len(self._asks):
            return True
        ask, admitted = self._asks[i], self._admits[self._selectors[i]]
        again = i > 0 and ask == self._asks[i - 1] and self._selectors[i] == self._selectors[i - 1]
        first = self._starts[i - 1] if again else 0
        seen: set[tuple[object, ...]] = set()
        for index in range(first, len(self._rooms)):
            room = self._rooms[index]
            if room.node.node_id not in admitted or not self._may_take(room) or not room.fits(ask):
                continue
            alike = (
                *emptiness(room),
                room.memory_bytes,
                *sorted(room.device_milli),
                *sorted(room.custom_milli.items()),
                *(room.node.node_id in nodes for nodes in self._admits.values()),
            )
            if alike in seen:
                continue
            if not self._apart(room):
                seen.add(alike)
            for device in room.devices_for(ask):
                self._tries -= 1
                if self._tries < 0:
                    return False
                self.placed.append((room, room.take(ask, device)))
                self._starts.append(index)
                if self.place(i + 1):
                    return True
                self._starts.pop()
                _, devices = self.placed.pop()
                room.untake(ask, devices)
        return False

    def _may_take(self, room: Room) -> bool:
        """Whether the strategy lets the next worker on this node."""
        if self._strategy is Strategy.STRICT_PACK:
            return not self.placed or self.placed[0][0] is room
        return self._strategy is not Strategy.STRICT_SPREAD or not self._apart(room)

    def _apart(self, room: Room) -> bool:
        """Whether a node has a worker of the job already, and so differs from another with equal room."""
        return any(used is room for used, _ in self.placed)
