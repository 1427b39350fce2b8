"""Where can it go? Finds nodes and devices for the workers of one new placement group.

Deterministic: ties go to the lower rank. Workers of one component that end on one node get neighbouring ranks, in
the order of node rank and device, so that rank 0 … k−1 share a machine (PG-01).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from callboard.model.quantities import MILLI, NOTHING, Resources, total
from callboard.model.specs import Labels, Strategy
from callboard.scheduler.records import BundleRecord, DeviceShare, NodeRecord
from callboard.scheduler.state import State
from callboard.scheduler.view import Room, View

EXACT_LIMIT = 12
"""Up to this many workers and nodes, a greedy miss is followed by an exhaustive search. Packing is NP-hard; greedy
first-fit decreasing misses only mixed shapes on nearly full clusters."""

EXACT_TRIES = 5_000
"""Most workers placed for trial in one exhaustive search: without a bound one odd job would stop the scheduler for
minutes (10 different workers on 9 free GPUs: 9! orders). About 50 ms."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One worker that wants room."""

    component: str
    rank: int
    resources: Resources


@dataclass(frozen=True, slots=True)
class NodeFilter:
    """Which nodes come into question.

    Attributes:
        required: labels that a node must have.
        preferred: labels that are better to have.
    """

    required: Labels = ()
    preferred: Labels = ()

    def admits(self, node: NodeRecord) -> bool:
        """Whether a node has every required label."""
        return _has(node, self.required)

    def prefers(self, node: NodeRecord) -> bool:
        """Whether a node has every preferred label."""
        return _has(node, self.preferred)


def _has(node: NodeRecord, labels: Labels) -> bool:
    if not labels:
        return True
    own = dict(node.labels)
    own.setdefault("node", node.node_id)
    own.setdefault("node_group", node.node_group)
    return all(own.get(key) == value for key, value in labels)


class Rooms:
    """Room of the nodes that come into question, in a view. What a plan takes from one is seen by the next question.

    Walks the index of free room where it is valid; nodes that the view or an earlier part of the plan changed are
    looked at one by one.
    """

    def __init__(self, state: State, view: View, wanted: NodeFilter) -> None:
        self._state = state
        self._view = view
        self._wanted = wanted
        self._known: dict[str, Room] = {}
        self.indexed = not view.assumption.empty and not wanted.preferred
        if self.indexed:
            for node_id in view.changed_nodes():
                node = state.nodes[node_id]
                if node.usable and wanted.admits(node):
                    self._known[node_id] = view.room(node)

    def adopt(self, other: Rooms) -> None:
        """Shares the rooms that another ask of the same job has used."""
        for node_id, room in other._known.items():
            if self._wanted.admits(room.node):
                self._known[node_id] = room

    def all(self, workers: int) -> list[Room]:
        """Every node, preferred ones first, then by rank. Under the assumption that nothing is used, nodes that are
        only cordoned or out of touch count too: what could *ever* fit?

        Args:
            workers: how many are to be placed. Of nodes that are alike while empty, as many are enough.
        """
        empty = self._view.assumption.empty
        nodes = [
            node
            for node in self._state.nodes.values()
            if self._wanted.admits(node) and (node.usable or (empty and could_return(node)))
        ]
        nodes.sort(key=lambda node: (not self._wanted.prefers(node), node.rank))
        if empty:
            alike: Counter[tuple[Resources, int]] = Counter()
            few = []
            for node in nodes:
                alike[node.capacity, len(node.devices)] += 1
                if alike[node.capacity, len(node.devices)] <= workers:
                    few.append(node)
            nodes = few
        return [self._room(node) for node in nodes]

    def fullest_first(self, ask: Resources) -> Iterator[Room]:
        """Nodes that may hold an ask, the one with the least to spare first."""
        changed = sorted(self._known.values(), key=lambda room: (_emptiness(room), room.node.rank))
        return self._merged(self._state.free.fullest_first(ask), changed, 1)

    def emptiest_first(self, ask: Resources) -> Iterator[Room]:
        """Nodes that may hold an ask, the one with most to spare first."""
        changed = sorted(self._known.values(), key=lambda room: (*(-free for free in _emptiness(room)), room.node.rank))
        return self._merged(self._state.free.emptiest_first(ask), changed, -1)

    def _merged(self, walk: Iterator[str], changed: list[Room], sign: int) -> Iterator[Room]:
        """The walk with the changed nodes at their places."""
        skip = set(self._known)
        waiting = list(reversed(changed))
        for node_id in walk:
            if node_id in skip or not self._wanted.admits(self._state.nodes[node_id]):
                continue
            room = self._view.room(self._state.nodes[node_id])
            while waiting and _goes_before(waiting[-1], room, sign):
                yield waiting.pop()
            self._known[node_id] = room
            yield room
        while waiting:
            yield waiting.pop()

    def _room(self, node: NodeRecord) -> Room:
        room = self._known.get(node.node_id)
        if room is None:
            room = self._known[node.node_id] = self._view.room(node)
        return room


