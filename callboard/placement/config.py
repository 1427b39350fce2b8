"""What does a config ask for? The placement of each component, in RLinf's form or in a job file, read and checked.

Three forms hold the same things: a whole RLinf config (``cluster:`` and the sizes of a reasoning job), its ``cluster``
section alone, and a job file whose components carry ``component_placement``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from callboard.model.inputs.located import shown_text
from callboard.model.names import NAME_PATTERN, is_name
from callboard.placement import fields
from callboard.placement.cluster import WHOLE_CLUSTER, Cluster, NodeGroup
from callboard.placement.defining import node_groups
from callboard.placement.describing import described_nodes
from callboard.placement.diagnostics import Report, Where, nearest_of
from callboard.placement.grammar import Segment, format_segments, parse_segments
from callboard.placement.source import Document, Items, Leaf, Table, Value, kind_of, traps

MAX_COMPONENTS = 1000
"""Most components of a config."""

MAX_NODES = 100_000
"""Largest ``num_nodes``."""

CLUSTER_KEYS = (
    "num_nodes",
    "component_placement",
    "node_groups",
    "nodes",
    "auto_scheduler",
    "num_gpus_per_node",
    "gpus_per_node",
    "use_pre_process_policy",
    "use_wait_before_last_iter_policy",
)
"""Keys of the cluster section. ``nodes`` describes nodes, for use without a controller; the last two are RLinf's own
and change no placement."""

_ENTRY_KEYS = ("node_group", "placement", "share", "visible")

KEY = "component_placement"
"""Key of the placements, and of one component's in a job."""

