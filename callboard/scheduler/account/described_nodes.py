"""A job on a cluster that is only described: what it would need there, and whether it would fit.

A state of its own gets the described nodes and is asked as a controller's is (`explain_spec`), so a plan says what the
controller would say on an empty cluster of these nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from callboard.model.cluster_text import NodeText
from callboard.model.frozen import dataclass
from callboard.model.quantities import MILLI, NOTHING, Resources, format_amount, pieces, total
from callboard.model.specs import ComponentSpec, JobSpec, Labels, PoolSpec, WorkerPlace
from callboard.scheduler.account.explain import PlannedWorker, explain_spec
from callboard.scheduler.plan.rooms import NodeFilter
from callboard.scheduler.records.asks import asks_of
from callboard.scheduler.records.job_records import Put
from callboard.scheduler.records.node_record import DeviceInfo, NodeRecord
from callboard.scheduler.records.pool_records import PoolRecord
from callboard.scheduler.records.states import NodeState
from callboard.scheduler.state.state import State

UNBOUNDED_CPU_MILLI = 1_000_000_000
UNBOUNDED_MEMORY = 1 << 60
"""Of a node whose text doesn't say: more than any job may ask."""

_MAX_REASONS = 4
"""Most nodes that are named for one component."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedNode:
    """One node that is only described.

    Attributes:
        gpu_model: what they are; empty: not stated.
        cpu_milli: milli-CPUs; None: not stated.
        memory_bytes: bytes of memory; None: not stated.
        hardware: types of the hardware that it declares beside its GPUs, in order.
    """

    node_id: str
    rank: int
    node_group: str
    labels: Labels = ()
    gpus: int = 0
    gpu_model: str = ""
    cpu_milli: int | None = None
    memory_bytes: int | None = None
    hardware: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unplaced:
    """Workers of a component that don't fit beside the others.

    Attributes:
        component: component, or colocation group.
        why: what stands in their way, one sentence each.
    """

    component: str
    workers: int
    why: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """What one described node would hold.

    Attributes:
        workers: component → number of its workers there.
        used: what they hold.
        left: what is free beside them; of what the text doesn't state, nothing is said.
        free: the same, with what the text doesn't state as more than anybody asks.
    """

    node_id: str
    node_group: str
    workers: Mapping[str, int]
    used: Resources
    left: Resources
    free: Resources


@dataclass(frozen=True, slots=True)
class JobPlan:
    """Where a job would go.

    Attributes:
        spec: the job, settled.
        unplaced: what doesn't fit; empty: everything does.
    """

    spec: JobSpec
    nodes: tuple[PlannedNode, ...]
    unplaced: tuple[Unplaced, ...]

    @property
    def fits(self) -> bool:
        """Whether the job could start."""
        return not self.unplaced


def ask_of(component: ComponentSpec) -> Resources:
    """What a component needs to start: its fewest workers."""
    return component.resources_of_first(component.min_workers)


def asks_by_pool(spec: JobSpec) -> dict[str, Resources]:
    """What each pool is charged when the job starts."""
    return {ask.pool: ask.resources for ask in asks_of(spec)}


def nodes_of(texts: Iterable[NodeText]) -> tuple[DescribedNode, ...]:
    """Nodes that a text describes: "node-0", "node-1" … in its order, in the node group gpu or cpu."""
    return tuple(
        DescribedNode(
            node_id=f"node-{rank}",
            rank=rank,
            node_group=text.node_group,
            gpus=text.gpus,
            gpu_model=text.gpu_model,
            cpu_milli=text.cpu_milli,
            memory_bytes=text.memory_bytes,
        )
        for rank, text in enumerate(texts)
    )


def plan_job(spec: JobSpec, nodes: Sequence[DescribedNode], pools: Sequence[PoolSpec] = ()) -> JobPlan:
    """Where the job would go on an empty cluster of these nodes, or how much of it.

    Args:
        spec: the job, settled (:func:`callboard.model.inputs.groups.settled`).
        nodes: the cluster, by rank.
        pools: its pools; those that the job names beside them have no quota and no selector.
    """
    state = described_state(spec, nodes, pools)
    whole = explain_spec(state, spec, 0)
    if whole.workers:
        return JobPlan(spec, _filled(spec, nodes, whole.workers), ())
    placed = _as_many_as_fit(state, spec)
    workers = explain_spec(state, replace(spec, components=placed), 0).workers if placed else ()
    filled = _filled(spec, nodes, workers)
    fitting = {component.name: component.min_workers for component in placed}
    unplaced = tuple(
        Unplaced(
            component.name,
            component.min_workers - fitting.get(component.name, 0),
            _why(state, spec, component, filled) or (whole.summary,),
        )
        for component in spec.components
        if fitting.get(component.name, 0) < component.min_workers
    )
    # Where each finds room by itself, it is all of it together that has none.
    everything = tuple(Unplaced(each.name, each.min_workers, (whole.summary,)) for each in spec.components)
    return JobPlan(spec, filled, unplaced or everything)


def described_state(spec: JobSpec, nodes: Sequence[DescribedNode], pools: Sequence[PoolSpec] = ()) -> State:
    """What a scheduler would know once these nodes joined and the pools were made."""
    state = State()
    missing = dict.fromkeys((spec.pool, *asks_by_pool(spec)))
    for pool in ({name: PoolSpec(name=name) for name in missing} | {pool.name: pool for pool in pools}).values():
        state.apply(Put(PoolRecord(spec=pool)))
    for node in nodes:
        record = NodeRecord(
            node_id=node.node_id,
            rank=node.rank,
            state=NodeState.READY,
            labels=node.labels,
            node_group=node.node_group,
            capacity=_capacity(node),
            devices=tuple(
                DeviceInfo(id=str(i), model=node.gpu_model, memory_bytes=UNBOUNDED_MEMORY) for i in range(node.gpus)
            ),
            simulated=True,
            runtime="process",
            epoch=1,
        )
        state.apply(Put(record))
    return state


def _capacity(node: DescribedNode) -> Resources:
    amounts = Resources(
        cpu_milli=UNBOUNDED_CPU_MILLI if node.cpu_milli is None else node.cpu_milli,
        gpu_milli=node.gpus * MILLI,
        memory_bytes=UNBOUNDED_MEMORY if node.memory_bytes is None else node.memory_bytes,
        gpu_memory_bytes=node.gpus * UNBOUNDED_MEMORY,
    )
    return amounts + pieces(node.hardware)


def _stated(node: DescribedNode, left: Resources) -> Resources:
    """Of what is left, that of which the text says how much there is."""
    return replace(
        left,
        cpu_milli=0 if node.cpu_milli is None else left.cpu_milli,
        memory_bytes=0 if node.memory_bytes is None else left.memory_bytes,
        gpu_memory_bytes=0,
    )


def _as_many_as_fit(state: State, spec: JobSpec) -> tuple[ComponentSpec, ...]:
    """Components cut to what fits beside those before them: those with places, then GPUs first."""
    taken = _Taken(state)
    fixed = [taken.fitting(component) for component in spec.components if component.places]
    placed = tuple(component for component in fixed if component.places)
    free = [component for component in spec.components if not component.places]
    for component in sorted(free, key=lambda component: -component.resources.gpu_milli):
        fitting = _most(state, spec, placed, component)
        if fitting:
            placed = (*placed, _cut(component, fitting))
    return placed


class _Taken:
    """What workers with places have taken of their nodes."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._amounts: dict[str, Resources] = {}
        self._milli: dict[tuple[str, int], int] = {}
        """(node, index of a device) → what is taken of it."""

    def fitting(self, component: ComponentSpec) -> ComponentSpec:
        """The component with those of its places that have room beside what is taken; takes their room."""
        places = []
        for rank, place in enumerate(component.places):
            ask = self._amounts.get(place.node_id, NOTHING) + component.resources_of(rank)
            if self._has_room(place, ask):
                places.append(place)
                self._amounts[place.node_id] = ask
                for index, milli in place.devices:
                    self._milli[place.node_id, index] = self._milli.get((place.node_id, index), 0) + milli
        return replace(component, min_workers=len(places), max_workers=len(places), places=tuple(places), scaling=())

    def _has_room(self, place: WorkerPlace, ask: Resources) -> bool:
        node = self._state.nodes.get(place.node_id)
        return (
            node is not None
            and node.capacity.covers(ask)
            and all(
                index < len(node.devices) and self._milli.get((place.node_id, index), 0) + milli <= MILLI
                for index, milli in place.devices
            )
        )


