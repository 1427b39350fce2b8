"""A plan on the screen."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from callboard.cli.show import tables
from callboard.model.quantities import format_memory

_UNITS = {"cpu": "CPU", "gpu": "GPU"}


def plan_view(value: Mapping[str, Any]) -> Group:
    """A plan in the form of :func:`callboard.cli.layouts.plan.as_plain`."""
    head = f"{value['job']} needs {amounts(value['totals'])}."
    parts: list[RenderableType] = [Text(head, style="bold"), "", _components(value)]
    if len(value["pools"]) > 1:
        charged = "; ".join(f"{pool} {amounts(ask)}" for pool, ask in value["pools"].items())
        parts += ["", f"Charged to pools: {charged}"]
    if value["fits"] is None:
        return Group(*parts, "", Text("Describe a cluster with --nodes to see whether it fits.", style="dim"))
    if value["fits"]:
        parts += ["", Text("It fits.", style="bold green")]
    else:
        parts += ["", Text("It does not fit.", style="bold red")]
        for each in value["unplaced"]:
            parts.append(f"  {each['workers']} × {each['component']} find no room:")
            parts += [f"    {why}" for why in each["why"]]
    return Group(*parts, "", _nodes(value))


def amounts(given: Mapping[str, int | float]) -> str:
    """ "14 CPU, 1 GPU"; "nothing" for none."""
    parts = [
        format_memory(int(amount)) if name == "memory" else f"{amount:g} {_UNITS.get(name, name)}"
        for name, amount in given.items()
        if amount
    ]
    return ", ".join(parts) or "nothing"


def _components(value: Mapping[str, Any]) -> Table:
    rows = [
        [
            _named(each),
            str(each["workers"]) + (f"–{each['max_workers']}" if "max_workers" in each else ""),
            amounts(each["per_worker"]),
            amounts(each["totals"]),
            each["pool"],
        ]
        for each in value["components"]
    ]
    return tables.table(["COMPONENT", "WORKERS", "EACH", "TOGETHER", "POOL"], rows, right=("WORKERS",))


def _named(component: Mapping[str, Any]) -> str:
    members = ", ".join(component["members"])
    return f"{component['component']}: {members}" if members else str(component["component"])


def _nodes(value: Mapping[str, Any]) -> Table:
    """Neighbours that hold the same make one row."""

    def alike(node: Mapping[str, Any]) -> tuple[Any, ...]:
        return (node["node_group"], node["workers"], node["used"], node["left"])

    rows = []
    for _, equal in groupby(value["nodes"], key=alike):
        nodes = list(equal)
        first, last = nodes[0], nodes[-1]
        name = first["node"] if first is last else f"{first['node']} … {last['node']}"
        held = ", ".join(f"{count} × {component}" for component, count in first["workers"].items()) or "nothing"
        rows.append([name, first["node_group"], held, amounts(first["used"]), amounts(first["left"])])
    return tables.table(["NODE", "GROUP", "HOLDS", "USED", "LEFT"], rows)
