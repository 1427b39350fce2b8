"""The strategies that placement texts compile to: ways to lay processes over resources, usable alone.

A strategy is a frozen description; :meth:`resolve` lays it over a cluster, always with the same result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import index as whole_number
from typing import SupportsIndex

from callboard.model.faults import Fault, InvalidInput
from callboard.model.frozen import dataclass
from callboard.model.inputs.located import shown
from callboard.placement.cluster.cluster import WHOLE_CLUSTER, Cluster, need_cluster
from callboard.placement.cluster.numbering import Numbering, labels_of, number
from callboard.placement.config.grammar import MAX_PROCESSES
from callboard.placement.layout.processes import Ranks, check_processes, place
from callboard.placement.layout.record import Placement
from callboard.placement.source.diagnostics import Report, Where


class PlacementStrategy:
    """What all strategies offer.

    Attributes:
        node_group: labels of the groups whose ranks are meant, in order.
    """

    __slots__ = ()
    node_group: tuple[str, ...]

    def processes(self) -> Sequence[Ranks]:
        """The resource ranks of each process, in the order of process ranks."""
        raise NotImplementedError

    @property
    def hardware_ranks(self) -> tuple[int, ...]:
        """Every resource rank that is used, ascending, each once."""
        return tuple(sorted({rank for ranks in self.processes() for rank in ranks}))

    def numbering(self, cluster: Cluster, where: Where, report: Report) -> Numbering | None:
        """The ranks that this strategy counts in; None with faults in ``report``."""
        return number(cluster, self.node_group, where, report)

    def fits(self, numbering: Numbering, where: Where, report: Report) -> bool:
        """Whether every process gets what exists, on one node and of one type; else ``report`` has the faults."""
        return check_processes(self.processes(), numbering, where, report)

    def resolve(self, cluster: Cluster, isolate_accelerator: bool = True) -> list[Placement]:
        """One record per process, by rank.

        Args:
            isolate_accelerator: whether a worker sees only its own accelerators; False: its node's whole list.

        Raises:
            InvalidInput: the strategy does not fit the cluster.
            TypeError: ``cluster`` is no :class:`~callboard.placement.Cluster`.
        """
        need_cluster(cluster)
        report = Report()
        where = Where("placement")
        numbering = self.numbering(cluster, where, report)
        if numbering is not None:
            self.fits(numbering, where, report)
        report.raise_any()
        assert numbering is not None
        return [
            placement for placement, _ in place(self.processes(), numbering, isolate_accelerator=isolate_accelerator)
        ]

    def get_placement(self, cluster: Cluster, isolate_accelerator: bool = True) -> list[Placement]:
        """The same as :meth:`resolve`, under RLinf's name."""
        return self.resolve(cluster, isolate_accelerator)


@dataclass(frozen=True, slots=True)
class FlexiblePlacementStrategy(PlacementStrategy):
    """A list of resource ranks for each process: sorted inside a process, processes ordered by their first rank.

    Args:
        hardware_ranks_list: resource ranks of each process; processes may share one.
        node_group: label, comma-separated labels or a list of labels; None: the whole cluster.

    Raises:
        InvalidInput: no process, a process without a rank, or a rank twice in a process.
    """

    hardware_ranks_list: Sequence[Ranks]
    node_group: tuple[str, ...] = (WHOLE_CLUSTER,)

    def __init__(
        self, hardware_ranks_list: Iterable[Iterable[int]], node_group: str | Sequence[str] | None = None
    ) -> None:
        given = _listed_in(hardware_ranks_list, "hardware_ranks_list", "the ranks of each process, e.g. [[0], [1, 2]]")
        lists = [
            tuple(sorted(_rank(rank, f"hardware_ranks_list[{i}]") for rank in _listed_in(ranks, *_PROCESS, index=i)))
            for i, ranks in enumerate(given)
        ]
        faults = [f"process {i} gets nothing" for i, ranks in enumerate(lists) if not ranks]
        faults += [f"process {i} gets rank {low} twice" for i, ranks in enumerate(lists) for low in _repeated(ranks)]
        faults += [f"process {i} gets the negative rank {r[0]}" for i, r in enumerate(lists) if r and r[0] < 0]
        if not lists:
            faults.append("the list is empty; give the ranks of at least one process")
        _raise("hardware_ranks_list", faults)
        lists.sort(key=lambda ranks: ranks[0])
        object.__setattr__(self, "hardware_ranks_list", tuple(lists))
        object.__setattr__(self, "node_group", labels_of(node_group))

    @classmethod
    def trusted(cls, lists: Sequence[Ranks], node_group: tuple[str, ...]) -> FlexiblePlacementStrategy:
        """The strategy of lists that are in order already: nothing is checked again."""
        strategy = cls.__new__(cls)
        object.__setattr__(strategy, "hardware_ranks_list", tuple([tuple(ranks) for ranks in lists]))
        object.__setattr__(strategy, "node_group", node_group)
        return strategy

    def processes(self) -> Sequence[Ranks]:
        return self.hardware_ranks_list


