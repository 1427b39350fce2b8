"""OR-Tools' CP-SAT on an instance: a better plan, a better bound, or the proof that there is none.

Optional: without OR-Tools the search of :mod:`callboard.autoplace.exact.branch_and_bound` goes on alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from callboard.autoplace.exact.cpsat_model import Model
from callboard.autoplace.instance.tasks import Found, Instance
from callboard.model.frozen import dataclass

SEED = 1
"""Of the solver, fixed."""

WORKERS = 2
"""Of the solver: one that searches and one that improves plans is the least with which it is robust."""

POLL_SECONDS = 0.05
"""How soon a stop is heard: far below what a person notices, far above what polling costs."""

TIES_DETERMINISTIC_TIME = 20.0
"""Of the solver's own units, about seconds on a fast core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the solver says.

    Attributes:
        found: the best plan; None: none within the time.
        bound: no plan is shorter.
        proved: ``found`` is the shortest, or there is none.
    """

    found: Found | None
    bound: int
    proved: bool


def installed() -> bool:
    """Whether OR-Tools seems to be there; looks only, since importing takes most of a second."""
    try:
        return find_spec("ortools") is not None
    except ImportError:  # Who keeps a module away may do so already when it is looked for.
        return False


def solver_module() -> Any:
    """``ortools.sat.python.cp_model``, imported when it is first needed.

    Raises:
        ImportError: OR-Tools is not installed, or not as it should be.
    """
    return import_module("ortools.sat.python.cp_model")


def solve(
    instance: Instance,
    *,
    best: Found | None,
    bound: int,
    halt: Callable[[], bool],
    told_plan: Callable[[Found], None],
    told_bound: Callable[[int], None],
) -> Answer:
    """Searches with the solver until it is done or ``halt`` says so.

    Args:
        best: the shortest plan that is known; only shorter ones are looked for.
        bound: a known lower bound.
        halt: polled while the solver runs.
        told_plan: each better plan.
        told_bound: each better bound.
    """
    cp = solver_module()
    below = instance.horizon + 1 if best is None else best.length
    if bound >= below:
        return Answer(found=best, bound=below, proved=True)
    # The incumbent stays inside the model as a start for its neighbourhoods; it is one unit above what counts.
    model = Model(cp, instance, below=below + (best is not None), bound=bound)
    if best is not None:
        model.hint(best)
    solver = cp.CpSolver()
    solver.parameters.random_seed = SEED
    solver.parameters.num_workers = WORKERS
    solver.best_bound_callback = lambda value: told_bound(math.ceil(value - 0.5))
    status = _run(solver, model, halt, _watcher(cp, model, told_plan))
    if status == cp.INFEASIBLE:
        return Answer(found=best, bound=below, proved=True)
    found = model.found(solver) if status in (cp.OPTIMAL, cp.FEASIBLE) else best
    reached = max(bound, math.ceil(solver.best_objective_bound - 0.5)) if status != cp.UNKNOWN else bound
    return Answer(found=found, bound=reached, proved=status == cp.OPTIMAL)


def ordered_plan(instance: Instance, length: int, halt: Callable[[], bool]) -> Found | None:
    """The plan with the fewest GPUs that is no longer than ``length``, the same one every time.

    One worker, a fixed seed and a limit in the solver's own deterministic time. None when that limit is reached before
    there is a plan, or ``halt`` ended it: what it had by then is chance.
    """
    cp = solver_module()
    model = Model(cp, instance, below=length + 1, bound=0)
    model.model.minimize(sum(model.weighted(i, lambda option: option.gpus) for i in range(len(instance.tasks))))
    solver = cp.CpSolver()
    solver.parameters.random_seed = SEED
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = TIES_DETERMINISTIC_TIME
    status = _run(solver, model, halt)
    if status != cp.OPTIMAL and halt():
        return None
    return model.found(solver) if status in (cp.OPTIMAL, cp.FEASIBLE) else None


def _watcher(cp: Any, model: Model, told: Callable[[Found], None]) -> Any:
    class Watcher(cp.CpSolverSolutionCallback):  # type: ignore[misc]
        def on_solution_callback(self) -> None:
            told(model.found(self))

    return Watcher()


def _run(solver: Any, model: Model, halt: Callable[[], bool], *callbacks: Any) -> Any:
    """Solves in a thread of its own and stops when ``halt`` says so: inside the call no Python of a thread runs.

    This thread stays free for signals, too. The solver's own handling of Ctrl-C would tell nobody.
    """
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1, thread_name_prefix="autoplace-solver") as executor:
        running = executor.submit(solver.solve, model.model, *callbacks)
        try:
            while not wait([running], POLL_SECONDS).done:
                if halt():
                    # Asked again until it is done: before its first steps the solver doesn't hear it.
                    solver.stop_search()
        finally:
            while not running.done():
                solver.stop_search()
                wait([running], POLL_SECONDS)
        return running.result()
