"""Where do actor, rollout and inference run when each model spans several GPUs? The interface of reasoning jobs."""

from __future__ import annotations

from callboard.placement.arranging import INFERENCE, Arranging
from callboard.placement.components import ComponentPlacement
from callboard.placement.diagnostics import Report
from callboard.placement.layouts import Layout
from callboard.placement.record import PlacementMode, RolloutSyncMode


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
