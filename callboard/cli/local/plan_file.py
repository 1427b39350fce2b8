"""The plan's file beside a cluster's record, for programs that come later."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from callboard.cli.local.plan import ClusterPlan, NodeShape

PLAN_NAME = "plan.json"


def write_plan(plan: ClusterPlan) -> None:
    """Writes the plan into the directory of its cluster; a reader sees all of it or nothing."""
    temporary = plan.directory / f"{PLAN_NAME}.new"
    temporary.write_text(json.dumps(asdict(plan) | {"directory": str(plan.directory)}, indent=2), encoding="utf-8")
    temporary.replace(plan.directory / PLAN_NAME)


def read_plan(directory: Path) -> ClusterPlan | None:
    """The plan of the cluster in ``directory``; None: it was not made by `up`, or is gone."""
    try:
        plain = json.loads((directory / PLAN_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    lists = {name: tuple(plain.get(name, ())) for name in ("machine_gpus", "resources", "interpreters")}
    shapes = tuple(NodeShape(**shape) for shape in plain["shapes"])
    return ClusterPlan(**(plain | lists | {"directory": directory, "shapes": shapes}))
