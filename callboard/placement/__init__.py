"""The placement language: texts such as ``0-3:0-7`` to nodes, devices and ranks.

The same text works from an RLinf/Hydra config and from a job file. Everything here is pure: a :class:`Cluster` is
described, or made by whoever has an inventory; nothing is read from files, networks or clocks.

From text to placements::

    from callboard.placement import Cluster, component_placement_for

    placement = component_placement_for(config, Cluster.from_nodes("8+8"))  # every fault at once: InvalidInput
    placement.resolve("actor")  # [Placement(rank=0, cluster_node_rank=0, visible_accelerators=("0",), …), …]

What a controller needs is one frozen result, :class:`PlacementPlan`::

    cluster = Cluster(tuple(Node(node_id=…, rank=…, accelerators=(Accelerator(id, type), …), labels=…,
                                 node_group=…, hardware=(HardwareUnit(type, config_json), …),
                                 interpreters=…, lost_accelerators=…) for each node that joined))
    plan = plan_placement(config, cluster, gpu_components={"actor"})
    plan.components[i].name, .strategy, .workers      # in the order written
    worker.node_id                                     # where it starts
    worker.placement                                   # Placement: rank, local_rank, local_world_size, visible ids …
    worker.devices                                     # (PlacedDevice(position, id, milli), …); () on CPUs
    worker.observer                                    # sees devices that it is not charged for (visible: all)
    worker.env, worker.interpreter, worker.hardware    # of env_configs and hardware of the group it was placed by
    plan.demand                                        # per node: the union of all components' devices, with milli
    plan.warnings                                      # Diagnostics that refuse nothing

A fault is a :class:`Diagnostic` (a :class:`callboard.model.faults.Fault` with component, segment, what was read and
what is allowed), so whatever shows or sends faults does so here too. ``parse(render(plan)) == plan``.
"""

from __future__ import annotations

from callboard.placement.cluster.cluster import Accelerator, Cluster, EnvConfig, HardwareUnit, Node, NodeGroup
from callboard.placement.components import (
    ComponentPlacement,
    HybridComponentPlacement,
    ModelParallelComponentPlacement,
    component_placement_for,
)
from callboard.placement.config.config import PlacementConfig
from callboard.placement.config.reading import placed_names
from callboard.placement.layout.plan import NodeDemand, PlacedDevice, PlacementPlan, PlannedComponent, PlannedWorker
from callboard.placement.layout.record import Placement, PlacementMode, RolloutSyncMode
from callboard.placement.layout.strategies import (
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    PlacementStrategy,
)
from callboard.placement.picture import DevicePicture, Holder, NodePicture, picture
from callboard.placement.render import parse, plan_placement, render
from callboard.placement.source.diagnostics import Diagnostic

__all__ = [
    "Accelerator",
    "Cluster",
    "ComponentPlacement",
    "DevicePicture",
    "Diagnostic",
    "EnvConfig",
    "FlexiblePlacementStrategy",
    "HardwareUnit",
    "Holder",
    "HybridComponentPlacement",
    "ModelParallelComponentPlacement",
    "Node",
    "NodeDemand",
    "NodeGroup",
    "NodePicture",
    "NodePlacementStrategy",
    "PackedPlacementStrategy",
    "PlacedDevice",
    "Placement",
    "PlacementConfig",
    "PlacementMode",
    "PlacementPlan",
    "PlacementStrategy",
    "PlannedComponent",
    "PlannedWorker",
    "RolloutSyncMode",
    "component_placement_for",
    "parse",
    "picture",
    "placed_names",
    "plan_placement",
    "render",
]
