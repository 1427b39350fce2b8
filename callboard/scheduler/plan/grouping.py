"""The placement groups that a job would use: idle ones that fit, and new ones that are planned in a view."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

from callboard.model.frozen import dataclass, quick
from callboard.model.quantities import MILLI, NOTHING, Resources, on_each, total
from callboard.model.specs import ComponentSpec, JobSpec, Labels, PgPoolSpec, PoolSpec, StopPolicy, Strategy
from callboard.scheduler.plan.fitting import fit, keeps_strategy
from callboard.scheduler.plan.packing import times_while_empty
from callboard.scheduler.plan.pinned import books
from callboard.scheduler.plan.quota import Charged, shortages
from callboard.scheduler.plan.rooms import ANY_NODE, NodeFilter, Rooms
from callboard.scheduler.plan.view import View
from callboard.scheduler.records.asks import INTERPRETER, Ask, Slot
from callboard.scheduler.records.node_record import DeviceShare, NodeRecord
from callboard.scheduler.records.pool_records import BundleRecord, GroupRecord
from callboard.scheduler.records.states import GROUP_READY, KIND_DYNAMIC, KIND_PRIVATE, KIND_RESERVED, GroupKind
from callboard.scheduler.state.state import State


@quick
@dataclass(frozen=True, slots=True)
class GroupUse:
    """One placement group that a job would use.

    Attributes:
        ask: whose workers go there.
        group_id: an existing group, or empty for a new one.
        bundle_of: bundle index of each slot of the ask.
        later: something has to end before the existing group is free.
    """

    ask: Ask
    group_id: str
    kind: GroupKind
    bundles: tuple[BundleRecord, ...]
    bundle_of: tuple[int, ...]
    later: bool = False


def node_filter(spec: JobSpec, pool: PoolSpec) -> NodeFilter:
    """Nodes that a job may use for what it charges to a pool."""
    if not pool.node_selector and not spec.node_selector:
        return ANY_NODE
    required = tuple(pool.node_selector) + (() if spec.node_selector_soft else tuple(spec.node_selector))
    return NodeFilter(required, tuple(spec.node_selector) if spec.node_selector_soft else ())


def choose_groups(state: State, view: View, spec: JobSpec, asks: Sequence[Ask]) -> tuple[GroupUse, ...] | None:
    """Groups for every ask of a job, or None when one of them finds none or its pool's quota is short."""
    for ask in asks:
        pool = state.pools.get(ask.pool)
        if pool is None or pool.deleting:
            return None
        if pool.spec.stop_policy is not StopPolicy.NONE and not view.assumption.empty:
            return None
    kept = [reuse(state, view, spec, ask) for ask in asks]
    uses = _complete(state, view, spec, asks, kept)
    if uses is None and len(asks) > 1 and any(kept):
        # A kept group may lie where the job's other workers can't follow.
        uses = _complete(state, view, spec, asks, [None] * len(asks))
    return uses


def _complete(
    state: State, view: View, spec: JobSpec, asks: Sequence[Ask], kept: Sequence[GroupUse | None]
) -> tuple[GroupUse, ...] | None:
    """The kept groups and new ones for the other asks, if the strategy and the quotas hold for all together."""
    made = _make(state, view, spec, [ask for ask, use in zip(asks, kept, strict=True) if use is None])
    if made is None:
        return None
    fresh = iter(made)
    uses = tuple(use or next(fresh) for use in kept)
    if len(uses) > 1 and not _keeps_strategy(spec.placement, uses):
        return None
    for use in uses:
        pool = state.pools[use.ask.pool].spec
        refund = reserved_refund(state, pool, use)
        if shortages(state.pools, charged_beside(view.charged, asks, use.ask), pool, use.ask.resources, refund):
            return None
    return uses


def charged_beside(charged: Charged, asks: Sequence[Ask], ask: Ask) -> Charged:
    """What counts against pools beside one ask of a job: in a cohort, its other asks come out of the same pot.

    Args:
        charged: what counts beside the job.
    """
    if len(asks) == 1:
        return charged
    others = {other.pool: other.resources for other in asks if other.pool != ask.pool}
    return lambda pool: charged(pool) + others.get(pool, NOTHING)


def _keeps_strategy(placement: Strategy, uses: Sequence[GroupUse]) -> bool:
    """Whether the strategy holds across the groups of a job; within each it does."""
    return keeps_strategy(
        (
            (slot, use.bundles[index].node_id)
            for use in uses
            for slot, index in zip(use.ask.slots, use.bundle_of, strict=True)
        ),
        placement,
    )


