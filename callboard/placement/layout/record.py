"""The record of one worker's place, made by a strategy for each process."""

from __future__ import annotations

from enum import StrEnum

from callboard.model.frozen import dataclass


class PlacementMode(StrEnum):
    """How the components of a config lie to each other."""

    COLLOCATED = "COLLOCATED"
    DISAGGREGATED = "DISAGGREGATED"
    AUTO = "AUTO"
    HYBRID = "HYBRID"


class RolloutSyncMode(StrEnum):
    """How weights get from the actor to the rollout."""

    IPC = "IPC"
    COLLECTIVE = "COLLECTIVE"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one process of a component runs, and what it sees.

    Attributes:
        rank: rank in its component, 0 … world size - 1.
        cluster_node_rank: rank of its node in the cluster.
        placement_node_rank: position of its node among the nodes of this component, in order of first use.
        local_rank: position among this component's processes on its node.
        local_world_size: how many processes this component has on its node.
        local_accelerator_rank: position of its first accelerator in the node's visible list; -1: it has none.
        accelerator_type: type of its accelerators; empty: it has none.
        visible_accelerators: ids that it sees, as the node's inventory gives them (index, GPU UUID or MIG id).
        local_hardware_ranks: positions of what it was given on its node: accelerators in the node's visible list, or
            units of declared hardware of its group there; empty for a process that was given a node.
        isolate_accelerator: whether it sees only its own accelerators; False: every one of its node.
        node_group_label: label of the node group that it was placed by.
    """

    rank: int
    cluster_node_rank: int
    placement_node_rank: int
    local_rank: int
    local_world_size: int
    local_accelerator_rank: int
    accelerator_type: str
    visible_accelerators: tuple[str, ...]
    local_hardware_ranks: tuple[int, ...]
    isolate_accelerator: bool
    node_group_label: str
