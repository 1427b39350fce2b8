"""Plans that RLinf's placement of model-parallel components accepts: one of two layouts, nothing between.

*Collocated*: actor and rollout on the same GPUs, inference inside the actor; everybody takes turns, so times add up.
*Disaggregated*: nobody shares a GPU, one range each; rollout, inference and actor form a pipeline. Both are small
enough to be looked through whole: the best plan of each is found by arithmetic, and is proved by that.

An engine never spans two nodes, nor does a rollout process that takes every n-th GPU of a larger actor's group.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations, product
from types import MappingProxyType

from callboard.autoplace.problem.plan import Plan, Spans, Status
from callboard.autoplace.problem.problem import Layout, Mode, ModelParallel, NoPlan, Problem, no_plan
from callboard.model.frozen import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """A layout that is accepted.

    Attributes:
        modes: the number of GPUs and cost of each component.
        starts: first GPU of each component, as its pool numbers them.
        seconds: of an iteration.
    """

    modes: Mapping[str, Mode]
    starts: Mapping[str, int]
    seconds: float


def uniform_plan(problem: Problem, rules: ModelParallel, timed: Callable[[Problem], Plan]) -> Plan:
    """The fastest plan in a layout that is accepted.

    Args:
        problem: a chain of rollout, perhaps inference, and actor, in one pool.
        rules: what its placement demands.
        timed: says when everybody runs where one mode each, and the layout, are given.

    Raises:
        NoPlan: neither layout is possible.
    """
    collocated = best_collocated(problem, rules)
    disaggregated = best_disaggregated(problem, rules)
    found = [uniform for uniform in (collocated, disaggregated) if uniform is not None]
    if not found:
        raise _neither(problem, rules)
    # The first of equals: collocated moves weights inside GPUs.
    best = min(found, key=lambda uniform: uniform.seconds)
    layout = Layout.COLLOCATED if best is collocated else Layout.DISAGGREGATED
    plan = timed(replace(_with_modes(problem, best), layout=layout))
    assert abs(plan.iteration_seconds - best.seconds) <= 1e-3 * best.seconds, "the search disagrees"
    ranks = problem.pools[0].gpu_ranks
    spans = []
    for span in plan.spans:
        first = best.starts[span.component]
        spans.append(replace(span, gpu_ranks=ranks[first : first + span.gpus]))
    alternatives = {
        "collocated": None if collocated is None else collocated.seconds,
        "disaggregated": None if disaggregated is None else disaggregated.seconds,
    }
    return replace(
        plan,
        problem=problem,
        spans=Spans(spans),
        alternatives=MappingProxyType(alternatives),
        lower_bound_seconds=plan.iteration_seconds,
        status=Status.OPTIMAL,
    )


def best_collocated(problem: Problem, rules: ModelParallel) -> Uniform | None:
    """The fastest collocated layout; None: there is none. Arguments as of :func:`uniform_plan`."""
    if rules.auto_scheduler:
        return None
    actor, rollout = (rules.tensor_gpus[name] for name in ("actor", "rollout"))
    if actor > rollout and actor % rollout:
        return None
    block = rules.group_gpus["rollout"] * max(actor // rollout, 1)
    by_gpus = [{mode.gpus: mode for mode in component.modes} for component in problem.components]
    shared = set.intersection(*(set(modes) for modes in by_gpus))
    ground = _Ground(rules)
    found = [
        (sum(modes[gpus].seconds for modes in by_gpus), gpus, first)
        for gpus in shared
        if (first := ground.first_fit(0, gpus, problem.gpus, block)) is not None
    ]
    if not found:
        return None
    seconds, gpus, first = min(found)
    names = [component.name for component in problem.components]
    return Uniform(
        modes={name: modes[gpus] for name, modes in zip(names, by_gpus, strict=True)},
        starts=dict.fromkeys(names, first),
        seconds=seconds,
    )


def best_disaggregated(problem: Problem, rules: ModelParallel) -> Uniform | None:
    """The fastest layout with GPUs of its own for each component; None: there is none.

    Best first: the sizes of all but the rollout are looked through, each with the largest rollout that is worth its
    GPUs; where no order of ranges keeps engines inside nodes, the next smaller one is tried.
    """
    total = problem.gpus
    names = [component.name for component in problem.components]
    others = [name for name in names if name != "rollout"]
    ground = _Ground(rules)
    longest = ground.longest(rules.group_gpus["rollout"])
    fitting_modes = [mode for mode in problem.component("rollout").modes if mode.gpus <= longest]
    engines = _worthwhile(fitting_modes, every=rules.auto_scheduler)
    queue: list[tuple[float, int, tuple[int, ...], int]] = []
    chosen: dict[tuple[int, ...], dict[str, Mode]] = {}

    def offer(sizes: tuple[int, ...], index: int) -> None:
        if index >= 0:
            modes = chosen[sizes] | {"rollout": engines[index]}
            used = sum(mode.gpus for mode in modes.values())
            heapq.heappush(
                queue, (pipeline_seconds([modes[name] for name in names], problem.chunks), used, sizes, index)
            )

    for modes in product(*(problem.component(name).modes for name in others)):
        sizes = tuple(mode.gpus for mode in modes)
        left = total - sum(sizes)
        fitting = [index for index, mode in enumerate(engines) if mode.gpus <= left]
        if rules.auto_scheduler:
            fitting = [index for index in fitting if engines[index].gpus == left]
        if fitting:
            chosen[sizes] = dict(zip(others, modes, strict=True))
            offer(sizes, fitting[-1])
    while queue:
        seconds, _, sizes, index = heapq.heappop(queue)
        modes_of = chosen[sizes] | {"rollout": engines[index]}
        starts = _arranged(rules, ground, {name: modes_of[name].gpus for name in names})
        if starts is not None:
            return Uniform(modes={name: modes_of[name] for name in names}, starts=starts, seconds=seconds)
        if not rules.auto_scheduler:
            offer(sizes, index - 1)
    return None


def pipeline_seconds(modes: Sequence[Mode], chunks: int) -> float:
    """Seconds of an iteration of a chain of components on GPUs of their own, which hand over piece by piece."""
    start = end = piece = 0.0
    for index, mode in enumerate(modes):
        start = start + piece if index else 0.0
        piece = mode.seconds / chunks
        end = max(start + mode.seconds, end + piece if index else 0.0)
    return end


def _worthwhile(modes: Sequence[Mode], *, every: bool) -> list[Mode]:
    """Modes that are faster than every smaller one, ascending. A slower rollout ends nothing sooner."""
    kept: list[Mode] = []
    for mode in sorted(modes, key=lambda mode: mode.gpus):
        if every or not kept or mode.seconds < kept[-1].seconds:
            kept.append(mode)
    return kept


def _arranged(rules: ModelParallel, ground: _Ground, gpus: Mapping[str, int]) -> dict[str, int] | None:
    """A first GPU for each component, ranges side by side; None when engines would span nodes in every order."""
    engine = {name: rules.group_gpus[name] if name == "rollout" else 1 for name in gpus}
    whole = {name: rules.group_gpus[name] for name in gpus}
    # Tensor-parallel groups inside nodes are faster, and tried first; only the rollout's have to be.
    for blocks in (whole, engine):
        for order in _orders(rules, list(gpus)):
            starts = _laid(rules, order, gpus, blocks, ground)
            if starts is not None and _lends(rules, gpus, ground):
                return {name: starts[name] for name in gpus}
    return None


def _lends(rules: ModelParallel, gpus: Mapping[str, int], ground: _Ground) -> bool:
    """Whether the rollout could begin on the actor's GPUs too, if it has to: they come before its own."""
    if not (rules.auto_scheduler and rules.pre_process):
        return True
    engine, both = rules.group_gpus["rollout"], gpus["actor"] + gpus["rollout"]
    return gpus["actor"] % engine == 0 and ground.first_fit(0, both, both, engine) == 0


