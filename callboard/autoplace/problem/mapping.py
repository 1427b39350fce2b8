"""Problems from mappings: the general form, and the plain form with the whole table at the top.

The general form has ``workflow`` and ``cluster``; counts without a measured point are interpolated or follow a named
law. The plain form has ``gpus``, ``chunks``, ``components`` and ``edges`` at the top: only the listed counts are legal,
and ``switch_seconds`` is paid whether or not GPUs are shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from callboard.autoplace.problem.costs import CostError, law_of
from callboard.autoplace.problem.graphs import GRAPHS, cycle_faults, edges_of
from callboard.autoplace.problem.modes import Asked, Rules, component_of, placeable
from callboard.autoplace.problem.problem import MAX_CHUNKS, Edge, EdgeKind, Layout, Pool, Problem, Sync
from callboard.autoplace.problem.written import (
    MAX_GPUS,
    MAX_POINTS,
    Count,
    CountOrNone,
    ExtraSeconds,
    Goal,
    HbmGib,
    Law,
    Memory,
    PoolTables,
    SecondsTable,
    count,
)
from callboard.model.cluster_text import parse_cluster
from callboard.model.faults import InvalidInput, guess
from callboard.model.inputs.compounds import list_of, table
from callboard.model.inputs.located import Misfit, Misfits, Refused, each, shown
from callboard.model.inputs.reading import Input, check, faults_of, read
from callboard.model.inputs.scalars import Flag, Name, Text, choice, label, whole
from callboard.model.schema import ANY, Kind, Written

MAX_COMPONENTS = 64
MAX_EDGES = 1024
MAX_NODES = 8192

ONE_POOL = "gpu"
"""Name of the pool of nodes without a group."""

M = TypeVar("M", bound=Input)

Label = Annotated[str, Kind(label)]
Chunks = Annotated[int, whole(1, MAX_CHUNKS)]


def _of(model: type[M]) -> Kind:
    return Kind(partial(check, model))


class CountsInput(Input):
    """The keys of ``gpus``: which counts are legal."""

    multiple_of: Count | None = None
    min: CountOrNone | None = None
    max: Count | None = None
    counts: Annotated[tuple[int, ...], list_of(count, "e.g. [1, 2, 4]", MAX_POINTS, distinct=True)] | None = None
    data_parallel_divides: Count | None = None
    measured: Flag | None = None

    def consistent(self) -> list[Misfit]:
        """A range that isn't empty."""
        most = MAX_GPUS if self.max is None else self.max
        return [Misfit(("min",), f"{self.min} is more than max, {most}")] if (self.min or 0) > most else []


