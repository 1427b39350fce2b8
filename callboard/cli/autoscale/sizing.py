"""The number of nodes that would give every waiting worker its place, by packing: first into free room, then into nodes
that are on their way, then into new ones, the largest workers first.

An answer that errs: the scheduler packs by more rules than these (strategies, groups). It errs for a moment only, since
the question is asked again and again: what still waits when a node has joined is counted again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from callboard.model.quantities import MILLI, Resources
from callboard.v1.node_pb2 import Node, NodeState
from callboard.v1.scheduler_pb2 import Demand
from callboard.wire.amounts import resources_from_proto

MAX_WORKERS = 100_000
"""Workers that are packed at most in one look: more can't be wanted by one job."""


@dataclass(slots=True)
class Room:
    """What is free on one node.

    Attributes:
        cpu_milli: CPU, in milli.
        memory_bytes: memory.
        devices: what is free of each device, in milli-GPU.
        custom: custom resources, in milli.
        labels: of the node.
    """

    cpu_milli: int
    memory_bytes: int
    devices: list[int]
    custom: dict[str, int] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, node: Node) -> Room:
        """What is free on a node now; placement groups that nobody uses are in nobody's way."""
        capacity, used = resources_from_proto(node.capacity), resources_from_proto(node.used)
        stuck = resources_from_proto(node.quarantined)
        left = {name: amount - used.get(name) - stuck.get(name) for name, amount in capacity.items()}
        devices = [MILLI - use.used_milli - use.quarantined_milli for use in node.devices]
        return cls._of(left, devices, _labels_of(node))

    @classmethod
    def whole(cls, capacity: Resources, labels: Mapping[str, str]) -> Room:
        """A node on which nothing runs."""
        return cls._of(dict(capacity.items()), [MILLI] * (capacity.gpu_milli // MILLI), labels)

    @classmethod
    def _of(cls, amounts: dict[str, int], devices: list[int], labels: Mapping[str, str]) -> Room:
        custom = {name: amount for name, amount in amounts.items() if name not in ("cpu", "gpu", "memory")}
        return cls(amounts.get("cpu", 0), amounts.get("memory", 0), devices, custom, labels)

    def take(self, ask: Resources, selector: Mapping[str, str]) -> bool:
        """Gives a worker its place; whether there is one."""
        if any(self.labels.get(name) != value for name, value in selector.items()):
            return False
        if ask.cpu_milli > self.cpu_milli or ask.memory_bytes > self.memory_bytes:
            return False
        custom = {name: amount for name, amount in ask.items() if name not in ("cpu", "gpu", "memory")}
        if any(amount > self.custom.get(name, 0) for name, amount in custom.items()):
            return False
        chosen = self._devices_for(ask.gpu_milli)
        if chosen is None:
            return False
        self.cpu_milli -= ask.cpu_milli
        self.memory_bytes -= ask.memory_bytes
        for name, amount in custom.items():
            self.custom[name] -= amount
        for device in chosen:
            self.devices[device] -= min(ask.gpu_milli, MILLI)
        return True

    def _devices_for(self, gpu_milli: int) -> list[int] | None:
        """Whole devices for a whole ask; for a part the fullest device that has it."""
        if gpu_milli >= MILLI:
            free = [index for index, left in enumerate(self.devices) if left == MILLI]
            count = gpu_milli // MILLI
            return free[:count] if len(free) >= count else None
        if not gpu_milli:
            return []
        parts = [(left, index) for index, left in enumerate(self.devices) if left >= gpu_milli]
        return [min(parts)[1]] if parts else None


@dataclass(frozen=True, slots=True)
class Sizing:
    """What the demand comes to.

    Attributes:
        nodes: more nodes that would give every worker its place, beside those on their way.
        hopeless: workers that not even an empty new node could hold, a sentence for each shape.
        waiting: whether others wait for room; those that are hopeless, or that a quota holds, keep no idle node.
    """

    nodes: int
    hopeless: tuple[str, ...] = ()
    waiting: bool = False


def size(
    demands: Sequence[Demand],
    nodes: Sequence[Node],
    new: Room | None,
    *,
    coming: int,
    most: int,
    grow_elastic: bool = False,
) -> Sizing:
    """How many more nodes are wanted.

    Args:
        demands: what is wanted.
        nodes: nodes that there are.
        new: an empty new node; None: not known. Then the first is added to know it.
        coming: new nodes that are on their way.
        most: more new nodes than this are not counted.
        grow_elastic: count what elastic components would take beyond their fewest.
    """
    rooms = [Room.of(node) for node in nodes if node.state == NodeState.NODE_STATE_READY]
    rooms += [copy_of(new) for _ in range(coming) if new is not None]
    added, waiting = 0, False
    hopeless: list[str] = []
    for ask, count, entry in _largest_first(demands, grow_elastic=grow_elastic):
        selector = dict(entry.node_selector)
        for _ in range(count):
            if any(room.take(ask, selector) for room in rooms):
                continue
            if new is None:
                return Sizing(min(most, 0 if coming else 1), tuple(hopeless), waiting=True)
            fresh = copy_of(new)
            if not fresh.take(ask, selector):
                jobs = ", ".join(entry.jobs)
                hopeless.append(f"no new node could hold {ask}, which {jobs} wants in pool {entry.pool}")
                break
            if added == most:
                return Sizing(added, tuple(hopeless), waiting=True)
            rooms.append(fresh)
            added += 1
        else:
            waiting = True
    return Sizing(added, tuple(hopeless), waiting)


def copy_of(room: Room) -> Room:
    """Another node that is the same."""
    return Room(room.cpu_milli, room.memory_bytes, list(room.devices), dict(room.custom), room.labels)


def _largest_first(demands: Iterable[Demand], *, grow_elastic: bool) -> list[tuple[Resources, int, Demand]]:
    wanted = []
    for entry in demands:
        count = entry.count if grow_elastic else entry.count - entry.optional_count
        if count > 0 and not entry.quota_blocked:
            wanted.append((resources_from_proto(entry.shape), min(count, MAX_WORKERS), entry))
    wanted.sort(key=lambda item: (item[0].gpu_milli, item[0].cpu_milli, item[0].memory_bytes), reverse=True)
    return wanted


def _labels_of(node: Node) -> dict[str, str]:
    own = dict(node.labels)
    own.setdefault("node", node.name.removeprefix("nodes/"))
    own.setdefault("node_group", node.node_group)
    return own
