"""Which edges has a well-known workflow? Reasoning, embodied and PPO, over the components that are there."""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

from callboard.autoplace.problem import Edge, EdgeKind

_SCORERS = ("reward", "reference", "old_logprob", "value")

GRAPHS = MappingProxyType(
    {
        "reasoning": (
            ("rollout", "inference", EdgeKind.STREAM),
            ("inference", "actor", EdgeKind.STREAM),
        ),
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
