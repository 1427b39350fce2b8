"""A placement as SVG: a row of boxes per node, every GPU a box, every component a band in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from callboard.cli.show import svg
from callboard.placement import DevicePicture, Holder, NodePicture, PlacementPlan, picture
from callboard.placement.source.fields import rank_list

# Fills that dark text reads well on, apart from each other also for most who see colours differently.
_FILLS = ("#8ecae6", "#ffb703", "#95d5b2", "#cdb4db", "#f4978e", "#e9c46a", "#a3b18a", "#bde0fe", "#ffc8dd", "#d9d9d9")
_INK = "#1b1f24"
_FAINT = "#6e7781"
_LINE = "#d0d7de"
_FREE = "#f6f8fa"

_BOX = 116
_BAND = 22
_GAP = 8
_LEFT = 132
_TOP = 84
_PER_ROW = 8
_MOST_NODES = 200
_CHARACTER = 6.4
"""Width of an average character at the size of labels."""


def draw(plan: PlacementPlan, *, title: str) -> str:
    """The drawing as a text.

    Args:
        plan: what to draw; of more than 200 nodes the first 200.
    """
    fills = {component.name: _FILLS[at % len(_FILLS)] for at, component in enumerate(plan.components)}
    nodes = picture(plan)
    shown = nodes[:_MOST_NODES]
    columns = max(1, min(_PER_ROW, max((len(node.devices) for node in shown), default=1)))
    others = any(node.others for node in shown)
    width = _LEFT + columns * (_BOX + _GAP) + (200 if others else 0) + 24
    body: list[str] = []
    y = _TOP + _legend_rows(fills, width) * 24
    for node in shown:
        lines, height = _node(node, y, columns, fills)
        body += lines
        y += height + 14
    if len(shown) < len(nodes):
        body.append(_text(24, y + 12, f"… and {len(nodes) - len(shown)} more nodes", fill=_FAINT))
        y += 28
    total = plan.cluster.num_accelerators
    said = f"{plan.mode.value} · {len(plan.demand)} of {plan.cluster.num_nodes} nodes · {plan.gpus} of {total} GPUs"
    head = [_text(24, 34, title, size=18, weight="600"), _text(24, 56, said, fill=_FAINT), *_legend(plan, fills, width)]
    font = "Inter, Helvetica, Arial, sans-serif"
    return svg.document(width, y + 10, [*head, *body], font=font, title=f"Placement of {title}")


def _legend_places(names: Sequence[str], width: int) -> Iterator[tuple[str, int, int]]:
    """Where each name of the legend stands: (name, x, row)."""
    x, row = 24, 0
    for name in names:
        needed = 34 + int(len(name) * (_CHARACTER + 1))
        if x > 24 and x + needed > width - 24:
            x, row = 24, row + 1
        yield name, x, row
        x += needed


def _legend_rows(fills: dict[str, str], width: int) -> int:
    return max((row for _, _, row in _legend_places([f"{name} × 0000" for name in fills], width)), default=0) + 1


def _legend(plan: PlacementPlan, fills: dict[str, str], width: int) -> Iterator[str]:
    names = [f"{component.name} × {component.world_size}" for component in plan.components]
    for component, (name, x, row) in zip(plan.components, _legend_places(names, width), strict=True):
        y = 72 + row * 24
        yield _rect(x, y, 14, 14, fills[component.name])
        yield _text(x + 20, y + 11, name)


def _node(node: NodePicture, y: int, columns: int, fills: dict[str, str]) -> tuple[list[str], int]:
    """A node's lines, and how high it is."""
    lines = [
        _text(24, y + 18, _fit(node.node_id, _LEFT - 36), weight="600"),
        _text(24, y + 34, f"rank {node.rank}", fill=_FAINT, size=11),
    ]
    rows = [node.devices[start : start + columns] for start in range(0, len(node.devices), columns)]
    top = y
    for row in rows:
        height = 22 + _BAND * max(1, *(len(device.holders) for device in row))
        for at, device in enumerate(row):
            lines += _device(device, _LEFT + at * (_BOX + _GAP), top, height, fills)
        top += height + _GAP
    if not rows:
        lines.append(_text(_LEFT, y + 18, "no GPU", fill=_FAINT))
    x = _LEFT + columns * (_BOX + _GAP) + 8
    for at, holder in enumerate(node.others):
        lines.append(_rect(x, y + at * (_BAND + 2), 184, _BAND, fills[holder.component], radius=4))
        lines.append(_text(x + 8, y + at * (_BAND + 2) + 15, _fit(_other(holder), 172), size=11))
    return lines, max(top - y - _GAP, len(node.others) * (_BAND + 2), 40)


def _device(device: DevicePicture, x: int, y: int, height: int, fills: dict[str, str]) -> Iterator[str]:
    used = bool(device.holders)
    yield _rect(x, y, _BOX, height, "#ffffff" if used else _FREE, stroke=_LINE, radius=6)
    yield _text(x + 8, y + 15, f"GPU {device.position}", fill=_FAINT, size=11)
    if device.id != str(device.position):
        yield _text(x + _BOX - 8, y + 15, _fit(f"id {device.id}", 64), fill=_FAINT, size=11, anchor="end")
    shared = len(device.holders) > 1 or any(len(holder.ranks) > 1 for holder in device.holders)
    for at, holder in enumerate(device.holders):
        top = y + 21 + at * _BAND
        yield _rect(x + 3, top, _BOX - 6, _BAND - 2, fills[holder.component], radius=4)
        share = f"{len(holder.ranks) * holder.milli / 10:.3g}%" if shared or holder.milli != 1000 else ""
        yield _text(x + 9, top + 14, _label(holder, _BOX - 20 - (34 if share else 0)), size=11)
        if share:
            yield _text(x + _BOX - 9, top + 14, share, size=11, anchor="end")
    if not used:
        yield _text(x + 9, y + 35, "free", fill=_FAINT, size=11)


def _other(holder: Holder) -> str:
    where = f" on {', '.join(holder.hardware)}" if holder.hardware else ""
    return f"{holder.component} {rank_list(holder.ranks)}{where}"


def _label(holder: Holder, width: int) -> str:
    """Component and ranks; of a long name the end goes first, as the ranks tell more."""
    ranks = rank_list(holder.ranks)
    rest = width - int((len(ranks) + 1) * _CHARACTER)
    name = _fit(holder.component, rest) if rest > 4 * _CHARACTER else holder.component
    return _fit(f"{name} {ranks}", width)


def _fit(text: str, width: int) -> str:
    most = max(2, int(width / _CHARACTER))
    return text if len(text) <= most else text[: most - 1] + "…"


def _rect(x: int, y: int, width: int, height: int, fill: str, *, stroke: str = "none", radius: int = 3) -> str:
    return svg.rect(x, y, width, height, fill, stroke=stroke, rx=radius)


def _text(
    x: int, y: int, said: str, *, fill: str = _INK, size: int = 12, weight: str = "400", anchor: str = "start"
) -> str:
    return svg.text(x, y, said, font_size=size, font_weight=weight, text_anchor=anchor, fill=fill)
