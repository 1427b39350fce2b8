"""Two searches that put workers on nodes: first fit in a good order, and an exhaustive one up to a bound."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from callboard.model.quantities import MILLI, NOTHING, Resources, total
from callboard.model.specs import Labels, Strategy
from callboard.scheduler.plan.rooms import NodeFilter, Rooms, emptiness
from callboard.scheduler.plan.view import Room
from callboard.scheduler.records.node_record import DeviceShare


def search(rooms: Rooms, asks: Sequence[Resources], strategy: Strategy) -> list[Room] | None:
    """A node for each ask, or None if it found none for one of them. Nothing is taken from the rooms."""
    if strategy is Strategy.PACK or strategy is Strategy.STRICT_PACK:
        alone = _one_node(rooms, asks)
        if alone is not None or strategy is Strategy.STRICT_PACK or len(asks) == 1:
            return alone
        return _pack(rooms, asks, equal=_equal(asks))
    equal = _equal(asks)
    if not (rooms.indexed and equal):
        return _SPREADS[strategy](rooms.all(len(asks)), asks)
    # As many nodes as workers are enough: of equally used ones the same are preferred every time.
    walk = rooms.emptiest_first if strategy is Strategy.SPREAD else rooms.fullest_first
    fitting = (room for room in walk(asks[0]) if room.fits(asks[0]))
    return _SPREADS[strategy](list(islice(fitting, len(asks))), asks)


def _equal(asks: Sequence[Resources]) -> bool:
    first = asks[0]
    return all(ask is first or ask == first for ask in asks)


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
    equal = _equal(asks)
    counts = [(_count(room, asks, equal=equal), room) for room in rooms]
    return [room for _, room in sorted(counts, key=lambda pair: -pair[0])]


def _one_node(rooms: Rooms, asks: Sequence[Resources]) -> list[Room] | None:
    """The node with the least to spare that holds all."""
    if rooms.indexed:
        if len(asks) == 1:
            ask = asks[0]
            return next(([room] for room in rooms.fullest_first(ask) if room.fits(ask)), None)
        equal = _equal(asks)
        for room in rooms.fullest_first(total(asks)):
            if _count(room, asks, equal=equal) == len(asks):
                return [room] * len(asks)
        return None
    best: Room | None = None
    equal = _equal(asks)
    for room in rooms.all(len(asks)):
        if (best is None or emptiness(room) < emptiness(best)) and _count(room, asks, equal=equal) == len(asks):
            best = room
    return None if best is None else [best] * len(asks)


def _spread(rooms: Sequence[Room], asks: Sequence[Resources]) -> list[Room] | None:
    """Each worker on the node that has fewest of the job so far, then the emptiest."""
    return _one_by_one(rooms, asks, lambda used, room: (used, *(-free for free in emptiness(room))), limit=None)


def _spread_strictly(rooms: Sequence[Room], asks: Sequence[Resources]) -> list[Room] | None:
    """Each worker on a node of its own, the fullest that can hold it."""
    return _one_by_one(rooms, asks, lambda used, room: (used, *emptiness(room)), limit=1)


def _one_by_one(
    rooms: Sequence[Room], asks: Sequence[Resources], rank: Callable[[int, Room], tuple[int, ...]], limit: int | None
) -> list[Room] | None:
    if len(asks) > 1 and _equal(asks):
        return _in_turn(rooms, asks, rank, limit)
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


def _in_turn(
    rooms: Sequence[Room], asks: Sequence[Resources], rank: Callable[[int, Room], tuple[int, ...]], limit: int | None
) -> list[Room] | None:
    """The same for equal asks: only the node that was taken last stands elsewhere in the order."""
    ask = asks[0]
    used = [0] * len(rooms)
    order = [(rank(0, room), room.node.rank, n) for n, room in enumerate(rooms) if room.fits(ask)]
    heapq.heapify(order)
    trial = _Trial(asks)
    for i in range(len(asks)):
        if not order:
            break
        _, _, n = heapq.heappop(order)
        room = rooms[n]
        trial.take(i, room)
        used[n] += 1
        if (limit is None or used[n] < limit) and room.fits(ask):
            heapq.heappush(order, (rank(used[n], room), room.node.rank, n))
    return trial.finish()


_SPREADS: Mapping[Strategy, Callable[[Sequence[Room], Sequence[Resources]], list[Room] | None]] = {
    Strategy.SPREAD: _spread,
    Strategy.STRICT_SPREAD: _spread_strictly,
}


def _count(room: Room, asks: Sequence[Resources], *, equal: bool) -> int:
    """How many of the asks, taken in order, one node can hold."""
    first = asks[0]
    if len(asks) == 1:
        return int(room.fits(first))
    if equal:
        return min(len(asks), times(room, first))
    trial = _Trial(asks)
    trial.fill(room)
    count = len(asks) - len(trial.waiting)
    trial.finish()
    return count


def times(room: Room, ask: Resources) -> int:
    """How often one ask fits on a node, by division."""
    limits = [room.cpu_milli // ask.cpu_milli] if ask.cpu_milli else []
    if ask.memory_bytes:
        limits.append(room.memory_bytes // ask.memory_bytes)
    if ask.gpu_memory_bytes or ask.selects:
        free = enumerate(room.device_milli)
        suiting = [(milli, room.free_bytes(i)) for i, milli in free if not ask.selects or room.suits(i, ask)]
        limits.append(_times_on(suiting, ask))
    elif ask.gpu_milli >= MILLI:
        limits.append(room.whole_devices() * MILLI // ask.gpu_milli)
    elif ask.gpu_milli:
        limits.append(sum(free // ask.gpu_milli for free in room.device_milli if free > 0))
    limits.extend(room.custom_milli.get(name, 0) // milli for name, milli in ask.custom_milli)
    return max(0, min(limits)) if limits else 1 << 30


def _times_on(free: Iterable[tuple[int, int]], ask: Resources) -> int:
    """How often the part of an ask that is on GPUs fits on some, of which so much (milli-GPU, bytes) is free."""
    need, each = min(ask.gpu_milli, MILLI), ask.each_gpu_memory_bytes
    if not need:
        return 0
    parts = sum(
        max(0, min(milli // need, free_bytes // each if each else milli // need))
        for milli, free_bytes in free
        if milli >= need
    )
    return parts // max(1, ask.gpu_milli // MILLI)


def times_while_empty(capacity: Resources, cards: Sequence[tuple[int, str]], ask: Resources) -> int:
    """How often one ask fits on a node that nobody uses.

    Args:
        cards: (bytes of memory, model) of each of its devices.
    """
    devices = len(cards)
    limits = (
        [devices * MILLI // ask.gpu_milli if ask.gpu_milli >= MILLI else devices * (MILLI // ask.gpu_milli)]
        if ask.gpu_milli
        else []
    )
    if ask.gpu_memory_bytes or ask.selects:
        limits.append(_times_on([(MILLI, size) for size, model in cards if ask.suits(model, size)], ask))
    if ask.cpu_milli:
        limits.append(capacity.cpu_milli // ask.cpu_milli)
    if ask.memory_bytes:
        limits.append(capacity.memory_bytes // ask.memory_bytes)
    limits.extend(capacity.get(name) // milli for name, milli in ask.custom_milli)
    return min(limits) if limits else 1 << 30


class _Trial:
    """Room taken while a search tries something; all of it is given back at the end."""

    def __init__(self, asks: Sequence[Resources]) -> None:
        self._asks = asks
        self._equal = _equal(asks)
        self._taken: dict[int, tuple[Room, tuple[DeviceShare, ...]]] = {}
        self.waiting = dict.fromkeys(range(len(asks)))

    def take(self, i: int, room: Room) -> None:
        """Puts ask ``i`` on a node where it fits."""
        self._taken[i] = (room, room.take(self._asks[i]))
        del self.waiting[i]

    def fill(self, room: Room) -> None:
        """Puts as many of the waiting asks on a node as fit, in order."""
        too_large: Resources | None = None
        placed = []
        for i in self.waiting:
            ask = self._asks[i]
            if ask is too_large:
                continue  # it found no room before, and there is less by now
            if room.fits(ask):
                self._taken[i] = (room, room.take(ask))
                placed.append(i)
            elif self._equal:
                break
            else:
                too_large = ask
        for i in placed:
            del self.waiting[i]

    def finish(self) -> list[Room] | None:
        """Gives everything back; the node of each ask, or None if one found none."""
        for i, (room, devices) in self._taken.items():
            room.untake(self._asks[i], devices)
        return None if self.waiting else [self._taken[i][0] for i in range(len(self._asks))]


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


def _devices(room: Room, *, by_card: bool) -> list[object]:
    """What is free of each device, in an order that forgets which is which; ``by_card``: and what each is."""
    if not by_card:
        return [*sorted(room.device_milli)]
    return [*sorted(room.card(index) for index in range(len(room.node.devices)))]


class Exhaustive:
    """Every assignment, in rank order, until one is complete: of equal asks only those in order, of nodes with equal
    room only the first, of a node's devices one for each amount that is free. Gives up after :data:`EXACT_TRIES`."""

    def __init__(
        self, rooms: Sequence[Room], asks: Sequence[Resources], strategy: Strategy, selectors: Sequence[Labels] = ()
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
        self._by_card = any(ask.selects or ask.gpu_memory_bytes for ask in asks)
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
                *_devices(room, by_card=self._by_card),
                *sorted(room.custom_milli.items()),
                *(room.node.node_id in nodes for nodes in self._admits.values()),
            )
            if alike in seen:
                continue
            if not self._apart(room):
                seen.add(alike)
            for devices in room.devices_for(ask, by_card=self._by_card):
                self._tries -= 1
                if self._tries < 0:
                    return False
                self.placed.append((room, room.take(ask, devices)))
                self._starts.append(index)
                if self.place(i + 1):
                    return True
                self._starts.pop()
                _, taken = self.placed.pop()
                room.untake(ask, taken)
        return False

    def _may_take(self, room: Room) -> bool:
        """Whether the strategy lets the next worker on this node."""
        if self._strategy is Strategy.STRICT_PACK:
            return not self.placed or self.placed[0][0] is room
        return self._strategy is not Strategy.STRICT_SPREAD or not self._apart(room)

    def _apart(self, room: Room) -> bool:
        """Whether a node has a worker of the job already, and so differs from another with equal room."""
        return any(used is room for used, _ in self.placed)
