"""Nodes that a config describes (``nodes: 8+8``, or a list), for use without a controller."""

from __future__ import annotations

from callboard.model.faults import InvalidInput
from callboard.model.inputs.located import Refused, shown_text
from callboard.model.inputs.scalars import interpreter as read_interpreter
from callboard.model.names import is_label, is_name
from callboard.model.quantities import QuantityError, parse_memory, parse_milli
from callboard.model.specs import Labels
from callboard.placement.cluster.cluster import Accelerator, Cluster, HardwareUnit, Node
from callboard.placement.source import fields
from callboard.placement.source.diagnostics import Report
from callboard.placement.source.tree import Items, Leaf, Table, Value, kind_of

MAX_ACCELERATORS = 1024
"""Most accelerators of a described node."""

_NODE_KEYS = (
    "node_id",
    "rank",
    "accelerators",
    "accelerator_type",
    "labels",
    "node_group",
    "hardware",
    "interpreters",
    "cpu",
    "memory",
    "lost_accelerators",
)


def described_nodes(value: Value, report: Report) -> Cluster | None:
    """The nodes that ``nodes: 8+8`` or a list of mappings describes; None with faults."""
    if isinstance(value, Leaf):
        if fields.text(value, "a description of nodes", report) is None:
            return None
        try:
            return Cluster.from_nodes(value.text, value.where.field)
        except InvalidInput as error:
            for fault in error.faults:
                report.fault(value.where.at(max(0, fault.column - 1)), fault.message, read=value.text[:80])
            return None
    if isinstance(value, Table) or not value.items:
        report.fault(value.where, f"{kind_of(value)} describes no nodes; write 8+8, or a list of nodes")
        return None
    if len(value.items) > fields.MAX_ITEMS:
        report.fault(value.where, f"{len(value.items)} nodes are too many; {fields.MAX_ITEMS} are allowed")
        return None
    faults_before = len(report.faults)
    nodes = [_node(item, index, report) for index, item in enumerate(value.items)]
    if len(report.faults) > faults_before:
        return None
    try:
        return Cluster(tuple(node for node in nodes if node is not None))
    except InvalidInput as error:
        for fault in error.faults:
            report.fault(value.where, fault.message)
        return None


def _node(value: Value, index: int, report: Report) -> Node | None:
    found = fields.table(value, "e.g. {node_id: node-0, accelerators: 8}", report)
    if found is None:
        return None
    fields.known_keys(found, _NODE_KEYS, report)
    rank = index
    if (asked := found.get("rank")) is not None:
        rank = fields.whole(asked, 0, 10**6, "rank of a node", report) or 0
    return Node(
        node_id=_word(found.get("node_id"), f"node-{rank}", "a node's id", report),
        rank=rank,
        accelerators=_accelerators(found, report),
        labels=_labels(found.get("labels"), report),
        node_group=_group_label(found.get("node_group"), report),
        hardware=_declared(found.get("hardware"), report),
        interpreters=_interpreters(found.get("interpreters"), report),
        cpu_milli=_amount(found.get("cpu"), report, memory=False),
        memory_bytes=_amount(found.get("memory"), report, memory=True),
        lost_accelerators=_lost(found.get("lost_accelerators"), report),
    )


def _word(value: Value | None, default: str, what: str, report: Report) -> str:
    if value is None:
        return default
    found = fields.text(value, what, report)
    if found is None:
        return default
    if not is_name(found.text):
        report.fault(found.where, f"{shown_text(found.text)} is not {what}, which is a name", read=found.text)
    return found.text


def _group_label(value: Value | None, report: Report) -> str:
    return "" if value is None else fields.label(value, "label", report) or ""


def _accelerators(found: Table, report: Report) -> tuple[Accelerator, ...]:
    kind_value = found.get("accelerator_type")
    kind = "gpu" if kind_value is None else _device_word(kind_value, "an accelerator's type", report) or "gpu"
    value = found.get("accelerators")
    if value is None:
        return ()
    if isinstance(value, Leaf):
        count = fields.whole(value, 0, MAX_ACCELERATORS, "number of accelerators", report)
        return tuple(Accelerator(str(index), kind) for index in range(count or 0))
    if isinstance(value, Table) or len(value.items) > MAX_ACCELERATORS:
        report.fault(
            value.where, f"{kind_of(value)} of this size is not a list of accelerators; write 8 or a list of ids"
        )
        return ()
    devices: dict[str, Accelerator] = {}
    for item in value.items:
        device = _accelerator(item, kind, report)
        if device is not None and device.id in devices:
            report.fault(item.where, f"the accelerator {shown_text(device.id)} occurs twice", read=device.id)
        elif device is not None:
            devices[device.id] = device
    return tuple(devices.values())


