"""Short ways to ask the placement language something, and to look at what it says."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from callboard.model.faults import InvalidInput
from callboard.placement import Accelerator, Cluster, Diagnostic, Node, PlacementPlan, plan_placement

Seen = list[tuple[int, tuple[str, ...]]]
"""Node rank and visible ids of each process, by rank."""


def nodes(*visible: Iterable[str]) -> Cluster:
    """A cluster of nodes with these visible ids."""
    return Cluster(
        tuple(
            Node(node_id=f"n{rank}", rank=rank, accelerators=tuple(Accelerator(name) for name in ids))
            for rank, ids in enumerate(visible)
        )
    )


def of(text: str, *, groups: str = "", num_nodes: int | None = None, more: str = "") -> str:
    """A config whose components are ``text``, in YAML's flow style without the braces."""
    lines = ["cluster:"]
    if num_nodes is not None:
        lines.append(f"  num_nodes: {num_nodes}")
    lines.append(f"  component_placement: {{{text}}}")
    if groups:
        lines.append(f"  node_groups: {groups}")
    return "\n".join(lines) + "\n" + more


def plan(config: object, cluster: Cluster | str | None = None, *, gpu_components: Iterable[str] = ()) -> PlacementPlan:
    """The plan of a config on a cluster, or on one that a text describes."""
    known = Cluster.from_nodes(cluster) if isinstance(cluster, str) else cluster
    return plan_placement(config, known, gpu_components=gpu_components)


def refused(config: object, cluster: Cluster | str | None = None, *, gpu_components: Iterable[str] = ()) -> str:
    """What is said of a config with exactly one fault."""
    found = faults(config, cluster, gpu_components=gpu_components)
    assert len(found) == 1, [str(fault) for fault in found]
    return found[0].message


def faults(
    config: object, cluster: Cluster | str | None = None, *, gpu_components: Iterable[str] = ()
) -> list[Diagnostic]:
    """Every fault of a config."""
    with pytest.raises(InvalidInput) as caught:
        plan(config, cluster, gpu_components=gpu_components)
    found = [fault for fault in caught.value.faults if isinstance(fault, Diagnostic)]
    assert len(found) == len(caught.value.faults)
    return found


def seen(found: PlacementPlan, component: str) -> Seen:
    """Where the processes of a component are, and what they see."""
    workers = found.by_name[component].workers
    return [(worker.placement.cluster_node_rank, worker.placement.visible_accelerators) for worker in workers]


def charged(found: PlacementPlan, component: str) -> list[list[tuple[int, int]]]:
    """Position and milli of each device of each process."""
    workers = found.by_name[component].workers
    return [[(device.position, device.milli) for device in worker.devices] for worker in workers]


def warned(found: PlacementPlan) -> str:
    """All warnings, a line each."""
    return "\n".join(warning.message for warning in found.warnings)