def _why(state: State, spec: JobSpec, component: ComponentSpec, filled: Sequence[PlannedNode]) -> tuple[str, ...]:
    """What one more worker of a component lacks on every node; nothing where it is the strategy that forbids it."""
    if component.places:
        return _why_of_places(component, filled)
    pool = state.pools[spec.pool_of(component)].spec
    labels = (
        *(() if component.node_selector_soft else component.node_selector),
        *pool.node_selector,
        *(() if spec.node_selector_soft else spec.node_selector),
    )
    wanted = NodeFilter(tuple(sorted(set(labels))))
    admitted = [node for node in filled if wanted.admits(state.nodes[node.node_id])]
    if not admitted:
        listed = ", ".join(f"{key}={value}" for key, value in labels)
        return (f"no node has {listed}" if listed else "there is no node",)
    which = f"of {len(admitted)} nodes" if len(admitted) > 1 else admitted[0].node_id
    short = []
    for resource, asked in component.resources_of(component.min_workers - 1).items():
        most = max(admitted, key=lambda node: node.free.get(resource))
        have = most.free.get(resource)
        if have < asked:
            here = f"{which} none has more than" if len(admitted) > 1 else f"{which} has"
            short.append(_lacks(resource, asked, here, have))
    if not short and not any(node.free.covers(component.resources) for node in admitted):
        short.append(f"no node has {component.resources} left at once")
    return tuple(short)


