"""The reading of a config, in order: its nodes, node groups, placements and the sizes of its models."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace

from callboard.model.faults import InvalidInput
from callboard.model.frozen import dataclass
from callboard.model.inputs.located import shown_text
from callboard.placement.cluster.cluster import Cluster, need_cluster
from callboard.placement.cluster.defining import node_groups
from callboard.placement.cluster.describing import described_nodes
from callboard.placement.config.config import (
    CLUSTER_KEYS,
    KEY,
    MODEL_PARALLEL,
    OLD_NAMES,
    PASSED_OVER,
    REASONING,
    TASKS,
    Entry,
    PlacementConfig,
    Section,
    components_of,
    is_further_rollout,
)
from callboard.placement.config.entries import EntryReader
from callboard.placement.source import fields
from callboard.placement.source.diagnostics import Report, Where, capped
from callboard.placement.source.document import Document, open_document
from callboard.placement.source.tree import Items, Leaf, Table, Value, kind_of

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
            config = replace(config, task_type=_forced(config.task_type) if reasoning else "")
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
        cluster: the nodes that are there; None: those that the document describes itself.
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
        self._section = Section(document, report)
        self._task_type = self._read_task_type(reasoning)

    def cluster(self, given: Cluster | None) -> Cluster | None:
        """The nodes that may be used: ``num_nodes`` of those that are there (rule 11)."""
        report = self._report
        nodes = self._section.value("nodes")
        if nodes is None:
            nodes = self._document.value("nodes")  # a job describes them beside its cluster
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
            there = "1 node is there" if given.num_nodes == 1 else f"{given.num_nodes} nodes are there"
            report.fault(
                self._section.place("num_nodes"),
                f"num_nodes is {wanted}, but {there}",
                read=str(wanted),
                allowed=f"1 to {given.num_nodes}",
            )
            return given
        return given.first(wanted)

    def config(self, cluster: Cluster | None) -> PlacementConfig:
        """Everything that is asked for."""
        report = self._report
        if self._section.table is not None:
            fields.known_keys(self._section.table, CLUSTER_KEYS, report, passed_over=PASSED_OVER)
        groups = self._section.value("node_groups")
        defective: set[str] = set()
        entries = tuple(EntryReader(self._document, self._section, report).entries())
        sizes, size_where = self._sizes(entries)
        parallel = self._task_type in MODEL_PARALLEL
        recompute = self._deciding("algorithm", "recompute_logprobs") if parallel else None
        return PlacementConfig(
            entries=entries,
            groups=node_groups(groups, cluster, report, defective) if groups is not None and cluster else (),
            defective=frozenset(defective),
            num_nodes=self._whole("num_nodes", 1, MAX_NODES, quiet=True),
            gpus_per_node=self._gpus_per_node(),
            auto_scheduler=self._flag("auto_scheduler"),
            pre_process=self._flag("use_pre_process_policy"),
            task_type=self._task_type,
            sizes=sizes,
            recompute_logprobs=(
                fields.flag(recompute, "algorithm.recompute_logprobs", report) if recompute is not None else None
            ),
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

    def _flag(self, key: str) -> bool:
        value = self._section.value(key) if self._section.table is not None else None
        return value is not None and bool(fields.flag(value, key, self._report))

    def _read_task_type(self, reasoning: bool | None) -> str:
        """``runner.task_type`` in RLinf's present words; a misspelt one would place everything in another way."""
        if reasoning is False:
            return ""
        value = self._deciding("runner", "task_type")
        if isinstance(value, Leaf) and not value.problem:
            read = value.text.strip()
        else:
            if value is not None:
                self._report.fault(value.where, f"{kind_of(value)} is not a task type", allowed=", ".join(TASKS))
            elif reasoning is None:
                self._warn_of_defaults()
            read = ""
        found = OLD_NAMES.get(read, read)
        if reasoning:
            return _forced(found)
        near = difflib.get_close_matches(found.lower(), TASKS, n=1, cutoff=0.88) if found not in TASKS else []
        if near and value is not None:
            said = f"unknown task type {shown_text(found)}; did you mean {near[0]}?"
            self._report.fault(value.where, said, read=found, allowed=", ".join(TASKS), nearest=near[0])
        return found

    def _deciding(self, *path: str) -> Value | None:
        """A value outside of ``cluster`` that decides where components are. Misspelt it is a fault, for it would be
        passed over among the hundreds of keys that decide nothing."""
        value = self._document.value(*path)
        around = self._document.value(*path[:-1]) if value is None else None
        for key, _ in around.entries if isinstance(around, Table) else ():
            if difflib.get_close_matches(key.text[:80], path[-1:], n=1, cutoff=0.9) and key.text != path[-1]:
                said = f"unknown key {shown_text(key.text)}; did you mean {path[-1]}?"
                self._report.fault(key.where, said, read=key.text, allowed=path[-1], nearest=path[-1])
        return value

    def _warn_of_defaults(self) -> None:
        """Whole configs that are made of several say their task in one of them, and only one is read here."""
        defaults = self._document.value("defaults")
        names = [item.text for item in defaults.items if isinstance(item, Leaf)] if isinstance(defaults, Items) else []
        bases = [name for name in names if "@" not in name and name != "_self_" and not name.startswith("override ")]
        if defaults is not None and bases:
            listed = ", ".join(map(shown_text, bases[:5]))
            self._report.warn(
                defaults.where,
                f"{listed} may say runner.task_type, and is not read here: components are placed as their texts say; "
                "a reasoning job needs the composed config",
            )

    def _sizes(self, entries: Sequence[Entry]) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, Where], ...]]:
        if self._task_type not in MODEL_PARALLEL:
            return (), ()
        further = {
            f"{name}.{kind}": (name, f"{key}_parallel_size")
            for name in components_of(entries)
            if is_further_rollout(name)
            for kind, key in (("tp", "tensor"), ("pp", "pipeline"))
        }
        found: list[tuple[str, int]] = []
        places: list[tuple[str, Where]] = []
        for name, path in {**_SIZES, **further}.items():
            value = self._deciding(*path)
            size = fields.whole(value, 1, 1_000_000, path[-1], self._report) if value is not None else None
            if value is not None and size is not None:
                found.append((name, size))
                places.append((name, value.where))
        return tuple(sorted(found)), tuple(places)


def _forced(task_type: str) -> str:
    """The task type where the caller chose model parallelism, whatever the config says."""
    return task_type if task_type in MODEL_PARALLEL else REASONING
