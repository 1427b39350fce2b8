"""The picture of GPUs: a row of boxes per node that shows who is on which GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from callboard.cli import words
from callboard.v1.node_pb2 import DeviceUse, Node, NodeState

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")
_WIDTH = 16


def gpu_picture(nodes: Sequence[Node]) -> Table:
    """One row per node, one box per GPU: the job on it, that it is kept for a placement group, or that it is free; of a
    node that takes nothing new its state instead."""
    colour_of = _colours(nodes)
    picture = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False, show_edge=False)
    for node in nodes:
        idle = "free" if node.state == NodeState.NODE_STATE_READY else words.node_state(node).lower()
        cells = [_box(use, colour_of, idle) for use in node.devices]
        cpu = words.share(node.used, node.capacity, "cpu")
        picture.add_row(Text(words.node_id(node), style="bold"), Text(f"CPU {cpu:<6}", style="dim"), *cells)
    return picture


def _box(use: DeviceUse, colour_of: dict[str, str], idle: str) -> Text:
    workers = Counter(worker.job for worker in use.workers)
    names = [f"{job} ×{count}" if count > 1 else job for job, count in workers.items()]
    if use.quarantined_milli:
        label, style = "quarantined", "bold red"
    elif names:
        label, style = "+".join(names), colour_of[next(iter(workers))]
    elif use.held_milli:
        label, style = "kept for a PG", "dim"
    else:
        label, style = idle, "dim"
    # As the worker knows it; a UUID is too long for a box.
    name = use.device.id if use.device.id.isdigit() else str(use.device.index)
    head = Text(f"GPU{name} ", style="dim")
    return head + Text(f"[{_fit(label):^{_WIDTH}}]", style=style)


def _fit(label: str) -> str:
    return label if len(label) <= _WIDTH else label[: _WIDTH - 1] + "…"


def _colours(nodes: Iterable[Node]) -> dict[str, str]:
    names = sorted({worker.job for node in nodes for use in node.devices for worker in use.workers})
    return {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(names)}
