"""How do nodes look on the screen?"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table

from callboard.cli import screen, words
from callboard.v1.node_pb2 import Node


def node_table(nodes: Sequence[Node], *, wide: bool) -> Table:
    """A row per node: used of what there is."""
    columns = ["RANK", "NODE", "STATE", "CPU", "GPU", "MEMORY", "JOBS", "LABELS", "WHY"]
    if wide:
        columns = [*columns[:-1], "HOST", "ADDRESS", "RUNTIME", "EPOCH", "VERSION", "RAY NODE", "WHY"]
    rows: list[list[RenderableType]] = []
    for node in nodes:
        row: list[RenderableType] = [
            str(node.rank),
            words.node_id(node),
            screen.state_text(words.node_state(node)),
            words.share(node.used, node.capacity, "cpu"),
            words.share(node.used, node.capacity, "gpu") + (" simulated" if node.simulated else ""),
            words.share(node.used, node.capacity, "memory"),
            ", ".join(sorted({worker.job for use in node.devices for worker in use.workers})),
            words.labels(node.labels),
        ]
        if wide:
            head = " (head)" if node.ray_head else ""
            row += [node.hostname, node.address + head, node.runtime, str(node.epoch), node.version, node.ray_node_id]
        rows.append([*row, "" if words.node_state(node) == "READY" else node.state_reason])
    return screen.table(columns, rows, right=("RANK", "EPOCH"))
