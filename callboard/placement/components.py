"""Which component runs where? The interface that a config is given to, under the names of RLinf's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from callboard.model.faults import InvalidInput
from callboard.placement.charging import Charges, Located
from callboard.placement.cluster import Cluster, Node, need_cluster
from callboard.placement.config import KEY, REASONING, Entry, PlacementConfig, components_of, read_config
from callboard.placement.diagnostics import Report, Where, capped, nearest_of
from callboard.placement.fields import rank_list
from callboard.placement.grammar import Part, compile_segments
from callboard.placement.numbering import Kind, Numbering, kind_of, number
from callboard.placement.plan import PlacementPlan, PlannedComponent
from callboard.placement.record import Placement, PlacementMode, RolloutSyncMode
from callboard.placement.source import open_document
from callboard.placement.strategies import (
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PlacementStrategy,
    Ranks,
    check_processes,
    place,
)


@dataclass(frozen=True, slots=True)
class Layout:
    """A component whose text fits the cluster.

    Attributes:
        entry: what was asked for.
        numbering: what its ranks mean.
        parts: its segments with their counts.
        strategy: what it compiled to.
        processes: resource ranks of each process.
    """

    entry: Entry
    numbering: Numbering
    parts: tuple[Part, ...]
    strategy: PlacementStrategy
    processes: Sequence[Ranks]

    def resources(self) -> list[tuple[int, str, int]]:
        """What it uses as (node rank, kind, position), whatever it is called in its groups."""
        spans = self.numbering.spans
        found: list[tuple[int, str, int]] = []
        at = 0
        for part in self.parts:
            end = part.first + part.resources
            while spans[at].end <= part.first:
                at += 1
            index = at
            while index < len(spans) and spans[index].first < end:
                span = spans[index]
                own = range(max(part.first, span.first) - span.first, min(end, span.end) - span.first)
                found.extend([(span.node.rank, span.kind.value, position) for position in own])
                index += 1
        return found


class ComponentPlacement:
    """The placement of every component of a config, checked against a cluster as a whole.

    Args:
        config: an RLinf config, its ``cluster`` section or a job; as a YAML text, a mapping or an OmegaConf
            ``DictConfig``.
        cluster: the nodes that are there; None: those that the config describes under ``nodes``.
        gpu_components: components that are known to need GPUs, beside those whose config says so.

    Raises:
        InvalidInput: every fault of the config, each a :class:`~callboard.placement.Diagnostic` with its place.
        TypeError: ``cluster`` is no :class:`~callboard.placement.Cluster`.
    """

    _reasoning = False
    """Whether components are placed by model parallelism, whatever the config's own task is."""

    def __init__(self, config: object, cluster: Cluster | None = None, *, gpu_components: Iterable[str] = ()) -> None:
        report = Report()
        if isinstance(config, _Read):
            report, self._config, used, given = config.report, config.config, config.cluster, config.given
        else:
            read = read_source(config, cluster, reasoning=self._reasoning)
            report, self._config, used, given = read.report, read.config, read.cluster, read.given
        if used is None:
            report.raise_any()
            raise InvalidInput(report.faults)
        self._cluster = used
        _check_nodes(self._config, used, report)
        laying = _Laying(self._config, used, given or used, frozenset(gpu_components), report)
        laid = {
            entry.component: layout for entry in self._config.entries if (layout := laying.lay_out(entry)) is not None
        }
        self._mode, self._sync_mode, self._layouts = self._arrange(laid, report)
        self._charges = Charges()
        users = [(layout.entry, layout.numbering, layout.processes) for layout in self._layouts.values()]
        for user in users:
            self._charges.add(*user, report)
        self._charges.check(users, report)
        report.raise_any()
        self._warnings = tuple(report.warnings)
        self._placed: dict[str, Located] = {}

    def _arrange(
        self, laid: dict[str, Layout], report: Report
    ) -> tuple[PlacementMode, RolloutSyncMode | None, dict[str, Layout]]:
        """How the components lie to each other; subclasses have rules for it."""
        del report
        return PlacementMode.HYBRID, None, laid

    @cached_property
    def plan(self) -> PlacementPlan:
        """Everything at once, as data."""
        components = tuple(
            PlannedComponent(
                name,
                layout.strategy,
                self._charges.workers(layout.entry, self._located(name)),
            )
            for name, layout in self._layouts.items()
        )
        return PlacementPlan(
            self._config,
            self._cluster,
            self._mode,
            self._sync_mode,
            components,
            self._charges.demand(self._placed),
            self._warnings,
        )

    def _located(self, component: str) -> Located:
        """The workers of a component with the span that each lies in, made when they are asked for."""
        if component not in self._placed:
            layout = self._layout(component)
            isolated = not layout.entry.visible_all
            self._placed[component] = place(layout.processes, layout.numbering, isolate_accelerator=isolated)
        return self._placed[component]

    @property
    def cluster(self) -> Cluster:
        """The nodes that may be used, with the groups of the config."""
        return self._cluster

    @property
    def components(self) -> list[str]:
        """Names of the components, in the order written."""
        return list(components_of(self._config.entries))

    @property
    def mode(self) -> PlacementMode:
        """How the components lie to each other."""
        return self._mode

    @property
    def placement_mode(self) -> PlacementMode:
        """The same as :attr:`mode`, under RLinf's name."""
        return self._mode

    @property
    def rollout_sync_mode(self) -> RolloutSyncMode | None:
        """How weights get from the actor to the rollout; None: not known for such components."""
        return self._sync_mode

    @property
    def warnings(self) -> list[str]:
        """What is allowed and may not be meant, as sentences."""
        return [str(warning) for warning in self._warnings]

    def world_size(self, component: str) -> int:
        """How many processes ``component`` has."""
        return len(self._layout(component).processes)

    def hardware_ranks(self, component: str) -> list[int]:
        """Resource ranks that ``component`` uses, ascending, each once, counted in its node groups."""
        return list(self._layout(component).strategy.hardware_ranks)

    def strategy(self, component: str) -> PlacementStrategy:
        """The strategy that the text of ``component`` compiled to."""
        return self._layout(component).strategy

    def resolve(self, component: str) -> list[Placement]:
        """The record of each process of ``component``, by rank."""
        return [placement for placement, _ in self._located(component)]

    def resolve_all(self) -> dict[str, list[Placement]]:
        """The records of every component."""
        return {component: self.resolve(component) for component in self.components}

    def get_world_size(self, component: str) -> int:
        """The same as :meth:`world_size`, under RLinf's name."""
        return self.world_size(component)

    def get_hardware_ranks(self, component: str) -> list[int]:
        """The same as :meth:`hardware_ranks`, under RLinf's name."""
        return self.hardware_ranks(component)

    def get_strategy(self, component: str) -> PlacementStrategy:
        """The same as :meth:`strategy`, under RLinf's name."""
        return self.strategy(component)

    def get_placement(self, component: str) -> list[Placement]:
        """The same as :meth:`resolve`, under RLinf's name."""
        return self.resolve(component)

    def _layout(self, component: str) -> Layout:
        found = self._layouts.get(component)
        if found is None:
            near = nearest_of(component, self._layouts)
            hint = f"did you mean {near}?" if near else f"there are {', '.join(self._layouts)}"
            raise KeyError(f"no component {component!r} is placed; {hint}")
        return found


