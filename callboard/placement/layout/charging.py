"""Charges for parts of devices: components that share GPUs count once (docs/placement.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from callboard.placement.cluster.numbering import Kind, Numbering, Span
from callboard.placement.config.config import Entry
from callboard.placement.layout.plan import WHOLE_DEVICE, NodeDemand, PlacedDevice, PlannedWorker
from callboard.placement.layout.processes import Ranks
from callboard.placement.layout.record import Placement
from callboard.placement.source.diagnostics import Report

User = tuple[Entry, Numbering, Sequence[Ranks]]
"""A component with the resource ranks of each of its processes."""

Located = Sequence[tuple[Placement, Span]]
"""Workers of a component with the span that each lies in."""

_Held = tuple[tuple[int, ...], tuple[int, ...]]
"""Positions of a worker's devices on its node, and its share of each."""

_MAX_FAULTS = 10


@dataclass(slots=True)
class _Use:
    """Who uses the devices of one node, by position.

    Attributes:
        stated_milli: sum of the stated shares.
        others: workers without a stated share.
        served: those of them that have their part.
    """

    stated_milli: list[int]
    others: list[int]
    served: list[int]

    def demand_milli(self, position: int) -> int:
        """What a device is charged in all: whole, unless everybody states a share."""
        return WHOLE_DEVICE if self.others[position] else self.stated_milli[position]

    def next_part(self, position: int) -> int:
        """What the next worker without a stated share is charged. The first get a thousandth more where the rest can't
        be divided evenly, so that what they are charged is what the device is charged: whole."""
        each, more = divmod(WHOLE_DEVICE - self.stated_milli[position], self.others[position])
        self.served[position] += 1
        return each + (self.served[position] <= more)


class Charges:
    """The use of every device, counted over all components: add them all, then check, then ask."""

    def __init__(self) -> None:
        self._uses: dict[int, _Use] = {}
        # Nodes are alike, so most workers hold equal devices: each is made once.
        self._made: dict[tuple[str, ...], dict[_Held, tuple[PlacedDevice, ...]]] = {}

    def add(self, entry: Entry, numbering: Numbering, processes: Sequence[Ranks]) -> None:
        """Counts the workers of one component."""
        share = entry.share_milli
        counts = [0] * numbering.total
        for ranks in processes:
            for rank in ranks:
                counts[rank] += 1
        for span in numbering.spans:
            own = counts[span.first : span.end]
            if span.kind is not Kind.ACCELERATOR or not any(own):
                continue
            use = self._uses.get(span.node.rank)
            if use is None:
                use = self._uses[span.node.rank] = _Use([0] * span.count, [0] * span.count, [0] * span.count)
            if share:
                use.stated_milli = [before + share * more for before, more in zip(use.stated_milli, own, strict=True)]
            else:
                use.others = [before + more for before, more in zip(use.others, own, strict=True)]

    def check(self, users: Sequence[User], report: Report) -> None:
        """No device is charged more than it is (I1), and nobody is charged nothing."""
        told = 0
        for node, use in self._uses.items():
            sums = list(zip(use.stated_milli, use.others, strict=True))
            for (stated, others), run in groupby(range(len(sums)), key=lambda at: sums[at]):
                positions = list(run)
                if stated + others > WHOLE_DEVICE and told < _MAX_FAULTS:
                    told += 1
                    self._too_much(node, positions, _holders(users, node, positions[0]), report)

    def _too_much(self, node: int, positions: Sequence[int], holders: Sequence[Entry], report: Report) -> None:
        use = self._uses[node]
        stated, others = use.stated_milli[positions[0]], use.others[positions[0]]
        names = ", ".join(dict.fromkeys(entry.component for entry in holders))
        what = [f"shares of {stated} milli-GPU"] if stated else []
        what += (
            [f"{others} worker{'s' if others > 1 else ''} that state{'' if others > 1 else 's'} none"] if others else []
        )
        first = next((entry for entry in holders if entry.share_milli), None)
        remedy = "lower the shares, or leave them out for equal parts" if stated else "place fewer workers there"
        gpus = f"GPU {positions[0]}" if len(positions) == 1 else f"each GPU of {positions[0]}-{positions[-1]}"
        report.fault(
            first.share_where if first else holders[0].where,
            f"{gpus} of node {node} is shared by {names}: {' and '.join(what)} do not fit into 1000 milli-GPU; "
            f"{remedy}",
            read=str(stated),
            allowed="1000",
        )

    def workers(self, entry: Entry, located: Located) -> tuple[PlannedWorker, ...]:
        """The workers of one component with what each is charged: asked once of each component, in their order.
        Clusters are large: one loop, little in it."""
        component, share = entry.component, entry.share_milli
        found: list[PlannedWorker] = []
        for span, members in groupby(located, key=itemgetter(1)):
            env = span.env
            interpreter, variables = (env.interpreter, env.env) if env is not None else ("", ())
            node_id, ids, units = span.node.node_id, span.ids, span.units
            use = self._uses[span.node.rank] if ids else None
            made = self._made.setdefault(ids, {})
            for placement, _ in members:
                positions = placement.local_hardware_ranks
                devices: tuple[PlacedDevice, ...] = ()
                if use is not None:
                    key = (positions, tuple([share or use.next_part(at) for at in positions]))
                    if key not in made:
                        made[key] = _devices(ids, *key)
                    devices = made[key]
                own = tuple([units[at] for at in positions]) if units else ()
                observer = len(placement.visible_accelerators) > len(devices)
                found.append(
                    PlannedWorker(component, placement, node_id, devices, observer, own, interpreter, variables)
                )
        return tuple(found)

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


def _devices(ids: tuple[str, ...], positions: tuple[int, ...], shares: tuple[int, ...]) -> tuple[PlacedDevice, ...]:
    return tuple([PlacedDevice(at, ids[at], milli) for at, milli in zip(positions, shares, strict=True)])


def _holders(users: Sequence[User], node: int, position: int) -> list[Entry]:
    """Whose workers use one device."""
    found: list[Entry] = []
    for entry, numbering, processes in users:
        spans = (span for span in numbering.spans if span.kind is Kind.ACCELERATOR and span.node.rank == node)
        wanted = {span.first + position for span in spans}
        if any(not wanted.isdisjoint(ranks) for ranks in processes):
            found.append(entry)
    return found