def reuse(state: State, view: View, spec: JobSpec, ask: Ask) -> GroupUse | None:
    """The best existing group for an ask: reserved ones first for a high priority, available now before
    free-to-come, then least waste, then lowest id (docs/scheduling.md)."""
    pool = state.pools[ask.pool].spec
    if view.assumption.empty or not pool.pg_pool.enable:
        return None
    best: tuple[tuple[int, ...], GroupUse] | None = None
    for group_id in state.group_index.of_pool.get(ask.pool, ()):
        group = state.groups[group_id]
        if not may_use(pool.pg_pool, spec, group) or not view.open_to_subject(group):
            continue
        bundle_of = match(state, group, spec, pool, ask)
        if bundle_of is None:
            continue
        later = bool(state.workers_in(group_id))
        waste = total(bundle.resources for bundle in group.bundles) - ask.resources
        preference = (
            group.group_kind is not KIND_RESERVED,
            later,
            group.state is not GROUP_READY,
            waste.gpu_milli,
            waste.cpu_milli,
            waste.memory_bytes,
            group.number,
        )
        if best is None or preference < best[0]:
            best = (preference, GroupUse(ask, group_id, group.group_kind, group.bundles, bundle_of, later))
    return None if best is None else best[1]


def may_use(pg_pool: PgPoolSpec, spec: JobSpec, group: GroupRecord) -> bool:
    """Whether the kind of a group is open to a job of this priority."""
    if group.group_kind is KIND_RESERVED:
        return spec.priority_milli >= pg_pool.reserved_min_priority_milli or pg_pool.reserved_lendable
    return group.group_kind is KIND_DYNAMIC and pg_pool.reuse


def match(state: State, group: GroupRecord, spec: JobSpec, pool: PoolSpec, ask: Ask) -> tuple[int, ...] | None:
    """A bundle of the group for each slot of the ask, or None if the group doesn't fit."""
    if len(group.bundles) < ask.count or not _size_fits(group, ask, pool.pg_pool):
        return None
    slots, wanted = ask.slots, node_filter(spec, pool)
    if not all(wanted.admits(state.nodes[bundle.node_id]) for bundle in group.bundles):
        return None
    # Bundles come back from Ray in no node order (PG-01), so order is made here: by node rank, then device.
    open_bundles = sorted(
        range(len(group.bundles)),
        key=lambda i: (
            state.nodes[group.bundles[i].node_id].rank,
            group.bundles[i].devices[0].index if group.bundles[i].devices else -1,
            i,
        ),
    )
    chosen: dict[int, int] = {}
    largest_first = sorted(range(len(slots)), key=lambda i: _amounts(slots[i].resources), reverse=True)
    for i in largest_first:
        fitting = [b for b in open_bundles if takes(state, group, b, slots[i])]
        if not fitting:
            return None
        smallest = min(_amounts(group.bundles[b].resources) for b in fitting)
        chosen[i] = next(b for b in fitting if _amounts(group.bundles[b].resources) == smallest)
        open_bundles.remove(chosen[i])
    if not keeps_strategy(((slots[i], group.bundles[b].node_id) for i, b in chosen.items()), spec.placement):
        return None
    return tuple(chosen[i] for i in range(len(slots)))


def match_new(state: State, group: GroupRecord, spec: JobSpec, pool: PoolSpec, ask: Ask) -> tuple[int, ...] | None:
    """The bundles of a group that was planned for an ask, or None if its pool or its nodes are others now."""
    wanted = node_filter(spec, pool)
    planned = group.group_kind is new_kind(pool.pg_pool) and len(group.bundles) == ask.count
    if not planned or not all(wanted.admits(state.nodes[bundle.node_id]) for bundle in group.bundles):
        return None
    if not all(takes(state, group, index, slot) for index, slot in enumerate(ask.slots)):
        return None
    return tuple(range(ask.count))


def may_make(view: View, pool: PoolSpec, kind: GroupKind) -> bool:
    """Whether a pool may have one more group of a kind."""
    if kind is not KIND_DYNAMIC or len(view.state.group_index.of_pool.get(pool.name, ())) < pool.pg_pool.max_dynamic:
        return True
    return view.dynamic_groups(pool.name) < pool.pg_pool.max_dynamic


