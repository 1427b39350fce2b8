"""How is one synchronous problem searched? Pure layouts, branch and bound, then a solver if one is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType

from callboard.autoplace.bounds import bounds_of, destructive
from callboard.autoplace.building import HYBRID, layout_of
from callboard.autoplace.chains import chains_of
from callboard.autoplace.cpsat import ordered_plan, solve
from callboard.autoplace.exact import Budget, Combination, Found, Leanest, Shortest, Stopped, combinations_in_order
from callboard.autoplace.improving import improved
from callboard.autoplace.problem import Layout
from callboard.autoplace.stopping import Stop
from callboard.autoplace.tasks import Instance, for_layout
from callboard.autoplace.variants import Variants

NODES_BEFORE_SOLVER = 40_000
"""Nodes of branch and bound before a solver is asked; about five seconds, and it proves what it can't in that time."""

FEW_NODES_BEFORE_SOLVER = 4_000
"""The same for more than :data:`ALWAYS_OWN` tasks, where it rarely proves anything."""

NODES_WITH_MEMORY_BEFORE_SOLVER = 300
"""The same where memory is short and more than :data:`SMALL_WITH_MEMORY` tasks want some: the solver proves in seconds
what branch and bound may not even find a first plan for."""

SMALL_WITH_MEMORY = 5
"""Most tasks that branch and bound places well in short memory."""

ALWAYS_OWN = 8
"""Most tasks for which branch and bound is the better way to a proof."""

SMALL = 8
"""With more tasks a good plan is looked for before the proof."""

NODES_OF_PURE = 1_500
"""Nodes spent on the best all-disjoint split and the best collocated order."""

NODES_OF_FIRST = 200
"""Nodes for a plan when the time is over before there is one; far less than a second."""

NODES_OF_TIES = 1_500
"""Nodes spent on finding fewer GPUs for the same time; a fixed number, so that the same input gives the same bytes."""

NODES_OF_HYBRID = 1_000
"""Nodes spent on the best hybrid when the best plan isn't one: its time is only shown."""

NODES_OF_WAY = 50
"""Of those, nodes for one way to be hybrid."""

FEW_COMBINATIONS = 128
"""Up to so many ways to combine pools and sharing are searched one by one."""

FEW_WITH_MEMORY = 8
"""The same where memory is short: most ways differ by little there, and are decided late."""

