"""The component placements of a config, under the names of RLinf's, also for models that span several GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from callboard.model.faults import InvalidInput
from callboard.placement.cluster.cluster import Cluster
from callboard.placement.config.config import MODEL_PARALLEL, PlacementConfig, components_of
from callboard.placement.config.reading import Read, read_source
from callboard.placement.layout.arranging import INFERENCE, Arranging
from callboard.placement.layout.charging import Charges, Located
from callboard.placement.layout.layouts import Laying, Layout
from callboard.placement.layout.plan import PlacementPlan, PlannedComponent
from callboard.placement.layout.processes import place
from callboard.placement.layout.record import Placement, PlacementMode, RolloutSyncMode
from callboard.placement.layout.strategies import PlacementStrategy
from callboard.placement.source.diagnostics import Report, nearest_of


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
        if isinstance(config, Read):
            report, self._config, used, given = config.report, config.config, config.cluster, config.given
        else:
            read = read_source(config, cluster, reasoning=self._reasoning)
            report, self._config, used, given = read.report, read.config, read.cluster, read.given
        if used is None:
            report.raise_any()
            raise InvalidInput(report.faults)
        self._cluster = used
        _check_nodes(self._config, used, report)
        laying = Laying(self._config, used, given or used, frozenset(gpu_components), report)
        laid = {
            entry.component: layout for entry in self._config.entries if (layout := laying.lay_out(entry)) is not None
        }
        self._mode, self._sync_mode, self._layouts = self._arrange(laid, report)
        self._charges = Charges()
        users = [(layout.entry, layout.numbering, layout.processes) for layout in self._layouts.values()]
        for user in users:
            self._charges.add(*user)
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
            PlannedComponent(name, layout.strategy, self._charges.workers(layout.entry, self._located(name)))
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


def component_placement_for(
    config: object, cluster: Cluster | None = None, *, gpu_components: Iterable[str] = ()
) -> ComponentPlacement:
    """The placement of a config by its ``runner.task_type``: reasoning (and RLinf's kinds of it) by model parallelism,
    everything else hybrid.

    Args:
        config: as of :class:`ComponentPlacement`.
        cluster: the nodes that are there; None: those that the config describes.
        gpu_components: components that are known to need GPUs.

    Raises:
        InvalidInput: every fault of the config.
    """
    # It builds on this module.

    read = read_source(config, cluster)
    parallel = read.config.task_type in MODEL_PARALLEL
    kind = ModelParallelComponentPlacement if parallel else HybridComponentPlacement
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


class ModelParallelComponentPlacement(ComponentPlacement):
    """Actor, rollout and optionally inference, reward and critic, by tensor and pipeline parallel sizes.

    The mode follows from the GPUs: the same for actor and rollout is ``COLLOCATED``, all disjoint is
    ``DISAGGREGATED`` (the reward may lie anywhere), ``cluster.auto_scheduler`` makes ``AUTO`` of the latter. A job of
    several agents has further rollouts (``rollout_judge``) that divide the actor's GPUs with the rollout, which is
    ``COLLOCATED`` too. Anything else is refused. An evaluation has rollouts alone. GPUs are compared as devices of
    nodes, so equal numbers in two groups are not taken for equal GPUs.
    """

    _reasoning = True

    def _arrange(
        self, laid: dict[str, Layout], report: Report
    ) -> tuple[PlacementMode, RolloutSyncMode | None, dict[str, Layout]]:
        return Arranging(self._config, self._cluster.num_accelerators, laid, report).arrange()

    @property
    def is_collocated(self) -> bool:
        """Whether actor and rollout share their GPUs."""
        return self.mode is PlacementMode.COLLOCATED

    @property
    def is_disaggregated(self) -> bool:
        """Whether each component has GPUs of its own."""
        return self.mode is PlacementMode.DISAGGREGATED

    @property
    def is_auto(self) -> bool:
        """Whether GPUs move between components while the job runs."""
        return self.mode is PlacementMode.AUTO

    @property
    def is_pipeline(self) -> bool:
        """Whether components run at the same time, one feeding the next."""
        return self.is_disaggregated or self.is_auto

    @property
    def has_dedicated_inference(self) -> bool:
        """Whether inference has GPUs of its own."""
        return self.is_pipeline and any(name in self.components for name in INFERENCE[:2])

    @property
    def actor_tp_size(self) -> int:
        """Tensor parallel size of the actor."""
        return self._config.size("actor.tp")

    @property
    def rollout_tp_size(self) -> int:
        """Tensor parallel size of the rollout."""
        return self._config.size("rollout.tp")

    @property
    def rollout_dp_size(self) -> int:
        """How many copies of the rollout's model there are: one per process."""
        return self.world_size("rollout")

    @property
    def actor_world_size(self) -> int:
        """How many processes the actor has: one per GPU."""
        return self.world_size("actor")
