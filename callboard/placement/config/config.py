"""The config: the placement of each component, and what else decides where they run.

Three forms hold the same things: a whole RLinf config (``cluster:`` and the sizes of a reasoning job), its ``cluster``
section alone, and a job file whose components carry ``component_placement``.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import field

from callboard.model.frozen import dataclass
from callboard.placement.cluster.cluster import WHOLE_CLUSTER, NodeGroup
from callboard.placement.config.grammar import Segment, format_segments
from callboard.placement.source import fields
from callboard.placement.source.diagnostics import Report, Where
from callboard.placement.source.document import Document
from callboard.placement.source.tree import Table, Value

KEY = "component_placement"
"""Key of the placements, and of one component's in a job."""

REASONING = "reasoning"
"""The task type whose components are placed by model parallelism."""

CODING = "coding_online_rl"
"""The same for requests of users, who are served while the actor trains: nobody shares GPUs."""

EVALUATION = "reasoning_eval"
"""Rollouts alone, by model parallelism: there is nothing to train."""

MODEL_PARALLEL = (REASONING, CODING, EVALUATION)
"""Task types that are placed by model parallelism."""

TASKS = (*MODEL_PARALLEL, "embodied", "embodied_eval", "sft", "offline")
"""Task types of RLinf."""

OLD_NAMES = {"math": REASONING}
"""What task types were called in RLinf's first releases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The placement that a config states for one component.

    Attributes:
        node_groups: labels of the node groups, in the order of their ranks.
        segments: what its placement text says; empty when it has faults.
        share_milli: milli-GPU of each worker; 0: not stated.
        visible_all: every worker sees all accelerators of its node.
        needs_gpus: it asks for GPUs elsewhere, so a placement without any is wrong.
        where: place of the placement text, or of whatever stands for it.
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
        defective: labels of groups whose definition has faults.
        num_nodes: nodes that it wants; None: all.
        gpus_per_node: accelerators that each node is said to have; None: not said.
        auto_scheduler: whether RLinf's dynamic scheduling is on.
        pre_process: whether it lends the actor's GPUs to the rollout first (``use_pre_process_policy``).
        task_type: ``runner.task_type``; empty: not stated.
        sizes: (name, size) of the model parallelism that is stated, e.g. ``("rollout.tp", 2)``, sorted.
        recompute_logprobs: ``algorithm.recompute_logprobs``; None: not stated.
    """

    entries: tuple[Entry, ...] = ()
    groups: tuple[NodeGroup, ...] = ()
    num_nodes: int | None = None
    gpus_per_node: int | None = None
    auto_scheduler: bool = False
    pre_process: bool = False
    task_type: str = ""
    sizes: tuple[tuple[str, int], ...] = ()
    recompute_logprobs: bool | None = None
    defective: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    gpus_where: Where = field(default=Where(), compare=False, repr=False)
    size_where: tuple[tuple[str, Where], ...] = field(default=(), compare=False, repr=False)
    where: Where = field(default=Where(), compare=False, repr=False)

    def size(self, name: str, default: int = 1) -> int:
        """One size of the model parallelism."""
        return dict(self.sizes).get(name, default)


def is_further_rollout(name: str) -> bool:
    """Whether a component is another engine beside the rollout, as jobs of several agents have: ``rollout_judge``."""
    return name.startswith("rollout_")


def components_of(entries: Sequence[Entry]) -> tuple[str, ...]:
    """Names of the components, in order."""
    return tuple(entry.component for entry in entries)


CLUSTER_KEYS = (
    "num_nodes",
    "component_placement",
    "node_groups",
    "nodes",
    "auto_scheduler",
    "num_gpus_per_node",
    "gpus_per_node",
    "use_pre_process_policy",
)
"""Keys of the cluster section. ``nodes`` describes nodes, for use without a controller."""

PASSED_OVER = (
    "assign_policy",
    "fuse_rollout_inference_only",
    "migrate_out_max_bs",
    "monitor_interval",
    "net_emulation",
    "nsight",
    "preprocess_threshold",
    "profiling",
    "recreate_nccl_groups",
    "rollout_use_all_gpus",
    "use_wait_before_last_iter_policy",
)
"""Keys that RLinf's own configs have there, for its dynamic scheduling, profilers and network emulation. They change no
placement."""


class Section:
    """The cluster section of a document.

    Attributes:
        path: keys that lead to it; none where it is the whole document.
        table: what it holds; None: the document has none, or it is not a mapping.
    """

    def __init__(self, document: Document, report: Report) -> None:
        self._document = document
        self.path, self.table = self._found(report)

    def _found(self, report: Report) -> tuple[tuple[str, ...], Table | None]:
        """Under ``cluster``, or the whole document."""
        document = self._document
        found = document.value("cluster")
        if found is not None:
            return ("cluster",), fields.table(found, "num_nodes, component_placement, …", report)
        if document.value(KEY) is not None and document.value("components") is None:
            whole = document.value()
            return (), whole if isinstance(whole, Table) else None
        return (), None

    def value(self, key: str) -> Value | None:
        """A value of the section; a job file without one has it at its top."""
        if self.table is not None:
            return self.table.get(key)
        return self._document.value(key)

    def misspelt(self) -> tuple[Where, str] | None:
        """Where the section's own key is misspelt, and what it is meant for."""
        top = self._document.value() if self.table is None else None
        for key, _ in top.entries if isinstance(top, Table) else ():
            near = difflib.get_close_matches(key.text[:80].lower(), ("cluster", KEY), n=1, cutoff=0.8)
            if near:
                return key.where, near[0]
        return None

    def place(self, *keys: str) -> Where:
        """Place of the first of these keys that is there, or of the section."""
        found = next((value for key in keys if (value := self.value(key)) is not None), None)
        if found is not None:
            return found.where
        return self.table.where if self.table is not None else Where(keys[0])
