"""The remedies: the smallest changes that would let a job start."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from callboard.model.quantities import MILLI, Resources, format_amount, total
from callboard.model.specs import JobSpec, Labels, PoolSpec, StopPolicy, Strategy
from callboard.scheduler.account.blockers import group_reasons, unallowed_interpreter
from callboard.scheduler.account.shortfall import Shortfall, Together, lacks_for_all, shortfall
from callboard.scheduler.plan.grouping import charged_beside, new_kind, reuse, together
from callboard.scheduler.plan.pinned import place_reasons, place_remedies
from callboard.scheduler.plan.quota import Charged, Pools, Shortage, shortages, usable
from callboard.scheduler.plan.rooms import NodeFilter, could_return, opening
from callboard.scheduler.plan.view import Room, View
from callboard.scheduler.records.asks import INTERPRETER, Ask, asks_of
from callboard.scheduler.records.node_record import NodeRecord
from callboard.scheduler.records.pool_records import PoolRecord
from callboard.scheduler.records.states import NodeState
from callboard.scheduler.records.wording import change, shown
from callboard.scheduler.state.node_kinds import cards
from callboard.scheduler.state.state import State

MAX_STEPS = 64
"""Most workers whose room is looked for one by one, and most nodes that are looked at for each of them."""


def remedies(state: State, spec: JobSpec, view: View) -> tuple[str, ...]:
    """Smallest changes, each of which removes one thing that is in the way; all together let the job start."""
    changes: list[str] = []
    asks = asks_of(spec)
    to_place: list[Ask] = []
    for ask in asks:
        pool = state.pools.get(ask.pool)
        if pool is None or pool.deleting:
            changes.append(f"create pool {ask.pool}" + (" once it is gone" if pool else ""))
            continue
        if pool.spec.stop_policy is not StopPolicy.NONE and not view.assumption.empty:
            changes.append(f"set the stop_policy of pool {ask.pool} to none")
        charged = charged_beside(view.charged, asks, ask)
        for short in shortages(state.pools, charged, pool.spec, ask.resources):
            more = change(short.resource, _least_raise(state.pools, charged, pool, short))
            changes.append(f"raise pool {ask.pool} {short.resource} by {more}")
        if reuse(state, view, spec, ask) is None:
            changes += _group_change(state, view, ask, pool.spec)
            to_place.append(ask)
    if to_place:
        changes += _node_change(state, view, spec, to_place)
    return tuple(dict.fromkeys(changes))


def _least_raise(pools: Pools, charged: Charged, pool: PoolRecord, short: Shortage) -> int:
    """By how much the quota must rise, by bisection: where a pool or its cohort uses more than it has, that counts
    too."""
    resource, nominal = short.resource, dict(pool.spec.nominal)

    def is_enough(more: int) -> bool:
        raised = tuple(sorted({**nominal, resource: nominal[resource] + more}.items()))
        record = replace(pool, spec=replace(pool.spec, nominal=raised))
        others = {**pools, record.spec.name: record}
        return usable(others, charged, record.spec, resource, short.used) >= short.asked

    low = short.asked - short.available
    high = low
    while not is_enough(high):
        low, high = high + 1, high * 2
    return low + bisect_left(range(low, high), True, key=is_enough)


def _group_change(state: State, view: View, ask: Ask, pool: PoolSpec) -> list[str]:
    if not group_reasons(state, view, ask):
        return []
    changes = []
    if new_kind(pool.pg_pool) is None:
        changes.append(f"let pool {ask.pool} make groups on demand (pg_pool.dynamic)")
    more = view.dynamic_groups(ask.pool) + 1 - pool.pg_pool.max_dynamic
    if more > 0:
        changes.append(f"raise pool {ask.pool} max_dynamic by {more}")
    return changes


def _node_change(state: State, view: View, spec: JobSpec, asks: Sequence[Ask]) -> list[str]:
    wanted, slots = together(state, spec, asks)
    short = shortfall(state, view, wanted, slots, spec.placement)
    if short is None:
        return []
    missing_places = place_reasons(state, view, wanted, slots)
    if missing_places:
        return place_remedies(state, missing_places)
    foreign = dict.fromkeys(unallowed_interpreter(state.nodes.values(), slot.selector) for slot in slots)
    if any(foreign):
        return [f"start an agent with --interpreter {path}" for path in foreign if path]
    shut = view.assumption.closed
    fitting = [node for node in state.nodes.values() if wanted.admits(node) and node.node_id not in shut]
    fitting.sort(key=lambda node: node.rank)
    if view.assumption.empty:  # cordoned nodes count there
        here = _unlike([node for node in fitting if could_return(node)], len(short.rest.slots))
        away = [node for node in fitting if node.state is NodeState.LOST]
    else:
        here = [node for node in fitting if node.usable]
        away = [node for node in fitting if not node.usable and node.state in _EFFORTS]
    for effort in range(len(_EFFORTS)):
        # The nodes that are easiest to open come first, and only as many as are needed.
        closed = sorted((node for node in away if _effort(node) <= effort), key=_effort)
        opened = _fewest(short, closed)
        if opened:
            return [change for node in opened for change in opening(node)]
        if effort == 0 and not view.assumption.empty and (shut_devices := _devices_to_open(short, here)):
            return shut_devices
    return _grown(short, here, wanted)


_EFFORTS = (NodeState.READY, NodeState.DRAINING, NodeState.JOINING, NodeState.SUSPECT, NodeState.LOST)
"""States of nodes by how easily they are opened. One that left said goodbye: nobody waits for it."""


def _effort(node: NodeRecord) -> int:
    """How much it takes until a node takes work again."""
    return _EFFORTS.index(node.state)


def _fewest(short: Shortfall, nodes: Sequence[NodeRecord]) -> list[NodeRecord]:
    """The fewest of some unused nodes that hold the workers which find no room, first fit; empty: all of them don't."""
    for node in nodes:
        if _hold(short, [node]):
            return [node]
    if short.strategy is Strategy.STRICT_PACK or not _hold(short, nodes):
        return []
    needed = list(nodes)
    for node in reversed(nodes):
        rest = [other for other in needed if other is not node]
        if rest and _hold(short, rest):
            needed = rest
    return needed


