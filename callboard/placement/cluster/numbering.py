"""The numbering of resources: the groups of a component, one after another, in the order written."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from enum import StrEnum

from callboard.model.faults import Fault, InvalidInput
from callboard.model.frozen import dataclass
from callboard.model.inputs.located import shown, shown_text
from callboard.placement.cluster.cluster import (
    NODES_ONLY,
    WHOLE_CLUSTER,
    Accelerator,
    Cluster,
    EnvConfig,
    HardwareUnit,
    Node,
    NodeGroup,
)
from callboard.placement.source.diagnostics import Report, Where, unknown

MAX_GROUPS = 64
"""Most groups of one component."""


class Kind(StrEnum):
    """What a rank stands for."""

    ACCELERATOR = "accelerator"
    HARDWARE = "hardware"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive ranks on one node.

    Attributes:
        group: the group that numbered them.
        ids: accelerators: id of each, in order; else empty.
        types: type of each, in order.
        uniform: whether all types are equal.
        units: hardware: each unit, in order; else empty.
    """

    first: int
    count: int
    node: Node
    group: NodeGroup
    kind: Kind
    ids: tuple[str, ...]
    types: tuple[str, ...]
    uniform: bool
    units: tuple[HardwareUnit, ...]
    env: EnvConfig | None

    @property
    def end(self) -> int:
        """The rank after the last."""
        return self.first + self.count


@dataclass(frozen=True, slots=True)
class Numbering:
    """The ranks that a component may use.

    Attributes:
        labels: labels of the groups, in order.
        spans: spans in the order of their ranks.
        starts: first rank of each span.
    """

    labels: tuple[str, ...]
    spans: tuple[Span, ...]
    starts: tuple[int, ...]
    total: int

    def index_of(self, rank: int) -> int:
        """Index of the span of ``rank``, which must exist."""
        return bisect_right(self.starts, rank) - 1

    @property
    def nodes_only(self) -> bool:
        """Whether every rank is a node."""
        return all(span.kind is Kind.NODE for span in self.spans)

    @property
    def resource(self) -> str:
        """What a rank is, for people."""
        kinds = {span.kind for span in self.spans}
        if kinds == {Kind.ACCELERATOR}:
            return "GPU"
        if kinds == {Kind.NODE}:
            return "node"
        if kinds == {Kind.HARDWARE}:
            return "/".join(dict.fromkeys(span.group.hardware_type for span in self.spans))
        return "resource"


def labels_of(node_group: str | int | Sequence[str] | None) -> tuple[str, ...]:
    """The labels that an API argument names: one, a comma-separated text, a list, or none for the whole cluster.

    Raises:
        InvalidInput: it is something else.
    """
    if node_group is None:
        return (WHOLE_CLUSTER,)
    if isinstance(node_group, int) and not isinstance(node_group, bool):
        node_group = str(node_group)  # 4090 is the label "4090", as in a file
    if isinstance(node_group, str):
        node_group = node_group.split(",")
    if not isinstance(node_group, Sequence) or not all(isinstance(label, str) for label in node_group):
        raise InvalidInput([Fault("node_group", f"{shown(node_group)} is neither a label nor a list of labels")])
    return tuple(label.strip() for label in node_group)


def number(
    cluster: Cluster,
    labels: Sequence[str],
    where: Where,
    report: Report,
    *,
    nodes_only: bool = False,
    defective: Iterable[str] = (),
) -> Numbering | None:
    """The ranks of the groups ``labels``; None when there are faults, which ``report`` has then.

    Args:
        labels: labels of groups, in the order of their ranks.
        nodes_only: number nodes, whatever they have.
        defective: labels that exist too, but have faults, which were told.
    """
    groups = _groups(cluster, labels, tuple(dict.fromkeys((*cluster.groups_by_label, *defective))), where, report)
    if groups is None:
        return None
    spans: list[Span] = []
    for group in groups:
        spans.extend(_spans(cluster, group, spans[-1].end if spans else 0, nodes_only=nodes_only))
    if not _apart(spans, where, report):
        return None
    if not spans:
        listed = ", ".join(labels)
        report.fault(where, f"the node group {listed} has nothing to place on: no node of it is there", read=listed)
        return None
    return Numbering(tuple(labels), tuple(spans), tuple(span.first for span in spans), spans[-1].end)