@dataclass(frozen=True, slots=True)
class PackedPlacementStrategy(PlacementStrategy):
    """A range of resource ranks, filled in the order of nodes; every rank of it is used exactly once.

    With a stride ``s`` a process takes the ranks r, r + s, r + 2s …: processes of one block of
    ``num_hardware_per_process * s`` ranks interleave. A block lies on one node.

    Args:
        start_hardware_rank: first rank.
        end_hardware_rank: last rank, inclusive.
        num_hardware_per_process: ranks of each process.
        stride: distance between the ranks of one process.
        node_group: label, comma-separated labels or a list of labels; None: the whole cluster.

    Raises:
        InvalidInput: the range descends, or does not divide into blocks.
    """

    start_hardware_rank: int
    end_hardware_rank: int
    num_hardware_per_process: int = 1
    stride: int = 1
    node_group: tuple[str, ...] = (WHOLE_CLUSTER,)

    def __init__(
        self,
        start_hardware_rank: int,
        end_hardware_rank: int,
        num_hardware_per_process: int = 1,
        stride: int = 1,
        node_group: str | Sequence[str] | None = None,
    ) -> None:
        start = _rank(start_hardware_rank, "start_hardware_rank")
        end = _rank(end_hardware_rank, "end_hardware_rank")
        size = _rank(num_hardware_per_process, "num_hardware_per_process")
        stride = _rank(stride, "stride")
        faults: list[str] = []
        if start < 0:
            faults.append(f"the range starts at {start}; ranks count from 0")
        if end < start:
            faults.append(f"the range {start}-{end} descends")
        if size < 1 or stride < 1:
            faults.append(f"{size} per process with stride {stride}: both are at least 1")
        elif end >= start and (end - start + 1) % (size * stride):
            block = f"{size} per process × stride {stride} = {size * stride}"
            faults.append(f"the range {start}-{end} has {end - start + 1} ranks, which {block} does not divide")
        elif end - start >= MAX_PROCESSES * size:
            faults.append(f"the range {start}-{end} gives more than {MAX_PROCESSES} processes")
        _raise("hardware_ranks", faults)
        object.__setattr__(self, "start_hardware_rank", start)
        object.__setattr__(self, "end_hardware_rank", end)
        object.__setattr__(self, "num_hardware_per_process", size)
        object.__setattr__(self, "stride", stride)
        object.__setattr__(self, "node_group", labels_of(node_group))

    def processes(self) -> Sequence[Ranks]:
        block = self.num_hardware_per_process * self.stride
        starts = range(self.start_hardware_rank, self.end_hardware_rank + 1, block)
        return [range(start + offset, start + block, self.stride) for start in starts for offset in range(self.stride)]

    def fits(self, numbering: Numbering, where: Where, report: Report) -> bool:
        """Also: each block of processes that interleave lies on one node, not only each process (PS-08)."""
        block = self.num_hardware_per_process * self.stride
        starts = range(self.start_hardware_rank, self.end_hardware_rank + 1, block)
        blocks = [range(start, start + block) for start in starts]
        return check_processes(blocks, numbering, where, report, per_block=self.stride)


@dataclass(frozen=True, slots=True)
class NodePlacementStrategy(PlacementStrategy):
    """A node for each process, and no accelerator: for components that live on CPUs.

    Args:
        node_ranks: the node of each process, counted in its node group; a node may occur several times.
        node_group: label, comma-separated labels or a list of labels; None: every node.

    Raises:
        InvalidInput: no process, or a negative rank.
    """

    node_ranks: tuple[int, ...]
    node_group: tuple[str, ...] = (WHOLE_CLUSTER,)

    def __init__(self, node_ranks: Iterable[int], node_group: str | Sequence[str] | None = None) -> None:
        given = _listed_in(node_ranks, "node_ranks", "the node of each process, e.g. [0, 0, 1]")
        ranks = tuple(sorted(_rank(rank, "node_ranks") for rank in given))
        faults = ["the list is empty; give the node of at least one process"] if not ranks else []
        faults += [f"the node rank {ranks[0]} is negative"] if ranks and ranks[0] < 0 else []
        _raise("node_ranks", faults)
        object.__setattr__(self, "node_ranks", ranks)
        object.__setattr__(self, "node_group", labels_of(node_group))

    def processes(self) -> Sequence[Ranks]:
        return [(rank,) for rank in self.node_ranks]

    def numbering(self, cluster: Cluster, where: Where, report: Report) -> Numbering | None:
        return number(cluster, self.node_group, where, report, nodes_only=True)


def _repeated(ranks: Ranks) -> list[int]:
    return [low for low, high in pairwise(ranks) if low == high]


_PROCESS = ("hardware_ranks_list", "the ranks of one process, e.g. [0, 1]")


def _listed_in(value: object, field: str, what: str, *, index: int = -1) -> Iterable[object]:
    """What a caller gives as a list; a text is none, although Python would take it apart."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        _raise(field if index < 0 else f"{field}[{index}]", [f"{shown(value)} is not {what}"])
    assert isinstance(value, Iterable)
    return value


def _rank(value: object, field: str) -> int:
    """A whole number of a caller, of whichever library."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        _raise(field, [f"{shown(value)} is not a whole number"])
    assert isinstance(value, SupportsIndex)
    return whole_number(value)


def _raise(field: str, faults: Sequence[str]) -> None:
    if faults:
        raise InvalidInput(Fault(field, fault) for fault in faults[:100])
