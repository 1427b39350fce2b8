"""Workers with explicit places: they go there and nowhere else, so each place has to be free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from callboard.model.quantities import format_amount, is_piece
from callboard.model.specs import WorkerPlace
from callboard.scheduler.plan.rooms import NodeFilter, Rooms, could_return, node_closed, opening
from callboard.scheduler.plan.view import Room, View
from callboard.scheduler.records.asks import AWAITED, Slot
from callboard.scheduler.records.job_records import WorkerRecord
from callboard.scheduler.records.node_record import DeviceShare, NodeRecord
from callboard.scheduler.records.pool_records import BundleRecord, GroupRecord
from callboard.scheduler.records.refusals import Reason
from callboard.scheduler.records.wording import a_card, labelled, missing
from callboard.scheduler.state.state import State


def pin(rooms: Rooms, slots: Sequence[Slot]) -> dict[int, BundleRecord] | None:
    """Bundles of the slots that have a place, by their position, or None if one of the places is taken. Uses up
    ``rooms``."""
    bundles: dict[int, BundleRecord] = {}
    for i, slot in enumerate(slots):
        if slot.place is None:
            continue
        room = rooms.at(slot.place.node_id)
        if room is not None and not NodeFilter(slot.selector).admits(room.node):
            return None
        bundle = None if room is None else bundle_at(room.node, slot, slot.place)
        if room is None or bundle is None or not room.holds(bundle):
            return None
        room.use(bundle)
        bundles[i] = bundle
    return bundles


def bundle_at(node: NodeRecord, slot: Slot, place: WorkerPlace) -> BundleRecord | None:
    """What a worker books at its place; None if the node has no such device."""
    if any(index >= len(node.devices) for index, _ in place.devices):
        return None
    devices = tuple(DeviceShare(index, node.devices[index].id, milli) for index, milli in place.devices)
    return BundleRecord(node_id=node.node_id, resources=slot.resources, devices=devices)


def books(state: State, group: GroupRecord, index: int, slot: Slot, place: WorkerPlace) -> bool:
    """Whether a bundle of a group is exactly what a worker needs at its place."""
    bundle = group.bundles[index]
    if bundle.node_id != place.node_id or not bundle.resources.covers(slot.resources):
        return False
    node = state.nodes[place.node_id]
    if not NodeFilter(slot.selector).admits(node):
        return False
    if slot.resources.selects and not all(node.devices[index].suits(slot.resources) for index, _ in place.devices):
        return False
    return bundle_at(state.nodes[place.node_id], slot, place) == BundleRecord(
        node_id=bundle.node_id, resources=slot.resources, devices=bundle.devices
    )


def place_reasons(state: State, view: View, wanted: NodeFilter, slots: Sequence[Slot]) -> list[Reason]:
    """What is in the way of the workers that have a place, each place looked at after those before it."""
    rooms: dict[str, Room] = {}
    reasons: dict[Reason, None] = {}  # one for all workers that lack the same
    for slot in slots:
        if slot.place is None:
            continue
        node = state.nodes.get(slot.place.node_id)
        found = _node_reasons(view, wanted, node, slot, slot.place.node_id)
        if found or node is None:
            reasons |= dict.fromkeys(found)
            continue
        room = rooms.setdefault(node.node_id, view.room(node))
        lacking = _lacking(view, room, slot, slot.place)
        reasons |= dict.fromkeys(lacking)
        bundle = None if lacking else bundle_at(node, slot, slot.place)
        if bundle is not None:
            room.use(bundle)
    return list(reasons)


def place_remedies(state: State, reasons: Sequence[Reason]) -> list[str]:
    """The smallest changes that take away what :func:`place_reasons` found."""
    changes = []
    for reason in reasons:
        name = reason.subject.split("/")[1]
        short = format_amount(reason.resource, reason.asked - reason.available)
        match reason.code:
            case "NODES_MISSING":
                changes.append("add the nodes that its placement counts")
            case "NO_NODE":
                changes.append(f"start an agent with the node id {name}")
            case "INTERPRETER_NOT_ALLOWED":
                changes.append(
                    f"start the agent of {name} with --interpreter {reason.message.partition('the interpreter ')[2]}"
                )
            case "NODE_STATE" | "CORDONED" | "DRAINING":
                changes += opening(state.nodes[name])
            case "DEVICE_TAKEN":
                device = state.nodes[name].devices[int(reason.subject.rsplit("/", 1)[1])]
                changes.append(f"free {short} of device {device.id} on {name}")
            case "NODE_LACKS" if is_piece(reason.resource):
                changes.append(f"free {short} of {reason.resource} on {name}")
            case "NODE_LACKS":
                changes.append(f"{short} more {reason.resource} on {name}")
            case _:
                changes.append(f"choose other places than {name}")
    return list(dict.fromkeys(changes))


def _node_reasons(view: View, wanted: NodeFilter, node: NodeRecord | None, slot: Slot, node_id: str) -> list[Reason]:
    subject = f"nodes/{node_id}"
    if node is None and node_id.startswith(AWAITED):
        return [Reason("NODES_MISSING", "nodes/missing", "its placement needs more nodes than have joined")]
    if node is None:
        return [Reason("NO_NODE", subject, f"its placement names {node_id}, which has not joined")]
    if not wanted.admits(node):
        labels = ", ".join(f"{key}={value}" for key, value in wanted.required)
        return [Reason("LABEL_MISMATCH", subject, f"its placement names {node_id}, which lacks {labels}")]
    if not NodeFilter(slot.selector).admits(node):
        message = f"{slot.component}/{slot.rank} must run on {node_id}, which does not allow {labelled(slot.selector)}"
        return [Reason("INTERPRETER_NOT_ALLOWED", subject, message)]
    if view.assumption.empty and could_return(node):
        return []
    return [
        replace(closed, message=f"its placement names {node_id}, which {closed.message.removeprefix(node_id)[1:]}")
        for closed in node_closed(node, ())
    ]


def _lacking(view: View, room: Room, slot: Slot, place: WorkerPlace) -> list[Reason]:
    node = room.node
    who = f"{slot.component}/{slot.rank}"
    reasons = []
    for index, milli in place.devices:
        subject = f"nodes/{node.node_id}/devices/{index}"
        if index >= len(node.devices):
            message = f"{who} must have device {index} of {node.node_id}, which has {len(node.devices)}"
            reasons.append(Reason("NO_DEVICE", subject, message, "gpu", index + 1, len(node.devices)))
        elif not node.devices[index].suits(slot.resources):
            device = node.devices[index]
            message = (
                f"{who} must have device {device.id} of {node.node_id}, {a_card(device.model, device.memory_bytes)}, "
                f"and asks for a GPU of {slot.resources.card}"
            )
            reasons.append(Reason("NO_DEVICE", subject, message, "gpu", milli, 0))
        elif room.device_milli[index] < milli:
            free = max(0, room.device_milli[index])
            users = _used_by(view, node, partial(_has_device, index=index))
            message = (
                f"{who} must have {format_amount('gpu', milli)} of device {node.devices[index].id} on {node.node_id}, "
                f"of which {format_amount('gpu', free)} is free{users}"
            )
            reasons.append(Reason("DEVICE_TAKEN", subject, message, "gpu", milli, free))
    free_now = room.free()
    for resource, asked in slot.resources.items():
        have = max(0, free_now.get(resource))
        if resource == "gpu" or have >= asked:
            continue
        message = f"{node.node_id} lacks {missing(resource, asked, have)} for {who}"
        if is_piece(resource):
            message = (
                f"{who} must have {format_amount(resource, asked)} of {resource} on {node.node_id}, of which "
                f"{format_amount(resource, have)} is free{_used_by(view, node, partial(_has_piece, piece=resource))}"
            )
        reasons.append(Reason("NODE_LACKS", f"nodes/{node.node_id}", message, resource, asked, have))
    return reasons


def _has_device(worker: WorkerRecord, index: int) -> bool:
    return any(share.index == index for share in worker.devices)


def _has_piece(worker: WorkerRecord, piece: str) -> bool:
    return worker.resources.get(piece) > 0


def _used_by(view: View, node: NodeRecord, uses: Callable[[WorkerRecord], bool]) -> str:
    if view.assumption.empty:
        return ""
    state = view.state
    jobs = dict.fromkeys(
        state.jobs[worker.job].name
        for worker in state.workers_on(node.node_id)
        if worker.job in state.jobs and uses(worker)
    )
    return f"; {', '.join(jobs)} {'uses' if len(jobs) == 1 else 'use'} it" if jobs else ""
