"""The outcome of a synchronous search: the plan, what is proved of it, and the best of each other kind."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field
from types import MappingProxyType

from callboard.autoplace.exact.branch_and_bound import Shortest, combinations_in_order
from callboard.autoplace.exact.branching import forced
from callboard.autoplace.instance.stopping import Budget, Stopped
from callboard.autoplace.instance.tasks import Found, Instance
from callboard.autoplace.problem.problem import Layout
from callboard.autoplace.solve.building import HYBRID, layout_of
from callboard.autoplace.solve.steps import Run
from callboard.model.frozen import dataclass

NODES_OF_HYBRID = 1_000
"""Nodes spent on the best hybrid when the best plan isn't one: its time is only shown."""

NODES_OF_WAY = 50
"""Of those, nodes for one way to be hybrid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came out.

    Attributes:
        found: the best plan; None: there is none.
        bound: no plan is shorter, in units.
        proved: ``found`` is the shortest.
        late: ended by the clock.
        layout: of ``found``.
        solver: which part of the search found or proved it.
        alternatives: units of the best plan of each kind.
        notes: what was lost.
        some_layout: a plan exists in another layout.
    """

    instance: Instance
    found: Found | None
    bound: int
    proved: bool
    late: bool = False
    layout: str = ""
    solver: str = "exact"
    alternatives: Mapping[str, int | None] = field(default_factory=lambda: MappingProxyType({}))
    notes: tuple[str, ...] = ()
    some_layout: bool = False


def outcome_of(
    run: Run, layout: Layout, pure: dict[str, Found | None], proved: dict[str, bool], *, done: bool
) -> Outcome:
    """What a run came to.

    Args:
        run: the search, at its end.
        layout: which plans might be proposed.
        pure: the best plan of each pure layout; None: there is none.
        proved: whether that is proved.
        done: whether the run's best is proved.
    """
    best = run.best
    if best is not None and layout is Layout.ANY and done:
        _hybrids(run)
    alternatives = {kind: None if found is None else found.length for kind, found in pure.items()}
    alternatives[HYBRID] = None if run.hybrid is None else run.hybrid.length
    notes = list(run.notes)
    notes += [
        f"the best {kind} layout may be faster: its search was cut short" for kind, sure in proved.items() if not sure
    ]
    if not done and not run.solver and len(run.instance.tasks) > 5 and not run.notes:
        notes.append(
            "OR-Tools is not installed: with more than five components the proof may not end, and the bound is weaker; "
            "pip install 'callboard[autoplace]'"
        )
    return Outcome(
        instance=run.instance,
        found=best,
        bound=run.bound,
        proved=done,
        late=run.halt.late,
        layout="" if best is None else layout_of(best.options, best.columns),
        solver=run.by,
        alternatives=MappingProxyType(alternatives),
        notes=tuple(notes),
        some_layout=any(found is not None for found in pure.values()),
    )


def _hybrids(run: Run) -> None:
    """The best hybrid where the best plan isn't one: some pair apart and some pair in turn, each tried briefly."""
    size = len(run.instance.tasks)
    if run.hybrid is not None or not 3 <= size <= 5:
        return
    left = NODES_OF_HYBRID
    for _, search in combinations_in_order(run.instance)[:4]:
        for apart in search.pairs():
            for one in search.pairs():
                for first, then in (one, one[::-1]):
                    start = forced(search, apart, (first, then))
                    if set(apart) == set(one) or start is None or left <= 0 or run.halt():
                        continue
                    below = run.instance.horizon + 1 if run.hybrid is None else run.hybrid.length
                    budget = Budget(NODES_OF_WAY)
                    shortest = Shortest(below, budget)
                    with suppress(Stopped):  # Nothing is proved of losers; what was found is shown.
                        shortest.run(search, start)
                    left -= NODES_OF_WAY - (budget.nodes or 0)
                    if shortest.best is not None and layout_of(shortest.best.options, shortest.best.columns) == HYBRID:
                        run.hybrid = shortest.best
