"""The entry of the search: which plan takes the least time, and what proves it.

The pure layouts come first, so that no answer is worse than they are. Then branch and bound
(:mod:`callboard.autoplace.exact.branch_and_bound`), which proves most problems of up to eight components by itself;
after a fixed number of its nodes OR-Tools' CP-SAT takes over, where installed. Every plan is simulated chunk by chunk
before it is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

from callboard.autoplace.exact.cpsat import installed
from callboard.autoplace.instance.instances import instance_of
from callboard.autoplace.instance.stopping import Stop
from callboard.autoplace.problem.plan import Plan, Spans, Status
from callboard.autoplace.problem.problem import Async, Layout, Problem, no_plan
from callboard.autoplace.solve.asynchronous import search_async
from callboard.autoplace.solve.building import seconds_of, spans_of
from callboard.autoplace.solve.checker import check_plan
from callboard.autoplace.solve.outcome import Outcome
from callboard.autoplace.solve.synchronous import search_sync
from callboard.autoplace.solve.uniform import uniform_plan

Progress = Callable[[float, float], None]
"""Told (incumbent, lower bound) in seconds, each time one of them improves."""


def search(
    problem: Problem,
    *,
    time_limit: float | None = 10.0,
    on_progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    gap: float = 0.0,
    solver: bool | None = None,
) -> Plan:
    """The fastest plan that was found, with a bound on every other.

    Ctrl-C ends the search and returns the incumbent, as ``stop`` does.

    Args:
        problem: what to place.
        time_limit: seconds; None: until it is proved or stopped. Runs on an alarm: a call of the solver ends with it.
        on_progress: told the incumbent and the bound in seconds, whenever one of them improves.
        stop: polled; True: return the incumbent.
        gap: 0.05: a plan that is proved to be within five per cent of the best is good enough.
        solver: whether to use OR-Tools for what the own search doesn't prove; None: where it is installed.

    Raises:
        NoPlan: the components can't lie on this cluster together, or not in the layout that was asked for.
        CheckFailed: the plan doesn't hold when simulated (a defect of the search).
    """
    if problem.layout is Layout.UNIFORM and problem.model_parallel is not None:

        def timed(fixed: Problem) -> Plan:
            return search(fixed, time_limit=None, solver=False)

        plan = check_plan(uniform_plan(problem, problem.model_parallel, timed))
        if on_progress is not None:
            on_progress(plan.iteration_seconds, plan.lower_bound_seconds)
        return plan
    instance = instance_of(problem)
    asked = installed() if solver is None else solver

    def told(incumbent: int, bound: int) -> None:
        if on_progress is not None:
            extra = 0.0 if isinstance(problem.objective, Async) else problem.weight_sync_seconds
            on_progress(seconds_of(incumbent, instance) + extra, seconds_of(bound, instance) + extra)

    with Stop(time_limit, stop) as halt:
        if isinstance(problem.objective, Async):
            return check_plan(search_async(problem, instance, halt=halt, told=told, gap=gap))
        outcome = search_sync(instance, layout=problem.layout, halt=halt, told=told, gap=gap, solver=asked)
    if outcome.found is None:
        raise no_plan(problem.components, _why_none(problem, outcome))
    return check_plan(_plan(problem, outcome))


def staleness_table(
    problem: Problem, staleness: Sequence[float], *, time_limit: float | None = 10.0
) -> dict[float, Plan]:
    """The best asynchronous plan for each staleness: what waiting less costs.

    Args:
        problem: any problem; its own objective doesn't matter.
        staleness: values of η.
        time_limit: seconds for each.
    """
    return {eta: search(replace(problem, objective=Async(staleness=eta)), time_limit=time_limit) for eta in staleness}


def _plan(problem: Problem, outcome: Outcome) -> Plan:
    instance, found = outcome.instance, outcome.found
    assert found is not None
    sync = problem.weight_sync_seconds
    length = round(seconds_of(found.length, instance) + sync, 9)
    bound = length if outcome.proved else round(seconds_of(min(outcome.bound, found.length), instance) + sync, 9)
    alternatives = {
        name: None if units is None else round(seconds_of(units, instance) + sync, 9)
        for name, units in outcome.alternatives.items()
    }
    status = Status.OPTIMAL if outcome.proved else Status.TIME_LIMIT if outcome.late else Status.FEASIBLE
    return Plan(
        problem=problem,
        iteration_seconds=length,
        lower_bound_seconds=bound,
        status=status,
        spans=Spans(spans_of(problem, instance, found)),
        layout=outcome.layout,
        alternatives=MappingProxyType(alternatives),
        latency_seconds=length,
        checked_seconds=length,
        solver=outcome.solver,
        notes=(*problem.notes, *outcome.notes),
    )


def _why_none(problem: Problem, outcome: Outcome) -> str:
    if problem.layout is not Layout.ANY and outcome.some_layout:
        return f"no {problem.layout.value} layout has room for it beside the others"
    if outcome.proved:
        return "its GPUs and memory can't be had beside what the others keep resident; offload, or add GPUs"
    return "no plan was found before the search ended; give it more time"
