"""Who is charged for which part of a device? Components that share GPUs count once (design 03, Demand)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from callboard.placement.config import Entry
from callboard.placement.diagnostics import Report
from callboard.placement.numbering import Kind, Span
from callboard.placement.plan import WHOLE_DEVICE, NodeDemand, PlacedDevice, PlannedWorker
from callboard.placement.record import Placement

Located = Sequence[tuple[Placement, Span]]
"""Workers of a component with the span that each lies in."""

_MAX_FAULTS = 10


@dataclass(slots=True)
class _Use:
    """Who uses the devices of one node, by position.

    Attributes:
        stated_milli: sum of the stated shares.
        others: workers without a stated share.
        share_milli: what each of those is charged; filled in once everybody is counted.
    """

    stated_milli: list[int]
    others: list[int]
    share_milli: list[int]

    def demand_milli(self, position: int) -> int:
        """What a device is charged in all: whole, unless everybody states a share."""
        return WHOLE_DEVICE if self.others[position] else self.stated_milli[position]


class Charges:
    """The use of every device, counted over all components: add them all, then check, then ask."""

    def __init__(self) -> None:
        self._uses: dict[int, _Use] = {}
        # Nodes are alike, so most workers hold equal devices: each is made once.
        self._made: dict[tuple[str, int, int], tuple[PlacedDevice, ...]] = {}

    def add(self, entry: Entry, workers: Located, report: Report) -> None:
        """Counts the workers of one component."""
        uses = self._uses
        share = entry.share_milli
        if share and (many := max(len(placement.local_hardware_ranks) for placement, _ in workers)) > 1:
            report.fault(
                entry.share_where,
                f"share is a part of one GPU, but a worker holds {many}; leave it out, or give each worker one GPU",
                read=str(share),
            )
        for placement, span in workers:
            if span.kind is not Kind.ACCELERATOR:
                continue
            use = uses.get(placement.cluster_node_rank)
            if use is None:
                size = span.count
                use = uses[placement.cluster_node_rank] = _Use([0] * size, [0] * size, [])
            for position in placement.local_hardware_ranks:
                if share:
                    use.stated_milli[position] += share
                else:
                    use.others[position] += 1

    def check(self, entries: Sequence[Entry], located: Mapping[str, Located], report: Report) -> None:
        """No device is charged more than it is (I1), and nobody is charged nothing."""
        told = 0
        for node, use in self._uses.items():
            use.share_milli = [
                (WHOLE_DEVICE - stated) // others if others else 0
                for stated, others in zip(use.stated_milli, use.others, strict=True)
            ]
            for position, (stated, others) in enumerate(zip(use.stated_milli, use.others, strict=True)):
                if stated + others > WHOLE_DEVICE and told < _MAX_FAULTS:
                    told += 1
                    self._too_much(node, position, _holders(entries, located, node, position), report)

    def _too_much(self, node: int, position: int, holders: Sequence[Entry], report: Report) -> None:
        use = self._uses[node]
        stated, others = use.stated_milli[position], use.others[position]
        names = ", ".join(dict.fromkeys(entry.component for entry in holders))
        what = [f"shares of {stated} milli"] if stated else []
        what += [f"{others} workers that state none"] if others else []
        first = next((entry for entry in holders if entry.share_milli), None)
        report.fault(
            first.share_where if first else holders[0].where,
            f"GPU {position} of node {node} is shared by {names}: {' and '.join(what)} do not fit into 1000 milli-GPU",
            read=str(stated),
            allowed="1000",
        )

    def worker(self, entry: Entry, placement: Placement, span: Span) -> PlannedWorker:
        """The worker with what it is charged."""
        devices: tuple[PlacedDevice, ...] = ()
        positions = placement.local_hardware_ranks
        if span.kind is Kind.ACCELERATOR:
            shares = self._uses[placement.cluster_node_rank].share_milli
            share = entry.share_milli
            if len(positions) == 1:
                devices = self._device(span.ids[positions[0]], positions[0], share or shares[positions[0]])
            else:
                devices = tuple([self._device(span.ids[at], at, share or shares[at])[0] for at in positions])
        env = span.env
        return PlannedWorker(
            entry.component,
            placement,
            span.node.node_id,
            devices,
            len(placement.visible_accelerators) > len(devices),
            tuple([span.units[at] for at in positions]) if span.units else (),
            env.interpreter if env is not None else "",
            env.env if env is not None else (),
        )

    def _device(self, name: str, position: int, milli: int) -> tuple[PlacedDevice, ...]:
        key = (name, position, milli)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = (PlacedDevice(position, name, milli),)
        return found

    def demand(self, located: Mapping[str, Located]) -> tuple[NodeDemand, ...]:
        """What is taken of each node."""
        ids: dict[int, str] = {}
        counts: dict[int, int] = {}
        for workers in located.values():
            for placement, span in workers:
                rank = placement.cluster_node_rank
                if rank in counts:
                    counts[rank] += 1
                else:
                    counts[rank] = 1
                    ids[rank] = span.node.node_id
        return tuple(NodeDemand(ids[rank], rank, self._demanded(rank), counts[rank]) for rank in sorted(counts))

    def _demanded(self, rank: int) -> tuple[tuple[int, int], ...]:
        use = self._uses.get(rank)
        if use is None:
            return ()
        return tuple([(at, milli) for at in range(len(use.others)) if (milli := use.demand_milli(at))])


def _holders(entries: Sequence[Entry], located: Mapping[str, Located], node: int, position: int) -> list[Entry]:
    return [
        entry
        for entry in entries
        if any(
            span.kind is Kind.ACCELERATOR
            and placement.cluster_node_rank == node
            and position in placement.local_hardware_ranks
            for placement, span in located.get(entry.component, ())
        )
    ]