class ComponentInput(Input):
    """The keys of a component in the general form."""

    example = "a component; write e.g. {seconds_by_gpus: {8: 59.9}}"

    seconds_by_gpus: SecondsTable | None = None
    seconds_by_pool: PoolTables | None = None
    scaling: Law | None = None
    work_gpu_seconds: ExtraSeconds | None = None
    tail_seconds: ExtraSeconds | None = None
    gpus: Annotated[CountsInput, _of(CountsInput)] | None = None
    pools: Annotated[tuple[str, ...], list_of(label, "e.g. [h100]", 64, distinct=True)] | None = None
    memory_gib: Memory | None = None
    resident_gib: Memory | None = None
    offload_seconds: ExtraSeconds | None = None
    switch_seconds: ExtraSeconds = 0.0

    def consistent(self) -> list[Misfit]:
        """One cost, with what it needs."""
        faults = []
        if self.seconds_by_gpus is not None and self.seconds_by_pool is not None:
            faults.append(Misfit(("seconds_by_pool",), "is stated beside seconds_by_gpus; one of them says it all"))
        if self.tail_seconds is not None and self.work_gpu_seconds is None:
            faults.append(Misfit(("tail_seconds",), "needs work_gpu_seconds; a tail alone is not a cost"))
        if self.work_gpu_seconds == 0:
            faults.append(Misfit(("work_gpu_seconds",), "0 is out of bounds; above 0 is allowed"))
        if self.scaling is not None and self.seconds_by_gpus is None and self.seconds_by_pool is None:
            faults.append(Misfit(("scaling",), "needs seconds_by_gpus with at least one measured count"))
        for points in (self.seconds_by_gpus, *(self.seconds_by_pool or {}).values()):
            try:
                if self.scaling is not None and points is not None:
                    law_of(self.scaling, {gpus: seconds for gpus, seconds in points.items() if gpus})
            except CostError as error:
                faults.append(Misfit(("scaling",), str(error)))
        return faults

    def asked(self, name: str) -> Asked:
        """What was asked, apart from how it was written."""
        gpus = self.gpus or check(CountsInput, {})
        return Asked(
            name=name,
            seconds_by_gpus=self.seconds_by_gpus,
            seconds_by_pool=self.seconds_by_pool,
            scaling=self.scaling,
            work_gpu_seconds=self.work_gpu_seconds,
            tail_seconds=self.tail_seconds or 0.0,
            pools=self.pools,
            memory_gib=self.memory_gib,
            resident_gib=self.resident_gib,
            offload_seconds=self.offload_seconds,
            switch_seconds=self.switch_seconds,
            rules=Rules(
                multiple_of=gpus.multiple_of or 1,
                least=gpus.min or 0,
                most=gpus.max or MAX_GPUS,
                counts=None if gpus.counts is None else frozenset(gpus.counts),
                data_parallel_divides=gpus.data_parallel_divides,
                measured_only=bool(gpus.measured),
            ),
        )


class PlainComponentInput(Input):
    """The keys of a component in the plain form."""

    seconds_by_gpus: SecondsTable
    switch_seconds: ExtraSeconds = 0.0

    def asked(self, name: str) -> Asked:
        """What was asked: the listed counts and no others."""
        return Asked(
            name=name,
            seconds_by_gpus=self.seconds_by_gpus,
            switch_seconds=self.switch_seconds,
            rules=Rules(measured_only=True),
        )


def _components(model: type[M]) -> Kind:
    def read_one(value: object) -> M:
        return check(model, {} if value is None else value)

    def read_each(value: object) -> dict[str, M]:
        found = table(value, "e.g. {rollout: {seconds_by_gpus: {8: 59.9}}}", read_one, MAX_COMPONENTS)
        if not found:
            raise Refused("there is no component; write e.g. {rollout: {seconds_by_gpus: {8: 59.9}}}")
        return found

    return Kind(read_each)


class EdgeInput(Input):
    """The keys of an edge; a list has their values in this order."""

    example = "an edge; write e.g. [rollout, actor, stream]"
    elsewhere = MappingProxyType({"source": "from", "target": "to"})

    source: Annotated[Name, Written("from")]
    target: Annotated[Name, Written("to")]
    kind: Annotated[EdgeKind, choice(EdgeKind)] = EdgeKind.STREAM
    transfer_seconds: ExtraSeconds = 0.0

    def consistent(self) -> list[Misfit]:
        """Two components."""
        return [Misfit((), f"{self.source} can't wait for itself")] if self.source == self.target else []


def _edge(value: object) -> Edge:
    """``[source, target, stream|barrier]``, or a mapping with ``from``, ``to``, ``kind``, ``transfer_seconds``."""
    if isinstance(value, list | tuple):
        if not 2 <= len(value) <= 3:
            raise Refused(f"an edge has two or three items, not {len(value)}; write e.g. [rollout, actor, stream]")
        value = dict(zip(("from", "to", "kind"), value, strict=False))
    return Edge(**check(EdgeInput, value).stated())


Edges = Annotated[tuple[Edge, ...], list_of(_edge, "e.g. [[rollout, actor, stream]]", MAX_EDGES)]


