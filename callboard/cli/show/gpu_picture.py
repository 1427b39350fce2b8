"""The picture of GPUs: a row of boxes per node that shows who is on which GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from callboard.cli.show import words
from callboard.model.frozen import dataclass
from callboard.v1.node_pb2 import DeviceUse, Node, NodeState

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")
_WIDTH = 16


@dataclass(frozen=True, slots=True)
class GpuPicture:
    """One row per node, one box per GPU: the job on it, that it is kept for a placement group, or that it is free; of a
    node that takes nothing new its state instead. Where that is too wide, neighbours that show the same share a box.

    Attributes:
        nodes: the nodes, in the order of the rows.
    """

    nodes: Sequence[Node]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The rows, as wide as the terminal lets them be."""
        colour_of = _colours(self.nodes)
        picture = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False, show_edge=False)
        heads: list[tuple[Text, Text]] = []
        boxes: list[list[tuple[str, Text]]] = []
        for node in self.nodes:
            idle = "free" if node.state == NodeState.NODE_STATE_READY else words.node_state(node).lower()
            cpu = words.share(node.used, node.capacity, "cpu")
            heads.append((Text(words.node_id(node), style="bold"), Text(f"CPU {cpu:<6}", style="dim")))
            boxes.append([(_name(use), _label(use, colour_of, idle)) for use in node.devices])
        head_width = max((len(name) + len(cpu) + 2 for name, cpu in heads), default=0)
        most = max(map(len, boxes), default=0)
        names = max((len(name) for row in boxes for name, _ in row), default=0)
        wide = head_width + most * (_WIDTH + names + len("GPU [] ")) <= options.max_width + 1
        for head, row in zip(heads, boxes, strict=True):
            picture.add_row(
                *head, *([_box(*each) for each in row] if wide else [_runs(row, options.max_width - head_width)])
            )
        yield picture


def _box(name: str, label: Text) -> Text:
    return Text(f"GPU{name} ", style="dim") + Text(f"[{_fit(label.plain):^{_WIDTH}}]", style=label.style)


def _runs(row: Sequence[tuple[str, Text]], width: int) -> Text:
    """ "GPU0-3 [train-00] GPU4 [free]": neighbours that show the same together; lines break between boxes."""
    lines = [Text()]
    for label, run in groupby(row, key=lambda each: each[1]):
        names = [name for name, _ in run]
        which = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
        box = Text(f"GPU{which} ", style="dim") + Text(f"[{_fit(label.plain)}]", style=label.style)
        if lines[-1] and len(lines[-1]) + 1 + len(box) > width:
            lines.append(Text())
        lines[-1] += Text(" ") + box if lines[-1] else box
    return Text("\n").join(lines)


def _name(use: DeviceUse) -> str:
    """As the worker knows it; a UUID is too long for a box."""
    return use.device.id if use.device.id.isdigit() else str(use.device.index)


def _label(use: DeviceUse, colour_of: dict[str, str], idle: str) -> Text:
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
    return Text(label, style=style)


def _fit(label: str) -> str:
    return label if len(label) <= _WIDTH else label[: _WIDTH - 1] + "…"


def _colours(nodes: Iterable[Node]) -> dict[str, str]:
    return {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(words.jobs_on(*nodes))}
