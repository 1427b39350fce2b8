"""Nodes on the screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from callboard.cli.show import tables, words
from callboard.model.quantities import format_memory, format_milli
from callboard.v1.common_pb2 import PreloadState
from callboard.v1.node_pb2 import DeviceUse, Node


def node_table(nodes: Sequence[Node], *, wide: bool) -> Table:
    columns = ["RANK", "NODE", "STATE", "CPU", "GPU", "MEMORY", "ON GPUS", "LABELS", "WHY"]
    if wide:
        columns = [*columns[:-1], "HOST", "ADDRESS", "RUNTIME", "EPOCH", "VERSION", "RAY NODE", "WHY"]
    rows: list[list[RenderableType]] = []
    for node in nodes:
        row: list[RenderableType] = [
            str(node.rank),
            words.node_id(node),
            tables.state_text(words.node_state(node)),
            words.share(node.used, node.capacity, "cpu"),
            words.share(node.used, node.capacity, "gpu") + (" simulated" if node.simulated else ""),
            words.share(node.used, node.capacity, "memory"),
            ", ".join(words.jobs_on(node)),
            words.labels(node.labels),
        ]
        if wide:
            head = " (head)" if node.ray_head else ""
            row += [node.hostname, node.address + head, node.runtime, str(node.epoch), node.version, node.ray_node_id]
        rows.append([*row, words.kill_in(node) if words.node_state(node) == "READY" else words.node_why(node)])
    return tables.table(columns, rows, right=("RANK", "EPOCH"))


def node_view(node: Node, *, wide: bool) -> Group:
    found: list[tuple[str, RenderableType]] = [
        ("Node", words.node_id(node)),
        ("State", tables.state_text(words.node_state(node))),
        ("Why", words.node_why(node)),
        ("Rank", str(node.rank)),
        ("Has", words.amounts(node.capacity) + (" (simulated GPUs)" if node.simulated else "")),
        ("Used", words.amounts(node.used)),
        ("Quarantined", words.amounts(node.quarantined)),
        ("Labels", words.labels(node.labels)),
        *(("Preloads", _preload(state)) for state in node.preloads),
        ("Host", node.hostname),
        ("Hosts workers as", {"ray": "Ray actors", "process": "plain processes"}.get(node.runtime, node.runtime)),
    ]
    if wide:
        found += [
            ("Address", node.address + (" (Ray's head)" if node.ray_head else "")),
            ("Ray node", node.ray_node_id),
            ("Epoch", str(node.epoch)),
            ("Version", node.version),
            ("Ray", node.ray_version),
            ("Python", node.python_version),
            ("Revision", str(node.revision)),
        ]
    parts: list[RenderableType] = [tables.facts((name, value) for name, value in found if value not in ("", "nothing"))]
    if node.devices:
        columns = ["GPU", *(_HARDWARE if wide else ()), *_USE]
        rows = [_device_row(use, wide=wide) for use in node.devices]
        parts += ["", tables.table(columns, rows, right=("INDEX", "NUMA"))]
        parts += _connections(node.devices)
        parts += [Text(f"GPU {use.device.id}: {_seen(use)}", style="yellow") for use in node.devices if _seen(use)]
    return Group(*parts)


_DISTANCES = ("?", "–", "NVLink", "switch", "switches", "bridge", "NUMA", "system")
"""What is between two GPUs, as ``DeviceDistance`` numbers it."""


def _connections(devices: Sequence[DeviceUse]) -> list[RenderableType]:
    """How each GPU of a node is connected with each other one; nothing: nobody told."""
    known = [use.device for use in devices if len(use.device.distances) == len(devices)]
    if len(known) < 2:
        return []
    between = {far for device in known for i, far in enumerate(device.distances) if i != device.index}
    if len(between) == 1:
        return ["", Text(f"Between each two GPUs: {_DISTANCES[between.pop()]}")]
    rows: list[list[RenderableType]] = [[each.id, *(_DISTANCES[far] for far in each.distances)] for each in known]
    return ["", tables.table(["BETWEEN", *(use.device.id for use in devices)], rows)]


def _seen(use: DeviceUse) -> str:
    """Why a GPU takes no new work, or what is unusual about it; empty: nothing."""
    state = use.state
    return f"takes no new work: {state.closed}" if state.closed else state.warning


def _preload(state: PreloadState) -> str:
    """ "torch: 2 spares ready, 568MiB", or why there are none."""
    modules = ", ".join(state.modules)
    if state.refused:
        return f"{modules}: none here, {state.refused}"
    return f"{modules}: {state.ready} spares ready, {format_memory(state.memory_bytes >> 20 << 20)}"


def device_table(nodes: Sequence[Node]) -> Table:
    """A row per GPU of every node: where a placement's position leads, and which hardware that is."""
    rows = [[words.node_id(node), *_device_row(use, wide=True)] for node in nodes for use in node.devices]
    columns = ["NODE", "GPU", *_HARDWARE, *_USE]
    return tables.table(columns, rows, right=("INDEX", "NUMA"))


_USE = ("USED", "KEPT", "QUARANTINED", "MEMORY ASKED", "WORKERS")
_HARDWARE = ("INDEX", "UUID", "BUS ID", "MODEL", "MEMORY", "NUMA")
"""The index is the position in the node's visible list, by which placements count; GPU is what workers see it as."""


def _asked_memory(use: DeviceUse) -> str:
    """ "60GiB/140GiB" of a GPU's memory; empty: nobody asked for any."""
    asked = use.promised_memory_bytes
    return f"{format_memory(asked)}/{format_memory(use.device.memory_bytes)}" if asked else ""


def _device_row(use: DeviceUse, *, wide: bool) -> list[RenderableType]:
    device = use.device
    hardware = [
        str(device.index),
        device.uuid,
        device.bus_id,
        device.model,
        format_memory(device.memory_bytes) if device.memory_bytes else "",
        str(device.numa_node) if device.numa_node >= 0 else "",
    ]
    workers = ", ".join(f"{worker.job}/{worker.component}/{worker.rank}" for worker in use.workers)
    amounts = (use.used_milli, use.held_milli, use.quarantined_milli)
    return [
        device.id,
        *(hardware if wide else ()),
        *(format_milli(amount) if amount else "" for amount in amounts),
        _asked_memory(use),
        workers,
    ]