def _groups(
    cluster: Cluster, labels: Sequence[str], every: Sequence[str], where: Where, report: Report
) -> list[NodeGroup] | None:
    if len(labels) > MAX_GROUPS:
        report.fault(where, f"{len(labels)} node groups are too many; {MAX_GROUPS} are allowed")
        return None
    known = cluster.groups_by_label
    found: list[NodeGroup] = []
    fine = True
    for index, label in enumerate(labels):
        if label in labels[:index]:
            report.fault(
                where,
                f"the node group {shown_text(label)} is named twice, so each of its resources would get two ranks; "
                "share with resources:processes, as in 0-1:0-3",
                read=label,
            )
            fine = False
        elif label in known:
            found.append(known[label])
        else:
            sentence, near = unknown("node group", label, every, shown_text(label))
            report.fault(where, sentence, read=label, allowed=", ".join(every)[:500], nearest=near)
            fine = False
    return found if fine else None


def _spans(cluster: Cluster, group: NodeGroup, first: int, *, nodes_only: bool) -> list[Span]:
    nodes = [node for rank in group.node_ranks if (node := cluster.by_rank.get(rank)) is not None]
    kind = kind_of(group, nodes, nodes_only=nodes_only)
    units: dict[int, list[HardwareUnit]] = {}
    for rank, unit in group.hardware if kind is Kind.HARDWARE else ():
        units.setdefault(rank, []).append(unit)
    env = {rank: config for config in reversed(group.env_configs) for rank in config.node_ranks}
    found: list[Span] = []
    alike: dict[tuple[Accelerator, ...], tuple[tuple[str, ...], tuple[str, ...]]] = {}
    for node in nodes:
        own = tuple(units.get(node.rank, ()))
        ids: tuple[str, ...] = ()
        if kind is Kind.ACCELERATOR:
            # Nodes of a large cluster are alike: their lists are made once.
            if node.accelerators not in alike:
                devices = node.accelerators
                alike[devices] = (tuple([device.id for device in devices]), tuple([device.type for device in devices]))
            ids, types = alike[node.accelerators]
        else:
            types = ("node",) if kind is Kind.NODE else tuple([unit.type for unit in own])
        if types:
            uniform = types.count(types[0]) == len(types)
            found.append(Span(first, len(types), node, group, kind, ids, types, uniform, own, env.get(node.rank)))
            first += len(types)
    return found


def kind_of(group: NodeGroup, nodes: Sequence[Node], *, nodes_only: bool = False) -> Kind:
    """What the ranks of a group stand for (rule 10 of the language)."""
    if nodes_only or group.ignore_hardware or group.label == NODES_ONLY:
        return Kind.NODE
    if group.hardware_type:
        return Kind.HARDWARE
    return Kind.ACCELERATOR if any(node.accelerators for node in nodes) else Kind.NODE


def _apart(spans: Sequence[Span], where: Where, report: Report) -> bool:
    """Rule 8: nothing gets two ranks. An accelerator and a robot of one node are different things."""
    seen: dict[tuple[int, str], Span] = {}
    for span in spans:
        what = span.group.hardware_type if span.kind is Kind.HARDWARE else span.kind.value
        first = seen.setdefault((span.node.rank, what), span)
        if first is not span:
            report.fault(
                where,
                f"the node groups {first.group.label} and {span.group.label} both number the {what}s of node "
                f"{span.node.rank}, so each would get two ranks; use one of them, or share with resources:processes",
                read=f"{first.group.label},{span.group.label}",
            )
            return False
    return True