REASONING = "reasoning"
"""The task type whose components are placed by model parallelism."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The placement that a config states for one component.

    Attributes:
        component: name of the component.
        node_groups: labels of the node groups, in the order of their ranks.
        segments: what its placement text says; empty when it has faults.
        share_milli: milli-GPU of each worker; 0: not stated.
        visible_all: every worker sees all accelerators of its node.
        needs_gpus: it asks for GPUs elsewhere, so a placement without any is wrong.
        where: place of the placement text, or of whatever stands for it.
        group_where: place of the node group.
        share_where: place of the share.
    """

    component: str
    node_groups: tuple[str, ...] = (WHOLE_CLUSTER,)
    segments: tuple[Segment, ...] = ()
    share_milli: int = 0
    visible_all: bool = False
    needs_gpus: bool = field(default=False, compare=False)
    where: Where = field(default=Where(), compare=False, repr=False)
    group_where: Where = field(default=Where(), compare=False, repr=False)
    share_where: Where = field(default=Where(), compare=False, repr=False)

    @property
    def text(self) -> str:
        """The placement as its shortest text."""
        return format_segments(self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """What a config asks for.

    Attributes:
        entries: one per component, in the order written.
        groups: node groups that it defines.
        defective: labels of groups whose definition has faults.
        num_nodes: nodes that it wants; None: all.
        gpus_per_node: accelerators that each node is said to have; None: not said.
        auto_scheduler: whether RLinf's dynamic scheduling is on.
        task_type: ``runner.task_type``; empty: not stated.
        sizes: (name, size) of the model parallelism that is stated, e.g. ``("rollout.tp", 2)``, sorted.
        recompute_logprobs: ``algorithm.recompute_logprobs``; None: not stated.
    """

    entries: tuple[Entry, ...] = ()
    groups: tuple[NodeGroup, ...] = ()
    num_nodes: int | None = None
    gpus_per_node: int | None = None
    auto_scheduler: bool = False
    task_type: str = ""
    sizes: tuple[tuple[str, int], ...] = ()
    recompute_logprobs: bool | None = None
    defective: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    num_nodes_where: Where = field(default=Where(), compare=False, repr=False)
    gpus_where: Where = field(default=Where(), compare=False, repr=False)
    size_where: tuple[tuple[str, Where], ...] = field(default=(), compare=False, repr=False)
    where: Where = field(default=Where(), compare=False, repr=False)

    def size(self, name: str, default: int = 1) -> int:
        """One size of the model parallelism."""
        return dict(self.sizes).get(name, default)


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
        self._section_path, self._section = self._find_section()
        self._seen: dict[str, Where] = {}

    def _find_section(self) -> tuple[tuple[str, ...], Table | None]:
        """The cluster section: under ``cluster``, or the whole document."""
        document, report = self._document, self._report
        found = document.value("cluster")
        if found is not None:
            return ("cluster",), fields.table(found, "num_nodes, component_placement, …", report)
        if document.value("component_placement") is not None and document.value("components") is None:
            whole = document.value()
            return (), whole if isinstance(whole, Table) else None
        return (), None

    def _cluster_value(self, key: str) -> Value | None:
        """A value of the cluster section; a job file without one has it at its top."""
        if self._section is not None:
            return self._section.get(key)
        return self._document.value(key)

    def cluster(self, given: Cluster | None) -> Cluster | None:
        """The nodes that may be used: ``num_nodes`` of those that are there (rule 11)."""
        report = self._report
        nodes = self._cluster_value("nodes")
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
                self._place("num_nodes"),
                f"num_nodes is {wanted}, but {given.num_nodes} nodes are there",
                read=str(wanted),
                allowed=f"1 to {given.num_nodes}",
            )
            return given
        return given.first(wanted)

    def config(self, cluster: Cluster | None) -> PlacementConfig:
        """Everything that is asked for."""
        report = self._report
        if self._section is not None:
            fields.known_keys(self._section, CLUSTER_KEYS, report)
        groups = self._cluster_value("node_groups")
        auto = self._cluster_value("auto_scheduler") if self._section is not None else None
        defective: set[str] = set()
        sizes, size_where = self._sizes()
        recompute = self._document.value("algorithm", "recompute_logprobs")
        task_type = self._task_type()
        return PlacementConfig(
            entries=tuple(self._entries()),
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
            num_nodes_where=self._place("num_nodes"),
            gpus_where=self._place("num_gpus_per_node", "gpus_per_node"),
            size_where=size_where,
            where=self._place("component_placement"),
        )

    def _place(self, *keys: str) -> Where:
        found = next((value for key in keys if (value := self._cluster_value(key)) is not None), None)
        if found is not None:
            return found.where
        return self._section.where if self._section is not None else Where(keys[0])

    def _whole(self, key: str, low: int, high: int, *, quiet: bool = False) -> int | None:
        value = self._cluster_value(key)
        return None if value is None else fields.whole(value, low, high, key, Report() if quiet else self._report)

    def _gpus_per_node(self) -> int | None:
        """Both spellings are in use; two numbers are a contradiction."""
        stated, other = self._whole("num_gpus_per_node", 0, 1024), self._whole("gpus_per_node", 0, 1024)
        if stated is not None and other is not None and stated != other:
            said = f"num_gpus_per_node is {stated} and gpus_per_node is {other}; they mean the same, so state one"
            self._report.fault(self._place("gpus_per_node"), said, read=str(other), allowed=str(stated))
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

    def _entries(self) -> list[Entry]:
        """The placement of each component, however the document carries it."""
        entries: list[Entry] = []
        placements = self._cluster_value(KEY)
        if placements is not None:
            what = "component names with their placements, e.g. {actor: 0-3, env: all}"
            found = fields.table(placements, what, self._report)
            for key, value in found.entries if found is not None else ():
                entries.extend(self._entries_of(key, value))
        job = self._document.value("components")
        if isinstance(job, Items):
            for item in job.items:
                entries.extend(self._job_entries(item))
        if not entries and not self._told_why_none():
            where = placements.where if placements is not None else self._place("component_placement")
            self._report.fault(where, "no component has a placement; write e.g. component_placement: {actor: 0-3}")
        if len(entries) > MAX_COMPONENTS:
            self._report.fault(self._place("component_placement"), f"more than {MAX_COMPONENTS} components")
            return []
        return entries

    def _told_why_none(self) -> bool:
        """Whether some fault already says why no component has a placement."""
        if self._section_path and self._section is None:
            return True
        keys = [key.text for key, _ in self._section.entries] if self._section is not None else []
        if KEY in {nearest_of(key, CLUSTER_KEYS) for key in keys if key not in CLUSTER_KEYS}:
            return True
        place = ".".join((*self._section_path, KEY))
        return any(fault.field.startswith((place, "components[")) for fault in self._report.faults)

    def _entries_of(self, key: Leaf, value: Value) -> list[Entry]:
        """The entries of one key: its names share one placement."""
        names = self._names(key)
        # Faults of the value are told once, for all its names.
        entry = self._entry(key.text.strip(), value)
        return [_named(entry, name) for name in names]

    def _names(self, key: Leaf) -> list[str]:
        if key.lost:
            message = f"{key.lost} is what a YAML reader made of a component's name; quote it"
            self._report.fault(key.where, message, read=key.lost)
            return []
        names: list[str] = []
        start = 0
        for part in key.text.split(","):
            where = key.where.at(start + len(part) - len(part.lstrip()))
            if self._name(part.strip(), where, bare=key.bare and "," not in key.text):
                names.append(part.strip())
            start += len(part) + 1
        return names

    def _name(self, name: str, where: Where, *, bare: bool = False) -> bool:
        report = self._report
        if not name:
            report.fault(where, "a component's name is empty; is there a comma too many?", read="nothing")
        elif bare and traps(name):
            said = f"{shown_text(name)} without quotes is {traps(name)} for other readers of YAML"
            report.fault(where, f"{said}; quote this name", read=name)
        elif not is_name(name):
            message = f"{shown_text(name)} is no component's name; names match {NAME_PATTERN}"
            if name[0].isdigit():
                message += "; between braces a text with commas needs quotes"
            report.fault(where, message, read=name[:80], allowed=NAME_PATTERN)
        elif name in self._seen:
            line = self._seen[name].line
            first = f", first in line {line}" if line else ""
            report.fault(where, f"the component {name} is placed twice{first}; a name appears once", read=name)
        else:
            self._seen[name] = where
            return True
        return False

    def _job_entries(self, item: Value) -> list[Entry]:
        """The entry of one component of a job; none when it carries no placement."""
        if not isinstance(item, Table):
            return []
        value, name = item.get(KEY), item.get("name")
        if value is None:
            return []
        if not isinstance(name, Leaf) or not self._name(name.text, name.where):
            if not isinstance(name, Leaf):
                self._report.fault(item.where, "a component with a placement needs a name")
            return []
        entry = self._entry(name.text, value)
        amounts = item.get("resources")
        gpu = amounts.get("gpu") if isinstance(amounts, Table) else None
        asks = isinstance(gpu, Leaf) and gpu.text.strip() not in ("0", "0.0")
        return [_named(entry, name.text, needs_gpus=asks or entry.needs_gpus)]

    def _entry(self, component: str, value: Value) -> Entry:
        report = self._report
        if not isinstance(value, Table):
            segments = self._segments(value, component)
            return Entry(component=component, segments=segments or (), where=value.where.of(component))
        fields.known_keys(value, _ENTRY_KEYS, report, component)
        group, text, share, visible = (value.get(key) for key in _ENTRY_KEYS)
        labels: tuple[str, ...] = (WHOLE_CLUSTER,) if group is None else self._group_labels(group, component)
        # What a misspelt key was meant for is told once, and nothing is concluded from its absence.
        misspelt = {nearest_of(key.text, _ENTRY_KEYS) for key, _ in value.entries if key.text not in _ENTRY_KEYS}
        if group is None and "node_group" in misspelt:
            labels = ()
        if text is None and "placement" not in misspelt:
            report.fault(value.where.of(component), "the placement is missing; write e.g. placement: 0-3")
        segments = self._segments(text, component) if text is not None else None
        share_milli = fields.share_milli(share, report, component) if share is not None else 0
        visible_all = visible is not None and self._visible(visible, component)
        return Entry(
            component=component,
            node_groups=labels,
            segments=segments or (),
            share_milli=share_milli or 0,
            visible_all=visible_all,
            needs_gpus=bool(share_milli),
            where=(text or value).where.of(component),
            group_where=(group or value).where.of(component),
            share_where=(share or value).where.of(component),
        )

    def _segments(self, value: Value, component: str) -> tuple[Segment, ...] | None:
        leaf = fields.placement_text(value, self._report, component)
        if leaf is None:
            return None
        return parse_segments("" if leaf.null else leaf.text, leaf.where.of(component), self._report)

    def _visible(self, value: Value, component: str) -> bool:
        read = value.text.strip().lower() if isinstance(value, Leaf) else ""
        if read not in ("all", "own"):
            message = (
                f"{kind_of(value)} is not allowed; visible: all shows workers every GPU of their node, own is usual"
            )
            self._report.fault(value.where.of(component), message, read=kind_of(value), allowed="all or own")
        return read == "all"

    def _group_labels(self, value: Value, component: str) -> tuple[str, ...]:
        """Rule 8: one label, a comma-separated text or a list; what has faults is left out."""
        if isinstance(value, Items):
            if not value.items:
                self._report.fault(value.where.of(component), "the list of node groups is empty")
            found = [fields.label(item, "label", self._report, component) for item in value.items]
        elif isinstance(value, Leaf) and "," in value.text and not value.lost:
            found = []
            start = 0
            for part in value.text.split(","):
                inner = Leaf(part.strip(), value.where.at(start + len(part) - len(part.lstrip())))
                found.append(fields.label(inner, "label", self._report, component))
                start += len(part) + 1
        else:
            found = [fields.label(value, "label", self._report, component)]
        return tuple(label for label in found if label is not None)


def _named(entry: Entry, component: str, *, needs_gpus: bool | None = None) -> Entry:
    return Entry(
        component=component,
        node_groups=entry.node_groups,
        segments=entry.segments,
        share_milli=entry.share_milli,
        visible_all=entry.visible_all,
        needs_gpus=entry.needs_gpus if needs_gpus is None else needs_gpus,
        where=entry.where.of(component),
        group_where=entry.group_where.of(component),
        share_where=entry.share_where.of(component),
    )


def components_of(entries: Sequence[Entry]) -> tuple[str, ...]:
    """Names of the components, in order."""
    return tuple(entry.component for entry in entries)