class HybridComponentPlacement(ComponentPlacement):
    """Any component on any set of resources, as in embodied work: environments, rollouts, actors."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A config that was read: it is not read twice to learn which class places it."""

    report: Report
    config: PlacementConfig
    cluster: Cluster | None
    given: Cluster | None


def read_source(config: object, cluster: Cluster | None, *, reasoning: bool | None = None) -> _Read:
    """What ``config`` asks for, faults collected.

    Args:
        config: as of :class:`ComponentPlacement`.
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
        return _Read(report, config, cluster.with_groups(config.groups) if cluster else None, cluster)
    found, used = read_config(open_document(config, report), cluster, report, reasoning=reasoning)
    return _Read(report, found, used, cluster)


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


def component_placement_for(
    config: object, cluster: Cluster | None = None, *, gpu_components: Iterable[str] = ()
) -> ComponentPlacement:
    """The placement of a config by its ``runner.task_type``: reasoning by model parallelism, everything else hybrid.

    Args:
        config: as of :class:`ComponentPlacement`.
        cluster: the nodes that are there; None: those that the config describes.
        gpu_components: components that are known to need GPUs.

    Raises:
        InvalidInput: every fault of the config.
    """
    # It builds on this module.
    from callboard.placement.model_parallel import ModelParallelComponentPlacement  # noqa: PLC0415

    read = read_source(config, cluster)
    kind = ModelParallelComponentPlacement if read.config.task_type == REASONING else HybridComponentPlacement
    return kind(read, gpu_components=gpu_components)


def _check_nodes(config: PlacementConfig, cluster: Cluster, report: Report) -> None:
    """Rule 11: numbers that are stated are honoured or refused, never recomputed."""
    if config.gpus_per_node is not None:
        wrong = [node for node in cluster.nodes if len(node.accelerators) != config.gpus_per_node]
        if wrong:
            listed = ", ".join(f"node {node.rank} ({node.node_id}) has {len(node.accelerators)}" for node in wrong[:8])
            more = f" and {len(wrong) - 8} more differ" if len(wrong) > 8 else ""
            said = f"{config.gpus_per_node} GPUs per node are stated, but {listed}{more}"
            report.fault(config.gpus_where, said, read=str(config.gpus_per_node))
    for node in cluster.nodes:
        if node.lost_accelerators:
            report.warn(
                config.where,
                f"node {node.rank} ({node.node_id}) had {node.lost_accelerators} accelerators more than it reports now",
            )


@dataclass(frozen=True, slots=True)
class _Laying:
    """Lays entries over the cluster.

    Attributes:
        config: what was asked for.
        cluster: the nodes that may be used.
        given: the nodes that are there.
        needing: components that need GPUs although their config does not say so.
        report: where faults go.
    """

    config: PlacementConfig
    cluster: Cluster
    given: Cluster
    needing: frozenset[str]
    report: Report

    def lay_out(self, entry: Entry) -> Layout | None:
        """``entry`` on the cluster, or None with faults."""
        report = self.report
        if self.config.defective.intersection(entry.node_groups) or not entry.node_groups:
            return None  # told where the group is defined
        numbering = number(
            self.cluster, entry.node_groups, entry.group_where, report, defective=sorted(self.config.defective)
        )
        if numbering is None or self._lacks_gpus(entry, numbering) or self._needs_more_nodes(entry, numbering):
            return None
        if not entry.segments:
            return None  # told where the text was read
        _say_kinds(entry, self.cluster, numbering, report)
        parts = compile_segments(entry.segments, numbering.total, numbering.resource, entry.where, report)
        if parts is None:
            return None
        processes: list[Ranks] = []
        faults_before = len(report.faults)
        for part in parts:
            ranks, first = part.ranks(), len(processes)
            check_processes(ranks, numbering, entry.where, report, first=first, segment=part.segment)
            processes.extend(ranks)
        if len(report.faults) > faults_before:
            return None
        strategy: PlacementStrategy
        if numbering.nodes_only:
            strategy = NodePlacementStrategy([ranks[0] for ranks in processes], entry.node_groups)
        else:
            strategy = FlexiblePlacementStrategy.trusted(processes, entry.node_groups)
        return Layout(entry, numbering, parts, strategy, processes)

    def _lacks_gpus(self, entry: Entry, numbering: Numbering) -> bool:
        """Rule 10: nodes are no substitute for the GPUs that a component asks for."""
        if any(span.kind is Kind.ACCELERATOR for span in numbering.spans):
            return False
        if not entry.needs_gpus and entry.component not in self.needing:
            return False
        ranks = rank_list(sorted({span.node.rank for span in numbering.spans}))
        groups = ",".join(numbering.labels)
        said = f"it asks for GPUs, but no accelerators were found on nodes {ranks} by the node group {groups}"
        self.report.fault(entry.where, said, read=entry.text)
        return True

    def _needs_more_nodes(self, entry: Entry, numbering: Numbering) -> bool:
        """PS-17: a placement beyond ``num_nodes`` says so, when the nodes that are left out would do."""
        wanted, given = self.config.num_nodes, self.given
        highest = max((segment.last for segment in entry.segments), default=-1)
        if wanted is None or highest < numbering.total or self.cluster.num_nodes >= given.num_nodes:
            return False
        wider = number(given.with_groups(self.config.groups), entry.node_groups, entry.group_where, Report())
        if wider is None or highest >= wider.total:
            return False
        needed = wider.spans[wider.index_of(highest)].node.rank
        count = sum(1 for node in given.nodes if node.rank <= needed)
        self.report.fault(
            entry.where,
            f"num_nodes is {wanted}, but the placement needs {count} nodes: {numbering.resource} rank {highest} is on "
            f"node {needed}",
            read=str(wanted),
            allowed=f"{count} or more",
        )
        return True


def _say_kinds(entry: Entry, cluster: Cluster, numbering: Numbering, report: Report) -> None:
    """Rule 10: what ranks mean on nodes without accelerators is said aloud."""
    for label in numbering.labels:
        group = cluster.groups_by_label[label]
        if group.ignore_hardware or group.hardware_type or label == "node":
            continue
        nodes = [cluster.by_rank[rank] for rank in group.node_ranks if rank in cluster.by_rank]
        bare = [node for node in nodes if not node.accelerators]
        if not bare:
            continue
        if kind_of(group, nodes) is Kind.NODE:
            report.warn(
                entry.where,
                f"no accelerators found on nodes {_ranks_of(nodes)} of the group {label}: resource = node, one "
                "process per node",
            )
        else:
            many = "nodes" if len(bare) > 1 else "node"
            report.warn(
                entry.where,
                f"{many} {_ranks_of(bare)} of the group {label} left out: no accelerators there; ranks count those of "
                "the others",
            )


def _ranks_of(nodes: Sequence[Node]) -> str:
    return rank_list([node.rank for node in nodes])
