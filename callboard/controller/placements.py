"""What does a placement text mean on the nodes there are now? Texts become places of workers, at submit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

import yaml

from callboard.model.colocation import unfused
from callboard.model.describe import masked
from callboard.model.faults import Fault, InvalidInput
from callboard.model.quantities import MILLI, format_milli
from callboard.model.specs import ComponentSpec, JobSpec, WorkerPlace
from callboard.placement import (
    Accelerator,
    Cluster,
    HardwareUnit,
    Node,
    PlacementPlan,
    PlannedComponent,
    PlannedWorker,
    plan_placement,
    render,
)
from callboard.scheduler.records import NodeRecord, NodeState
from callboard.wire.refusals import InventoryChanged

_GONE = (NodeState.LOST, NodeState.LEFT)


def cluster_of(nodes: Iterable[NodeRecord]) -> Cluster:
    """The nodes that a placement may use: all that are there and have something to give (PG-11).

    A cordoned or silent node counts: what a text's ranks mean must not change with it; a job on it waits.
    """
    return Cluster(
        nodes=tuple(
            Node(
                node_id=node.node_id,
                rank=node.rank,
                accelerators=tuple(
                    Accelerator(device.id, _type(device.model, simulated=node.simulated)) for device in node.devices
                ),
                labels=node.labels,
                node_group=node.node_group,
                hardware=tuple(HardwareUnit(item.type, item.config_json or "{}") for item in node.hardware),
                interpreters=node.interpreters,
                cpu_milli=node.capacity.cpu_milli,
                memory_bytes=node.capacity.memory_bytes,
                lost_accelerators=node.lost_devices,
            )
            for node in sorted(nodes, key=lambda node: node.rank)
            if node.state not in _GONE and node.capacity
        )
    )


def _type(model: str, *, simulated: bool) -> str:
    """What an accelerator is: its model in lower case."""
    return "gpu" if simulated or not model else model.lower()


def placed(spec: JobSpec, nodes: Iterable[NodeRecord]) -> JobSpec:
    """The job with a place for each worker that its text places; a job without a text as it is.

    Raises:
        InvalidInput: every fault of the text, and of what the job says beside it.
        InventoryChanged: it was planned for other nodes than there are now.
    """
    if not spec.placement_config:
        return spec
    nodes = list(nodes)
    _check_planned_for(spec, nodes)
    asking = [component.name for component in spec.components if component.resources.gpu_milli]
    plan = plan_placement(spec.placement_config, cluster_of(nodes), gpu_components=asking)
    faults = list(_faults(spec, plan))
    if faults:
        raise InvalidInput(faults)
    components = tuple(
        component if component.name not in plan.by_name else _with_places(component, plan.by_name[component.name])
        for component in spec.components
    )
    return replace(
        spec, components=components, placement_config=_kept(plan), placement_digest=_digest(spec.placement_config)
    )


def _check_planned_for(spec: JobSpec, nodes: Iterable[NodeRecord]) -> None:
    """A plan whose GPUs are gone must not start half (AP-16)."""
    changed = [node for node in nodes if node.revision > spec.placement_revision]
    if spec.placement_revision and changed:
        listed = ", ".join(f"{node.node_id} is {node.state}" for node in changed[:5])
        raise InventoryChanged(
            f"{spec.name} was planned at revision {spec.placement_revision}, and since then "
            f"{len(changed)} nodes changed: {listed}",
            metadata={"planned": str(spec.placement_revision), "changed": str(max(node.revision for node in changed))},
        )


def _kept(plan: PlacementPlan) -> str:
    """The text that a job keeps: the placement alone, in its normal form. A whole config may hold secrets, and so may
    the variables of its node groups, which are kept with the places (:mod:`callboard.controller.secret_store`)."""
    config = yaml.safe_load(render(plan))
    del config["cluster"]["nodes"]
    for group in config["cluster"].get("node_groups", ()):
        for settings in group.get("env_configs", ()):
            if "env_vars" in settings:
                settings["env_vars"] = [masked(tuple(pair.items())) for pair in settings["env_vars"]]
    kept: str = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=120)
    return kept


def as_before(spec: JobSpec, first: JobSpec) -> JobSpec:
    """A repeated request resolved as it was the first time, whatever became of the nodes; one that says something else
    stays different."""
    if first.placement_digest != _digest(spec.placement_config):
        return spec
    resolved = {component.name: component for component in unfused(first).components}
    components = tuple(
        replace(
            component,
            min_workers=resolved[component.name].min_workers,
            max_workers=resolved[component.name].max_workers,
            resources=replace(component.resources, gpu_milli=0),
            places=resolved[component.name].places,
        )
        if component.name in resolved and resolved[component.name].places
        else component
        for component in spec.components
    )
    return replace(
        spec,
        components=components,
        placement_config=first.placement_config,
        placement_digest=first.placement_digest,
    )


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _with_places(component: ComponentSpec, planned: PlannedComponent) -> ComponentSpec:
    places = tuple(place_of(worker) for worker in planned.workers)
    return replace(
        component,
        min_workers=len(places),
        max_workers=len(places),
        resources=replace(component.resources, gpu_milli=0),
        places=places,
    )


def place_of(worker: PlannedWorker) -> WorkerPlace:
    """Where one worker must run."""
    settings = ",".join(unit.config_json for unit in worker.hardware)
    return WorkerPlace(
        node_id=worker.node_id,
        devices=tuple((device.position, device.milli) for device in worker.devices),
        observes=worker.observer,
        env=worker.env,
        interpreter=worker.interpreter,
        node_group=worker.placement.node_group_label or "",
        hardware_json=f"[{settings}]" if settings else "",
    )


def _faults(spec: JobSpec, plan: PlacementPlan) -> Iterable[Fault]:
    """What the job and its placement say differently."""
    known = {component.name for component in spec.components}
    for name in plan.by_name:
        if name not in known:
            listed = ", ".join(sorted(known))
            yield Fault("cluster.component_placement", f"places {name}, but the job's components are {listed}")
    for index, component in enumerate(spec.components):
        planned = plan.by_name.get(component.name)
        if planned is None:
            continue
        field = f"spec.components[{index}]"
        if component.elastic:
            yield Fault(f"{field}.min_workers", f"{component.name} has a placement, so its number of workers is fixed")
        elif component.places and _where(component.places) != _where(place_of(worker) for worker in planned.workers):
            # What a job says of itself has both, and equal, so it may be submitted again.
            said = f"{component.name} states places, and its placement gives others; state one of the two"
            yield Fault(f"{field}.places", said)
        elif component.min_workers not in (1, planned.world_size):
            yield Fault(
                f"{field}.workers",
                f"{component.name} states {component.min_workers} workers, its placement makes {planned.world_size}; "
                "leave workers out or correct one of the two",
            )
        yield from _gpu_faults(field, component, planned)


def _where(places: Iterable[WorkerPlace]) -> list[tuple[str, tuple[tuple[int, int], ...]]]:
    return [(place.node_id, place.devices) for place in places]


def _gpu_faults(field: str, component: ComponentSpec, planned: PlannedComponent) -> Iterable[Fault]:
    asked = component.resources.gpu_milli
    if not asked:
        return
    for worker in planned.workers:
        held, whole = sum(device.milli for device in worker.devices), len(worker.devices) * MILLI
        if asked not in (held, whole):
            yield Fault(
                f"{field}.resources.gpu",
                f"{component.name} asks {format_milli(asked)} GPU a worker, its placement gives rank "
                f"{worker.placement.rank} {format_milli(held)}; leave gpu out or correct one of the two",
            )
            return
