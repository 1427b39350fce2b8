"""The resources of each process: ranks that exist, on one node and of one type, and where they are."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from callboard.model.frozen import dataclass
from callboard.placement.cluster.numbering import Kind, Numbering, Span
from callboard.placement.config.grammar import Segment
from callboard.placement.layout.record import Placement
from callboard.placement.source.diagnostics import Report, Where

Ranks = Sequence[int]
"""Resource ranks of one process, ascending."""


def check_processes(
    processes: Sequence[Ranks],
    numbering: Numbering,
    where: Where,
    report: Report,
    *,
    first: int = 0,
    per_block: int = 1,
    segment: Segment | None = None,
) -> bool:
    """Whether each process gets ranks that exist, on one node and of one type (rules 1 and 4).

    Args:
        processes: resource ranks of each process, or of each block of them, ascending.
        first: rank of the first process.
        per_block: how many processes an item of ``processes`` stands for.
        segment: what was written for them; None: they are of no text, or of all of it.
    """
    faults_before = len(report.faults)
    spans, total = numbering.spans, numbering.total
    saying = _Saying(where, report, segment)
    at = numbering.index_of(processes[0][0]) if processes else 0
    for index, ranks in enumerate(processes):
        process = first + index * per_block
        low, high = ranks[0], ranks[-1]
        if high >= total:
            have = f"there are {total} here, 0 to {total - 1}"
            saying.fault(f"{numbering.resource} rank {high} does not exist; {have}", read=str(high), allowed=have)
            return False
        while spans[at].end <= low:
            at += 1
        if high < spans[at].end:
            if not spans[at].uniform and _mixed(ranks, spans[at]):
                saying.types(process, ranks, [spans[at]])
            continue
        touched = [span for span in spans[at : numbering.index_of(high) + 1] if _touches(ranks, span)]
        nodes = list(dict.fromkeys(span.node.rank for span in touched))
        if len(nodes) > 1:
            what = f"process {process}" if per_block == 1 else f"processes {process} to {process + per_block - 1}"
            saying.fault(
                f"{what} would span nodes {_listed(nodes)}: {numbering.resource} ranks {_ranks_text(ranks)} lie on "
                "several nodes, and all of a process are on one; the last rank of node "
                f"{nodes[0]} is {touched[0].end - 1}",
                read=_ranks_text(ranks),
                allowed="ranks of one node",
            )
        else:
            saying.types(process, ranks, touched)
        if len(report.faults) - faults_before >= 10:
            return False
    return len(report.faults) == faults_before


def place(
    processes: Sequence[Ranks], numbering: Numbering, *, isolate_accelerator: bool = True
) -> list[tuple[Placement, Span]]:
    """The record of each process with the span it lies in. The processes fit: :func:`check_processes` said so."""
    spans = numbering.spans
    located: list[tuple[Ranks, Span]] = []
    on_node: dict[int, int] = {}
    at = 0
    for ranks in processes:
        low = ranks[0]
        while spans[at].end <= low:
            at += 1
        span = spans[at]
        located.append((ranks, span))
        on_node[span.node.rank] = on_node.get(span.node.rank, 0) + 1
    order = {rank: position for position, rank in enumerate(on_node)}
    begun = dict.fromkeys(on_node, 0)
    whole: dict[int, tuple[str, ...]] = {}
    found: list[tuple[Placement, Span]] = []
    for process, (ranks, span) in enumerate(located):
        node = span.node
        local_rank = begun[node.rank]
        begun[node.rank] = local_rank + 1
        first = span.first
        own = () if span.kind is Kind.NODE else tuple([rank - first for rank in ranks])
        devices = own if span.kind is Kind.ACCELERATOR else ()
        if isolate_accelerator:
            visible = (span.ids[devices[0]],) if len(devices) == 1 else tuple([span.ids[i] for i in devices])
        else:
            if node.rank not in whole:
                whole[node.rank] = tuple(device.id for device in node.accelerators)
            visible = whole[node.rank]
        placement = Placement(
            process,
            node.rank,
            order[node.rank],
            local_rank,
            on_node[node.rank],
            devices[0] if devices else -1,
            span.types[devices[0]] if devices else "",
            visible,
            own,
            isolate_accelerator,
            span.group.label,
        )
        found.append((placement, span))
    return found


def _touches(ranks: Ranks, span: Span) -> bool:
    index = bisect_left(ranks, span.first)
    return index < len(ranks) and ranks[index] < span.end


def _mixed(ranks: Ranks, span: Span) -> bool:
    return len({span.types[rank - span.first] for rank in ranks}) > 1


@dataclass(frozen=True, slots=True)
class _Saying:
    """Notes what is wrong with processes, at the segment that asks for them."""

    where: Where
    report: Report
    segment: Segment | None

    def fault(self, message: str, *, read: str, allowed: str) -> None:
        if self.segment is None:
            self.report.fault(self.where, message, read=read, allowed=allowed)
            return
        self.report.fault(
            self.where.at(self.segment.column - 1),
            message,
            segment=self.segment.text or str(self.segment),
            segment_column=self.segment.column,
            read=read,
            allowed=allowed,
        )

    def types(self, process: int, ranks: Ranks, spans: Sequence[Span]) -> None:
        types = dict.fromkeys(
            span.types[rank - span.first] for span in spans for rank in ranks if span.first <= rank < span.end
        )
        listed = " and ".join(types)
        self.fault(
            f"process {process} would get {listed} on node {spans[0].node.rank}: ranks {_ranks_text(ranks)} are of "
            "several types, and all of a process are of one",
            read=listed,
            allowed="one type",
        )


def _ranks_text(ranks: Ranks) -> str:
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return _listed(ranks)


def _listed(numbers: Sequence[int]) -> str:
    shown = ",".join(str(one) for one in numbers[:16])
    return shown if len(numbers) <= 16 else f"{shown},…"