def _devices_to_open(short: Shortfall, nodes: Sequence[NodeRecord]) -> list[str]:
    """Devices that take no new work now and are all that is missing, each with what its agent says of it; empty: there
    are none."""
    shut = [node for node in nodes if node.closed][:MAX_STEPS]
    for some in [*([node] for node in shut), shut]:
        rooms = [_unclosed(short.room(node), node) for node in some]
        if rooms and (used := _held(short, rooms)) is not None:
            return [
                f"open GPU {node.devices[index].id} of {node.node_id}: {why}"
                for node in some
                for index, why in node.closed
                if (node.node_id, index) in used
            ]
    return []


def _unclosed(room: Room, node: NodeRecord) -> Room:
    """What would be free on a node if all its devices took work."""
    found = copy(room)
    found.device_milli, found.custom_milli, found.taken_bytes = (
        list(room.device_milli),
        dict(room.custom_milli),
        dict(room.taken_bytes),
    )
    for index, _ in node.closed:
        if index < len(found.device_milli):
            found.device_milli[index] += MILLI
    return found


def _hold(short: Shortfall, nodes: Sequence[NodeRecord]) -> bool:
    return _held(short, [short.view.room(node) for node in nodes]) is not None


def _held(short: Shortfall, rooms: list[Room]) -> set[tuple[str, int]] | None:
    """(node, device) of what the workers that find no room would use of these rooms, first fit; None: they don't fit.
    Uses up the rooms."""
    used: set[tuple[str, int]] = set()
    for slot in short.rest.slots:
        admits = NodeFilter(slot.selector).admits
        room = next((room for room in rooms if admits(room.node) and room.fits(slot.resources)), None)
        if room is None:
            return None
        used |= {(room.node.node_id, share.index) for share in room.take(slot.resources)}
        if short.strategy is Strategy.STRICT_SPREAD:
            rooms.remove(room)
    return used


