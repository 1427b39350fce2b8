"""The graphs of workflows: the edges of the well-known ones, and the cycles, which are one ping-pong stage each."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from types import MappingProxyType

from callboard.autoplace.problem.problem import Edge, EdgeKind

_SCORERS = ("reward", "reference", "old_logprob", "value")

GRAPHS = MappingProxyType(
    {
        "reasoning": (("rollout", "inference", EdgeKind.STREAM), ("inference", "actor", EdgeKind.STREAM)),
        "embodied": (
            ("env", "rollout", EdgeKind.STREAM),
            ("rollout", "env", EdgeKind.STREAM),
            ("rollout", "actor", EdgeKind.STREAM),
        ),
        # Advantages are normalised over the whole batch, so nothing trains before everything is scored.
        "ppo": tuple(("rollout", scorer, EdgeKind.STREAM) for scorer in _SCORERS)
        + tuple((scorer, trainer, EdgeKind.BARRIER) for scorer in _SCORERS for trainer in ("actor", "critic")),
    }
)
"""Edges by name of the graph."""


def edges_of(graph: str, components: Collection[str]) -> tuple[Edge, ...]:
    """The edges of a built-in graph between the components that are there.

    A component that isn't there is bridged: without ``inference``, reasoning is rollout → actor (what
    ``recompute_logprobs: false`` means). A bridge is a barrier when either of its edges is.

    Args:
        graph: a key of :data:`GRAPHS`.
        components: names of the components that have a cost.
    """
    edges = list(GRAPHS[graph])
    absent = [name for name in dict.fromkeys(end for edge in edges for end in edge[:2]) if name not in components]
    for gone in absent:
        into = [edge for edge in edges if edge[1] == gone]
        out = [edge for edge in edges if edge[0] == gone]
        edges = [edge for edge in edges if gone not in edge[:2]]
        for source, _, first in into:
            for _, target, second in out:
                if source != target and not any(edge[:2] == (source, target) for edge in edges):
                    both = EdgeKind.STREAM if first == second == EdgeKind.STREAM else EdgeKind.BARRIER
                    edges.append((source, target, both))
    return tuple(Edge(source=source, target=target, kind=kind) for source, target, kind in edges)


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
