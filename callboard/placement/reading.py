"""What is read of a config, and in which order? Its nodes, node groups, placements and the sizes of its models."""

from __future__ import annotations

from dataclasses import dataclass, replace

from callboard.model.faults import InvalidInput
from callboard.placement import fields
from callboard.placement.cluster import Cluster, need_cluster
from callboard.placement.config import KEY, REASONING, PlacementConfig, components_of
from callboard.placement.defining import node_groups
from callboard.placement.describing import described_nodes
from callboard.placement.diagnostics import Report, Where, capped
from callboard.placement.entries import EntryReader
from callboard.placement.section import CLUSTER_KEYS, Section
from callboard.placement.source import Document, open_document
from callboard.placement.tree import Leaf

MAX_NODES = 100_000
"""Largest ``num_nodes``."""

_SIZES = {
    "actor.tp": ("actor", "model", "tensor_model_parallel_size"),
    "actor.pp": ("actor", "model", "pipeline_model_parallel_size"),
    "rollout.tp": ("rollout", "tensor_parallel_size"),
    "rollout.pp": ("rollout", "pipeline_parallel_size"),
    "inference.tp": ("inference", "model", "tensor_model_parallel_size"),
    "inference.pp": ("inference", "model", "pipeline_model_parallel_size"),
    "actor_inference.tp": ("actor_inference", "model", "tensor_model_parallel_size"),
    "critic.tp": ("critic", "model", "tensor_model_parallel_size"),
    "critic.pp": ("critic", "model", "pipeline_model_parallel_size"),
    "critic_inference.tp": ("critic_inference", "model", "tensor_model_parallel_size"),
}


@dataclass(frozen=True, slots=True)
class Read:
    """A config that was read: it is not read twice to learn which class places it."""

    report: Report
    config: PlacementConfig
    cluster: Cluster | None
    given: Cluster | None


def read_source(config: object, cluster: Cluster | None, *, reasoning: bool | None = None) -> Read:
    """What ``config`` asks for, faults collected.

    Args:
        config: as of :class:`~callboard.placement.ComponentPlacement`.
        cluster: the nodes that are there; None: those that the config describes.
        reasoning: whether to place by model parallelism; None: as the config's own task says.

    Raises:
        InvalidInput: it is no YAML and no mapping.
        TypeError: ``cluster`` is no cluster.
    """
    if cluster is not None:
        need_cluster(cluster)
    report = Report()
    if isinstance(config, PlacementConfig):
        if cluster is None:
            report.fault(Where("nodes"), "which nodes are there? give a cluster")
        if reasoning is not None:
            config = replace(config, task_type=REASONING if reasoning else "")
        return Read(report, config, cluster.with_groups(config.groups) if cluster else None, cluster)
    found, used = read_config(open_document(config, report), cluster, report, reasoning=reasoning)
    return Read(report, found, used, cluster)


def placed_names(config: object) -> list[str]:
    """Names of the components that a config places, in its order, whatever else is wrong with it.

    Raises:
        InvalidInput: it is no YAML and no mapping, or what should be names is none.
    """
    report = Report()
    names = components_of(read_config(open_document(config, report), Cluster(()), report)[0].entries)
    if not names:
        told = [fault for fault in report.faults if KEY in fault.field and fault.line]
        if told:
            raise InvalidInput(capped(told))
    return list(names)


def read_config(
    document: Document, cluster: Cluster | None, report: Report, *, reasoning: bool | None = None
) -> tuple[PlacementConfig, Cluster | None]:
    """What ``document`` asks for, and the nodes that it may use.

    Args:
        document: what was written.
        cluster: the nodes that are there; None: those that the document describes itself.
        report: where faults go.
        reasoning: whether the sizes of model parallelism count; None: as ``runner.task_type`` says.

    Returns:
        The config, without what has faults, and the cluster with its groups; None when no nodes are known.
    """
    reader = _Reader(document, report, reasoning)
    cluster = reader.cluster(cluster)
    config = reader.config(cluster)
    return config, cluster.with_groups(config.groups) if cluster is not None else None


