"""What is the smallest change that would let a job start?"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from callboard.model.quantities import MILLI, Resources, total
from callboard.model.specs import JobSpec, PoolSpec, StopPolicy, Strategy
from callboard.scheduler.asks import Ask, asks_of
from callboard.scheduler.blockers import group_reasons
from callboard.scheduler.grouping import charged_beside, new_kind, node_filter, reuse
from callboard.scheduler.pinned import place_reasons, place_remedies
from callboard.scheduler.quota import shortages
from callboard.scheduler.records import NodeRecord
from callboard.scheduler.rooms import NodeFilter, could_return
from callboard.scheduler.shortfall import Shortfall, lacks_for_all, shortfall
from callboard.scheduler.slots import Slot
from callboard.scheduler.state import State
from callboard.scheduler.view import Room, View
from callboard.scheduler.wording import change, shown

MAX_STEPS = 64
"""Most workers whose room is looked for one by one, and most nodes that are looked at for each of them."""


def remedies(state: State, spec: JobSpec, view: View) -> tuple[str, ...]:
    """Smallest changes, each of which removes one thing that is in the way; all together let the job start."""
    changes: list[str] = []
    asks = asks_of(spec)
    room_is_short = False
    for ask in asks:
        pool = state.pools.get(ask.pool)
        if pool is None or pool.deleting:
            changes.append(f"create pool {ask.pool}" + (" once it is gone" if pool else ""))
            continue
        if pool.spec.stop_policy is not StopPolicy.NONE and not view.assumption.empty:
            changes.append(f"set the stop_policy of pool {ask.pool} to none")
        for short in shortages(state.pools, charged_beside(view, asks, ask), pool.spec, ask.resources):
            more = change(short.resource, short.asked - short.available)
            changes.append(f"raise pool {ask.pool} {short.resource} by {more}")
        if reuse(state, view, spec, ask) is not None:
            continue
        changes += _group_change(state, view, ask, pool.spec)
        found = _node_change(state, view, spec, ask)
        room_is_short = room_is_short or bool(found)
        changes += found
    if len(asks) > 1 and not room_is_short and all(ask.pool in state.pools for ask in asks):
        # Each pool's workers find room, all together don't.
        together = Ask.of(spec.pool, (slot for ask in asks for slot in ask.slots))
        changes += _node_change(state, view, spec, together)
    return tuple(dict.fromkeys(changes))


def _group_change(state: State, view: View, ask: Ask, pool: PoolSpec) -> list[str]:
    if not group_reasons(state, view, ask):
        return []
    if new_kind(pool.pg_pool) is None:
        return [f"let pool {ask.pool} make groups on demand (pg_pool.dynamic)"]
    more = max(0, view.dynamic_groups(ask.pool) - pool.pg_pool.max_dynamic) + 1
    return [f"raise pool {ask.pool} max_dynamic by {more}"]


def _node_change(state: State, view: View, spec: JobSpec, ask: Ask) -> list[str]:
    wanted = node_filter(spec, state.pools[ask.pool].spec)
    short = shortfall(state, view, wanted, ask.slots, spec.placement)
    if short is None:
        return []
    missing_places = place_reasons(state, view, wanted, ask.slots)
    if missing_places:
        return place_remedies(state, missing_places)
    fitting = [node for node in state.nodes.values() if wanted.admits(node)]
    fitting.sort(key=lambda node: node.rank)
    cordoned = _uncordoned(short, [node for node in fitting if node.cordoned and could_return(node)], spec.placement)
    if cordoned:
        return [f"uncordon {node.node_id}" for node in cordoned]
    usable = [node for node in fitting if node.usable or (view.assumption.empty and could_return(node))]
    return _grown(short, _unlike(usable, len(short.rest)) if view.assumption.empty else usable, wanted, spec.placement)


def _uncordoned(short: Shortfall, cordoned: Sequence[NodeRecord], placement: Strategy) -> list[NodeRecord]:
    """The fewest cordoned nodes that hold the workers which find no room, first fit; empty: all of them don't."""
    for node in cordoned:
        if _hold(short, [node], placement):
            return [node]
    if placement is Strategy.STRICT_PACK or not _hold(short, cordoned, placement):
        return []
    needed = list(cordoned)
    for node in reversed(cordoned):
        rest = [other for other in needed if other is not node]
        if rest and _hold(short, rest, placement):
            needed = rest
    return needed


