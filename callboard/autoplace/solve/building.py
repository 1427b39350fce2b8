"""Plans from solutions: ranks of the cluster, seconds, and what kind of layout it is."""

from __future__ import annotations

from collections.abc import Sequence

from callboard.autoplace.instance.tasks import Found, Instance, Option
from callboard.autoplace.problem.plan import Span
from callboard.autoplace.problem.problem import Layout, Problem

HYBRID = "hybrid"
"""Neither collocated nor disaggregated."""


def seconds_of(units: int, instance: Instance) -> float:
    """Units as seconds, without the noise of binary fractions."""
    return round(units * instance.unit_seconds, 9)


def spans_of(problem: Problem, instance: Instance, found: Found) -> tuple[Span, ...]:
    """One span per component, in the problem's order. All members of a cycle's stage have the span of the stage."""
    spans: dict[int, Span] = {}
    for task, option in enumerate(found.options):
        for part in option.parts:
            component = problem.components[part.component]
            ranks: tuple[int, ...] = ()
            if part.mode.gpus:
                first = found.columns[task][part.pool] + part.column
                ranks = problem.pools[part.pool].gpu_ranks[first : first + part.mode.gpus]
            pays = problem.switch_always or option.takes_turns or (bool(option.widths) and not option.alone)
            spans[part.component] = Span(
                component=component.name,
                start_seconds=seconds_of(found.starts[task], instance),
                end_seconds=seconds_of(found.ends[task], instance),
                gpu_ranks=ranks,
                pool=part.mode.pool,
                estimated=part.mode.estimated,
                work_seconds=part.mode.seconds,
                overhead_seconds=(component.switch_seconds if pays else 0.0)
                + ((component.offload_seconds or 0.0) if part.offloads else 0.0),
                offloads=part.offloads,
            )
    return tuple(spans[i] for i in range(len(problem.components)))


def layout_of(options: Sequence[Option], columns: Sequence[dict[int, int]]) -> str:
    """``collocated``, ``disaggregated`` or ``hybrid``; a single component with GPUs is collocated with nobody."""
    ranges = []
    for task, option in enumerate(options):
        for part in option.parts:
            if part.mode.gpus:
                first = columns[task][part.pool] + part.column
                ranges.append((part.pool, first, first + part.mode.gpus))
    pairs = [(one, other) for i, one in enumerate(ranges) for other in ranges[:i]]
    meeting = [one[0] == other[0] and one[1] < other[2] and other[1] < one[2] for one, other in pairs]
    if all(meeting):
        return Layout.COLLOCATED.value
    return HYBRID if any(meeting) else Layout.DISAGGREGATED.value
