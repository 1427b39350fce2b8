"""The usable nodes, sorted by what is free on them, so that a search need not look at all of them.

Best fit asks for the node with the least to spare that still holds an ask; a gang asks for the emptiest ones first.
Both are a walk along one sorted list, begun where the free GPU suffices. A second list, by free CPU, answers at once
when no node has enough, so that a full cluster costs nothing to look at.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from callboard.model.quantities import MILLI, Resources
from callboard.scheduler.state.ledger import NodeBook

Key = tuple[int, int, int, str]
"""(free milli-GPU, free milli-CPU, rank, node id)."""


class FreeIndex:
    """Usable nodes by what is booked and claimed on them; whole devices and shares count alike in the key."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._cpus: list[tuple[int, str]] = []
        self._known: dict[str, Key] = {}
        self.gpu_milli = 0
        self.cpu_milli = 0
        """What is free on all of them together."""

    def __len__(self) -> int:
        """How many nodes are usable."""
        return len(self._known)

    def update(self, book: NodeBook) -> None:
        """Follows a node after its record or its sums changed."""
        node_id = book.node.node_id
        old = self._known.get(node_id)
        new = _key(book) if book.node.usable else None
        if old == new:
            return
        self.drop(node_id)
        if new is not None:
            self.gpu_milli += new[0]
            self.cpu_milli += new[1]
            insort(self._keys, new)
            insort(self._cpus, (new[1], node_id))
            self._known[node_id] = new

    def drop(self, node_id: str) -> None:
        old = self._known.pop(node_id, None)
        if old is not None:
            del self._keys[bisect_left(self._keys, old)]
            del self._cpus[bisect_left(self._cpus, (old[1], node_id))]
            self.gpu_milli -= old[0]
            self.cpu_milli -= old[1]

    def fullest_first(self, ask: Resources) -> Iterator[str]:
        """Nodes that may hold an ask, the one with the least to spare first."""
        if self._may_hold(ask):
            for index in range(bisect_left(self._keys, (ask.gpu_milli, 0, -1, "")), len(self._keys)):
                key = self._keys[index]
                if key[1] >= ask.cpu_milli:
                    yield key[3]

    def emptiest_first(self, ask: Resources) -> Iterator[str]:
        """Nodes that may hold an ask, the one with most to spare first."""
        if self._may_hold(ask):
            end, floor = len(self._keys), bisect_left(self._keys, (ask.gpu_milli, 0, -1, ""))
            while end > floor:
                gpu_milli, cpu_milli = self._keys[end - 1][:2]
                # Equally empty nodes go by rank, so a run of them is walked from its front.
                start = max(floor, bisect_left(self._keys, (gpu_milli, cpu_milli, -1, "")))
                if cpu_milli >= ask.cpu_milli:
                    for index in range(start, end):
                        yield self._keys[index][3]
                end = start

    def __contains__(self, node_id: str) -> bool:
        return node_id in self._known

    def keys(self) -> list[Key]:
        """Every entry, for the check of the invariants."""
        return list(self._keys)

    def _may_hold(self, ask: Resources) -> bool:
        return bool(self._keys) and self._keys[-1][0] >= ask.gpu_milli and self._cpus[-1][0] >= ask.cpu_milli


def _key(book: NodeBook) -> Key:
    booked, claimed, node = book.booked, book.claimed, book.node
    devices = len(node.devices)
    if not claimed.parts and len(booked.device_milli) == devices and not node.closed:
        # The rule: nothing is claimed, and what is booked is never more than the device (I1).
        gpu_milli = MILLI * devices - sum(booked.device_milli)
    else:
        gpu_milli = 0
        closed = {index for index, _ in node.closed}
        for index, (taken, promised) in enumerate(zip(booked.device_milli, claimed.device_milli, strict=False)):
            free = MILLI - taken - promised
            if free > 0 and index < devices and index not in closed:
                gpu_milli += free
    cpu_milli = node.capacity.cpu_milli - booked.cpu_milli - claimed.cpu_milli
    return (gpu_milli, max(0, cpu_milli), node.rank, node.node_id)
