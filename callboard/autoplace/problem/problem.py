"""The problem: a workflow of costed components, a cluster, and what shall be short, as frozen data.

Built by :meth:`Problem.from_mapping` (:mod:`callboard.autoplace.problem.mapping`) from what people write; every rule
between the fields is checked there. The search reads nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from callboard.model.frozen import dataclass

MAX_CHUNKS = 1_000_000
"""Most pieces of a batch."""


class EdgeKind(StrEnum):
    """When may the target of an edge start?"""

    STREAM = "stream"
    """As soon as the first piece of the source is done; piece by piece from then on."""
    BARRIER = "barrier"
    """When the source has ended."""


class Layout(StrEnum):
    """Which plans may be proposed?"""

    ANY = "any"
    """Shared in time, split in space, or any mix."""
    COLLOCATED = "collocated"
    """Every pair of components that use GPUs shares some."""
    DISAGGREGATED = "disaggregated"
    """No two components share a GPU."""
    UNIFORM = "uniform"
    """Collocated or disaggregated, but no mix: what model-parallel component placements accept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One legal way to run a component: a number of GPUs of one pool, and what that costs.

    Attributes:
        pool: name of the pool; empty when no GPU is used.
        gpus: number of GPUs, a contiguous range of the pool; 0: CPU only, conflicts with nobody.
        seconds: for the whole batch, once the component runs without waiting.
        held_seconds: how long the GPUs are held for one batch in an asynchronous steady state; ``seconds`` unless the
            cost was given as work and tail.
        tail_seconds: how long after the held time the last piece is done, in an asynchronous steady state.
        estimated: ``seconds`` is fitted, interpolated or derived from a law, not measured.
        memory_gib: per GPU while it runs.
        resident_gib: per GPU between its spans, unless it is offloaded.
    """

    pool: str
    gpus: int
    seconds: float
    held_seconds: float
    tail_seconds: float = 0.0
    estimated: bool = False
    memory_gib: float = 0.0
    resident_gib: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A role of the workflow with its costs.

    Attributes:
        name: name, once per problem.
        modes: every legal mode, sorted by pool (in the problem's order) and GPUs; at least one.
        switch_seconds: added to its span when its GPUs are shared in time (always, with
            :attr:`Problem.switch_always`).
        offload_seconds: cost of leaving the GPUs' memory between its spans; None: it can't, and stays resident.
    """

    name: str
    modes: tuple[Mode, ...]
    switch_seconds: float = 0.0
    offload_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """The target needs what the source makes.

    Attributes:
        source: name of a component.
        target: name of another.
        kind: piece by piece, or all at once.
        transfer_seconds: seconds to move the whole batch when the two lie in different pools; on a stream edge it
            moves piece by piece.
    """

    source: str
    target: str
    kind: EdgeKind = EdgeKind.STREAM
    transfer_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """GPUs of one kind: a node group.

    Attributes:
        name: the group's label.
        gpu_ranks: their ranks in the cluster, ascending, from 0 over all nodes in order.
        memory_gib: HBM per GPU; None: not limited.
        node_ranks: ranks of the nodes in the cluster.
    """

    name: str
    gpu_ranks: tuple[int, ...]
    memory_gib: float | None = None
    node_ranks: tuple[int, ...] = (0,)

    @property
    def gpus(self) -> int:
        return len(self.gpu_ranks)


@dataclass(frozen=True, slots=True)
class Sync:
    """One iteration after the other: the time from its start to the end of its last component is minimised."""


@dataclass(frozen=True, slots=True)
class Async:
    """A steady state: the period between two batches is minimised.

    Attributes:
        staleness: η ≥ 0; the latency of a batch stays ≤ (η + 1) · period. Need not be whole.
    """

    staleness: float = 1.0