class _Reader:
    """Reads one document."""

    def __init__(self, document: Document, report: Report, reasoning: bool | None) -> None:
        self._document = document
        self._report = report
        self._reasoning = reasoning
        self._section = Section(document, report)

    def cluster(self, given: Cluster | None) -> Cluster | None:
        """The nodes that may be used: ``num_nodes`` of those that are there (rule 11)."""
        report = self._report
        nodes = self._section.value("nodes")
        if given is None and nodes is not None:
            given = described_nodes(nodes, report)
        if given is None:
            if nodes is None:
                report.fault(Where("nodes"), "which nodes are there? give a cluster, or describe one: nodes: 8+8")
            return None
        wanted = self._whole("num_nodes", 1, MAX_NODES)
        if wanted is None:
            return given
        if wanted > given.num_nodes:
            report.fault(
                self._section.place("num_nodes"),
                f"num_nodes is {wanted}, but {given.num_nodes} nodes are there",
                read=str(wanted),
                allowed=f"1 to {given.num_nodes}",
            )
            return given
        return given.first(wanted)

    def config(self, cluster: Cluster | None) -> PlacementConfig:
        """Everything that is asked for."""
        report = self._report
        if self._section.table is not None:
            fields.known_keys(self._section.table, CLUSTER_KEYS, report)
        groups = self._section.value("node_groups")
        auto = self._section.value("auto_scheduler") if self._section.table is not None else None
        defective: set[str] = set()
        sizes, size_where = self._sizes()
        recompute = self._document.value("algorithm", "recompute_logprobs")
        task_type = self._task_type()
        return PlacementConfig(
            entries=tuple(EntryReader(self._document, self._section, report).entries()),
            groups=node_groups(groups, cluster, report, defective) if groups is not None and cluster else (),
            defective=frozenset(defective),
            num_nodes=self._whole("num_nodes", 1, MAX_NODES, quiet=True),
            gpus_per_node=self._gpus_per_node(),
            auto_scheduler=auto is not None and bool(fields.flag(auto, "auto_scheduler", report)),
            task_type=task_type,
            sizes=sizes if task_type == REASONING else (),
            recompute_logprobs=(
                fields.flag(recompute, "algorithm.recompute_logprobs", report)
                if recompute is not None and task_type == REASONING
                else None
            ),
            num_nodes_where=self._section.place("num_nodes"),
            gpus_where=self._section.place("num_gpus_per_node", "gpus_per_node"),
            size_where=size_where,
            where=self._section.place(KEY),
        )

    def _whole(self, key: str, low: int, high: int, *, quiet: bool = False) -> int | None:
        value = self._section.value(key)
        return None if value is None else fields.whole(value, low, high, key, Report() if quiet else self._report)

    def _gpus_per_node(self) -> int | None:
        """Both spellings are in use; two numbers are a contradiction."""
        stated, other = self._whole("num_gpus_per_node", 0, 1024), self._whole("gpus_per_node", 0, 1024)
        if stated is not None and other is not None and stated != other:
            said = f"num_gpus_per_node is {stated} and gpus_per_node is {other}; they mean the same, so state one"
            self._report.fault(self._section.place("gpus_per_node"), said, read=str(other), allowed=str(stated))
        return other if stated is None else stated

    def _task_type(self) -> str:
        if self._reasoning is not None:
            return REASONING if self._reasoning else ""
        value = self._document.value("runner", "task_type")
        return value.text.strip() if isinstance(value, Leaf) else ""

    def _sizes(self) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, Where], ...]]:
        if self._task_type() != REASONING:
            return (), ()
        found: list[tuple[str, int]] = []
        places: list[tuple[str, Where]] = []
        for name, path in _SIZES.items():
            value = self._document.value(*path)
            size = fields.whole(value, 1, 1_000_000, path[-1], self._report) if value is not None else None
            if value is not None and size is not None:
                found.append((name, size))
                places.append((name, value.where))
        return tuple(sorted(found)), tuple(places)
