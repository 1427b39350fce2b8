"""The fit of one new placement group: nodes and devices for its workers.

Deterministic: ties go to the lower rank. Workers of one component that end on one node get neighbouring ranks, in
the order of node rank and device, so that rank 0 … k−1 share a machine (PG-01).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, permutations

from callboard.model.quantities import MILLI, Resources
from callboard.model.specs import Labels, Strategy
from callboard.scheduler.plan.packing import Exhaustive, may_hold, search
from callboard.scheduler.plan.pinned import pin
from callboard.scheduler.plan.rooms import Rooms
from callboard.scheduler.plan.view import Room
from callboard.scheduler.records.asks import Slot
from callboard.scheduler.records.node_record import DeviceShare
from callboard.scheduler.records.pool_records import BundleRecord

_PACKS = (Strategy.PACK, Strategy.STRICT_PACK)
_STRICT = (Strategy.STRICT_PACK, Strategy.STRICT_SPREAD)

MAX_ORDERS = 24
"""Most orders tried of components with a strategy of their own: all of them, of up to four."""

EXACT_LIMIT = 12
"""Up to this many workers and nodes, a greedy miss is followed by an exhaustive search. Packing is NP-hard; greedy
first-fit decreasing misses only mixed shapes on nearly full clusters."""


def fit(rooms: Rooms, slots: Sequence[Slot], strategy: Strategy) -> tuple[BundleRecord, ...] | None:
    """A bundle for each slot, in the order of the slots, or None if they don't fit. Uses up ``rooms``.

    Workers with a place come first; the strategy is for the others.
    """
    alone = slots[0] if len(slots) == 1 else None
    if alone is not None and alone.place is None and not (alone.selector or alone.prefers):
        return _fit_one(rooms, alone, alone.strategy or strategy)
    if any(slot.place is not None for slot in slots):
        return _fit_placed(rooms, slots, strategy)
    if not slots:
        return ()
    if any(slot.strategy for slot in slots):
        return _fit_parts(rooms, slots, strategy)
    if any(slot.selector or slot.prefers for slot in slots):
        return _fit_selected(rooms, slots, strategy)
    asks = [slot.resources for slot in slots]
    order = list(range(len(slots)))
    if asks.count(asks[0]) < len(asks):
        order.sort(key=lambda i: _size(slots[i].resources), reverse=True)
        asks = [slots[i].resources for i in order]
    chosen = search(rooms, asks, strategy)
    if chosen is None:
        return _fit_exactly(rooms, slots, order, strategy)
    rooms_of = dict(zip(order, chosen, strict=True))
    return _hand_out(slots, order, [rooms_of[i] for i in range(len(slots))], near=strategy in _PACKS)


def _fit_placed(rooms: Rooms, slots: Sequence[Slot], strategy: Strategy) -> tuple[BundleRecord, ...] | None:
    """Slots some of which have a place."""
    pinned = pin(rooms, slots)
    if pinned is None:
        return None
    rest = fit(rooms, [slot for slot in slots if slot.place is None], strategy)
    if rest is None:
        return None
    free = iter(rest)
    return tuple(pinned[i] if i in pinned else next(free) for i in range(len(slots)))


def _fit_parts(rooms: Rooms, slots: Sequence[Slot], strategy: Strategy) -> tuple[BundleRecord, ...] | None:
    """Slots some of whose components have a strategy of their own: each such component is a part, all others are one.
    What the order of the parts decides is tried."""
    parts: dict[tuple[str, Strategy], list[int]] = {}
    for i, slot in enumerate(slots):
        parts.setdefault((slot.component, slot.strategy) if slot.strategy else ("", strategy), []).append(i)
    # Those with the least choice first.
    strictest = sorted(parts, key=lambda part: (part[1] not in _STRICT, -len(parts[part]), part[0]))
    for order in islice(permutations(strictest), MAX_ORDERS):
        found: dict[int, BundleRecord] = {}
        for part in order:
            members = parts[part]
            bundles = fit(rooms, [replace(slots[i], strategy=None) for i in members], part[1])
            if bundles is None:
                break
            found.update(zip(members, bundles, strict=True))
        if len(found) == len(slots):
            return tuple(found[i] for i in range(len(slots)))
        for bundle in found.values():
            _give_back(rooms, bundle)
    return None


def keeps_strategy(placed: Iterable[tuple[Slot, str]], strategy: Strategy) -> bool:
    """Whether the strict strategies hold for workers, each with its node. Those with a place are where it is."""
    parts: dict[tuple[str, Strategy], list[str]] = {}
    for slot, node_id in placed:
        if slot.place is None:
            parts.setdefault((slot.component, slot.strategy) if slot.strategy else ("", strategy), []).append(node_id)
    return all(
        len(set(nodes)) == {Strategy.STRICT_PACK: 1, Strategy.STRICT_SPREAD: len(nodes)}.get(own, len(set(nodes)))
        for (_, own), nodes in parts.items()
    )


def _fit_one(rooms: Rooms, slot: Slot, strategy: Strategy) -> tuple[BundleRecord, ...] | None:
    """Most jobs have one worker, of which there is nothing to order."""
    chosen = search(rooms, [slot.resources], strategy)
    if chosen is None:
        return _fit_exactly(rooms, [slot], [0], strategy)
    room = chosen[0]
    if strategy in _PACKS and room.tells_distances:
        room.prefer_near((slot.resources,))
    devices = room.take(slot.resources)
    return (BundleRecord(node_id=room.node.node_id, resources=slot.resources, devices=devices),)


def _fit_preferring(rooms: Rooms, slots: Sequence[Slot], strategy: Strategy) -> tuple[BundleRecord, ...] | None:
    """Slots some of which prefer nodes: as many of the first of those as find room there, the others anywhere."""
    soft = [i for i, slot in enumerate(slots) if slot.prefers]
    # All of them, which is the rule. Then by bisection: `low` fit where they prefer to be, more than `high` don't.
    low, high, middle = 0, len(soft), len(soft)
    while True:
        kept = frozenset(soft[:middle])
        found = fit(rooms, [_settled(slot, keeps=i in kept) for i, slot in enumerate(slots)], strategy)
        if found is None:
            high = middle - 1
        elif middle == high:
            return found
        else:
            low = middle
            for bundle in found:
                _give_back(rooms, bundle)
        if high < 0:
            return None
        middle = (low + high + 1) // 2


def _settled(slot: Slot, *, keeps: bool) -> Slot:
    """A slot that asks for what it prefers, or for nothing of it."""
    asked = tuple(sorted({*slot.selector, *slot.prefers})) if keeps else slot.selector
    return replace(slot, selector=asked, prefers=())


def _give_back(rooms: Rooms, bundle: BundleRecord) -> None:
    room = rooms.at(bundle.node_id)
    assert room is not None, "what was taken from a room can be given back to it"
    room.give_back(bundle)


def _fit_selected(rooms: Rooms, slots: Sequence[Slot], strategy: Strategy) -> tuple[BundleRecord, ...] | None:
    """Slots that ask for labels of their own, or prefer some. A strict strategy holds across all of them."""
    if any(slot.prefers for slot in slots):
        return _fit_preferring(rooms, slots, strategy)
    if strategy is Strategy.STRICT_PACK:
        every = tuple(sorted({label for slot in slots for label in slot.selector}))
        return fit(rooms.narrowed(every, frozenset()), [replace(slot, selector=()) for slot in slots], strategy)
    # Those with the most labels first, for they have the least choice; who comes first may take what others need.
    selectors = sorted({slot.selector for slot in slots}, key=lambda labels: (-len(labels), labels))
    for order in (selectors, selectors[::-1]):
        found = _fit_in_turn(rooms, slots, strategy, order)
        if found is not None:
            return found
    order_of_size = sorted(
        range(len(slots)), key=lambda i: (len(slots[i].selector), _size(slots[i].resources), slots[i].selector)
    )
    return _fit_exactly(rooms, slots, order_of_size[::-1], strategy)


def _fit_in_turn(
    rooms: Rooms, slots: Sequence[Slot], strategy: Strategy, order: Sequence[Labels]
) -> tuple[BundleRecord, ...] | None:
    """Fits the slots of one selector after those of the other; what was taken is given back if one finds no room."""
    found: dict[int, BundleRecord] = {}
    for selector in order:
        members = [i for i, slot in enumerate(slots) if slot.selector == selector]
        taken = {bundle.node_id for bundle in found.values()} if strategy is Strategy.STRICT_SPREAD else ()
        own = rooms.narrowed(selector, frozenset(taken))
        bundles = fit(own, [replace(slots[i], selector=()) for i in members], strategy)
        rooms.adopt(own)
        if bundles is None:
            for bundle in found.values():
                _give_back(rooms, bundle)
            return None
        found.update(zip(members, bundles, strict=True))
    return tuple(found[i] for i in range(len(slots)))


def _fit_exactly(
    rooms: Rooms, slots: Sequence[Slot], order: Sequence[int], strategy: Strategy
) -> tuple[BundleRecord, ...] | None:
    """What a greedy search may have missed, if there is little to try."""
    asks = [slots[i].resources for i in order]
    selectors = [slots[i].selector for i in order]
    if len(slots) > EXACT_LIMIT or not (any(selectors) or _mixed(asks, strategy)):
        return None
    every = rooms.all(len(asks), selectors)
    if len(every) > EXACT_LIMIT or not may_hold(every, asks):
        return None
    exhaustive = Exhaustive(every, asks, strategy, selectors)
    if not exhaustive.place():
        return None
    return _name(slots, dict(zip(order, exhaustive.placed, strict=True)))


def _name(
    slots: Sequence[Slot], placed: Mapping[int, tuple[Room, tuple[DeviceShare, ...]]]
) -> tuple[BundleRecord, ...]:
    """Bundles of slots whose room is taken. Slots of one component and shape swap so that ranks follow node ranks."""
    places = dict(placed)
    for members in _alike(slots):
        ordered = sorted(
            (places[i] for i in members), key=lambda place: (place[0].node.rank, place[1][0].index if place[1] else -1)
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


def _hand_out(
    slots: Sequence[Slot], order: Sequence[int], rooms: Sequence[Room], *, near: bool
) -> tuple[BundleRecord, ...]:
    """Names devices. Slots of one component and shape swap nodes so that ranks follow node ranks; room is taken in the
    order of the search, so that what fitted there fits here.

    Args:
        near: those on one node had better be connected with each other.
    """
    nodes = list(rooms)
    for members in _alike(slots):
        ordered = sorted((nodes[i] for i in members), key=lambda room: room.node.rank)
        for i, room in zip(members, ordered, strict=True):
            nodes[i] = room
    if near and any(room.tells_distances for room in set(rooms)):
        together: dict[str, list[int]] = {}
        for i, room in enumerate(nodes):
            together.setdefault(room.node.node_id, []).append(i)
        for members in together.values():
            nodes[members[0]].prefer_near([slots[i].resources for i in members])
    devices = {i: nodes[i].take(slots[i].resources) for i in order}
    return tuple(
        BundleRecord(node_id=nodes[i].node.node_id, resources=slot.resources, devices=devices[i])
        for i, slot in enumerate(slots)
    )


def _size(ask: Resources) -> tuple[bool, int, int, int, int, int]:
    """Those that can't have every GPU come first: others would take what only they can use."""
    custom = sum(milli for _, milli in ask.custom_milli)
    return (ask.selects, ask.gpu_milli, ask.gpu_memory_bytes, ask.cpu_milli, ask.memory_bytes, custom)
