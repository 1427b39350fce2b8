"""The cluster that a placement is resolved against: its nodes and what each has.

It is described (:meth:`Cluster.from_nodes`, ``nodes:`` of a config) or made from a live inventory by whoever has one.
Accelerators are numbered by their position in the node's *visible* list: an agent that was started with
``CUDA_VISIBLE_DEVICES=1,2,3`` offers positions 0 to 2, whose ids are 1, 2 and 3 (GV-01).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import field, replace
from functools import cached_property

from callboard.model.cluster_text import parse_cluster
from callboard.model.faults import Fault, InvalidInput
from callboard.model.frozen import dataclass
from callboard.model.inputs.located import shown
from callboard.model.specs import Labels

WHOLE_CLUSTER = "cluster"
"""Reserved label: every node, by its accelerators. The default."""

NODES_ONLY = "node"
"""Reserved label: every node, without hardware: ranks are nodes."""

RESERVED_LABELS = (WHOLE_CLUSTER, NODES_ONLY)


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator of a node.

    Attributes:
        id: what goes into the visibility variable: an index, a GPU UUID or a MIG id.
        type: what it is, e.g. ``gpu`` or ``h100``; processes never mix types.
    """

    id: str
    type: str = "gpu"


@dataclass(frozen=True, slots=True)
class HardwareUnit:
    """One piece of declared hardware, such as a robot.

    Attributes:
        type: what it is, e.g. ``Franka``.
        config_json: its own settings as a JSON object, for the worker that gets it.
    """

    type: str
    config_json: str = field(default="{}", repr=False)  # may hold addresses and passwords


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine, or a slice of one.

    Attributes:
        rank: its rank in the cluster, from 0; ranks may have gaps.
        accelerators: its visible accelerators, in the order of its inventory.
        node_group: label of the node group that it joined with; empty: none.
        hardware: hardware that it declared, in order.
        interpreters: Python interpreters that it allows; None: not known.
        cpu_milli: milli-CPUs; None: not known.
        memory_bytes: bytes of memory; None: not known.
        lost_accelerators: how many accelerators it had and no longer reports (PS-13).
    """

    node_id: str
    rank: int
    accelerators: tuple[Accelerator, ...] = ()
    labels: Labels = ()
    node_group: str = ""
    hardware: tuple[HardwareUnit, ...] = ()
    interpreters: tuple[str, ...] | None = None
    cpu_milli: int | None = None
    memory_bytes: int | None = None
    lost_accelerators: int = 0


@dataclass(frozen=True, slots=True)
class EnvConfig:
    """How workers start on some nodes of a group.

    Attributes:
        node_ranks: ranks of the nodes, ascending.
        interpreter: Python interpreter; empty: the agent's.
        env: (name, value) of variables, sorted.
    """

    node_ranks: tuple[int, ...]
    interpreter: str = ""
    env: Labels = field(default=(), repr=False)  # values may be secrets (SE-04)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes under one label.

    Attributes:
        node_ranks: ranks of its nodes, ascending.
        hardware_type: what its ranks number instead of accelerators; empty: accelerators, or nodes.
        hardware: (node rank, unit) of each unit, in the order of their ranks.
        ignore_hardware: its nodes are plain nodes, whatever they have.
    """

    label: str
    node_ranks: tuple[int, ...]
    hardware_type: str = ""
    hardware: tuple[tuple[int, HardwareUnit], ...] = ()
    env_configs: tuple[EnvConfig, ...] = ()
    ignore_hardware: bool = False


