"""The blockers of a job: quotas, group rules and nodes, each with what it lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from callboard.model.quantities import MILLI, format_amount, format_memory
from callboard.model.specs import JobSpec, Labels, StopPolicy, Strategy
from callboard.scheduler.account.shortfall import Lack, Shortfall, Together, lacks, lacks_for_all, shortfall
from callboard.scheduler.plan.grouping import charged_beside, new_kind, reuse, together
from callboard.scheduler.plan.pinned import place_reasons
from callboard.scheduler.plan.quota import shortages
from callboard.scheduler.plan.rooms import OPENS_AGAIN, NodeFilter, could_return, node_closed
from callboard.scheduler.plan.view import Room, View
from callboard.scheduler.records.asks import INTERPRETER, Ask, Slot, asks_of
from callboard.scheduler.records.node_record import DeviceInfo, NodeRecord
from callboard.scheduler.records.refusals import Reason
from callboard.scheduler.records.states import GroupKind
from callboard.scheduler.records.wording import a_card, asked, join, labelled, missing
from callboard.scheduler.records.wording import workers as words_of
from callboard.scheduler.state.state import State

MAX_SUBJECTS = 50
"""Most nodes or victims named one by one in an account; the rest is counted."""

_SHOWN_CARDS = 4
"""GPUs of a node of which is told how much memory is free."""

_SHOWN_CLOSED = 2
"""Devices of a node whose reason for taking no work is told."""


def blockers(state: State, view: View, spec: JobSpec) -> list[Reason]:
    """Quotas that are short, group rules that say no, nodes that lack something; only what is in the way."""
    reasons: list[Reason] = []
    asks = asks_of(spec)
    to_place: list[Ask] = []
    for ask in asks:
        pool = state.pools.get(ask.pool)
        if pool is None:
            reasons.append(Reason("NO_POOL", f"pools/{ask.pool}", f"pool {ask.pool} does not exist"))
            continue
        if pool.deleting or pool.spec.stop_policy is not StopPolicy.NONE:
            what = "is being deleted" if pool.deleting else f"admits nothing (stop policy {pool.spec.stop_policy})"
            reasons.append(Reason("POOL_HELD", f"pools/{ask.pool}", f"pool {ask.pool} {what}"))
        reasons += _quota_reasons(view, state, asks, ask)
        if reuse(state, view, spec, ask) is None:
            reasons += group_reasons(state, view, ask)
            to_place.append(ask)
    if to_place:
        reasons += _node_reasons(state, view, spec, to_place)
    return reasons


def _quota_reasons(view: View, state: State, asks: Sequence[Ask], ask: Ask) -> list[Reason]:
    spec = state.pools[ask.pool].spec
    reasons = []
    for short in shortages(state.pools, charged_beside(view.charged, asks, ask), spec, ask.resources):
        resource, nominal = short.resource, dict(spec.nominal)[short.resource]
        own, used = format_amount(resource, nominal), format_amount(resource, short.used)
        lent = f"other pools lend at most {format_amount(resource, short.limit - nominal)}"
        if view.assumption.empty:
            held = f"its quota is {own} {resource}{f' and {lent}' if spec.cohort else ''}"
        elif spec.cohort:
            left = format_amount(resource, short.available)
            held = f"{used} {resource} used (its own quota is {own}, {lent}); {left} left"
        else:
            held = f"{used} of {own} {resource} used"
        each = [slot.resources.get(resource) for slot in ask.slots]
        several = sum(amount > 0 for amount in each) > 1
        wants = f"asks for {asked(resource, each)}" if several else f"asks {format_amount(resource, short.asked)}"
        message = f"pool {ask.pool}: {held}, {wants}"
        reasons.append(Reason("QUOTA_SHORT", f"pools/{ask.pool}", message, resource, short.asked, short.available))
    return reasons


def group_reasons(state: State, view: View, ask: Ask) -> list[Reason]:
    spec = state.pools[ask.pool].spec.pg_pool
    kind = new_kind(spec)
    count = view.dynamic_groups(ask.pool)
    if kind is None:
        message = f"pool {ask.pool} makes no groups on demand and no kept group is free and fits"
        return [Reason("NO_DYNAMIC_GROUPS", f"pools/{ask.pool}", message)]
    if kind is GroupKind.DYNAMIC and count >= spec.max_dynamic:
        message = f"pool {ask.pool} has {count} of {spec.max_dynamic} dynamic groups and none is free and fits"
        return [Reason("MAX_DYNAMIC", f"pools/{ask.pool}", message, "", spec.max_dynamic + 1, spec.max_dynamic)]
    return []


def _node_reasons(state: State, view: View, spec: JobSpec, asks: Sequence[Ask]) -> list[Reason]:
    """What each node lacks for the workers of some asks; empty when they fit."""
    wanted, slots = together(state, spec, asks)
    short = shortfall(state, view, wanted, slots, spec.placement)
    if short is None:
        return []
    reasons: list[Reason] = place_reasons(state, view, wanted, slots)
    if reasons:
        return reasons  # how the others fit is seen once these have their places
    if not state.nodes:
        return [Reason("NO_NODES", "nodes", "no node has joined")]
    unmet = _unmet_selectors(list(state.nodes.values()), slots)
    if unmet:
        return unmet
    closed = view.assumption.closed
    nodes = sorted((node for node in state.nodes.values() if node.node_id not in closed), key=lambda node: node.rank)
    if not nodes:
        message = f"by {short.strategy} the next worker needs another node, and there is none"
        return [Reason("ONE_EACH", "nodes", message)]
    for node in nodes[:MAX_SUBJECTS]:
        reasons += _one_node(short, node, wanted)
    if len(nodes) > MAX_SUBJECTS:
        reasons.append(Reason("MORE_NODES", "nodes", f"and {len(nodes) - MAX_SUBJECTS} nodes more"))
    largest = _largest(state, view, slots)
    if largest is not None:
        reasons.insert(0, largest)
    if short.placed:
        count, placed = len(slots), short.placed
        reasons.insert(0, Reason("ROOM_FOR", "nodes", f"room for {placed} of {count} workers", "", count, placed))
    return reasons


def _unmet_selectors(nodes: Sequence[NodeRecord], slots: Sequence[Slot]) -> list[Reason]:
    """Components whose labels no node has, or whose interpreter no node allows."""
    reasons = []
    for component, selector in {slot.component: slot.selector for slot in slots if slot.selector}.items():
        if any(NodeFilter(selector).admits(node) for node in nodes):
            continue
        foreign = unallowed_interpreter(nodes, selector)
        if foreign:
            message = f"no node allows the interpreter {foreign}, which {component} names"
            reasons.append(Reason("INTERPRETER_NOT_ALLOWED", "nodes", message))
        else:
            message = f"no node has {labelled(selector)}, which {component} asks for"
            reasons.append(Reason("LABEL_MISMATCH", "nodes", message))
    return reasons


def unallowed_interpreter(nodes: Iterable[NodeRecord], selector: Labels) -> str:
    """The interpreter of a selector if no node allows it; empty: it names none, or a node does."""
    path = dict(selector).get(INTERPRETER, "")
    return path if path and not any(path in node.interpreters for node in nodes) else ""


def _one_node(short: Shortfall, node: NodeRecord, wanted: NodeFilter) -> list[Reason]:
    """What a node lacks for the workers that find no room, beside those that do."""
    subject, view = f"nodes/{node.node_id}", short.view
    # Where the first of them asks for labels of its own, nodes without them are no help.
    closed = node_closed(node, (*wanted.required, *short.rest.slots[0].selector))
    if closed and not (view.assumption.empty and could_return(node) and closed[0].code in OPENS_AGAIN):
        return closed
    room = short.room(node)
    workers = short.rest
    if short.strategy is not Strategy.STRICT_SPREAD:
        lacking = lacks_for_all(room, workers)
    elif node.node_id in short.apart:
        return [Reason("ONE_EACH", subject, f"{node.node_id} can hold one worker, and by STRICT_SPREAD no more")]
    else:
        workers = Together.of(workers.slots[:1])
        lacking = lacks(room, workers.ask)
    return [
        Reason("NODE_LACKS", subject, _lacks_what(view, room, workers, lack), lack[0], lack[1], lack[2])
        for lack in lacking
    ]


def _lacks_what(view: View, room: Room, workers: Together, lack: Lack) -> str:
    """What a node lacks, with the need and what is free where the one figure doesn't say it all: for several workers,
    and for GPUs that are free in parts only."""
    resource, need, have = lack
    if resource == "gpu_memory":
        return _lacks_memory(view, room, workers, need - have)
    several = words_of(resource, [slot.resources.get(resource) for slot in workers.slots])
    short = f"{room.node.node_id} lacks {missing(resource, need, have)}{f' for {several}' if several else ''}"
    held = _quarantined(view, room.node, resource)
    details = [f"{format_amount(resource, have)} free"] if several and have else []
    if resource == "gpu" and room.device_milli:
        free, whole = sum(max(0, milli) for milli in room.device_milli), room.whole_devices()
        if need < MILLI and not several:
            short += " on one GPU"
            in_all = f", all together {format_amount('gpu', free)}" if free > have else ""
            details = [
                f"needs {format_amount('gpu', need)}",
                f"the emptiest has {format_amount('gpu', have)} free{in_all}",
            ]
        elif free > whole * MILLI:
            parts = format_amount("gpu", free - whole * MILLI)
            details = [f"needs {format_amount('gpu', need)}", f"{whole} whole free and {parts} in parts"]
    selecting = dict.fromkeys(slot.resources.card for slot in workers.slots if slot.resources.selects)
    if resource == "gpu" and selecting:
        details = [f"only {' and '.join(selecting)} will do", f"its GPUs: {_cards(room.node)}"]
    return f"{short}{held}{f' ({join(details)})' if details else ''}"


def _lacks_memory(view: View, room: Room, workers: Together, short_bytes: int) -> str:
    """What a node lacks of its GPUs' memory, with what each of them has."""
    node, (first, *more) = room.node, [slot.resources for slot in workers.slots if slot.resources.gpu_memory_bytes]
    each = format_memory(first.each_gpu_memory_bytes)
    if not any(ask.gpu_milli for ask in (first, *more)):
        return f"a worker asks {each} gpu_memory and no GPU"
    if not node.capacity.gpu_memory_bytes:
        what = "has no GPU" if not node.devices else "does not report how much memory its GPUs have"
        return f"{node.node_id} {what} ({each} asked)"
    cards = sorted(enumerate(node.devices), key=lambda card: (-room.free_bytes(card[0]), card[0]))
    told = [_card(view, room, index, device) for index, device in cards[:_SHOWN_CARDS]]
    if len(cards) > _SHOWN_CARDS:
        told.append(f"{len(cards) - _SHOWN_CARDS} more have no more")
    count = max(1, first.gpu_milli // MILLI)
    needs = f"{f'{1 + len(more)} workers need' if more else 'needs'} {each}{' each' if more else ''}"
    needs += " on one GPU" if count == 1 else f" on each of {count} GPUs"
    return f"{node.node_id} lacks {format_memory(short_bytes)} gpu_memory ({needs}; {', '.join(told)})"


def _card(view: View, room: Room, index: int, device: DeviceInfo) -> str:
    """What is free of one GPU and its memory."""
    model = f" ({device.model})" if device.model else ""
    if view.assumption.empty:
        return f"GPU {device.id}{model} has {format_memory(device.memory_bytes)}"
    free = format_memory(max(0, room.free_bytes(index)))
    part = max(0, room.device_milli[index])
    held = "" if part == MILLI else f" and {format_amount('gpu', part)} of the GPU"
    return f"GPU {device.id}{model} has {free} of {format_memory(device.memory_bytes)}{held} free"


def _cards(node: NodeRecord) -> str:
    """What the GPUs of a node are: "4 × NVIDIA H200 with 141GiB"."""
    counts = Counter(a_card(device.model, device.memory_bytes) for device in node.devices)
    told = [f"{count} × {what}" for what, count in counts.most_common(_SHOWN_CARDS)]
    return " and ".join(told) if told else "none"


def _quarantined(view: View, node: NodeRecord, resource: str) -> str:
    """That some of what a node lacks is there, but held by a process that can't be proved gone."""
    amount = 0 if view.assumption.empty else view.state.node_use(node.node_id).quarantined.get(resource)
    if not amount:
        return ""
    closed = node.closed if resource == "gpu" else ()
    whys = [f"GPU {node.devices[index].id} takes no new work: {why}" for index, why in closed[:_SHOWN_CLOSED]]
    more = [f"{len(closed) - _SHOWN_CLOSED} more take none"] if len(closed) > _SHOWN_CLOSED else []
    return f" ({'; '.join([f'{format_amount(resource, amount)} quarantined', *whys, *more])})"


def _largest(state: State, view: View, slots: Sequence[Slot]) -> Reason | None:
    """For a worker larger than any node: "largest node has 1" (PG-08)."""
    biggest = max(slots, key=lambda slot: slot.resources.gpu_milli).resources
    capacity = max((node.capacity.gpu_milli for node in state.nodes.values()), default=0)
    if not view.assumption.empty or biggest.gpu_milli <= capacity:
        return None
    message = (
        f"one worker asks {format_amount('gpu', biggest.gpu_milli)} GPU, "
        f"the largest node has {format_amount('gpu', capacity)}"
    )
    return Reason("LARGEST_NODE", "nodes", message, "gpu", biggest.gpu_milli, capacity)
