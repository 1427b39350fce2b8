"""A job's placement on nodes that are only described, as a controller with those nodes would have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from callboard.model.cluster_text import group_of
from callboard.model.faults import Fault, InvalidInput
from callboard.model.specs import JobSpec
from callboard.placement import Accelerator, Cluster, Node
from callboard.placement.jobs import place_by, plan_of
from callboard.placement.source.diagnostics import Report
from callboard.placement.source.document import open_document
from callboard.scheduler.account.described_nodes import DescribedNode

_ANY_TYPE = Accelerator("").type


def placed(
    spec: JobSpec, described: Sequence[DescribedNode], otherwise: Sequence[DescribedNode]
) -> tuple[JobSpec, list[DescribedNode], Sequence[Fault]]:
    """A job with the places that its text gives its workers.

    Args:
        spec: the job, as it was read.
        described: the nodes; empty: those that its text describes.
        otherwise: the nodes if it describes none.

    Returns:
        The job, the nodes by rank, and what is allowed and may not be meant.

    Raises:
        InvalidInput: every fault of the text, or there are no nodes.
        Misfits: what the job says beside it and differently.
    """
    if described:
        cluster = _cluster_of(described)
    elif otherwise and not describes_nodes(spec.placement_config):
        cluster = _cluster_of(otherwise)
    else:
        cluster = _own_cluster(spec.placement_config)
    plan = plan_of(spec, cluster)
    return place_by(spec, plan), [_described(node) for node in cluster.nodes], plan.warnings


def _cluster_of(described: Sequence[DescribedNode]) -> Cluster:
    return Cluster(
        tuple(
            Node(
                node_id=node.node_id,
                rank=node.rank,
                accelerators=tuple(Accelerator(str(at), node.gpu_model or _ANY_TYPE) for at in range(node.gpus)),
                labels=node.labels,
                node_group=node.node_group,
                cpu_milli=node.cpu_milli,
                memory_bytes=node.memory_bytes,
            )
            for node in described
        )
    )


def describes_nodes(text: str) -> bool:
    """Whether a placement text says which nodes there are."""
    document = open_document(text, Report())
    return document.value("cluster", "nodes") is not None or document.value("nodes") is not None


def _own_cluster(text: str) -> Cluster:
    if not describes_nodes(text):
        what = "which nodes are there? what a placement means depends on them; describe them, e.g. --nodes 8+8"
        raise InvalidInput([Fault("nodes", what)])
    cluster = Cluster.from_mapping(text)
    return replace(cluster, nodes=tuple(_grouped(node) for node in cluster.nodes))


def _grouped(node: Node) -> Node:
    return node if node.node_group else replace(node, node_group=group_of(len(node.accelerators)))


def _described(node: Node) -> DescribedNode:
    types = {accelerator.type for accelerator in node.accelerators}
    return DescribedNode(
        node_id=node.node_id,
        rank=node.rank,
        node_group=node.node_group,
        labels=node.labels,
        gpus=len(node.accelerators),
        gpu_model="" if len(types) != 1 or types == {_ANY_TYPE} else types.pop(),
        cpu_milli=node.cpu_milli,
        memory_bytes=node.memory_bytes,
        hardware=tuple(unit.type for unit in node.hardware),
    )