class WorkflowInput(Input):
    """The keys of ``workflow``."""

    chunks: Chunks = 1
    components: Annotated[dict[str, ComponentInput], _components(ComponentInput)]
    edges: Edges | None = None
    graph: Text | None = None

    def consistent(self) -> list[Misfit]:
        """Edges between components that there are."""
        faults = list(_edge_faults(dict(enumerate(self.edges or ())), self.components))
        if self.graph is not None and self.graph not in GRAPHS:
            faults.append(Misfit(("graph",), f"{shown(self.graph)} is unknown; use {', '.join(GRAPHS)}"))
        if self.graph is not None and self.edges is not None:
            faults.append(Misfit(("graph",), "is stated beside edges; one of them says it all"))
        return faults


class NodeInput(Input):
    """The keys of a node of the cluster."""

    example = "a node; write e.g. {gpus: 8}"

    gpus: CountOrNone
    memory_gib: HbmGib | None = None
    group: Label = ONE_POOL
    count: Annotated[int, whole(1, MAX_NODES)] = 1


def _described(value: object) -> object:
    """The nodes of a text such as ``8+8``, which ``--nodes`` takes too; a list as it is."""
    if not isinstance(value, str | int) or isinstance(value, bool):
        return value
    try:
        return [{"gpus": node.gpus, "group": node.gpu_model or ONE_POOL} for node in parse_cluster(str(value), "nodes")]
    except InvalidInput as error:
        raise Refused(error.faults[0].message) from None


class ClusterInput(Input):
    """The keys of ``cluster``."""

    before = MappingProxyType({"nodes": _described})

    nodes: Annotated[tuple[NodeInput, ...], list_of(partial(check, NodeInput), "8+8, or e.g. [{gpus: 8}]", MAX_NODES)]

    def consistent(self) -> list[Misfit]:
        """At least one node, and not too many GPUs."""
        if not self.nodes:
            return [Misfit(("nodes",), "there is no node; write e.g. [{gpus: 8}]")]
        gpus = sum(node.gpus * node.count for node in self.nodes)
        if gpus > MAX_GPUS:
            return [Misfit(("nodes",), f"{gpus} GPUs are too many; {MAX_GPUS} are allowed")]
        return []

    def pools(self) -> tuple[Pool, ...]:
        """One pool per group, in the order of their first nodes; ranks run over all nodes in order."""
        ranks: dict[str, list[int]] = {}
        nodes: dict[str, list[int]] = {}
        memory: dict[str, list[float]] = {}
        next_rank = next_node = 0
        for node in self.nodes:
            for _ in range(node.count):
                ranks.setdefault(node.group, []).extend(range(next_rank, next_rank + node.gpus))
                nodes.setdefault(node.group, []).append(next_node)
                next_rank += node.gpus
                next_node += 1
            if node.memory_gib is not None:
                memory.setdefault(node.group, []).append(node.memory_gib)
        return tuple(
            # The smallest HBM of a group counts: a component may lie on any of its GPUs.
            Pool(
                name=group,
                gpu_ranks=tuple(ranks[group]),
                node_ranks=tuple(nodes[group]),
                memory_gib=min(memory[group]) if group in memory else None,
            )
            for group in ranks
        )


class GeneralInput(Input):
    """The general form."""

    neighbours = MappingProxyType({WorkflowInput: "workflow"})

    workflow: Annotated[WorkflowInput, _of(WorkflowInput)]
    cluster: Annotated[ClusterInput, _of(ClusterInput)]
    objective: Goal = Sync()
    weight_sync_seconds: ExtraSeconds = 0.0
    layout: Annotated[Layout, choice(Layout)] = Layout.ANY

    def consistent(self) -> list[Misfit]:
        """Pools that nodes are of."""
        known = {node.group for node in self.cluster.nodes}
        faults = []
        for part, component in self.workflow.components.items():
            for key, asked in (("pools", component.pools or ()), ("seconds_by_pool", component.seconds_by_pool or {})):
                faults += [
                    Misfit(
                        ("workflow", "components", part, key),
                        f"no node is of group {shown(pool)}; {guess(pool, known)}",
                    )
                    for pool in asked
                    if pool not in known
                ]
        return faults

    def problem(self) -> Problem:
        flow = self.workflow
        edges = flow.edges if flow.graph is None else edges_of(flow.graph, flow.components)
        pools = self.cluster.pools()
        return Problem(
            components=placeable(component_of(part.asked(name), pools) for name, part in flow.components.items()),
            edges=edges or (),
            pools=pools,
            chunks=flow.chunks,
            objective=self.objective,
            weight_sync_seconds=self.weight_sync_seconds,
            layout=self.layout,
        )


