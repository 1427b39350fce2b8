"""What does a placement text mean on the nodes there are now? Texts become places of workers, at submit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from callboard.model.colocation import unfused
from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs.located import Misfit, Misfits, path_of
from callboard.model.specs import JobSpec
from callboard.placement import Accelerator, Cluster, HardwareUnit, Node
from callboard.placement.jobs import digest_of, place_job
from callboard.scheduler.node_record import NodeRecord
from callboard.scheduler.states import NodeState
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
    try:
        return place_job(spec, cluster_of(nodes))
    except Misfits as error:
        raise InvalidInput(map(_fault, error.found)) from None


def _fault(misfit: Misfit) -> Fault:
    """What a job says differently is at its place in the request, what its text says at its place in the text."""
    field = path_of(misfit.place)
    return Fault(field if misfit.place[0] == "cluster" else f"spec.{field}", misfit.message)


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


def as_before(spec: JobSpec, first: JobSpec) -> JobSpec:
    """A repeated request resolved as it was the first time, whatever became of the nodes; one that says something else
    stays different."""
    if first.placement_digest != digest_of(spec.placement_config):
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
