"""The synchronous search of one problem: which steps are taken, and whether they prove the best plan the fastest."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from callboard.autoplace.exact.branch_and_bound import combinations_in_order
from callboard.autoplace.exact.cpsat import ordered_plan, solve
from callboard.autoplace.instance.chains import chains_of
from callboard.autoplace.instance.stopping import Stop
from callboard.autoplace.instance.tasks import Found, Instance
from callboard.autoplace.problem.problem import Layout
from callboard.autoplace.solve.building import layout_of
from callboard.autoplace.solve.outcome import Outcome, outcome_of
from callboard.autoplace.solve.steps import Run

NODES_BEFORE_SOLVER = 40_000
"""Nodes of branch and bound before a solver is asked; about five seconds, and it proves what it can't in that time."""

SOME_NODES_BEFORE_SOLVER = 7_000
"""The same for more than :data:`ALWAYS_OWN` tasks, up to :data:`OFTEN_OWN`: also about five seconds, in which it proves
what it ever will, and the solver has the rest."""

FEW_NODES_BEFORE_SOLVER = 4_000
"""The same for more than :data:`OFTEN_OWN` tasks, where it rarely proves anything."""

NODES_WITH_MEMORY_BEFORE_SOLVER = 300
"""The same where memory is short and more than :data:`SMALL_WITH_MEMORY` tasks want some: the solver proves in seconds
what branch and bound may not even find a first plan for."""

SMALL_WITH_MEMORY = 5
"""Most tasks that branch and bound places well in short memory."""

ALWAYS_OWN = 8
"""Most tasks for which branch and bound is the better way to a proof."""

OFTEN_OWN = 10
"""Most tasks for which it often is."""

FEW_COMBINATIONS = 128
"""Up to so many ways to combine pools and sharing are searched one by one."""

FEW_WITH_MEMORY = 8
"""The same where memory is short: most ways differ by little there, and are decided late."""


def search_sync(
    instance: Instance, *, layout: Layout, halt: Stop, told: Callable[[int, int], None], gap: float, solver: bool
) -> Outcome:
    """The shortest plan of an instance.

    Args:
        layout: which plans may be proposed.
        told: the incumbent and the bound, in units, as they improve.
        gap: relative gap that is good enough.
        solver: whether to ask CP-SAT for what branch and bound doesn't prove.
    """
    run = Run(instance, halt, told, gap, solver)
    pure: dict[str, Found | None] = {}
    proved: dict[str, bool] = {}
    try:
        for kind in (Layout.COLLOCATED, Layout.DISAGGREGATED):
            pure[kind.value], proved[kind.value] = run.pure(kind)
        if layout is Layout.ANY:
            for found in pure.values():
                if found is not None:
                    run.incumbent(found)
            done = _mixed(run)
        else:
            done = _restricted(run, layout, pure, proved)
    except KeyboardInterrupt:
        halt.interrupted = True
        done = False
    return outcome_of(run, layout, pure, proved, done=done)


def _mixed(run: Run) -> bool:
    """Any layout; whether it is proved."""
    combinations = prod(len(chains_of(task.options)) for task in run.instance.tasks)
    crowded = any(limit is not None for limit in run.instance.memory)
    if combinations > (FEW_WITH_MEMORY if crowded else FEW_COMBINATIONS):
        few = crowded and len(run.instance.tasks) > SMALL_WITH_MEMORY
        nodes = NODES_WITH_MEMORY_BEFORE_SOLVER if few else NODES_BEFORE_SOLVER
        if run.variants(min(nodes, NODES_BEFORE_SOLVER) if run.solver else None):
            return True
    else:
        searches = combinations_in_order(run.instance)
        run.refute(searches)
        tasks = len(run.instance.tasks)
        nodes = SOME_NODES_BEFORE_SOLVER if tasks <= OFTEN_OWN else FEW_NODES_BEFORE_SOLVER
        nodes = NODES_BEFORE_SOLVER if tasks <= ALWAYS_OWN else nodes
        if run.branch(searches, nodes if run.solver else None):
            if run.best is not None:
                run.leanest()
                run.bound = run.best.length
            return True
    if run.halt() or run.good_enough():
        return False
    if not run.solver:
        return False
    try:
        return _by_solver(run)
    except ImportError as error:
        run.notes.append(f"OR-Tools is installed and can't be imported ({error}), so the search went on without it")
        run.solver, run.by = False, "exact"
        return _mixed(run)


def _by_solver(run: Run) -> bool:
    run.by = "cp-sat"
    answer = solve(
        run.instance,
        best=run.best,
        bound=run.bound,
        halt=run.good_enough,
        told_plan=run.incumbent,
        told_bound=run.raised,
    )
    if answer.found is not None:
        run.incumbent(answer.found)
    run.raised(answer.bound)
    if not answer.proved:
        return False
    if run.best is None:
        return True
    # Several workers race, and which optimum they end at is chance: one plan of that length is found again in order.
    again = ordered_plan(run.instance, run.best.length, run.halt)
    if again is None:
        run.notes.append("the time is proved, but of the plans with this time any one may be shown")
        return False
    run.best = again
    run.bound = again.length
    return True


def _restricted(run: Run, layout: Layout, pure: dict[str, Found | None], proved: dict[str, bool]) -> bool:
    """Only pure layouts; whether it is proved."""
    kinds = [Layout.COLLOCATED, Layout.DISAGGREGATED] if layout is Layout.UNIFORM else [layout]
    for kind in kinds:
        if not proved[kind.value]:
            pure[kind.value], proved[kind.value] = run.pure(kind, nodes=None)
        found = pure[kind.value]
        if found is not None:
            run.incumbent(found)
    done = all(proved[kind.value] for kind in kinds)
    if done and run.best is not None:
        run.leanest(Layout(layout_of(run.best.options, run.best.columns)))
        run.bound = run.best.length
    return done
