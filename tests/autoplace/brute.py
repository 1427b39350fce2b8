"""What is the best plan when everything is tried? Every mode, range, choice to offload, and order on shared GPUs.

It shares nothing with the search but the problem: times are the least fixed point of the rules as the design states
them, in floating point.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product

from callboard.autoplace.problem.problem import EdgeKind, Mode, Problem

Choice = tuple[Mode, bool]


def best_seconds(problem: Problem) -> float | None:
    """Seconds of the best plan; None: there is none. For a handful of components on a handful of GPUs."""
    best: float | None = None
    for choice in product(*(list(_choices(problem, i)) for i in range(len(problem.components)))):
        for shared in sorted(_sharings(problem, choice)):
            spans = [_span(problem, choice, shared, i) for i in range(len(choice))]
            for order in permutations(range(len(choice))):
                length = _length(problem, choice, spans, [(i, j) for i, j in _directed(shared, order)])
                if length is not None and (best is None or length < best):
                    best = length
    return best


def _choices(problem: Problem, i: int) -> Iterator[Choice]:
    component = problem.components[i]
    for mode in component.modes:
        yield mode, False
        if component.offload_seconds is not None and mode.gpus:
            yield mode, True


def _sharings(problem: Problem, choice: tuple[Choice, ...]) -> set[tuple[tuple[int, int], ...]]:
    """Which pairs share GPUs, over all ranges that the memory allows."""
    capacity = problem.pools[0].gpus
    found = set()
    for columns in product(*(range(capacity - mode.gpus + 1) if mode.gpus else (0,) for mode, _ in choice)):
        cover = [
            [i for i, (mode, _) in enumerate(choice) if columns[i] <= gpu < columns[i] + mode.gpus]
            for gpu in range(capacity)
        ]
        if all(_fits(problem, choice, here) for here in cover):
            pairs = {(i, j) for here in cover for i in here for j in here if i < j}
            found.add(tuple(sorted(pairs)))
    return found


def _fits(problem: Problem, choice: tuple[Choice, ...], here: list[int]) -> bool:
    limit = problem.pools[0].memory_gib
    if limit is None:
        return True
    stays = {i: 0.0 if choice[i][1] else choice[i][0].resident_gib for i in here}
    return all(choice[i][0].memory_gib + sum(stays[j] for j in here if j != i) <= limit for i in here)


def _span(problem: Problem, choice: tuple[Choice, ...], shared: tuple[tuple[int, int], ...], i: int) -> float:
    component = problem.components[i]
    mode, offloads = choice[i]
    pays = problem.switch_always or any(i in pair for pair in shared)
    return mode.seconds + component.switch_seconds * pays + (component.offload_seconds or 0.0) * offloads


def _directed(shared: tuple[tuple[int, int], ...], order: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    for i, j in shared:
        yield (i, j) if order.index(i) < order.index(j) else (j, i)


def _length(
    problem: Problem, choice: tuple[Choice, ...], spans: list[float], before: list[tuple[int, int]]
) -> float | None:
    names = [component.name for component in problem.components]
    piece = [mode.seconds / problem.chunks for mode, _ in choice]
    starts = [0.0] * len(spans)
    ends = list(spans)
    for _ in range(2 * len(spans) + 2):
        old = (list(starts), list(ends))
        for i, j in before:
            starts[j] = max(starts[j], ends[i])
        for edge in problem.edges:
            i, j = names.index(edge.source), names.index(edge.target)
            if edge.kind is EdgeKind.BARRIER:
                starts[j] = max(starts[j], ends[i])
            else:
                starts[j] = max(starts[j], starts[i] + piece[i])
                ends[j] = max(ends[j], ends[i] + piece[j])
        ends = [max(end, start + span) for start, end, span in zip(starts, ends, spans, strict=True)]
        if old == (starts, ends):
            return max(ends)
    return None  # The order goes against the edges, so the times grow for ever.