@dataclass(frozen=True)
class Cluster:
    """Nodes by rank, and the node groups of a config.

    Attributes:
        nodes: sorted by rank; ranks and ids are unique.
        groups: groups that a config defines, in its order. Nodes that joined with a group need no config for it.

    Raises:
        InvalidInput: a rank or an id twice.
    """

    nodes: tuple[Node, ...]
    groups: tuple[NodeGroup, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(sorted(self.nodes, key=lambda node: node.rank)))
        object.__setattr__(self, "groups", tuple(self.groups))
        ranks = Counter(node.rank for node in self.nodes)
        ids = Counter(node.node_id for node in self.nodes)
        faults = [Fault("nodes", f"{count} nodes have the rank {rank}") for rank, count in ranks.items() if count > 1]
        faults += [Fault("nodes", f"{count} nodes have the id {name!r}") for name, count in ids.items() if count > 1]
        faults += [Fault("nodes", f"{node.node_id} has the rank {node.rank}") for node in self.nodes if node.rank < 0]
        if faults:
            raise InvalidInput(faults)

    @classmethod
    def from_nodes(cls, text: str, field: str = "nodes") -> Cluster:
        """The cluster that a text describes, e.g. ``8+8`` (:mod:`callboard.model.cluster_text`).

        Node ``i`` has the rank ``i``, the id ``node-i`` and accelerators with the ids 0, 1, …

        Raises:
            InvalidInput: every fault of the text.
        """
        if not isinstance(text, str):
            raise InvalidInput([Fault(field, f"{shown(text)} is not a text; write e.g. '8+8'")])
        nodes: list[Node] = []
        made: dict[tuple[int, str], tuple[Accelerator, ...]] = {}
        for rank, found in enumerate(parse_cluster(text, field)):
            kind = found.gpu_model or "gpu"
            if (found.gpus, kind) not in made:
                made[found.gpus, kind] = tuple(Accelerator(str(index), kind) for index in range(found.gpus))
            nodes.append(
                Node(
                    node_id=f"node-{rank}",
                    rank=rank,
                    accelerators=made[found.gpus, kind],
                    cpu_milli=found.cpu_milli,
                    memory_bytes=found.memory_bytes,
                )
            )
        return cls(tuple(nodes))

    @classmethod
    def from_mapping(cls, source: object) -> Cluster:
        """The cluster that a YAML text, a mapping or an OmegaConf config describes with ``nodes`` and ``node_groups``.

        Raises:
            InvalidInput: every fault.
        """
        # The reader knows Cluster, so it is found when it is needed.
        from callboard.placement.cluster.defining import read_cluster  # noqa: PLC0415

        return read_cluster(source)

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @property
    def num_accelerators(self) -> int:
        return sum(len(node.accelerators) for node in self.nodes)

    @cached_property
    def by_rank(self) -> dict[int, Node]:
        return {node.rank: node for node in self.nodes}

    @cached_property
    def groups_by_label(self) -> dict[str, NodeGroup]:
        """Every group by its label: reserved ones, those of the config, and those that nodes joined with."""
        every = tuple(node.rank for node in self.nodes)
        found = {label: NodeGroup(label=label, node_ranks=every) for label in RESERVED_LABELS}
        joined: dict[str, list[Node]] = {}
        for node in self.nodes:
            if node.node_group and node.node_group not in RESERVED_LABELS:
                joined.setdefault(node.node_group, []).append(node)
        for label, nodes in joined.items():
            found[label] = joined_group(label, nodes)
        found.update((group.label, group) for group in self.groups)
        return found

    def with_groups(self, groups: Iterable[NodeGroup]) -> Cluster:
        """The same nodes with these groups."""
        return replace(self, groups=tuple(groups))

    def first(self, count: int) -> Cluster:
        """The ``count`` nodes of the lowest ranks, with the same groups."""
        return self if count >= len(self.nodes) else replace(self, nodes=self.nodes[:count])


def need_cluster(value: object) -> None:
    """Says what a caller should have given, before something inside says it worse.

    Raises:
        TypeError: it is no cluster.
    """
    if not isinstance(value, Cluster):
        raise TypeError(f"{shown(value)} is not a Cluster; write e.g. Cluster.from_nodes('8+8')")


def joined_group(label: str, nodes: Iterable[Node]) -> NodeGroup:
    """The group that nodes joined with: by accelerators if any has some, else by the one type of declared hardware."""
    members = list(nodes)
    ranks = tuple(node.rank for node in members)
    declared = declared_hardware(members, "")
    types = {unit.type for _, unit in declared}
    if any(node.accelerators for node in members) or len(types) != 1:
        return NodeGroup(label=label, node_ranks=ranks)
    return NodeGroup(label=label, node_ranks=ranks, hardware_type=types.pop(), hardware=declared)


def declared_hardware(nodes: Iterable[Node], hardware_type: str) -> tuple[tuple[int, HardwareUnit], ...]:
    """What nodes declared of a type (empty: of any), in the order of nodes."""
    return tuple((node.rank, unit) for node in nodes for unit in node.hardware if hardware_type in ("", unit.type))
