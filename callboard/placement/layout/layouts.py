"""The layout of one component: its text laid over the nodes of its groups, or its faults."""

from __future__ import annotations

from collections.abc import Sequence

from callboard.model.frozen import dataclass
from callboard.placement.cluster.cluster import Cluster, Node
from callboard.placement.cluster.numbering import Kind, Numbering, kind_of, number
from callboard.placement.config.config import Entry, PlacementConfig
from callboard.placement.config.grammar import Part, compile_segments
from callboard.placement.layout.processes import Ranks, check_processes
from callboard.placement.layout.strategies import FlexiblePlacementStrategy, NodePlacementStrategy, PlacementStrategy
from callboard.placement.source.diagnostics import Report
from callboard.placement.source.fields import rank_list


@dataclass(frozen=True, slots=True)
class Layout:
    """A component whose text fits the cluster.

    Attributes:
        parts: its segments with their counts.
        processes: resource ranks of each process.
    """

    entry: Entry
    numbering: Numbering
    parts: tuple[Part, ...]
    strategy: PlacementStrategy
    processes: Sequence[Ranks]

    def resources(self) -> list[tuple[int, str, int]]:
        """What it uses as (node rank, kind, position), whatever it is called in its groups."""
        spans = self.numbering.spans
        found: list[tuple[int, str, int]] = []
        at = 0
        for part in self.parts:
            end = part.first + part.resources
            while spans[at].end <= part.first:
                at += 1
            index = at
            while index < len(spans) and spans[index].first < end:
                span = spans[index]
                own = range(max(part.first, span.first) - span.first, min(end, span.end) - span.first)
                found.extend([(span.node.rank, span.kind.value, position) for position in own])
                index += 1
        return found


@dataclass(frozen=True, slots=True)
class Laying:
    """Lays entries over the cluster.

    Attributes:
        cluster: the nodes that may be used.
        given: the nodes that are there.
        needing: components that need GPUs although their config does not say so.
    """

    config: PlacementConfig
    cluster: Cluster
    given: Cluster
    needing: frozenset[str]
    report: Report

    def lay_out(self, entry: Entry) -> Layout | None:
        """``entry`` on the cluster, or None with faults."""
        report = self.report
        if self.config.defective.intersection(entry.node_groups) or not entry.node_groups:
            return None  # told where the group is defined
        numbering = number(
            self.cluster, entry.node_groups, entry.group_where, report, defective=sorted(self.config.defective)
        )
        if numbering is None or self._lacks_gpus(entry, numbering) or self._needs_more_nodes(entry, numbering):
            return None
        if not entry.segments:
            return None  # told where the text was read
        _say_kinds(entry, self.cluster, numbering, report)
        parts = compile_segments(entry.segments, numbering.total, numbering.resource, entry.where, report)
        if parts is None:
            return None
        processes: list[Ranks] = []
        faults_before = len(report.faults)
        for part in parts:
            ranks, first = part.ranks(), len(processes)
            check_processes(ranks, numbering, entry.where, report, first=first, segment=part.segment)
            processes.extend(ranks)
        if len(report.faults) > faults_before:
            return None
        _say_unseen(entry, numbering, processes, report)
        strategy: PlacementStrategy
        if numbering.nodes_only:
            strategy = NodePlacementStrategy([ranks[0] for ranks in processes], entry.node_groups)
        else:
            strategy = FlexiblePlacementStrategy.trusted(processes, entry.node_groups)
        return Layout(entry, numbering, parts, strategy, processes)

    def _lacks_gpus(self, entry: Entry, numbering: Numbering) -> bool:
        """Rule 10: nodes are no substitute for the GPUs that a component asks for."""
        if any(span.kind is Kind.ACCELERATOR for span in numbering.spans):
            return False
        if not entry.needs_gpus and entry.component not in self.needing:
            return False
        ranks = rank_list(sorted({span.node.rank for span in numbering.spans}))
        groups = ",".join(numbering.labels)
        said = f"it asks for GPUs, but no accelerators were found on nodes {ranks} by the node group {groups}"
        self.report.fault(entry.where, said, read=entry.text)
        return True

    def _needs_more_nodes(self, entry: Entry, numbering: Numbering) -> bool:
        """PS-17: a placement beyond ``num_nodes`` says so, when the nodes that are left out would do."""
        wanted, given = self.config.num_nodes, self.given
        highest = max((segment.last for segment in entry.segments), default=-1)
        if wanted is None or highest < numbering.total or self.cluster.num_nodes >= given.num_nodes:
            return False
        wider = number(given.with_groups(self.config.groups), entry.node_groups, entry.group_where, Report())
        if wider is None or highest >= wider.total:
            return False
        needed = wider.spans[wider.index_of(highest)].node.rank
        count = sum(1 for node in given.nodes if node.rank <= needed)
        self.report.fault(
            entry.where,
            f"num_nodes is {wanted}, but the placement needs {count} nodes: {numbering.resource} rank {highest} is on "
            f"node {needed}",
            read=str(wanted),
            allowed=f"{count} or more",
        )
        return True


def _say_kinds(entry: Entry, cluster: Cluster, numbering: Numbering, report: Report) -> None:
    """Rule 10: what ranks mean on nodes without accelerators is said aloud."""
    for label in numbering.labels:
        group = cluster.groups_by_label[label]
        if group.ignore_hardware or group.hardware_type or label == "node":
            continue
        nodes = [cluster.by_rank[rank] for rank in group.node_ranks if rank in cluster.by_rank]
        bare = [node for node in nodes if not node.accelerators]
        if not bare:
            continue
        if kind_of(group, nodes) is Kind.NODE:
            report.warn(
                entry.where,
                f"no accelerators found on nodes {_ranks_of(nodes)} of the group {label}: resource = node, one "
                "process per node",
            )
        else:
            many = "nodes" if len(bare) > 1 else "node"
            report.warn(
                entry.where,
                f"{many} {_ranks_of(bare)} of the group {label} left out: no accelerators there; ranks count those of "
                "the others",
            )


def _say_unseen(entry: Entry, numbering: Numbering, processes: Sequence[Ranks], report: Report) -> None:
    """Workers that are placed on robots see no GPU (GV-11). RLinf's see every one of their node, and some need it."""
    if entry.visible_all or all(span.kind is not Kind.HARDWARE for span in numbering.spans):
        return
    spans = [numbering.spans[numbering.index_of(ranks[0])] for ranks in processes]
    beside = {span.node.rank: span for span in spans if span.kind is Kind.HARDWARE and span.node.accelerators}
    if beside:
        hardware = ", ".join(dict.fromkeys(span.group.hardware_type for span in beside.values()))
        report.warn(
            entry.where,
            f"it is placed on {hardware}, so its workers see none of the GPUs of node {rank_list(sorted(beside))}; "
            "visible: all shows them all",
        )


def _ranks_of(nodes: Sequence[Node]) -> str:
    return rank_list([node.rank for node in nodes])
