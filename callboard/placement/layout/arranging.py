"""The arrangement of a reasoning job: the mode that its GPUs mean, and how each model is packed on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from callboard.model.frozen import dataclass
from callboard.placement.config.config import CODING, EVALUATION, PlacementConfig, is_further_rollout
from callboard.placement.layout.layouts import Layout
from callboard.placement.layout.record import PlacementMode, RolloutSyncMode
from callboard.placement.layout.strategies import PackedPlacementStrategy
from callboard.placement.source.diagnostics import Report, Where

INFERENCE = ("inference", "actor_inference", "critic_inference")
"""Components that only compute log-probabilities or values."""

PLACED = ("actor", "rollout", *INFERENCE, "reward", "critic")
"""Components that are packed here, and further rollouts where GPUs are shared; any other is placed as its text says."""


def _generates(name: str) -> bool:
    """Whether each process of a component is an engine with a whole model."""
    return name == "rollout" or is_further_rollout(name)


@dataclass(frozen=True, slots=True)
class Arranging:
    """Finds the mode and packs the components."""

    config: PlacementConfig
    num_accelerators: int
    laid: dict[str, Layout]
    report: Report

    def arrange(self) -> tuple[PlacementMode, RolloutSyncMode | None, dict[str, Layout]]:
        """The mode, how weights move, and the packed components; faults go to the report."""
        if self.config.task_type == EVALUATION:
            return self._arrange_evaluation()
        asked = {entry.component for entry in self.config.entries}
        # Where nothing is placed at all, that was told.
        missing = [name for name in ("actor", "rollout") if asked and name not in asked]
        for name in missing:
            self.report.fault(
                self.config.where,
                f"a reasoning job needs the component {name}, and no placement names it",
                allowed="actor and rollout, optionally inference, reward and critic",
            )
        for name in self.laid:
            if name in PLACED or is_further_rollout(name):
                self._check_shape(self.laid[name])
        if not {"actor", "rollout"} <= set(self.laid):
            return PlacementMode.HYBRID, None, self.laid
        mode = self._mode()
        if mode is None:
            return PlacementMode.HYBRID, None, self.laid
        packed = {name: self._packed(name, layout, mode) for name, layout in self.laid.items()}
        # Where GPUs are shared, the rollout has all of the actor's or a part of them.
        inside = mode is PlacementMode.COLLOCATED and len(self._ranks("actor")) == len(self._ranks("rollout"))
        return mode, RolloutSyncMode.IPC if inside else RolloutSyncMode.COLLECTIVE, packed

    def _arrange_evaluation(self) -> tuple[PlacementMode, RolloutSyncMode | None, dict[str, Layout]]:
        """Engines of whole models; nobody trains, so nobody's weights move."""
        if self.config.entries and all(entry.component != "rollout" for entry in self.config.entries):
            self.report.fault(
                self.config.where,
                "an evaluation needs the component rollout, and no placement names it",
                allowed="rollout, optionally reward and others",
            )
        packed = dict(self.laid)
        for name in ("rollout", "reward"):
            if name in packed:
                self._check_shape(packed[name])
                packed[name] = self._packed(name, packed[name], PlacementMode.COLLOCATED, stride=1)
        return PlacementMode.COLLOCATED, None, packed

    def _gpus(self, name: str) -> set[tuple[int, str, int]]:
        return set(self.laid[name].resources())

    def _mode(self) -> PlacementMode | None:
        sets = {name: self._gpus(name) for name in PLACED if name in self.laid}
        given = [name for name in INFERENCE if name in sets]
        if sets["actor"] == sets["rollout"] and not self.config.auto_scheduler:
            for name in given:
                self._fault(name, f"{name} runs inside the actor when actor and rollout share their GPUs; leave it out")
            alike = self.laid["actor"].resources() == self.laid["rollout"].resources()
            said = f"actor is on {self._said('actor')} and rollout on {self._said('rollout')}"
            if not alike:
                self._fault(
                    "rollout",
                    f"{said}: the same GPUs in another order, so weights would not move inside a GPU; name the node "
                    "groups in the same order",
                )
            if self.config.task_type == CODING:
                self._fault("rollout", f"{said}: a {CODING} job serves while it trains, so each has GPUs of its own")
                return None
            return PlacementMode.COLLOCATED if alike and not given else None
        agents = [name for name in self.laid if is_further_rollout(name)]
        if agents and sets["rollout"] < sets["actor"] and not self.config.auto_scheduler:
            return self._mode_of_agents(agents, given)
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

    def _mode_of_agents(self, agents: Sequence[str], inference: Sequence[str]) -> PlacementMode | None:
        """Several agents: each engine has a part of the actor's GPUs, and the reward has all of them."""
        faults_before = len(self.report.faults)
        for name in inference:
            self._fault(name, f"{name} runs inside the actor when rollouts share its GPUs; leave it out")
        whole = self._gpus("actor")
        if "reward" in self.laid and self._gpus("reward") != whole:
            said = f"actor is on {self._said('actor')} and reward on {self._said('reward')}"
            self._fault("reward", f"{said}: with several rollouts both have the same GPUs")
        taken: dict[str, set[tuple[int, str, int]]] = {}
        for name in agents:
            own = self._gpus(name)
            if not own <= whole:
                said = f"actor is on {self._said('actor')} and {name} on {self._said(name)}"
                self._fault(name, f"{said}: further rollouts have a part of the actor's GPUs")
            for other, theirs in taken.items():
                if not own.isdisjoint(theirs):
                    said = f"{other} is on {self._said(other)} and {name} on {self._said(name)}"
                    self._fault(name, f"{said}: further rollouts share no GPU with each other")
            taken[name] = own
        return PlacementMode.COLLOCATED if len(self.report.faults) == faults_before else None

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
        engine = _generates(name)
        if size > resources:
            where = dict(self.config.size_where).get(f"{name}.tp", layout.entry.where)
            self.report.fault(
                where.of(name),
                f"{said} is {size}, but the component has {resources} GPUs",
                read=str(size),
                allowed=f"1 to {resources}",
            )
        elif engine and resources % size:
            self._fault(name, f"{said} is {size}, which does not divide its {resources} GPUs")
        self._check_processes(layout, size if engine else 1)

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
        if is_further_rollout(name):
            tensor, pipeline = (config.size(f"{name}.{kind}", config.size(f"rollout.{kind}")) for kind in ("tp", "pp"))
            return tensor * pipeline, f"the parallel size of {name}"
        pipeline = config.size(f"{name}.pp")
        said = "tensor × pipeline parallel size" if pipeline > 1 else "tensor parallel size"
        return config.size(f"{name}.tp") * pipeline, f"the {said} of {name}"

    def _packed(self, name: str, layout: Layout, mode: PlacementMode, *, stride: int | None = None) -> Layout:
        if name not in PLACED and not (is_further_rollout(name) and mode is PlacementMode.COLLOCATED):
            return layout
        ranks, size = self._ranks(name), 1
        if name == "actor" and mode is PlacementMode.AUTO:
            ranks = range(layout.numbering.total)
        if not _generates(name):
            stride = 1
        else:
            size = self._model_size(name)[0]
            stride = self._stride(mode) if stride is None else stride
            if mode is PlacementMode.AUTO and self.config.pre_process:
                if not self._may_lend(size):
                    return layout
                ranks = range(self._ranks("actor").start, ranks.stop)
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

    def _may_lend(self, size: int) -> bool:
        """``use_pre_process_policy``: engines begin on the actor's GPUs too, which come before their own."""
        lent = len(self._ranks("actor"))
        if lent % size:
            said = f"use_pre_process_policy lends its {lent} GPUs to rollouts of {size} GPUs each"
            self._fault("actor", f"{said}, which does not divide them")
        return lent % size == 0

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