def _accelerator(value: Value, kind: str, report: Report) -> Accelerator | None:
    if isinstance(value, Table):
        fields.known_keys(value, ("id", "type"), report)
        own = value.get("type")
        kind = kind if own is None else _device_word(own, "an accelerator's type", report) or kind
        inner = value.get("id")
        if inner is None:
            report.fault(value.where, "an accelerator needs an id", allowed="{id: …, type: …}")
            return None
        value = inner
    name = _device_word(value, "an accelerator's id", report)
    return None if name is None else Accelerator(name, kind)


def _device_word(value: Value, what: str, report: Report) -> str | None:
    """A device's id or type as an inventory gives it, which may hold spaces."""
    found = fields.text(value, what, report)
    if found is None:
        return None
    if not found.text or len(found.text) > 128 or not found.text.isprintable() or "," in found.text:
        report.fault(found.where, f"{shown_text(found.text)} is not {what}", read=found.text[:80])
        return None
    return found.text


def _labels(value: Value | None, report: Report) -> Labels:
    if value is None:
        return ()
    found = fields.table(value, "e.g. {zone: a}", report)
    pairs: list[tuple[str, str]] = []
    for key, inner in found.entries if found is not None else ():
        leaf = fields.text(inner, "a label's value", report)
        if leaf is not None and is_label(key.text) and is_label(leaf.text):
            pairs.append((key.text, leaf.text))
        elif leaf is not None:
            report.fault(key.where, f"{shown_text(key.text)}: {shown_text(leaf.text)} is not a label", read=key.text)
    return tuple(sorted(pairs))


def _interpreters(value: Value | None, report: Report) -> tuple[str, ...] | None:
    if value is None:
        return None
    items = value.items if isinstance(value, Items) else (value,)
    return tuple(path for item in items if (path := interpreter_path(item, report)))


def _amount(value: Value | None, report: Report, *, memory: bool) -> int | None:
    if value is None:
        return None
    if not isinstance(value, Leaf) or len(value.text) > 64:
        report.fault(value.where, f"{kind_of(value)} is not an amount")
        return None
    try:
        return parse_memory(value.text) if memory else parse_milli(value.text)
    except QuantityError as error:
        report.fault(value.where, str(error), read=value.text)
        return None


def _lost(value: Value | None, report: Report) -> int:
    return 0 if value is None else fields.whole(value, 0, MAX_ACCELERATORS, "number of accelerators", report) or 0


def _declared(value: Value | None, report: Report) -> tuple[HardwareUnit, ...]:
    """``hardware`` of a described node: a list of ``{type: …, …}``."""
    if value is None:
        return ()
    if not isinstance(value, Items):
        report.fault(value.where, f"{kind_of(value)} is not a list of hardware; write e.g. [{{type: Franka}}]")
        return ()
    units = []
    for item in value.items:
        found = fields.table(item, "e.g. {type: Franka}", report)
        kind = found.get("type") if found is not None else None
        if found is not None and kind is None:
            report.fault(found.where, "declared hardware needs a type", allowed="{type: Franka, …}")
        name = fields.label(kind, "hardware type", report) if kind is not None else None
        if found is not None and name is not None:
            units.append(HardwareUnit(name, settings_json(found, "type", report)))
    return tuple(units)


def settings_json(found: Table, but: str, report: Report) -> str:
    """A mapping without one of its keys, as JSON."""
    return fields.as_json(Table(tuple(e for e in found.entries if e[0].text != but), found.where), report)


def interpreter_path(value: Value, report: Report) -> str:
    """The absolute path of an interpreter; empty with a fault."""
    found = fields.text(value, "an interpreter's path", report)
    if found is None:
        return ""
    try:
        return read_interpreter(found.text)
    except Refused as error:
        report.fault(found.where, str(error), read=found.text[:80])
        return ""
