"""The cluster of an RLinf config: its own, as far as it says, held against the one stated."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from callboard.autoplace.problem.problem import Pool
from callboard.autoplace.rlinf.config import MAX_GPUS_PER_NODE, Entry, RLinfConfig
from callboard.autoplace.rlinf.values import located_fault
from callboard.model.faults import Fault, InvalidInput
from callboard.placement.cluster.cluster import Cluster

ASSUMED_GPUS_PER_NODE = 8
"""When nothing tells: the machines that RLinf's configs are written for."""

WHOLE_CLUSTER = "cluster"
"""Label of the node group that is every node."""

_PLACEMENT = "cluster.component_placement"
_RANKS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def own_nodes(config: RLinfConfig, source: Mapping[str, Any], notes: list[str]) -> tuple[int, ...]:
    """GPUs of each node, by what the config says: nodes are stated, GPUs per node perhaps.

    Args:
        notes: gets what was assumed.

    Raises:
        InvalidInput: the nodes that it describes have faults.
    """
    if config.described:
        described = Cluster.from_mapping(source).nodes[: config.num_nodes]
        return tuple(len(node.accelerators) for node in described)
    count = config.num_nodes or 1
    if config.gpus_per_node is not None:
        return (config.gpus_per_node,) * count
    ranks = [
        (entry.highest_rank, len(_group_nodes(config, entry.group, count)))
        for entry in config.entries
        if entry.highest_rank is not None and _has_gpus(config, entry)
    ]
    if ranks:
        gpus = max(math.ceil((rank + 1) / nodes) for rank, nodes in ranks)
        notes.append(f"{gpus} GPUs per node: taken from the ranks of {_PLACEMENT}; --nodes states it")
    else:
        gpus = ASSUMED_GPUS_PER_NODE
        notes.append(f"{gpus} GPUs per node are assumed: the config doesn't say; --nodes states it")
    if gpus > MAX_GPUS_PER_NODE:
        why = f"its ranks mean {gpus} GPUs per node; {MAX_GPUS_PER_NODE} are allowed"
        raise InvalidInput([Fault(_PLACEMENT, why)])
    return (gpus,) * count


def group_of(config: RLinfConfig) -> str:
    """Label of the one node group in which the costed components are; empty: the whole cluster.

    Raises:
        InvalidInput: they are in several.
    """
    costed = set(config.workload.profiles)
    groups = {entry.group for entry in config.entries if costed & set(entry.names)}
    if len(groups) > 1:
        named = ", ".join(sorted(label or WHOLE_CLUSTER for label in groups))
        why = (
            f"the costed components are in several node groups ({named}), and profile_data doesn't say on which GPUs "
            "it was measured; describe the workflow in the general form, with a cost per pool"
        )
        raise InvalidInput([Fault(_PLACEMENT, why)])
    return groups.pop() if groups else ""


def pool_of(config: RLinfConfig, group: str, nodes: Sequence[int]) -> Pool:
    """The GPUs of a group, as it numbers them.

    Args:
        group: its label; empty: the whole cluster.
        nodes: GPUs of each node.

    Raises:
        InvalidInput: its node ranks can't be read.
    """
    offsets = [0, *accumulate(nodes)]
    ranks = _group_nodes(config, group, len(nodes))
    return Pool(
        name=group or WHOLE_CLUSTER,
        gpu_ranks=tuple(rank for node in ranks for rank in range(offsets[node], offsets[node + 1])),
        node_ranks=ranks,
    )


def _group_nodes(config: RLinfConfig, group: str, nodes: int) -> tuple[int, ...]:
    """Ranks of the nodes of a group (or of several, joined with commas), in its order.

    Those that the cluster doesn't have are left out; a label that nobody defined means the whole cluster here, and is
    told by whoever places components in it.
    """
    labels = [label for part in group.split(",") if (label := part.strip()) in config.groups]
    ranks = [rank for label in labels for rank in _label_nodes(label, config.groups[label], nodes)]
    return tuple(dict.fromkeys(ranks)) if labels else tuple(range(nodes))


def _label_nodes(label: str, text: str, nodes: int) -> Iterator[int]:
    for part in text.replace(" ", "").split(","):
        match = _RANKS.fullmatch(part)
        if part.lower() == "all":
            yield from range(nodes)
        elif match is None:
            where = f"cluster.node_groups[{label}].node_ranks"
            raise InvalidInput([Fault(where, f"'{part}' is not a rank of a node; write e.g. 0-3")])
        else:
            yield from range(int(match[1]), min(int(match[2] or match[1]), nodes - 1) + 1)


def _has_gpus(config: RLinfConfig, entry: Entry) -> bool:
    """Whether the entry's ranks are GPUs: those of a robot group or of nodes are not."""
    return not any(label.strip() in config.hardware_groups for label in entry.group.split(","))


def refuse_beyond(config: RLinfConfig, group: str, pool: Pool, nodes: Sequence[int], located: object) -> None:
    """A current placement that the cluster can't hold means that the wrong cluster was stated, or the wrong file.

    Args:
        group: label of the costed components' group.
        pool: its GPUs.
        nodes: GPUs of each node.
        located: what was read from a file, for the places of faults.

    Raises:
        InvalidInput: every entry with a rank that doesn't exist.
    """
    faults = []
    for entry in config.entries:
        rank = entry.highest_rank
        if rank is None or not _has_gpus(config, entry):
            continue
        own = pool if entry.group == group else pool_of(config, entry.group, nodes)
        if rank >= own.gpus:
            where = "cluster" if not entry.group else f"node group {entry.group}"
            has = f"0 to {own.gpus - 1}" if own.gpus else "none"
            why = f"rank {rank} doesn't exist: the {where} has {own.gpus} GPUs (ranks {has}) on {len(nodes)} nodes"
            faults.append(located_fault(located, ("cluster", "component_placement", entry.key), why))
    if faults:
        raise InvalidInput(faults)


def profiled_gpus(config: RLinfConfig, pool: Pool, nodes: Sequence[int], stated: bool, notes: list[str]) -> int:
    """W: on how many GPUs the single figures were measured. "All" is meant of the cluster that the config is for.

    Args:
        pool: GPUs that are searched.
        nodes: GPUs of each node.
        stated: the nodes are not the config's own.
        notes: gets what was assumed.
    """
    if config.profiled_gpus is not None:
        return config.profiled_gpus
    own_nodes = config.num_nodes
    if not stated or own_nodes is None:
        return pool.gpus
    if own_nodes == len(nodes) and config.gpus_per_node in {None, *nodes}:
        return pool.gpus
    per_node = config.gpus_per_node or max(nodes, default=0)
    profiled = own_nodes * per_node
    if profiled == pool.gpus:
        return profiled
    stated_by = "cluster.num_nodes" if config.gpus_per_node is None else "cluster.num_nodes and num_gpus_per_node"
    notes.append(
        f"the figures of profile_data are taken as measured on the {own_nodes} × {per_node} = {profiled} GPUs that "
        f"the config is written for ({stated_by}); profile_data.num_gpus states another number"
        + ("; larger counts have no cost" if profiled < pool.gpus else "")
    )
    return profiled
