"""The plan, which is the answer: who gets which GPUs and when, and how close to the best that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from types import MappingProxyType
from typing import SupportsIndex, overload

from callboard.autoplace.problem.problem import Pool, Problem
from callboard.model.frozen import dataclass


class Status(StrEnum):
    """How did the search end?"""

    OPTIMAL = "OPTIMAL"
    """No plan of the model is faster; the same input gives the same bytes."""
    FEASIBLE = "FEASIBLE"
    """Ended by choice: interrupted, gap reached, or the limits of the search without a solver."""
    TIME_LIMIT = "TIME_LIMIT"
    """Ended by the clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When and where one component runs.

    Attributes:
        start_seconds: start, from the start of the batch's iteration.
        end_seconds: end, including waiting for pieces, switching and offloading.
        gpu_ranks: ranks in the cluster, ascending, contiguous in the pool; empty: CPU only.
        pool: name of the pool; empty: CPU only.
        estimated: its time is fitted or interpolated, not measured.
        work_seconds: its time for the whole batch on these GPUs, without waiting.
        overhead_seconds: switching and offloading, part of the span.
        offloads: it leaves the GPUs' memory between its spans.
        tail_seconds: async: how long after ``end_seconds`` its last piece is done.
    """

    component: str
    start_seconds: float
    end_seconds: float
    gpu_ranks: tuple[int, ...]
    pool: str
    estimated: bool
    work_seconds: float
    overhead_seconds: float = 0.0
    offloads: bool = False
    tail_seconds: float = 0.0

    @property
    def gpus(self) -> int:
        return len(self.gpu_ranks)


class Spans(tuple[Span, ...]):
    """The spans of a plan, in the problem's order; a tuple that knows its spans by the component's name too.

    ``plan.spans["actor"]``, ``"actor" in plan.spans``, ``dict(plan.spans)`` and ``plan.spans.items()`` work as with a
    mapping; iterating gives the spans.
    """

    __slots__ = ()

    @overload
    def __getitem__(self, key: SupportsIndex | str) -> Span: ...

    @overload
    def __getitem__(self, key: slice) -> tuple[Span, ...]: ...

    def __getitem__(self, key: SupportsIndex | str | slice) -> Span | tuple[Span, ...]:
        if not isinstance(key, str):
            return super().__getitem__(key)
        for span in self:
            if span.component == key:
                return span
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return key in self.keys() if isinstance(key, str) else super().__contains__(key)

    def keys(self) -> tuple[str, ...]:
        return tuple(span.component for span in self)

    def values(self) -> tuple[Span, ...]:
        return tuple(self)

    def items(self) -> tuple[tuple[str, Span], ...]:
        """(name of the component, span) of each."""
        return tuple((span.component, span) for span in self)


PlacementValue = str | dict[str, str]
"""A range of ranks, or ``{node_group, placement}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A placement with its proof.

    Attributes:
        iteration_seconds: sync: time of one iteration with its weight sync; async: the period.
        lower_bound_seconds: no plan of the model is faster.
        spans: one per component, in the problem's order; by name too, ``spans["actor"]``.
        layout: ``collocated``, ``disaggregated`` or ``hybrid``.
        alternatives: seconds of the best ``collocated``, ``disaggregated`` and ``hybrid`` plans; None: there is none,
            or (``hybrid``) none was met.
        latency_seconds: async: from the start of a batch to its weights; sync: ``iteration_seconds``.
        checked_seconds: what the chunk-by-chunk checker measured.
        solver: ``exact``, ``cp-sat``, ``async`` or ``greedy``.
        notes: what was assumed or lost, one sentence each.
    """

    problem: Problem = field(repr=False)
    iteration_seconds: float
    lower_bound_seconds: float
    status: Status
    spans: Spans
    layout: str
    alternatives: Mapping[str, float | None] = field(default_factory=lambda: MappingProxyType({}))
    latency_seconds: float
    checked_seconds: float
    solver: str
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """How far above the lower bound the plan may be: 0.05 is five per cent; 0 when OPTIMAL."""
        if self.iteration_seconds <= 0:
            return 0.0
        return max(0.0, (self.iteration_seconds - self.lower_bound_seconds) / self.iteration_seconds)

    @property
    def estimated(self) -> bool:
        """Whether some time in it is fitted or interpolated."""
        return any(span.estimated for span in self.spans)

    def span(self, component: str) -> Span:
        """The span of a component.

        Raises:
            KeyError: there is none.
        """
        return self.spans[component]

    def component_placement(self) -> dict[str, PlacementValue]:
        """The mapping to paste below ``cluster.component_placement``.

        Components on the same GPUs share a key. ``all`` where that is every GPU of the cluster; with several pools
        the ranks are those inside the pool's node group. A component without GPUs gets a process on node 0. One that
        runs inside its host (:attr:`Problem.inside`) is left out.
        """
        host_of = dict(self.problem.inside)
        ranks_of = {span.component: span.gpu_ranks for span in self.spans}
        together: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for span in self.spans:
            if span.gpu_ranks and span.gpu_ranks == ranks_of.get(host_of.get(span.component, "")):
                continue
            together.setdefault((span.pool, span.gpu_ranks), []).append(span.component)
        return {",".join(names): self._placement(pool, ranks) for (pool, ranks), names in together.items()}

    def _placement(self, pool_name: str, ranks: tuple[int, ...]) -> PlacementValue:
        if not ranks:
            return {"node_group": "node", "placement": "0"}
        pools = self.problem.pools
        pool = self.problem.pool(pool_name)
        if len(pools) > 1:
            return {"node_group": pool.name, "placement": _range_in(pool, ranks)}
        return "all" if len(ranks) == pool.gpus else _range_in(pool, ranks)


def _range_in(pool: Pool, ranks: tuple[int, ...]) -> str:
    """``0-3``: the ranks as the node group numbers them."""
    first = pool.gpu_ranks.index(ranks[0])
    return f"{first}-{first + len(ranks) - 1}"
