"""A placement on the screen: a map of nodes and GPUs, and a row per rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from callboard.cli.show import tables
from callboard.model.names import is_secret
from callboard.placement import (
    DevicePicture,
    FlexiblePlacementStrategy,
    Holder,
    NodePicture,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    PlacementPlan,
    PlacementStrategy,
    PlannedWorker,
    picture,
)
from callboard.placement.source.fields import rank_list

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")
MOST_NODES = 40
"""Nodes shown unless everything is wanted."""
_LONGEST_NAME = 20
"""Longest name in a box; the tables have it whole."""
MOST_RANKS = 32
"""Ranks of a component shown unless everything is wanted."""


def plan_view(plan: PlacementPlan, *, width: int, wide: bool) -> Iterator[RenderableType]:
    """The parts of the picture.

    Args:
        wide: show every node and rank.
    """
    colours = {c.name: COLOURS[place % len(COLOURS)] for place, c in enumerate(plan.components)}
    yield _head(plan)
    yield ""
    yield _components(plan, colours)
    yield ""
    yield from _map(plan, colours, width=width, wide=wide)
    yield ""
    yield _ranks(plan, colours, wide=wide)


def _head(plan: PlacementPlan) -> Table:
    total = plan.cluster.num_accelerators
    mode = plan.mode.value + (f", weights by {plan.sync_mode.value}" if plan.sync_mode is not None else "")
    rows: list[tuple[str, RenderableType]] = [
        ("Mode", mode),
        ("Nodes", f"{len(plan.demand)} of {plan.cluster.num_nodes} used"),
        ("GPUs", f"{plan.gpus} of {total} used" if total else "none here: resource = node"),
    ]
    return tables.facts(rows)


def _components(plan: PlacementPlan, colours: dict[str, str]) -> Table:
    rows: list[list[RenderableType]] = [
        [
            Text(component.name, style=colours[component.name]),
            str(component.world_size),
            strategy_text(component.strategy),
        ]
        for component in plan.components
    ]
    return tables.table(["COMPONENT", "WORKERS", "PLACED"], rows, right=("WORKERS",))


def strategy_text(strategy: PlacementStrategy) -> str:
    """A strategy in a few words."""
    groups = ",".join(strategy.node_group)
    where = "" if groups in ("cluster", "node") else f" of {groups}"
    ranks = rank_list(strategy.hardware_ranks)
    if isinstance(strategy, NodePlacementStrategy):
        return f"on nodes {ranks}{where}"
    if isinstance(strategy, PackedPlacementStrategy):
        size, stride = strategy.num_hardware_per_process, strategy.stride
        each = f", {size} each" if size > 1 else ""
        return f"packed on {ranks}{where}{each}" + (f", stride {stride}" if stride > 1 else "")
    assert isinstance(strategy, FlexiblePlacementStrategy)
    sizes = {len(own) for own in strategy.hardware_ranks_list}
    each = f", {min(sizes)} each" if len(sizes) == 1 and sizes != {1} else ""
    return f"on {ranks}{where}{each}"


def _map(plan: PlacementPlan, colours: dict[str, str], *, width: int, wide: bool) -> Iterator[RenderableType]:
    nodes = picture(plan)
    shown = nodes if wide else nodes[:MOST_NODES]
    most = max((len(node.devices) for node in shown), default=0)
    others = any(node.others for node in shown)
    labels = [label for node in shown for device in node.devices for label in _labels(device.holders)]
    cell = max([5, *(text.cell_len for text in labels)])
    name = max([4, *(len(_title(node)) for node in shown)])
    beside = max([0, *(_label(holder, shares=False).cell_len for node in shown for holder in node.others)])
    room = width - name - 4 - (beside + 3 if others else 0)
    per_row = next((size for size in (most, 8, 4, 2) if 0 < size <= most and size * (cell + 3) <= room), min(most, 1))
    # Where a node's GPUs take several rows, each box names its GPU and the columns have no names.
    whole = per_row == most
    built = Table(
        box=box.ROUNDED, show_lines=True, padding=(0, 1), header_style="dim", border_style="dim", show_header=whole
    )
    built.add_column("node", style="bold", no_wrap=True)
    for position in range(per_row):
        built.add_column(f"GPU {position}", min_width=cell, no_wrap=True)
    if others:
        built.add_column("without a GPU", overflow="fold")
    for node in shown:
        for start in range(0, max(len(node.devices), 1), max(per_row, 1)):
            built.add_row(*_row(node, start, per_row, colours, numbered=not whole, others=others))
    yield built
    if len(shown) < len(nodes):
        yield Text(f"… and {len(nodes) - len(shown)} more nodes; -o wide shows all of them", style="dim")


def _row(
    node: NodePicture, start: int, per_row: int, colours: dict[str, str], *, numbered: bool, others: bool
) -> list[RenderableType]:
    cells: list[RenderableType] = [Text(_title(node) if start == 0 else "")]
    for position in range(start, start + per_row):
        if position < len(node.devices):
            cells.append(_cell(node.devices[position], colours, numbered=numbered))
        else:
            cells.append("")
    if others:
        lines = [Text(_label(holder, shares=False).plain, style=colours[holder.component]) for holder in node.others]
        cells.append(Group(*lines) if start == 0 else "")
    return cells


def _title(node: NodePicture) -> str:
    return f"{node.rank} {node.node_id}"


def _cell(device: DevicePicture, colours: dict[str, str], *, numbered: bool) -> RenderableType:
    lines = [Text(f"GPU {device.position}", style="dim")] if numbered else []
    if not device.holders:
        return Group(*lines, Text("free", style="dim"))
    for holder, label in zip(device.holders, _labels(device.holders), strict=True):
        label.stylize(colours[holder.component])
        lines.append(label)
    return Group(*lines)


def _labels(holders: Sequence[Holder]) -> list[Text]:
    shared = len(holders) > 1 or any(len(holder.ranks) > 1 or holder.milli != 1000 for holder in holders)
    return [_label(holder, shares=shared) for holder in holders]


def _label(holder: Holder, *, shares: bool) -> Text:
    """``actor 0``, ``env 0-3 25%``, ``env 0 on Franka 0``."""
    name = holder.component if len(holder.component) <= _LONGEST_NAME else f"{holder.component[: _LONGEST_NAME - 1]}…"
    text = f"{name} {rank_list(holder.ranks)}"
    if shares:
        percent = f"{holder.milli / 10:.3g}%"
        text += f" {percent}" if len(holder.ranks) == 1 else f" {len(holder.ranks)}×{percent}"
    if holder.hardware:
        text += f" on {', '.join(holder.hardware)}"
    return Text(text)


def _ranks(plan: PlacementPlan, colours: dict[str, str], *, wide: bool) -> Table:
    columns = ["COMPONENT", "RANK", "NODE", "LOCAL", "GPU", "VISIBLE", "SHARE", "GROUP", "ALSO"]
    rows: list[list[RenderableType]] = []
    for component in plan.components:
        shown = component.workers if wide else component.workers[:MOST_RANKS]
        rows.extend(_rank_row(worker, colours[component.name]) for worker in shown)
        left = len(component.workers) - len(shown)
        if left:
            more = Text(f"… {left} more ranks; -o wide shows all of them", style="dim")
            rows.append([Text(component.name, style=colours[component.name]), "", more, *[""] * 6])
    return tables.table(columns, rows, right=("RANK",))


def _rank_row(worker: PlannedWorker, colour: str) -> list[RenderableType]:
    placement = worker.placement
    own = rank_list([device.position for device in worker.devices]) if worker.devices else "–"
    return [
        Text(worker.component, style=colour),
        str(placement.rank),
        f"{placement.cluster_node_rank} {worker.node_id}",
        f"{placement.local_rank} of {placement.local_world_size}",
        own,
        ",".join(placement.visible_accelerators) or "–",
        _shares(worker),
        placement.node_group_label,
        "; ".join(_notes(worker)),
    ]


def _shares(worker: PlannedWorker) -> str:
    """What it is charged: ``1``, ``2``, ``0.5``, ``0.5 + 1``."""
    runs = [(milli, sum(1 for _ in same)) for milli, same in groupby(device.milli for device in worker.devices)]
    return " + ".join(f"{count} × {milli}m" if count > 1 else f"{milli}m" for milli, count in runs) or "–"


def _notes(worker: PlannedWorker) -> Iterator[str]:
    if worker.observer:
        yield "observer"
    for unit, position in zip(worker.hardware, worker.placement.local_hardware_ranks, strict=bool(worker.hardware)):
        yield f"{unit.type} {position}"
    if worker.interpreter:
        yield worker.interpreter
    if worker.env:
        yield "sets " + ", ".join(name for name, _ in worker.env)


def plain(plan: PlacementPlan) -> dict[str, Any]:
    """The plan as plain values, for :mod:`json` and :mod:`yaml`. Values of variables that may be secrets are masked."""
    return {
        "mode": plan.mode.value,
        "rollout_sync_mode": plan.sync_mode.value if plan.sync_mode is not None else None,
        "components": [
            {
                "name": component.name,
                "world_size": component.world_size,
                "placement": entry.text,
                "node_groups": list(entry.node_groups),
                "strategy": type(component.strategy).__name__,
                "hardware_ranks": list(component.strategy.hardware_ranks),
                "workers": [_plain_worker(worker) for worker in component.workers],
            }
            for component, entry in zip(plan.components, plan.config.entries, strict=True)
        ],
        "nodes": [
            {
                "node_id": node.node_id,
                "rank": node.rank,
                "gpus": [
                    {
                        "position": device.position,
                        "id": device.id,
                        "type": device.type,
                        "holders": [
                            {"component": held.component, "ranks": list(held.ranks), "milli": held.milli}
                            for held in device.holders
                        ],
                    }
                    for device in node.devices
                ],
            }
            for node in picture(plan)
        ],
        "demand": [
            {
                "node_id": node.node_id,
                "rank": node.node_rank,
                "gpu_milli": node.gpu_milli,
                "gpus": [{"position": position, "milli": milli} for position, milli in node.devices],
                "workers": node.workers,
            }
            for node in plan.demand
        ],
        "warnings": [
            {"field": fault.field, "line": fault.line, "column": fault.column, "message": fault.message}
            for fault in plan.warnings
        ],
    }


def _plain_worker(worker: PlannedWorker) -> dict[str, Any]:
    placement = worker.placement
    return {
        "rank": placement.rank,
        "node_id": worker.node_id,
        "cluster_node_rank": placement.cluster_node_rank,
        "placement_node_rank": placement.placement_node_rank,
        "local_rank": placement.local_rank,
        "local_world_size": placement.local_world_size,
        "local_accelerator_rank": placement.local_accelerator_rank,
        "accelerator_type": placement.accelerator_type,
        "visible_accelerators": list(placement.visible_accelerators),
        "local_hardware_ranks": list(placement.local_hardware_ranks),
        "isolate_accelerator": placement.isolate_accelerator,
        "node_group_label": placement.node_group_label,
        "devices": [{"position": one.position, "id": one.id, "milli": one.milli} for one in worker.devices],
        "observer": worker.observer,
        "hardware": [unit.type for unit in worker.hardware],
        "interpreter": worker.interpreter,
        "env": {name: "***" if is_secret(name) else value for name, value in worker.env},
    }
