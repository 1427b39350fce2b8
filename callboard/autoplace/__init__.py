"""The search for the fastest placement: who gets which GPUs and when, and how close to the best that is."""

from callboard.autoplace.problem.plan import Plan, Span, Status
from callboard.autoplace.problem.problem import (
    Async,
    Component,
    Edge,
    EdgeKind,
    Layout,
    Mode,
    NoPlan,
    Objective,
    Pool,
    Problem,
    Sync,
    Unplaceable,
)
from callboard.autoplace.solve.checker import predict
from callboard.autoplace.solve.search import search, staleness_table

__all__ = [
    "Async",
    "Component",
    "Edge",
    "EdgeKind",
    "Layout",
    "Mode",
    "NoPlan",
    "Objective",
    "Plan",
    "Pool",
    "Problem",
    "Span",
    "Status",
    "Sync",
    "Unplaceable",
    "predict",
    "search",
    "staleness_table",
]
