"""The section of a document that keeps its placements: all of it, or the top of a job."""

from __future__ import annotations

from callboard.placement.config.config import KEY
from callboard.placement.source import fields
from callboard.placement.source.diagnostics import Report, Where
from callboard.placement.source.source import Document
from callboard.placement.source.tree import Table, Value

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
        table: what it holds; None: the document has none, or it is no mapping.

    Args:
        document: what was written.
        report: where faults go.
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

    def place(self, *keys: str) -> Where:
        """Place of the first of these keys that is there, or of the section."""
        found = next((value for key in keys if (value := self.value(key)) is not None), None)
        if found is not None:
            return found.where
        return self.table.where if self.table is not None else Where(keys[0])