class PlainInput(Input):
    """The plain form; its last fields belong to whoever keeps such instances, and are not read."""

    gpus: Count
    chunks: Chunks = 1
    components: Annotated[dict[str, PlainComponentInput], _components(PlainComponentInput)]
    edges: Edges = ()
    objective: Goal = Sync()
    weight_sync_seconds: ExtraSeconds = 0.0
    layout: Annotated[Layout, choice(Layout)] = Layout.ANY
    name: Annotated[Any, ANY] = None
    what: Annotated[Any, ANY] = None
    profile: Annotated[Any, ANY] = None
    rlinf: Annotated[Any, ANY] = None
    optimum_seconds: Annotated[Any, ANY] = None

    def consistent(self) -> list[Misfit]:
        """Edges between components that there are."""
        return list(_edge_faults(dict(enumerate(self.edges)), self.components))

    def problem(self) -> Problem:
        pools = (Pool(name=ONE_POOL, gpu_ranks=tuple(range(self.gpus))),)
        return Problem(
            components=placeable(component_of(part.asked(name), pools) for name, part in self.components.items()),
            edges=self.edges,
            pools=pools,
            chunks=self.chunks,
            objective=self.objective,
            weight_sync_seconds=self.weight_sync_seconds,
            switch_always=True,
            layout=self.layout,
        )


def problem_of(mapping: object) -> Problem:
    """The problem of a mapping in either form.

    Raises:
        InvalidInput: every fault with its path.
        NoPlan: a component has no cost or no legal count on this cluster.
    """
    plain = isinstance(mapping, Mapping) and "workflow" not in mapping and "components" in mapping
    try:
        given = read(PlainInput, mapping) if plain else read(GeneralInput, mapping)
    except InvalidInput as error:
        # What lies between components and edges is looked at only where both are right: told too, in the same run.
        known = {(fault.field, fault.message) for fault in error.faults}
        between = faults_of(Misfits(_faults_between(mapping, plain=plain)), mapping)
        more = [fault for fault in between if (fault.field, fault.message) not in known]
        raise InvalidInput([*error.faults, *more]) from None
    return given.problem()


def _faults_between(mapping: object, *, plain: bool) -> list[Misfit]:
    """Faults of edges that can be read, whatever is wrong with others and with components."""
    flow = mapping if plain else mapping.get("workflow") if isinstance(mapping, Mapping) else None
    place = () if plain else ("workflow",)
    components, edges = (flow.get("components"), flow.get("edges")) if isinstance(flow, Mapping) else (None, None)
    if not isinstance(components, Mapping) or not isinstance(edges, list | tuple):
        return []
    readable = {index: found for index, one in enumerate(edges) if (found := each(index, _edge, one, [])) is not None}
    return [Misfit((*place, *one.place), one.message) for one in _edge_faults(readable, components)]


def _edge_faults(edges: Mapping[int, Edge], components: Mapping[str, object]) -> Iterator[Misfit]:
    pairs = Counter((arc.source, arc.target) for arc in edges.values())
    unknown = False
    for index, arc in edges.items():
        for end in (arc.source, arc.target):
            if end not in components:
                unknown = True
                yield Misfit(("edges", index), f"no component is called {shown(end)}; {guess(end, components)}")
        if pairs[arc.source, arc.target] > 1:
            yield Misfit(("edges", index), f"{arc.source} → {arc.target} is listed twice")
    if not unknown:
        places = tuple(edges)
        for index, message in cycle_faults(tuple(components), tuple(edges.values())):
            yield Misfit(("edges", places[index]), message)