def takes(state: State, group: GroupRecord, index: int, slot: Slot) -> bool:
    """Whether a bundle of a group can hold a worker."""
    bundle = group.bundles[index]
    if slot.place is not None:
        return books(state, group, index, slot, slot.place)
    admitted = not slot.selector or NodeFilter(slot.selector).admits(state.nodes[bundle.node_id])
    return admitted and _holds(state.nodes[bundle.node_id], bundle, slot.resources)


def _make(state: State, view: View, spec: JobSpec, asks: Sequence[Ask]) -> list[GroupUse] | None:
    """New groups for some asks of a job, if their pools may make them and all the bundles find room together."""
    if not asks:
        return []
    if len(asks) == 1:
        return _make_one(state, view, spec, asks[0])
    kinds: list[GroupKind] = []
    for ask in asks:
        kind = _kind_open(view, spec, state.pools[ask.pool].spec, ask)
        if kind is None:
            return None
        kinds.append(kind)
    if not may_hold(state, view, spec, asks):
        return None
    wanted, slots = together(state, spec, asks)
    found = fit(Rooms(state, view, wanted), slots, spec.placement)
    if found is None:
        return None
    rest = iter(found)
    bundles_of = {ask.pool: tuple(islice(rest, ask.count)) for ask in asks}
    return [
        GroupUse(ask, "", kind, bundles_of[ask.pool], tuple(range(ask.count)))
        for ask, kind in zip(asks, kinds, strict=True)
    ]


def together(state: State, spec: JobSpec, asks: Sequence[Ask]) -> tuple[NodeFilter, Sequence[Slot]]:
    """The workers of several asks as one, so that none takes what another needs, and the nodes that come into question
    for all: pools that use different nodes are told apart by labels."""
    filters = [node_filter(spec, state.pools[ask.pool].spec) for ask in asks]
    if len(asks) == 1:
        return filters[0], asks[0].slots
    shared = frozenset.intersection(*(frozenset(wanted.required) for wanted in filters))
    slots = [
        _selecting(slot, frozenset(wanted.required) - shared)
        for ask, wanted in zip(asks, filters, strict=True)
        for slot in ask.slots
    ]
    return NodeFilter(tuple(sorted(shared)), filters[0].preferred), slots


def _selecting(slot: Slot, labels: frozenset[tuple[str, str]]) -> Slot:
    """A slot that asks for further labels of its node."""
    return replace(slot, selector=tuple(sorted({*slot.selector, *labels}))) if labels else slot


def _make_one(state: State, view: View, spec: JobSpec, ask: Ask) -> list[GroupUse] | None:
    pool = state.pools[ask.pool].spec
    kind = _kind_open(view, spec, pool, ask)
    if kind is None or not may_hold(state, view, spec, [ask]):
        return None
    bundles = fit(Rooms(state, view, node_filter(spec, pool)), ask.slots, spec.placement)
    return None if bundles is None else [GroupUse(ask, "", kind, bundles, tuple(range(len(bundles))))]


def may_hold(state: State, view: View, spec: JobSpec, asks: Sequence[Ask]) -> bool:
    """Whether workers may find room as far as sums tell: none of them is listed, and no node is looked at. Many that
    can't be held cost no more than one."""
    empty = view.assumption.empty
    if not empty and len(asks) == 1 and asks[0].count == 1:
        return True  # the index of free room tells that as soon
    if any(ask.placed for ask in asks):
        return True
    if empty:
        return all(
            _held_by_empty_nodes(state, spec, state.pools[ask.pool].spec, component, len(ranks))
            for ask in asks
            for component, ranks in ask.parts
        )
    return view.may_hold(total(ask.resources for ask in asks))


def ever_fits(state: State, view: View, spec: JobSpec, asks: Sequence[Ask]) -> bool:
    """Whether the nodes and quotas there are could hold a job if nothing else was there. Of equal workers that go
    anywhere, sums tell it all."""
    counted = len(asks) == 1 and len(asks[0].parts) == 1 and not asks[0].placed
    if counted:
        ask, pool = asks[0], state.pools.get(asks[0].pool)
        component = ask.parts[0][0]
        counted = pool is not None and not (node_filter(spec, pool.spec).required or _labels_of(component))
        if counted and pool is not None and not pool.deleting:
            open_to = _kind_open(view, spec, pool.spec, ask) is not None
            held = open_to and may_hold(state, view, spec, asks)
            return held and not shortages(state.pools, view.charged, pool.spec, ask.resources)
    return choose_groups(state, view, spec, asks) is not None


