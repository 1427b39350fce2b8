"""Which components go round in a cycle? They are one ping-pong stage: env ⇄ rollout."""

from __future__ import annotations

from collections.abc import Iterator

from callboard.autoplace.problem import Edge, EdgeKind


def stages_of(components: tuple[str, ...], edges: tuple[Edge, ...]) -> tuple[tuple[str, ...], ...]:
    """The strongly connected components of the graph, members and stages in the order of ``components``.

    By reachability: workflows are small, and this needs no recursion and no tie-breaking.
    """
    reach = {name: {name} for name in components}
    changed = True
    while changed:
        changed = False
        for edge in edges:
            wider = reach[edge.source] | reach[edge.target]
            if len(wider) > len(reach[edge.source]):
                reach[edge.source] = wider
                changed = True
    stages: list[tuple[str, ...]] = []
    placed: set[str] = set()
    for name in components:
        if name not in placed:
            stage = tuple(other for other in components if other in reach[name] and name in reach[other])
            stages.append(stage)
            placed.update(stage)
    return tuple(stages)


def cycle_faults(components: tuple[str, ...], edges: tuple[Edge, ...]) -> Iterator[tuple[int, str]]:
    """(index of the edge, sentence) of every edge that can't be part of its cycle."""
    stage_of = {name: stage for stage in stages_of(components, edges) for name in stage}
    for index, edge in enumerate(edges):
        if edge.kind is EdgeKind.BARRIER and stage_of[edge.source] == stage_of[edge.target]:
            around = " → ".join((*stage_of[edge.source], stage_of[edge.source][0]))
            yield index, f"a barrier in the cycle {around} would wait for itself; make it a stream"
