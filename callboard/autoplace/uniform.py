"""Which plan does RLinf's placement of model-parallel components accept? One of two layouts, and nothing between.

*Collocated*: actor and rollout on the same GPUs, inference inside the actor; everybody takes turns, so times add up.
*Disaggregated*: nobody shares a GPU, one range each; rollout, inference and actor form a pipeline. Both are small
enough to be looked through whole: the best plan of each is found by arithmetic, and is proved by that.

An engine never spans two nodes, nor does a rollout process that takes every n-th GPU of a larger actor's group.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

from callboard.autoplace.problem import Mode, Problem
from callboard.autoplace.rlinf import RLinfJob
from callboard.autoplace.rlinf_config import Reasoning


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


def best_collocated(job: RLinfJob, workload: Reasoning) -> Uniform | None:
    """The fastest collocated layout; None: there is none.

    Args:
        job: a reasoning job.
        workload: what it configures.
    """
    if job.config.auto_scheduler:
        return None
    actor, rollout = (workload.tensor_parallel[name] for name in ("actor", "rollout"))
    if actor > rollout and actor % rollout:
        return None
    block = workload.model_parallel["rollout"] * max(actor // rollout, 1)
    by_gpus = [{mode.gpus: mode for mode in component.modes} for component in job.problem.components]
    shared = set.intersection(*(set(modes) for modes in by_gpus))
    ground = _Ground(job)
    found = [
        (sum(modes[gpus].seconds for modes in by_gpus), gpus, first)
        for gpus in shared
        if (first := ground.first_fit(0, gpus, job.problem.gpus, block)) is not None
    ]
    if not found:
        return None
    seconds, gpus, first = min(found)
    names = [component.name for component in job.problem.components]
    return Uniform(
        modes={name: modes[gpus] for name, modes in zip(names, by_gpus, strict=True)},
        starts=dict.fromkeys(names, first),
        seconds=seconds,
    )


def best_disaggregated(job: RLinfJob, workload: Reasoning) -> Uniform | None:
    """The fastest layout with GPUs of its own for each component; None: there is none.

    Best first: the sizes of all but the rollout are looked through, each with the largest rollout that is worth its
    GPUs; where no order of ranges keeps engines inside nodes, the next smaller one is tried.
    """
    problem = job.problem
    total = problem.gpus
    names = [component.name for component in problem.components]
    others = [name for name in names if name != "rollout"]
    ground = _Ground(job)
    longest = ground.longest(workload.model_parallel["rollout"])
    fitting_modes = [mode for mode in problem.component("rollout").modes if mode.gpus <= longest]
    engines = _worthwhile(fitting_modes, every=job.config.auto_scheduler)
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
        if job.config.auto_scheduler:
            fitting = [index for index in fitting if engines[index].gpus == left]
        if fitting:
            chosen[sizes] = dict(zip(others, modes, strict=True))
            offer(sizes, fitting[-1])
    while queue:
        seconds, _, sizes, index = heapq.heappop(queue)
        modes_of = chosen[sizes] | {"rollout": engines[index]}
        starts = _arranged(job, workload, ground, {name: modes_of[name].gpus for name in names})
        if starts is not None:
            return Uniform(modes={name: modes_of[name] for name in names}, starts=starts, seconds=seconds)
        if not job.config.auto_scheduler:
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


def _arranged(job: RLinfJob, workload: Reasoning, ground: _Ground, gpus: Mapping[str, int]) -> dict[str, int] | None:
    """A first GPU for each component, ranges side by side; None when engines would span nodes in every order."""
    engine = {name: workload.model_parallel[name] if name == "rollout" else 1 for name in gpus}
    whole = {name: workload.model_parallel[name] for name in gpus}
    # Tensor-parallel groups inside nodes are faster, and tried first; only the rollout's have to be.
    for blocks in (whole, engine):
        for order in _orders(job, list(gpus)):
            starts = _laid(job, order, gpus, blocks, ground)
            if starts is not None:
                return {name: starts[name] for name in gpus}
    return None


def _orders(job: RLinfJob, names: Sequence[str]) -> Iterator[Sequence[str]]:
    """The workflow's own order first, then the others; with the auto scheduler only the one that it knows."""
    if job.config.auto_scheduler:
        yield [name for name in ("actor", "rollout", "inference") if name in names]
        return
    yield from permutations(names)


def _laid(
    job: RLinfJob, order: Sequence[str], gpus: Mapping[str, int], blocks: Mapping[str, int], ground: _Ground
) -> dict[str, int] | None:
    """The ranges in this order, each as far left as its blocks fit; GPUs in between stay idle."""
    starts: dict[str, int] = {}
    at = 0
    for name in order:
        end = at + gpus[name] if job.config.auto_scheduler else job.problem.gpus
        first = ground.first_fit(at, gpus[name], end, blocks[name])
        if first is None:
            return None
        starts[name] = first
        at = first + gpus[name]
    return starts


class _Ground:
    """Which ranges of GPUs keep every block of a size inside a node?"""

    def __init__(self, job: RLinfJob) -> None:
        self._nodes = [job.nodes[rank] for rank in job.problem.pools[0].node_ranks]
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


def with_modes(problem: Problem, uniform: Uniform) -> Problem:
    """The problem with these modes alone."""
    components = tuple(replace(component, modes=(uniform.modes[component.name],)) for component in problem.components)
    return replace(problem, components=components)