def _held_by_empty_nodes(state: State, spec: JobSpec, pool: PoolSpec, component: ComponentSpec, workers: int) -> bool:
    """Whether as many nodes as may have the labels could hold some equal workers if nothing else was there."""
    strategy = component.placement or spec.placement
    left = workers
    labels = (*node_filter(spec, pool).required, *_labels_of(component))
    for (capacity, cards), places in state.node_kinds.of(labels).items():
        each = times_while_empty(capacity, cards, component.resources)
        if strategy is Strategy.STRICT_PACK:
            left = min(left, workers - each)
        else:
            left -= len(places) * (min(each, 1) if strategy is Strategy.STRICT_SPREAD else each)
        if left <= 0:
            return True
    return left <= 0


def _labels_of(component: ComponentSpec) -> Labels:
    """Labels that every node of a component must have, the interpreter among them."""
    labels = () if component.node_selector_soft else component.node_selector
    return (*labels, (INTERPRETER, component.interpreter)) if component.interpreter else labels


def _kind_open(view: View, spec: JobSpec, pool: PoolSpec, ask: Ask) -> GroupKind | None:
    """Kind of the new group that a pool may make for an ask, or None. When the question is what could ever fit, a
    reserved group that isn't made yet counts too."""
    kind = new_kind(pool.pg_pool)
    if kind is not None and may_make(view, pool, kind):
        return kind
    if not view.assumption.empty or ask.count != 1 or not pool.pg_pool.enable:
        return None
    meant = spec.priority_milli >= pool.pg_pool.reserved_min_priority_milli or pool.pg_pool.reserved_lendable
    fits = any(shape.covers(ask.slots[0].resources) for shape in pool.pg_pool.reserved)
    return KIND_RESERVED if meant and fits else None


def new_kind(pg_pool: PgPoolSpec) -> GroupKind | None:
    """Kind of the groups that a pool makes on demand, or None if it makes none."""
    if not pg_pool.enable:
        return KIND_PRIVATE
    return KIND_DYNAMIC if pg_pool.dynamic else None


def reserved_refund(state: State, pool: PoolSpec, use: GroupUse) -> Resources:
    """What the pool already charges for a reserved group that the job would take: nothing for one that is not there
    yet, which counts only where the question is what could ever fit."""
    if not pool.pg_pool.charge_reserved or use.kind is not KIND_RESERVED or not use.group_id:
        return NOTHING
    return total(bundle.resources for bundle in state.groups[use.group_id].bundles)


def _size_fits(group: GroupRecord, ask: Ask, pg_pool: PgPoolSpec) -> bool:
    """Whether a group isn't far larger than the ask. GPUs and CPUs count, memory only decides between fitting ones;
    a group with GPUs is never spent on workers without. Reserved groups are there to be used, whatever their size."""
    size, wanted = total(bundle.resources for bundle in group.bundles), ask.resources
    if size.gpu_milli and not wanted.gpu_milli:
        return False
    if group.group_kind is KIND_RESERVED:
        return True
    for have, want in ((size.gpu_milli, wanted.gpu_milli), (size.cpu_milli, wanted.cpu_milli)):
        if want and have * 1000 > want * pg_pool.reuse_slack_milli:
            return False
    return True


def _holds(node: NodeRecord, bundle: BundleRecord, ask: Resources) -> bool:
    """Whether a bundle can hold one worker; a share needs a device of the bundle, whole devices need as many."""
    devices = bundle.devices if not ask.selects else suiting(node, bundle.devices, ask)
    if not bundle.resources.covers(ask):
        return False
    held_bytes = on_each(bundle.resources.gpu_memory_bytes, max(1, len(bundle.devices)))
    if held_bytes < ask.each_gpu_memory_bytes:
        return False
    if ask.gpu_milli >= MILLI:
        return sum(1 for share in devices if share.milli == MILLI) * MILLI >= ask.gpu_milli
    return ask.gpu_milli == 0 or any(share.milli >= ask.gpu_milli for share in devices)


def suiting(node: NodeRecord, devices: Iterable[DeviceShare], ask: Resources) -> tuple[DeviceShare, ...]:
    """Those of a node's devices that an ask is for."""
    known = node.devices
    return tuple(share for share in devices if share.index < len(known) and known[share.index].suits(ask))


def _amounts(resources: Resources) -> tuple[int, int, int, int]:
    return (resources.gpu_milli, resources.cpu_milli, resources.memory_bytes, resources.gpu_memory_bytes)