def _hold(short: Shortfall, nodes: Sequence[NodeRecord], placement: Strategy) -> bool:
    rooms = [short.view.room(node) for node in nodes]
    for slot in short.rest:
        admits = NodeFilter(slot.selector).admits
        room = next((room for room in rooms if admits(room.node) and room.fits(slot.resources)), None)
        if room is None:
            return False
        room.take(slot.resources)
        if placement is Strategy.STRICT_SPREAD:
            rooms.remove(room)
    return True


def _grown(short: Shortfall, nodes: Sequence[NodeRecord], wanted: NodeFilter, placement: Strategy) -> list[str]:
    """By how much which nodes must grow to hold the workers that find no room, each on the node that is nearest."""
    spread = placement is Strategy.STRICT_SPREAD
    at_once = placement is Strategy.STRICT_PACK or (len(short.rest) > MAX_STEPS and not spread)
    steps: list[tuple[Slot, ...]] = [short.rest] if at_once else [(slot,) for slot in short.rest]
    rooms = [short.room(node) for node in nodes if not spread or node.node_id not in short.taken]
    grown: dict[tuple[str, str], int] = {}
    added: dict[tuple[tuple[str, str], ...], int] = {}
    nearest = heapq.nsmallest(MAX_STEPS, rooms, key=lambda room: _distance(room, steps[0]))
    for step in steps:
        selector = tuple(sorted({label for slot in step for label in slot.selector}))
        admits = NodeFilter(selector).admits
        open_rooms = [room for room in (nearest if not selector else rooms) if admits(room.node)]
        if not open_rooms:
            labels = tuple(sorted({*wanted.required, *selector}))
            added[labels] = added.get(labels, 0) + 1
            continue
        best = min(open_rooms, key=lambda room: _distance(room, step))
        for resource, asked, have in lacks_for_all(best, step):
            key = (best.node.node_id, resource)
            grown[key] = grown.get(key, 0) + asked - have
        for slot in step:
            _use_up(best, slot.resources)
        if spread:
            rooms.remove(best)
            nearest = [room for room in nearest if room is not best]
    return [
        *(f"{change(resource, amount)} more {shown(resource)} on {node}" for (node, resource), amount in grown.items()),
        *_added(added.items()),
    ]


def _added(counts: Iterable[tuple[tuple[tuple[str, str], ...], int]]) -> list[str]:
    return [
        ("add a node" if count == 1 else f"add {count} nodes")
        + "".join(f" with the label {key}={value}" for key, value in labels)
        for labels, count in counts
    ]


def _distance(room: Room, slots: Sequence[Slot]) -> tuple[int, int, int]:
    """How far a node is from holding some workers."""
    short = lacks_for_all(room, slots)
    return (len(short), sum(asked - have for _, asked, have in short), room.node.rank)


def _use_up(room: Room, ask: Resources) -> None:
    """Takes what one worker needs from a node, or all there is where that is too little."""
    room.cpu_milli = max(0, room.cpu_milli - ask.cpu_milli) if ask.cpu_milli else room.cpu_milli
    room.memory_bytes = max(0, room.memory_bytes - ask.memory_bytes) if ask.memory_bytes else room.memory_bytes
    for name, milli in ask.custom_milli:
        room.custom_milli[name] = max(0, room.custom_milli.get(name, 0) - milli)
    free = room.device_milli
    if ask.gpu_milli >= MILLI:
        whole = [index for index, milli in enumerate(free) if milli >= MILLI]
        for index in whole[: ask.gpu_milli // MILLI]:
            free[index] = 0
    elif ask.gpu_milli and free:
        fitting = [index for index, milli in enumerate(free) if milli >= ask.gpu_milli]
        index = min(fitting or range(len(free)), key=lambda index: free[index] if fitting else -free[index])
        free[index] = max(0, free[index] - ask.gpu_milli)


def _unlike(nodes: Sequence[NodeRecord], most: int) -> list[NodeRecord]:
    """Of nodes that are alike while empty, as many as there are workers to place, the lowest ranks first."""
    counts: dict[tuple[object, ...], int] = {}
    few = []
    for node in nodes:
        kind = (node.capacity, len(node.devices), node.labels, node.node_group)
        count = counts.get(kind, 0)
        if count < min(most, MAX_STEPS):
            counts[kind] = count + 1
            few.append(node)
    return few