def _why_of_places(component: ComponentSpec, filled: Sequence[PlannedNode]) -> tuple[str, ...]:
    """What the workers lack that have no room where they are placed, for the first nodes of those."""
    here = {node.node_id: node for node in filled}
    wanted: dict[str, list[int]] = {}
    for rank, place in enumerate(component.places):
        wanted.setdefault(place.node_id, []).append(rank)
    short: list[str] = []
    for node_id, ranks in wanted.items():
        node = here.get(node_id)
        if node is None:
            short.append(f"there is no node {node_id}, where it is placed")
        elif node.workers.get(component.name, 0) < len(ranks):
            last = component.resources_of(ranks[-1])
            short += [
                _lacks(resource, asked, f"{node_id}, where it is placed, has", node.free.get(resource))
                for resource, asked in last.items()
                if node.free.get(resource) < asked
            ]
    return tuple(short[:_MAX_REASONS])


def _lacks(resource: str, asked: int, here: str, have: int) -> str:
    left = format_amount(resource, max(0, have))
    return f"one worker asks {format_amount(resource, asked)} {resource}; {here} {left} left"


def _most(state: State, spec: JobSpec, placed: tuple[ComponentSpec, ...], component: ComponentSpec) -> int:
    """How many workers of a component fit beside what is placed; by bisection."""
    low, high = 0, component.min_workers
    while low < high:
        middle = (low + high + 1) // 2
        trial = replace(spec, components=(*placed, _cut(component, middle)))
        if explain_spec(state, trial, 0).workers:
            low = middle
        else:
            high = middle - 1
    return low


def _cut(component: ComponentSpec, workers: int) -> ComponentSpec:
    return replace(component, min_workers=workers, max_workers=workers, scaling=())


def _filled(spec: JobSpec, nodes: Sequence[DescribedNode], workers: Iterable[PlannedWorker]) -> tuple[PlannedNode, ...]:
    components = {component.name: component for component in spec.components}
    held: dict[str, list[PlannedWorker]] = {}
    for worker in workers:
        held.setdefault(worker.node_id, []).append(worker)
    filled = []
    for node in nodes:
        here = held.get(node.node_id, [])
        counts = Counter(worker.component for worker in here)
        used = total(components[worker.component].resources_of(worker.rank) for worker in here)
        free = _capacity(node) - used
        filled.append(PlannedNode(node.node_id, node.node_group, counts, used, _stated(node, free), free))
    return tuple(filled)
