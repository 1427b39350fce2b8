"""The number of nodes that would give every waiting worker its place, by packing: first into free room, then into nodes
that are on their way, then into new ones, the largest workers first.

An answer that errs: the scheduler packs by more rules than these (strategies, groups). It errs for a moment only, since
the question is asked again and again: what still waits when a node has joined is counted again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace

from callboard.client.calls.cluster_calls import id_of
from callboard.model.frozen import dataclass
from callboard.model.names import OWN_RESOURCES
from callboard.model.quantities import MAX_MEMORY_BYTES, MILLI, Resources
from callboard.v1.node_pb2 import Node, NodeState
from callboard.v1.scheduler_pb2 import Demand
from callboard.wire.amounts import resources_from_proto

MAX_WORKERS = 100_000
"""Workers that are packed at most in one look: more can't be wanted by one job."""


@dataclass(slots=True)
class Card:
    """What is free of one GPU, and what it is.

    Attributes:
        milli: of the GPU, in milli-GPU.
        model: its model; None: not known, so that it may be any.
    """

    milli: int = MILLI
    free_bytes: int = MAX_MEMORY_BYTES
    model: str | None = None
    memory_bytes: int = MAX_MEMORY_BYTES

    def holds(self, ask: Resources) -> bool:
        """Whether it has the part of a worker that lies on one GPU."""
        return (
            self.milli >= min(ask.gpu_milli, MILLI)
            and self.free_bytes >= ask.each_gpu_memory_bytes
            and ask.suits(ask.gpu_model if self.model is None else self.model, self.memory_bytes)
        )


def cards_of(node: Node, *, used: bool) -> list[Card]:
    """The GPUs of a node; ``used``: what is free of them now, else as if nobody used them."""
    found = []
    for use in node.devices:
        device = use.device
        card = Card(MILLI, device.memory_bytes, device.model, device.memory_bytes)
        if used:
            card.milli -= use.used_milli + use.quarantined_milli
            card.free_bytes -= use.promised_memory_bytes
        found.append(card)
    return found


@dataclass(slots=True)
class Room:
    """What is free on one node.

    Attributes:
        cpu_milli: CPU, in milli.
        custom: custom resources, in milli.
    """

    cpu_milli: int
    memory_bytes: int
    devices: list[Card]
    custom: dict[str, int] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, node: Node) -> Room:
        """What is free on a node now; placement groups that nobody uses are in nobody's way."""
        capacity, used = resources_from_proto(node.capacity), resources_from_proto(node.used)
        stuck = resources_from_proto(node.quarantined)
        left = {name: amount - used.get(name) - stuck.get(name) for name, amount in capacity.items()}
        return cls._of(left, cards_of(node, used=True), _labels_of(node))

    @classmethod
    def whole(cls, capacity: Resources, labels: Mapping[str, str], like: Node | None = None) -> Room:
        """A node on which nothing runs.

        Args:
            like: another one of its kind; None: nobody says what the GPUs are of a machine that isn't there yet.
        """
        known = cards_of(like, used=False) if like is not None else []
        count = capacity.gpu_milli // MILLI
        cards = known[:count] + [replace(known[0]) if known else Card() for _ in range(count - len(known))]
        return cls._of(dict(capacity.items()), cards, labels)

    @classmethod
    def _of(cls, amounts: dict[str, int], devices: list[Card], labels: Mapping[str, str]) -> Room:
        custom = {name: amount for name, amount in amounts.items() if name not in OWN_RESOURCES}
        return cls(amounts.get("cpu", 0), amounts.get("memory", 0), devices, custom, labels)

    def take(self, ask: Resources, selector: Mapping[str, str]) -> bool:
        """Gives a worker its place; whether there is one."""
        if any(self.labels.get(name) != value for name, value in selector.items()):
            return False
        if ask.cpu_milli > self.cpu_milli or ask.memory_bytes > self.memory_bytes:
            return False
        custom = dict(ask.custom_milli)
        if any(amount > self.custom.get(name, 0) for name, amount in custom.items()):
            return False
        chosen = self._devices_for(ask)
        if chosen is None:
            return False
        self.cpu_milli -= ask.cpu_milli
        self.memory_bytes -= ask.memory_bytes
        for name, amount in custom.items():
            self.custom[name] -= amount
        for card in chosen:
            card.milli -= min(ask.gpu_milli, MILLI)
            card.free_bytes -= ask.each_gpu_memory_bytes
        return True

    def _devices_for(self, ask: Resources) -> list[Card] | None:
        """Whole devices for a whole ask; for a part the fullest device that has it. The smallest that will do."""
        if not ask.gpu_milli:
            return None if ask.gpu_memory_bytes or ask.selects else []
        count = max(1, ask.gpu_milli // MILLI)
        having = [card for card in self.devices if card.holds(ask)]
        having.sort(key=lambda card: (card.milli, card.free_bytes if ask.gpu_memory_bytes else 0))
        return having[:count] if len(having) >= count else None


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
    cards = [replace(card) for card in room.devices]
    return Room(room.cpu_milli, room.memory_bytes, cards, dict(room.custom), room.labels)


def _largest_first(demands: Iterable[Demand], *, grow_elastic: bool) -> list[tuple[Resources, int, Demand]]:
    wanted = []
    for entry in demands:
        count = entry.count if grow_elastic else entry.count - entry.optional_count
        if count > 0 and not entry.quota_blocked:
            wanted.append((resources_from_proto(entry.shape), min(count, MAX_WORKERS), entry))
    wanted.sort(key=lambda item: _size(item[0]), reverse=True)
    return wanted


def _size(ask: Resources) -> tuple[bool, int, int, int, int]:
    return (ask.selects, ask.gpu_milli, ask.gpu_memory_bytes, ask.cpu_milli, ask.memory_bytes)


def _labels_of(node: Node) -> dict[str, str]:
    own = dict(node.labels)
    own.setdefault("node", id_of(node))
    own.setdefault("node_group", node.node_group)
    return own