def _orders(rules: ModelParallel, names: Sequence[str]) -> Iterator[Sequence[str]]:
    """The workflow's own order first, then the others; with the auto scheduler only the one that it knows."""
    if rules.auto_scheduler:
        yield [name for name in ("actor", "rollout", "inference") if name in names]
        return
    yield from permutations(names)


def _laid(
    rules: ModelParallel, order: Sequence[str], gpus: Mapping[str, int], blocks: Mapping[str, int], ground: _Ground
) -> dict[str, int] | None:
    """The ranges in this order, each as far left as its blocks fit; GPUs in between stay idle."""
    starts: dict[str, int] = {}
    at = 0
    for name in order:
        end = at + gpus[name] if rules.auto_scheduler else sum(rules.node_gpus)
        first = ground.first_fit(at, gpus[name], end, blocks[name])
        if first is None:
            return None
        starts[name] = first
        at = first + gpus[name]
    return starts


class _Ground:
    """Which ranges of GPUs keep every block of a size inside a node?"""

    def __init__(self, rules: ModelParallel) -> None:
        self._nodes = rules.node_gpus
        self._reach: dict[int, list[int]] = {}

    def longest(self, block: int) -> int:
        """The most GPUs that a range of such blocks can have."""
        return max(self._reaches(block), default=0)

    def first_fit(self, start: int, gpus: int, end: int, block: int) -> int | None:
        """The leftmost place of a range from ``start`` up to ``end``, as the pool numbers GPUs; None: nowhere."""
        if gpus % block:
            return None
        reach = self._reaches(block)
        return next((first for first in range(start, end - gpus + 1) if gpus <= reach[first]), None)

    def _reaches(self, block: int) -> list[int]:
        """By first GPU, how many GPUs on blocks go before the end of a node would cut one."""
        if block not in self._reach:
            reach: list[int] = []
            # From the last node to the first: what fills a node exactly goes on in the next.
            for gpus in reversed(self._nodes):
                beyond = reach[-1] if reach else 0
                reach += [left // block * block if left % block else left + beyond for left in range(1, gpus + 1)]
            self._reach[block] = reach[::-1]
        return self._reach[block]


def _with_modes(problem: Problem, uniform: Uniform) -> Problem:
    """The problem with these modes alone."""
    components = tuple(replace(component, modes=(uniform.modes[component.name],)) for component in problem.components)
    return replace(problem, components=components)


def _neither(problem: Problem, rules: ModelParallel) -> NoPlan:
    """Why neither layout is possible."""
    engine, largest = rules.group_gpus["rollout"], max(rules.node_gpus, default=0)
    if engine > largest:
        reason = f"one engine takes {engine} GPUs of one node, and no node has more than {largest}"
        return no_plan([problem.component("rollout")], reason)
    reason = "no count is legal for all components together, and side by side they don't fit; --mixed allows more"
    return no_plan(problem.components, reason)