def _goes_before(left: Room, right: Room, sign: int) -> bool:
    first, second = _emptiness(left), _emptiness(right)
    if first != second:
        return first < second if sign > 0 else first > second
    return left.node.rank < right.node.rank


def could_return(node: NodeRecord) -> bool:
    """Whether a node that takes no work now may take some later without anybody adding a machine."""
    return node.state.value not in ("LOST", "LEFT")


def fit(rooms: Rooms, slots: Sequence[Slot], strategy: Strategy) -> tuple[BundleRecord, ...] | None:
    """A bundle for each slot, in the order of the slots, or None if they don't fit. Uses up ``rooms``."""
    if not slots:
        return ()
    order = sorted(range(len(slots)), key=lambda i: _size(slots[i].resources), reverse=True)
    asks = [slots[i].resources for i in order]
    chosen = _search(rooms, asks, strategy)
    if chosen is None:
        return _fit_exactly(rooms, slots, order, strategy)
    rooms_of = dict(zip(order, chosen, strict=True))
    return _hand_out(slots, order, [rooms_of[i] for i in range(len(slots))])


def _fit_exactly(
    rooms: Rooms, slots: Sequence[Slot], order: Sequence[int], strategy: Strategy
) -> tuple[BundleRecord, ...] | None:
    """What a greedy search may have missed, if there is little to try."""
    asks = [slots[i].resources for i in order]
    if len(slots) > EXACT_LIMIT or not _mixed(asks, strategy):
        return None
    every = rooms.all(len(asks))
    if len(every) > EXACT_LIMIT:
        return None
    search = _Exhaustive(every, asks, strategy)
    if not search.place():
        return None
    return _name(slots, dict(zip(order, search.placed, strict=True)))


def _name(
    slots: Sequence[Slot], placed: Mapping[int, tuple[Room, tuple[DeviceShare, ...]]]
) -> tuple[BundleRecord, ...]:
    """Bundles of slots whose room is taken. Slots of one component and shape swap so that ranks follow node ranks."""
    places = dict(placed)
    for members in _alike(slots):
        ordered = sorted(
            (places[i] for i in members),
            key=lambda place: (place[0].node.rank, place[1][0].index if place[1] else -1),
        )
        places.update(zip(members, ordered, strict=True))
    return tuple(
        BundleRecord(node_id=places[i][0].node.node_id, resources=slot.resources, devices=places[i][1])
        for i, slot in enumerate(slots)
    )


def _alike(slots: Sequence[Slot]) -> Iterable[list[int]]:
    """Slots of one component and shape, which may swap places."""
    alike: dict[tuple[str, Resources], list[int]] = {}
    for i, slot in enumerate(slots):
        alike.setdefault((slot.component, slot.resources), []).append(i)
    return alike.values()


def _mixed(asks: Sequence[Resources], strategy: Strategy) -> bool:
    """Whether a greedy search may miss a solution: never for equal asks of whole devices."""
    if strategy is Strategy.STRICT_PACK:  # on one node only the packing of shares can be missed
        return any(0 < ask.gpu_milli < MILLI for ask in asks)
    return strategy is Strategy.STRICT_SPREAD or any(ask != asks[0] for ask in asks) or 0 < asks[0].gpu_milli < MILLI


