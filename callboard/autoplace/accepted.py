"""What is proposed for a job? The best plan that whoever runs it accepts, and the best without that limit beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType

from callboard.autoplace.plan import Plan, Status
from callboard.autoplace.problem import Component, Layout, NoPlan, Problem, Unplaceable
from callboard.autoplace.rlinf import RLinfJob
from callboard.autoplace.rlinf_config import Reasoning
from callboard.autoplace.uniform import Uniform, best_collocated, best_disaggregated, with_modes

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
    """

    plan: Plan
    job: RLinfJob | None = None
    unrestricted: Plan | None = None


def answer_for_problem(problem: Problem, search: Search) -> Answer:
    """The answer to a workflow in the general form.

    Raises:
        NoPlan: there is none.
    """
    return Answer(plan=search(problem))


def answer_for_job(job: RLinfJob, search: Search) -> Answer:
    """The answer to an RLinf job. A reasoning job that isn't ``mixed`` gets one of the two layouts it accepts.

    Raises:
        NoPlan: there is none.
    """
    workload = job.config.workload
    if not isinstance(workload, Reasoning) or job.problem.layout is not Layout.UNIFORM:
        return Answer(plan=search(job.problem), job=job)
    collocated = best_collocated(job, workload)
    disaggregated = best_disaggregated(job, workload)
    found = [uniform for uniform in (collocated, disaggregated) if uniform is not None]
    if not found:
        raise NoPlan(tuple(_neither(component) for component in job.problem.components))
    # The first of equals: collocated moves weights inside GPUs.
    best = min(found, key=lambda uniform: uniform.seconds)
    alternatives = {
        "collocated": None if collocated is None else collocated.seconds,
        "disaggregated": None if disaggregated is None else disaggregated.seconds,
    }
    layout = Layout.COLLOCATED if best is collocated else Layout.DISAGGREGATED
    plan = _placed(search(replace(with_modes(job.problem, best), layout=layout)), job, best)
    plan = replace(plan, alternatives=MappingProxyType(alternatives), status=Status.OPTIMAL)
    return Answer(plan=plan, job=job, unrestricted=search(replace(job.problem, layout=Layout.ANY)))


def _placed(plan: Plan, job: RLinfJob, uniform: Uniform) -> Plan:
    """The plan of these modes, checked, on the ranges that they were given."""
    assert abs(plan.iteration_seconds - uniform.seconds) <= 1e-3 * uniform.seconds, "the search disagrees"
    ranks = job.problem.pools[0].gpu_ranks
    spans = tuple(
        replace(span, gpu_ranks=ranks[first : first + span.gpus])
        for span in plan.spans
        if (first := uniform.starts[span.component]) >= 0
    )
    return replace(plan, problem=job.problem, spans=spans)


def _neither(component: Component) -> Unplaceable:
    counts = tuple(sorted({mode.gpus for mode in component.modes}))
    shown = ", ".join(map(str, counts))
    reason = (
        f"its legal counts ({shown} GPUs) are no common count of all components, and don't fit beside those of the "
        "others; --mixed allows other layouts"
    )
    return Unplaceable(component=component.name, gpus=counts, reason=reason)
