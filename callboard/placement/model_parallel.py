"""Where do actor, rollout and inference run when each model spans several GPUs? The modes of reasoning jobs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from callboard.placement.components import ComponentPlacement
from callboard.placement.config import PlacementConfig
from callboard.placement.diagnostics import Report, Where
from callboard.placement.layouts import Layout
from callboard.placement.record import PlacementMode, RolloutSyncMode
from callboard.placement.strategies import PackedPlacementStrategy

INFERENCE = ("inference", "actor_inference", "critic_inference")
"""Components that only compute log-probabilities or values."""

PLACED = ("actor", "rollout", *INFERENCE, "reward", "critic")
"""Components that are packed here; any other is placed as its text says."""


class ModelParallelComponentPlacement(ComponentPlacement):
    """Actor, rollout and optionally inference, reward and critic, by tensor and pipeline parallel sizes.

    The mode follows from the GPUs: the same for actor and rollout is ``COLLOCATED``, all disjoint is
    ``DISAGGREGATED`` (the reward may lie anywhere), ``cluster.auto_scheduler`` makes ``AUTO`` of the latter. Anything
    else is refused. GPUs are compared as devices of nodes, so equal numbers in two groups are not taken for equal GPUs.
    """

    _reasoning = True

    def _arrange(
        self, laid: dict[str, Layout], report: Report
    ) -> tuple[PlacementMode, RolloutSyncMode | None, dict[str, Layout]]:
        return _Arranging(self._config, self._cluster.num_accelerators, laid, report).arrange()

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


@dataclass(frozen=True, slots=True)
class _Arranging:
    """Finds the mode and packs the components."""

    config: PlacementConfig
    num_accelerators: int
    laid: dict[str, Layout]
    report: Report

    def arrange(self) -> tuple[PlacementMode, RolloutSyncMode | None, dict[str, Layout]]:
        """The mode, how weights move, and the packed components; faults go to the report."""
        asked = {entry.component for entry in self.config.entries}
        missing = [name for name in ("actor", "rollout") if name not in asked]
        for name in missing:
            self.report.fault(
                self.config.where,
                f"a reasoning job needs the component {name}, and no placement names it",
                allowed="actor and rollout, optionally inference, reward and critic",
            )
        for name in PLACED:
            if name in self.laid:
                self._check_shape(self.laid[name])
        if missing or not {"actor", "rollout"} <= set(self.laid):
            return PlacementMode.HYBRID, None, self.laid
        mode = self._mode()
        if mode is None:
            return PlacementMode.HYBRID, None, self.laid
        packed = {name: self._packed(name, layout, mode) for name, layout in self.laid.items()}
        sync = RolloutSyncMode.IPC if mode is PlacementMode.COLLOCATED else RolloutSyncMode.COLLECTIVE
        return mode, sync, packed

    def _mode(self) -> PlacementMode | None:
        sets = {name: set(self.laid[name].resources()) for name in PLACED if name in self.laid}
        given = [name for name in INFERENCE if name in sets]
        if sets["actor"] == sets["rollout"] and not self.config.auto_scheduler:
            for name in given:
                self._fault(name, f"{name} runs inside the actor when actor and rollout share their GPUs; leave it out")
            alike = self.laid["actor"].resources() == self.laid["rollout"].resources()
            if not alike:
                said = f"actor is on {self._said('actor')} and rollout on {self._said('rollout')}"
                self._fault(
                    "rollout",
                    f"{said}: the same GPUs in another order, so weights would not move inside a GPU; name the node "
                    "groups in the same order",
                )
            return PlacementMode.COLLOCATED if alike and not given else None
        apart = [name for name in sets if name != "reward"]
        clashes = [
            (one, other)
            for index, one in enumerate(apart)
            for other in apart[index + 1 :]
            if not sets[one].isdisjoint(sets[other])
        ]
        for one, other in clashes:
            self._fault(
                other,
                f"{one} is on {self._said(one)} and {other} on {self._said(other)}: that is neither the same GPUs for "
                "actor and rollout nor GPUs of its own for each, and a reasoning job needs one of them",
            )
        if self.config.recompute_logprobs is False:
            for name in given:
                if name != "critic_inference":
                    self._fault(
                        name, f"algorithm.recompute_logprobs is false, so {name} has nothing to do; leave it out"
                    )
        if clashes:
            return None
        if not self.config.auto_scheduler:
            return PlacementMode.DISAGGREGATED
        return PlacementMode.AUTO if self._in_order() else None

    def _in_order(self) -> bool:
        """AUTO: actor, rollout, inference from the first GPU to the last, without a gap."""
        faults_before = len(self.report.faults)
        for name in ("critic", "critic_inference"):
            if name in self.laid:
                self._fault(name, f"auto_scheduler knows no {name}; leave it out")
        order = [name for name in ("actor", "rollout", "inference", "actor_inference") if name in self.laid]
        expected = 0
        for name in order:
            ranks = self._ranks(name)
            if ranks.start != expected:
                self._fault(
                    name,
                    f"with auto_scheduler the order is actor, rollout, inference from GPU 0 without a gap: {name} "
                    f"should start at {expected} and starts at {ranks.start}",
                )
                return False
            expected = ranks.stop
        total = self.laid["actor"].numbering.total
        if expected != total:
            self._fault(
                order[-1],
                f"with auto_scheduler the components cover every GPU: {order[-1]} ends at {expected - 1}, and the last "
                f"is {total - 1}",
            )
        return len(self.report.faults) == faults_before

    def _check_shape(self, layout: Layout) -> None:
        """Contiguous, and large enough for its parallel sizes."""
        name = layout.entry.component
        parts = layout.parts
        gaps = [
            (before.first + before.resources - 1, after.first)
            for before, after in pairwise(parts)
            if after.first != before.first + before.resources
        ]
        if gaps:
            low, high = gaps[0]
            self._fault(name, f"its GPUs are one range without a gap in a reasoning job, but {high} follows {low}")
        resources = sum(part.resources for part in parts)
        size, said = self._model_size(name)
        if size > resources:
            where = dict(self.config.size_where).get(f"{name}.tp", layout.entry.where)
            self.report.fault(
                where.of(name),
                f"{said} is {size}, but the component has {resources} GPUs",
                read=str(size),
                allowed=f"1 to {resources}",
            )
        elif name == "rollout" and resources % size:
            self._fault(name, f"{said} is {size}, which does not divide its {resources} GPUs")
        self._check_processes(layout, size if name == "rollout" else 1)

    def _check_processes(self, layout: Layout, size: int) -> None:
        """Processes that the text states are kept or refused, never renumbered (PS-20)."""
        for part in layout.parts:
            wanted = part.resources // size
            if part.segment.processes is not None and part.processes != wanted and part.resources % size == 0:
                self.report.fault(
                    layout.entry.where.at(part.segment.process_column - 1),
                    f"its text asks for {part.processes} processes on {part.resources} GPUs, but with {size} GPUs per "
                    f"process it has {wanted}; leave the process ranks out, or state {wanted}",
                    segment=str(part.segment),
                    segment_column=part.segment.process_column,
                    read=str(part.processes),
                    allowed=str(wanted),
                )

    def _model_size(self, name: str) -> tuple[int, str]:
        """GPUs of one copy of a component's model, and what it is called."""
        config = self.config
        if name in ("inference", "actor_inference"):
            return config.size(f"{name}.tp", config.size("actor.tp")), "its tensor parallel size"
        if name == "critic_inference":
            return config.size("critic_inference.tp", config.size("critic.tp")), "its tensor parallel size"
        pipeline = config.size(f"{name}.pp")
        said = "tensor × pipeline parallel size" if pipeline > 1 else "tensor parallel size"
        return config.size(f"{name}.tp") * pipeline, f"the {said} of {name}"

    def _packed(self, name: str, layout: Layout, mode: PlacementMode) -> Layout:
        if name not in PLACED:
            return layout
        ranks = self._ranks(name)
        if name == "actor" and mode is PlacementMode.AUTO:
            ranks = range(layout.numbering.total)
        size, stride = (self._model_size(name)[0], self._stride(mode)) if name == "rollout" else (1, 1)
        if len(ranks) % (size * stride):
            if len(ranks) % size == 0:  # otherwise it was told already
                self._fault(
                    name,
                    f"its {len(ranks)} GPUs do not divide into blocks of {size} per process × stride {stride}, which "
                    "the actor's larger tensor parallel size asks for",
                )
            return layout
        strategy = PackedPlacementStrategy(ranks.start, ranks.stop - 1, size, stride, layout.entry.node_groups)
        if not strategy.fits(layout.numbering, layout.entry.where, self.report):
            return layout
        return replace(layout, strategy=strategy, processes=strategy.processes())

    def _stride(self, mode: PlacementMode) -> int:
        """COLLOCATED with a larger actor: a rollout process takes every n-th GPU, so weights move inside GPUs."""
        actor, rollout = self.config.size("actor.tp"), self.config.size("rollout.tp")
        if mode is not PlacementMode.COLLOCATED or actor <= rollout:
            return 1
        if actor % rollout:
            where = dict(self.config.size_where).get("rollout.tp", Where("rollout.tensor_parallel_size"))
            self.report.fault(
                where.of("rollout"),
                f"the actor's tensor parallel size, {actor}, is larger than the rollout's, {rollout}, and no multiple "
                "of it",
                read=str(rollout),
            )
            return 1
        return actor // rollout

    def _ranks(self, name: str) -> range:
        parts = self.laid[name].parts
        return range(parts[0].first, parts[-1].first + parts[-1].resources)

    def _said(self, name: str) -> str:
        layout = self.laid[name]
        groups = ",".join(layout.entry.node_groups)
        return f"{layout.entry.text} of {groups}" if groups != "cluster" else layout.entry.text

    def _fault(self, name: str, message: str) -> None:
        self.report.fault(self.laid[name].entry.where, message, read=self.laid[name].entry.text)
