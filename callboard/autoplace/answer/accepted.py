"""The plan that is proposed: the best that whoever runs it accepts, with the best without that limit beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from callboard.autoplace.problem.plan import Plan
from callboard.autoplace.problem.problem import Async, Layout, Problem
from callboard.autoplace.rlinf.job import RLinfJob

STALENESS = (0.0, 0.5, 1.0, 2.0)
"""Values that are compared: how old data may be is the user's choice, and this is what it costs."""

Search = Callable[[Problem], Plan]
"""Searches one problem; raises NoPlan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a config gets.

    Attributes:
        plan: the plan to use.
        job: the RLinf job that it is for; None: a workflow in the general form.
        unrestricted: the best plan of any layout, where ``plan`` was restricted; None: it wasn't, or it could not be
            searched.
        staleness: the best plan for each staleness, where batches overlap; empty: they don't.
    """

    plan: Plan
    job: RLinfJob | None = None
    unrestricted: Plan | None = None
    staleness: Mapping[float, Plan] = field(default_factory=lambda: MappingProxyType({}))


def answer_for_problem(problem: Problem, search: Search) -> Answer:
    """The answer to a workflow in the general form; where batches overlap, for several values of staleness.

    Raises:
        NoPlan: there is none.
    """
    plan = search(problem)
    if not isinstance(problem.objective, Async):
        return Answer(plan=plan)
    tried = sorted({*STALENESS, problem.objective.staleness})
    table = {eta: search(replace(problem, objective=Async(staleness=eta))) for eta in tried}
    return Answer(plan=plan, staleness=MappingProxyType(table))


def answer_for_job(job: RLinfJob, search: Search) -> Answer:
    """The answer to an RLinf job. A reasoning job that isn't ``mixed`` gets one of the two layouts it accepts.

    Raises:
        NoPlan: there is none.
    """
    plan = search(job.problem)
    if job.problem.layout is not Layout.UNIFORM:
        return Answer(plan=plan, job=job)
    return Answer(plan=plan, job=job, unrestricted=search(replace(job.problem, layout=Layout.ANY)))