def _grown(short: Shortfall, nodes: Sequence[NodeRecord], wanted: NodeFilter) -> list[str]:
    """By how much which nodes must grow to hold the workers that find no room, each on the node that is nearest."""
    spread = short.strategy is Strategy.STRICT_SPREAD
    at_once = short.strategy is Strategy.STRICT_PACK or (len(short.rest.slots) > MAX_STEPS and not spread)
    steps = [short.rest] if at_once else [Together.of([slot]) for slot in short.rest.slots]
    rooms = [short.room(node) for node in nodes if not spread or node.node_id not in short.apart]
    grown: dict[tuple[str, str], int] = {}
    advised: dict[str, None] = {}
    added: dict[Labels, list[Resources]] = {}
    nearest = heapq.nsmallest(MAX_STEPS, rooms, key=lambda room: _distance(room, steps[0]))
    for step in steps:
        selector = tuple(sorted({label for slot in step.slots for label in slot.selector}))
        admits = NodeFilter(selector).admits
        open_rooms = [room for room in (nearest if not selector else rooms) if admits(room.node)]
        if not open_rooms:
            labels = tuple(sorted({*wanted.required, *selector}))
            if dict(labels).get("node"):
                return [f"start an agent with the node id {dict(labels)['node']}"]
            added.setdefault(labels, []).append(step.ask)
            continue
        best = min(open_rooms, key=lambda room: _distance(room, step))
        for resource, asked, have in lacks_for_all(best, step):
            if resource == "gpu" and (advice := _card_advice(best, step)):
                advised.setdefault(advice)
                continue
            if resource == "gpu_memory" and (advice := _memory_advice(best, step)):
                advised.setdefault(advice)
                continue
            key = (best.node.node_id, resource)
            missing = asked - have
            grown[key] = grown.get(key, 0) + (-(-missing // MILLI) * MILLI if resource == "gpu" else missing)
        for slot in () if at_once else step.slots:  # nobody comes after all at once
            _use_up(best, slot.resources)
        if spread:
            rooms.remove(best)
            nearest = [room for room in nearest if room is not best]
    return [
        *advised,
        *(f"{change(resource, amount)} more {shown(resource)} on {node}" for (node, resource), amount in grown.items()),
        *(_added(labels, asks, short.strategy) for labels, asks in added.items()),
    ]


def _added(labels: Labels, asks: Sequence[Resources], placement: Strategy) -> str:
    """Which nodes are missing altogether: one for all these workers, or by STRICT_SPREAD one for each."""
    allowing = "".join(f" that allows the interpreter {value}" for key, value in labels if key == INTERPRETER)
    labels = tuple(label for label in labels if label[0] != INTERPRETER)
    keys = [key for key, _ in labels]
    twice = [f"{key}={value}" for key, value in labels if keys.count(key) > 1]
    if twice:
        return f"ask for one of {' and '.join(twice)}, since no node can have both"
    labelled = "".join(f" with the label {key}={value}" for key, value in labels) + allowing
    selecting = dict.fromkeys(ask.card for ask in asks if ask.selects)
    gpus = f" with GPUs of {' and '.join(selecting)}" if selecting else ""
    if placement is Strategy.STRICT_SPREAD and len(asks) > 1:
        names = dict.fromkeys(name for ask in asks for name, _ in ask.items())
        each = Resources.from_items([(name, max(ask.get(name) for ask in asks)) for name in names])
        return f"add {len(asks)} nodes{labelled}{gpus}, each with {_amounts(each)} free"
    return f"add a node{labelled}{gpus}, with {_amounts(total(asks))} free"


def _amounts(ask: Resources) -> str:
    return ", ".join(f"{format_amount(name, amount)} {shown(name)}" for name, amount in ask.items()) or "anything"


def _distance(room: Room, workers: Together) -> tuple[bool, int, int, int]:
    """How far a node is from holding some workers; farthest if it has no GPU of those they are for."""
    short = lacks_for_all(room, workers)
    return (
        bool(_card_advice(room, workers)),
        len(short),
        sum(asked - have for _, asked, have in short),
        room.node.rank,
    )


def _card_advice(room: Room, workers: Together) -> str:
    """What helps where a node has too few GPUs of those that workers are for, whoever uses them; empty: it has
    enough."""
    for ask in dict.fromkeys(slot.resources for slot in workers.slots if slot.resources.selects):
        count = max(1, ask.gpu_milli // MILLI)
        if sum(device.suits(ask) for device in room.node.devices) < count:
            if not ask.gpu_milli:
                return f"state gpu beside what GPU it is to be ({ask.card}): `gpu: 1` for a whole one"
            here = dict.fromkeys(device.model for device in room.node.devices if device.model)
            other = f" ({', '.join(list(here)[:4])})" if here else ""
            return f"ask for other GPUs{other}, or add a node with {count} of {ask.card}"
    return ""


def _memory_advice(room: Room, workers: Together) -> str:
    """What helps where a node's GPUs could not have the memory even while nobody uses them; empty: they could."""
    asks = [slot.resources for slot in workers.slots if slot.resources.gpu_memory_bytes]
    biggest = max(asks, key=lambda ask: ask.each_gpu_memory_bytes)
    each = biggest.each_gpu_memory_bytes
    if not biggest.gpu_milli:
        return "state gpu beside gpu_memory: `gpu: 0.5` for a part of one, `gpu: 1` for a whole one"
    if not room.node.capacity.gpu_memory_bytes:
        return f"leave gpu_memory out, or add a node whose GPUs report {format_amount('gpu_memory', each)}"
    most = max(device.memory_bytes for device in room.node.devices)
    if each <= most:
        return ""
    largest, asked = format_amount("gpu_memory", most), format_amount("gpu_memory", each)
    return f"ask for at most {largest} of gpu_memory on each GPU, or add a node whose GPUs have {asked}"


def _use_up(room: Room, ask: Resources) -> None:
    """Takes what one worker needs from a node, or all there is where that is too little. Devices come whole."""
    room.cpu_milli = max(0, room.cpu_milli - ask.cpu_milli) if ask.cpu_milli else room.cpu_milli
    room.memory_bytes = max(0, room.memory_bytes - ask.memory_bytes) if ask.memory_bytes else room.memory_bytes
    for name, milli in ask.custom_milli:
        room.custom_milli[name] = max(0, room.custom_milli.get(name, 0) - milli)
    free = room.device_milli
    gpus = Resources(gpu_milli=ask.gpu_milli, gpu_memory_bytes=ask.gpu_memory_bytes).on_gpus_of(ask)
    if (ask.gpu_memory_bytes or ask.selects) and room.fits(gpus):
        room.take(gpus)
        return
    if ask.gpu_milli >= MILLI:
        whole = [index for index, milli in enumerate(free) if milli >= MILLI]
        for index in whole[: ask.gpu_milli // MILLI]:
            free[index] = 0
    elif ask.gpu_milli:
        fitting = [index for index, milli in enumerate(free) if milli >= ask.gpu_milli]
        if fitting:
            free[min(fitting, key=lambda index: free[index])] -= ask.gpu_milli
        else:  # on the device that comes
            free.append(MILLI - ask.gpu_milli)


def _unlike(nodes: Sequence[NodeRecord], most: int) -> list[NodeRecord]:
    """Of nodes that are alike while empty, as many as there are workers to place, the lowest ranks first."""
    counts: dict[tuple[object, ...], int] = {}
    few = []
    for node in nodes:
        kind = (node.capacity, cards(node), node.labels, node.node_group)
        count = counts.get(kind, 0)
        if count < min(most, MAX_STEPS):
            counts[kind] = count + 1
            few.append(node)
    return few