Objective = Sync | Async


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParallel:
    """What RLinf's placement of model-parallel components demands, besides one of its two layouts.

    Attributes:
        node_gpus: GPUs of each node of the pool: an engine of the rollout never spans two.
        group_gpus: by component, GPUs of one model-parallel group, tensor × pipeline.
        tensor_gpus: by component, GPUs of one tensor-parallel group.
        auto_scheduler: GPUs move between components while the job runs: disaggregated only, in one order, no GPU idle.
        pre_process: with it, the rollout begins on the actor's GPUs too (``use_pre_process_policy``).
    """

    node_gpus: tuple[int, ...]
    group_gpus: Mapping[str, int]
    tensor_gpus: Mapping[str, int]
    auto_scheduler: bool = False
    pre_process: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A workflow on a cluster.

    Attributes:
        components: in the order of the input, which also breaks ties.
        edges: between them; a cycle of edges is one ping-pong stage.
        pools: at least one; a component lies in one of them.
        chunks: pieces M that the batch streams in; a component that takes t for the batch takes t/M for one.
        weight_sync_seconds: trainer → rollout; added to the iteration when sync, overlapped when async.
        switch_always: ``switch_seconds`` is paid whether or not GPUs are shared (the case files' form).
        layout: which plans may be proposed.
        model_parallel: with :attr:`Layout.UNIFORM`: what else is demanded; collocated components then have the very
            same GPUs. None: nothing.
        inside: (component, host): on the same GPUs the component runs inside its host, and has no placement of its own.
        notes: what was assumed while reading the input, one sentence each.
    """

    components: tuple[Component, ...]
    edges: tuple[Edge, ...] = ()
    pools: tuple[Pool, ...]
    chunks: int = 1
    objective: Objective = Sync()
    weight_sync_seconds: float = 0.0
    switch_always: bool = False
    layout: Layout = Layout.ANY
    model_parallel: ModelParallel | None = None
    inside: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Problem:
        """The problem that a mapping describes: ``{workflow: …, cluster: …}``, or top-level ``gpus``, ``components``…

        Raises:
            InvalidInput: every fault with its path.
            NoPlan: a component has no cost or no legal count on this cluster.
        """
        from callboard.autoplace.problem.mapping import problem_of  # noqa: PLC0415 - it builds problems, so it imports this

        return problem_of(mapping)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, nodes: Sequence[int] | None = None, mixed: bool = False
    ) -> Problem:
        """The problem that an RLinf config describes (:mod:`callboard.autoplace.rlinf.job`).

        What :func:`~callboard.autoplace.solve.search.search` finds for it is what `callboard autoplace` proposes.

        Args:
            config: a mapping, or OmegaConf's DictConfig.
            nodes: GPUs of each node; None: what the config says of its own cluster.
            mixed: also allow layouts that RLinf's placement of model-parallel components refuses.

        Raises:
            ProfileMissing: a cost that the workflow needs is missing (an InvalidInput).
            InvalidInput: every other fault with its path.
            NoPlan: a component has no cost or no legal count on this cluster.
        """
        from callboard.autoplace.rlinf.job import rlinf_job  # noqa: PLC0415 - it builds problems, so it imports this

        return rlinf_job(config, nodes=nodes, mixed=mixed).problem

    @property
    def gpus(self) -> int:
        return sum(pool.gpus for pool in self.pools)

    def component(self, name: str) -> Component:
        """The component called ``name``.

        Raises:
            KeyError: there is none.
        """
        for component in self.components:
            if component.name == name:
                return component
        raise KeyError(name)

    def pool(self, name: str) -> Pool:
        """The pool called ``name``.

        Raises:
            KeyError: there is none.
        """
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise KeyError(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unplaceable:
    """Why a component has no place.

    Attributes:
        gpus: the counts that were looked at.
    """

    component: str
    gpus: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.component}: {self.reason}"


class NoPlan(ValueError):
    """No plan exists.

    Attributes:
        causes: the components that have no cost or no legal count, or cannot lie beside the others.
    """

    def __init__(self, causes: tuple[Unplaceable, ...]) -> None:
        self.causes = causes
        super().__init__("; ".join(str(cause) for cause in causes))


def no_plan(components: Iterable[Component], reason: str) -> NoPlan:
    """That these components have no place, all for one reason."""
    return NoPlan(
        tuple(
            Unplaceable(component=each.name, gpus=tuple(sorted({mode.gpus for mode in each.modes})), reason=reason)
            for each in components
        )
    )
