"""The plan: every worker with its node, devices, environment and hardware, as one frozen result."""

from __future__ import annotations

from dataclasses import field
from functools import cached_property

from callboard.model.frozen import dataclass
from callboard.model.quantities import MILLI
from callboard.model.specs import Labels
from callboard.placement.cluster.cluster import Cluster, HardwareUnit
from callboard.placement.config.config import PlacementConfig
from callboard.placement.layout.record import Placement, PlacementMode, RolloutSyncMode
from callboard.placement.layout.strategies import PlacementStrategy
from callboard.placement.source.diagnostics import Diagnostic


@dataclass(frozen=True, slots=True)
class PlacedDevice:
    """One accelerator that a worker is charged for.

    Attributes:
        position: position in its node's visible list.
        id: its id, as the node's inventory gives it.
        milli: the worker's part of it, of 1000 (I1); a part never straddles devices.
    """

    position: int
    id: str
    milli: int


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """One process.

    Attributes:
        devices: what it is charged for, by position; empty: it lives on CPUs.
        observer: it sees accelerators that it is not charged for.
        hardware: declared hardware that it was given, with settings.
        interpreter: Python interpreter of ``env_configs``; empty: the component's own, or the agent's.
        env: (name, value) of variables of ``env_configs``, sorted.
    """

    component: str
    placement: Placement
    node_id: str
    devices: tuple[PlacedDevice, ...] = ()
    observer: bool = False
    hardware: tuple[HardwareUnit, ...] = ()
    interpreter: str = ""
    env: Labels = field(default=(), repr=False)  # values may be secrets (SE-04)


@dataclass(frozen=True, slots=True)
class PlannedComponent:
    """One component.

    Attributes:
        workers: its workers by rank.
    """

    name: str
    strategy: PlacementStrategy
    workers: tuple[PlannedWorker, ...]

    @property
    def world_size(self) -> int:
        """How many workers it has."""
        return len(self.workers)


@dataclass(frozen=True, slots=True)
class NodeDemand:
    """What a placement takes of one node: the union of its components' devices, each counted once.

    Attributes:
        devices: position and milli of each device that is used: 1000, or the sum of the shares where all are stated.
    """

    node_id: str
    node_rank: int
    devices: tuple[tuple[int, int], ...]
    workers: int

    @property
    def gpu_milli(self) -> int:
        """Milli-GPU in all."""
        return sum(milli for _, milli in self.devices)


@dataclass(frozen=True)
class PlacementPlan:
    """A placement that was checked against a cluster.

    Attributes:
        cluster: the nodes it was resolved against, with the groups of the config.
        mode: how the components lie to each other.
        sync_mode: how weights get from actor to rollout; None unless the components are placed by model parallelism.
        components: components in the order written.
        demand: what is taken of each node that is used, by node rank.
        warnings: what is allowed and may not be meant.
    """

    config: PlacementConfig
    cluster: Cluster
    mode: PlacementMode
    sync_mode: RolloutSyncMode | None
    components: tuple[PlannedComponent, ...]
    demand: tuple[NodeDemand, ...]
    warnings: tuple[Diagnostic, ...] = field(default=(), compare=False)

    @cached_property
    def by_name(self) -> dict[str, PlannedComponent]:
        return {component.name: component for component in self.components}

    @property
    def workers(self) -> tuple[PlannedWorker, ...]:
        """Every worker, by component and rank."""
        return tuple(worker for component in self.components for worker in component.workers)

    @property
    def gpus(self) -> int:
        """How many GPUs are used, each counted once."""
        return sum(len(node.devices) for node in self.demand)


WHOLE_DEVICE = MILLI
"""Milli-GPU of one device."""