MOST_COMBINATIONS = 4_096
"""More of them than this aren't enumerated for a pure layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came out.

    Attributes:
        instance: what was searched.
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


class _Run:
    """One search: the incumbent, the bound, and who is told of them."""

    def __init__(
        self, instance: Instance, halt: Stop, told: Callable[[int, int], None], gap: float, solver: bool
    ) -> None:
        self.instance = instance
        self.halt = halt
        self.told = told
        self.gap = gap
        self.solver = solver
        self.bound = min(bounds_of(instance).best, instance.horizon)
        self.best: Found | None = None
        self.hybrid: Found | None = None
        self.notes: list[str] = []
        self.by = "exact"

    def incumbent(self, found: Found) -> None:
        """A plan, better than the last or not."""
        if layout_of(found.options, found.columns) == HYBRID and (
            self.hybrid is None or found.length < self.hybrid.length
        ):
            self.hybrid = found
        if self.best is None or found.length < self.best.length:
            self.best = found
            self.told(found.length, min(self.bound, found.length))

    def raised(self, bound: int) -> None:
        """A better lower bound."""
        if bound > self.bound:
            self.bound = bound
            if self.best is not None:
                self.told(self.best.length, min(bound, self.best.length))

    def good_enough(self) -> bool:
        """Whether to stop: somebody said so, or the gap is reached."""
        if self.halt():
            return True
        return self.gap > 0 and self.best is not None and self.best.length - self.bound <= self.gap * self.best.length

    def pure(self, layout: Layout, nodes: int | None = NODES_OF_PURE) -> tuple[Found | None, bool]:
        """(the best plan of a pure layout, whether that is proved)."""
        instance = for_layout(self.instance, layout)
        whole = prod(len(chains_of(task.options)) for task in instance.tasks) <= MOST_COMBINATIONS
        if not whole:
            instance = _one_chain_each(instance)
        searches = combinations_in_order(instance, layout)
        shortest = Shortest(self.instance.horizon + 1, Budget(nodes, self.halt))
        try:
            for bound, search in searches:
                if bound < shortest.below:
                    shortest.run(search)
        except Stopped:
            if shortest.best is None and self.halt():
                # However little time there was, some plan: a few nodes that nobody stops.
                shortest = Shortest(self.instance.horizon + 1, Budget(NODES_OF_FIRST))
                with suppress(Stopped):
                    for _, search in searches:
                        if shortest.best is None:
                            shortest.run(search)
            return shortest.best, False
        return shortest.best, whole

    def branch(self, searches: list[tuple[int, Combination]], nodes: int | None) -> bool:
        """Branch and bound; whether it is done."""
        below = self.instance.horizon + 1 if self.best is None else self.best.length
        shortest = Shortest(below, Budget(nodes, self.good_enough), on_found=self.incumbent)
        for place, (bound, search) in enumerate(searches):
            if bound >= shortest.below:
                break
            if search.size > SMALL and self.best is not None and search.has(self.best.options):
                self.incumbent(improved(search, self.best, Budget(None, self.good_enough)))
                shortest.below = min(shortest.below, self.best.length)
            try:
                shortest.run(search)
            except Stopped:
                rest = [bound for bound, _ in searches[place + 1 :]]
                self.raised(min([shortest.open, shortest.below, *rest]))
                return False
            if search.unsure:
                self.notes.append("some layouts were too many to try, so the proof is missing")
                return False
        return True

    def variants(self, nodes: int | None) -> bool:
        """Branch and bound that decides late who offloads and who shares; whether it is done."""
        below = self.instance.horizon + 1 if self.best is None else self.best.length
        search = Variants(self.instance, Budget(nodes, self.good_enough), self.incumbent)
        done = search.run(below)
        if not done:
            self.raised(min(search.open, below))
            return False
        if self.best is not None:
            self._leaner_than(self.best)
            self.bound = self.best.length
        return True

    def _leaner_than(self, best: Found) -> None:
        """Fewer GPUs for the same time, everything but GPU counts and their order as in ``best``."""
        chains = [
            next((chain for chain in chains_of(task.options) if option in chain.options), None)
            for task, option in zip(self.instance.tasks, best.options, strict=True)
        ]
        if any(chain is None for chain in chains):
            # It is the best disjoint split, whose options were thinned for that layout.
            self.leanest(Layout.DISAGGREGATED)
            return
        lean = Leanest(best.length, Budget(NODES_OF_TIES), best)
        with suppress(Stopped):  # The fixed number of nodes is the rule for ties, not a failure.
            lean.run(Combination(self.instance, tuple(chain for chain in chains if chain is not None)))
        self.best = lean.best

    def refute(self, searches: list[tuple[int, Combination]]) -> None:
        """Raises the bound by propagation alone."""
        most = self.instance.horizon if self.best is None else self.best.length
        least = most
        for bound, search in searches:
            if bound >= least or self.halt():
                break
            least = min(least, destructive(search, max(bound, self.bound), least))
        if not self.halt():
            self.raised(least)

    def leanest(self, layout: Layout = Layout.ANY) -> None:
        """Fewer GPUs for the same time."""
        assert self.best is not None
        instance = for_layout(self.instance, layout)
        searches = [one for one in combinations_in_order(instance, layout) if one[0] <= self.best.length]
        lean = Leanest(self.best.length, Budget(NODES_OF_TIES), self.best)
        with suppress(Stopped):  # The fixed number of nodes is the rule for ties, not a failure.
            for _, search in searches:
                lean.run(search)
        self.best = lean.best


def search_sync(
    instance: Instance,
    *,
    layout: Layout,
    halt: Stop,
    told: Callable[[int, int], None],
    gap: float,
    solver: bool,
) -> Outcome:
    """The shortest plan of an instance.

    Args:
        instance: what to search.
        layout: which plans may be proposed.
        halt: when to end.
        told: the incumbent and the bound, in units, as they improve.
        gap: relative gap that is good enough.
        solver: whether to ask CP-SAT for what branch and bound doesn't prove.
    """
    run = _Run(instance, halt, told, gap, solver)
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
    return _outcome(run, layout, pure, proved, done=done)


def _one_chain_each(instance: Instance) -> Instance:
    """The instance with the options of each task that leave most memory: what fits at all fits with them."""
    tasks = []
    for task in instance.tasks:
        chain = min(chains_of(task.options), key=lambda chain: (chain.resident, chain.peak, chain.spans[-1]))
        tasks.append(replace(task, options=chain.options))
    return replace(instance, tasks=tuple(tasks))


def _mixed(run: _Run) -> bool:
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
        nodes = NODES_BEFORE_SOLVER if len(run.instance.tasks) <= ALWAYS_OWN else FEW_NODES_BEFORE_SOLVER
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


def _by_solver(run: _Run) -> bool:
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


def _restricted(run: _Run, layout: Layout, pure: dict[str, Found | None], proved: dict[str, bool]) -> bool:
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


def _hybrids(run: _Run) -> None:
    """The best hybrid where the best plan isn't one: some pair apart and some pair in turn, each tried briefly."""
    size = len(run.instance.tasks)
    if run.hybrid is not None or not 3 <= size <= 5:
        return
    left = NODES_OF_HYBRID
    for _, search in combinations_in_order(run.instance)[:4]:
        for apart in search.pairs():
            for one in search.pairs():
                for first, then in (one, one[::-1]):
                    start = search.forced(apart, (first, then))
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


def _outcome(
    run: _Run, layout: Layout, pure: dict[str, Found | None], proved: dict[str, bool], *, done: bool
) -> Outcome:
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
        late=run.halt.late and not run.halt.interrupted,
        layout="" if best is None else layout_of(best.options, best.columns),
        solver=run.by,
        alternatives=MappingProxyType(alternatives),
        notes=tuple(notes),
        some_layout=any(found is not None for found in pure.values()),
    )