def _search(rooms: Rooms, asks: Sequence[Resources], strategy: Strategy) -> list[Room] | None:
    equal = all(ask == asks[0] for ask in asks)
    if strategy in (Strategy.PACK, Strategy.STRICT_PACK):
        alone = _one_node(rooms, asks)
        if alone is not None or strategy is Strategy.STRICT_PACK or len(asks) == 1:
            return alone
        return _pack(rooms, asks, equal=equal)
    if not (rooms.indexed and equal):
        return _SPREADS[strategy](rooms.all(len(asks)), asks)
    # As many nodes as workers are enough: of equally used ones the same are preferred every time.
    walk = rooms.emptiest_first if strategy is Strategy.SPREAD else rooms.fullest_first
    fitting = (room for room in walk(asks[0]) if room.fits(asks[0]))
    return _SPREADS[strategy](list(islice(fitting, len(asks))), asks)


def _hand_out(slots: Sequence[Slot], order: Sequence[int], rooms: Sequence[Room]) -> tuple[BundleRecord, ...]:
    """Names devices. Slots of one component and shape swap nodes so that ranks follow node ranks; room is taken in
    the order of the search, so that what fitted there fits here."""
    nodes = list(rooms)
    for members in _alike(slots):
        ordered = sorted((nodes[i] for i in members), key=lambda room: room.node.rank)
        for i, room in zip(members, ordered, strict=True):
            nodes[i] = room
    devices = {i: nodes[i].take(slots[i].resources) for i in order}
    return tuple(
        BundleRecord(node_id=nodes[i].node.node_id, resources=slot.resources, devices=devices[i])
        for i, slot in enumerate(slots)
    )


def _size(ask: Resources) -> tuple[int, int, int, int]:
    return (ask.gpu_milli, ask.cpu_milli, ask.memory_bytes, sum(milli for _, milli in ask.custom_milli))


def _emptiness(room: Room) -> tuple[int, int]:
    return (sum(room.device_milli), room.cpu_milli)


def _pack(rooms: Rooms, asks: Sequence[Resources], *, equal: bool) -> list[Room] | None:
    """The emptiest nodes first, each filled as far as it goes."""
    trial = _Trial(asks)
    for room in (
        rooms.emptiest_first(asks[0] if equal else NOTHING) if rooms.indexed else _by_count(rooms.all(len(asks)), asks)
    ):
        trial.fill(room)
        if not trial.waiting:
            break
    return trial.finish()


def _by_count(rooms: Sequence[Room], asks: Sequence[Resources]) -> list[Room]:
    counts = [(_count(room, asks), room) for room in rooms]
    return [room for _, room in sorted(counts, key=lambda pair: -pair[0])]


def _one_node(rooms: Rooms, asks: Sequence[Resources]) -> list[Room] | None:
    """The node with the least to spare that holds all."""
    if rooms.indexed:
        for room in rooms.fullest_first(total(asks) if len(asks) > 1 else asks[0]):
            if _count(room, asks) == len(asks):
                return [room] * len(asks)
        return None
    best: Room | None = None
    for room in rooms.all(len(asks)):
        if (best is None or _emptiness(room) < _emptiness(best)) and _count(room, asks) == len(asks):
            best = room
    return None if best is None else [best] * len(asks)


def _spread(rooms: Sequence[Room], asks: Sequence[Resources]) -> list[Room] | None:
    """Each worker on the node that has fewest of the job so far, then the emptiest."""
    return _one_by_one(rooms, asks, lambda used, room: (used, *(-free for free in _emptiness(room))), limit=None)


def _spread_strictly(rooms: Sequence[Room], asks: Sequence[Resources]) -> list[Room] | None:
    """Each worker on a node of its own, the fullest that can hold it."""
    return _one_by_one(rooms, asks, lambda used, room: (used, *_emptiness(room)), limit=1)


def _one_by_one(
    rooms: Sequence[Room],
    asks: Sequence[Resources],
    rank: Callable[[int, Room], tuple[int, ...]],
    limit: int | None,
) -> list[Room] | None:
    used = {room.node.node_id: 0 for room in rooms}
    trial = _Trial(asks)
    for i, ask in enumerate(asks):
        open_rooms = [room for room in rooms if room.fits(ask) and (limit is None or used[room.node.node_id] < limit)]
        if not open_rooms:
            break
        best = min(open_rooms, key=lambda room: (rank(used[room.node.node_id], room), room.node.rank))
        trial.take(i, best)
        used[best.node.node_id] += 1
    return trial.finish()


