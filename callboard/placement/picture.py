"""The picture of a plan: who sits on which GPU, by node and device."""

from __future__ import annotations

from callboard.model.frozen import dataclass
from callboard.placement.layout.plan import PlacementPlan


@dataclass(frozen=True, slots=True)
class Holder:
    """Workers of one component on one device, or on no device of a node.

    Attributes:
        ranks: their ranks, ascending.
        milli: what each is charged of the device; 0: nothing.
        hardware: declared hardware that they were given; empty: none.
    """

    component: str
    ranks: tuple[int, ...]
    milli: int = 0
    hardware: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DevicePicture:
    """One device with everybody who holds a part of it, in the order of components."""

    position: int
    id: str
    type: str
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class NodePicture:
    """One node with its devices, and those who run there without one."""

    node_id: str
    rank: int
    devices: tuple[DevicePicture, ...]
    others: tuple[Holder, ...]


def picture(plan: PlacementPlan) -> tuple[NodePicture, ...]:
    """Every node of the plan's cluster, by rank."""
    on_device: dict[tuple[int, int], dict[str, tuple[list[int], int]]] = {}
    elsewhere: dict[int, dict[tuple[str, tuple[str, ...]], list[int]]] = {}
    for worker in plan.workers:
        node, rank = worker.placement.cluster_node_rank, worker.placement.rank
        for device in worker.devices:
            holders = on_device.setdefault((node, device.position), {})
            holders.setdefault(worker.component, ([], device.milli))[0].append(rank)
        if not worker.devices:
            named = tuple(
                f"{unit.type} {at}"
                for unit, at in zip(worker.hardware, worker.placement.local_hardware_ranks, strict=True)
            )
            elsewhere.setdefault(node, {}).setdefault((worker.component, named), []).append(rank)
    return tuple(
        NodePicture(
            node.node_id,
            node.rank,
            tuple(
                DevicePicture(
                    position,
                    device.id,
                    device.type,
                    tuple(
                        Holder(component, tuple(ranks), milli)
                        for component, (ranks, milli) in on_device.get((node.rank, position), {}).items()
                    ),
                )
                for position, device in enumerate(node.accelerators)
            ),
            tuple(
                Holder(component, tuple(ranks), 0, units)
                for (component, units), ranks in elsewhere.get(node.rank, {}).items()
            ),
        )
        for node in plan.cluster.nodes
    )