_SPREADS: Mapping[Strategy, Callable[[Sequence[Room], Sequence[Resources]], list[Room] | None]] = {
    Strategy.SPREAD: _spread,
    Strategy.STRICT_SPREAD: _spread_strictly,
}


def _free_alike(room: Room) -> tuple[object, ...]:
    """Equal for nodes with equal room."""
    return (room.cpu_milli, room.memory_bytes, *sorted(room.device_milli), *sorted(room.custom_milli.items()))


class _Exhaustive:
    """Every assignment, in rank order, until one is complete: of equal asks only those in order, of nodes with equal
    room only the first, of a node's devices one for each amount that is free. Gives up after :data:`EXACT_TRIES`."""

    def __init__(self, rooms: Sequence[Room], asks: Sequence[Resources], strategy: Strategy) -> None:
        self._rooms = rooms
        self._asks = asks
        self._strategy = strategy
        self._tries = EXACT_TRIES
        self._starts: list[int] = []
        self.placed: list[tuple[Room, tuple[DeviceShare, ...]]] = []

    def place(self, i: int = 0) -> bool:
        """Places the asks from the ``i``-th on; their room stays taken if all find some."""
        if i == len(self._asks):
            return True
        ask = self._asks[i]
        first = self._starts[i - 1] if i and ask == self._asks[i - 1] else 0
        seen: set[tuple[object, ...]] = set()
        for index in range(first, len(self._rooms)):
            room = self._rooms[index]
            alike = (
                *_emptiness(room),
                room.memory_bytes,
                *sorted(room.device_milli),
                *sorted(room.custom_milli.items()),
            )
            if not self._may_take(room) or not room.fits(ask) or alike in seen:
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


def _count(room: Room, asks: Sequence[Resources]) -> int:
    """How many of the asks, taken in order, one node can hold."""
    first = asks[0]
    if len(asks) == 1:
        return int(room.fits(first))
    if all(ask == first for ask in asks):
        return min(len(asks), _times(room, first))
    trial = _Trial(asks)
    trial.fill(room)
    count = len(asks) - len(trial.waiting)
    trial.finish()
    return count


def _times(room: Room, ask: Resources) -> int:
    """How often one ask fits on a node, by division."""
    limits = [room.cpu_milli // ask.cpu_milli] if ask.cpu_milli else []
    if ask.memory_bytes:
        limits.append(room.memory_bytes // ask.memory_bytes)
    if ask.gpu_milli >= MILLI:
        limits.append(room.whole_devices() * MILLI // ask.gpu_milli)
    elif ask.gpu_milli:
        limits.append(sum(free // ask.gpu_milli for free in room.device_milli if free > 0))
    limits.extend(room.custom_milli.get(name, 0) // milli for name, milli in ask.custom_milli)
    return max(0, min(limits)) if limits else 1 << 30


class _Trial:
    """Room taken while a search tries something; all of it is given back at the end."""

    def __init__(self, asks: Sequence[Resources]) -> None:
        self._asks = asks
        self._taken: dict[int, tuple[Room, tuple[DeviceShare, ...]]] = {}
        self.waiting = list(range(len(asks)))

    def take(self, i: int, room: Room) -> None:
        """Puts ask ``i`` on a node where it fits."""
        self._taken[i] = (room, room.take(self._asks[i]))
        self.waiting.remove(i)

    def fill(self, room: Room) -> None:
        """Puts as many of the waiting asks on a node as fit, in order."""
        for i in self.waiting:
            if room.fits(self._asks[i]):
                self._taken[i] = (room, room.take(self._asks[i]))
        self.waiting = [i for i in self.waiting if i not in self._taken]

    def finish(self) -> list[Room] | None:
        """Gives everything back; the node of each ask, or None if one found none."""
        for i, (room, devices) in self._taken.items():
            room.untake(self._asks[i], devices)
        return None if self.waiting else [self._taken[i][0] for i in range(len(self._asks))]
