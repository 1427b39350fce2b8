"""The figures of pools: sums over the state for people; nothing here decides."""

from __future__ import annotations

from dataclasses import dataclass

from callboard.model.quantities import Resources
from callboard.scheduler.plan.quota import usable
from callboard.scheduler.records.states import ENDED, GroupKind, GroupState, JobState
from callboard.scheduler.state.ledger import PoolUse
from callboard.scheduler.state.state import State


@dataclass(frozen=True, slots=True)
class GroupStats:
    """How many placement groups a pool has. Idle: no worker holds it and nobody is nominated to it."""

    total: int = 0
    reserved: int = 0
    reserved_idle: int = 0
    dynamic: int = 0
    dynamic_idle: int = 0


def group_stats(state: State, pool: str) -> GroupStats:
    """Counts of the groups that exist or are being made; those being removed or not yet made don't count."""
    counts = {kind: [0, 0] for kind in GroupKind}
    for group_id in state.group_index.of_pool.get(pool, ()):
        group = state.groups[group_id]
        if group.state not in (GroupState.CREATING, GroupState.READY):
            continue
        counts[group.group_kind][0] += 1
        # Groups of one job's own are many, and never idle.
        if group.group_kind is not GroupKind.PRIVATE and not group.nominee and not state.workers_in(group_id):
            counts[group.group_kind][1] += 1
    reserved, dynamic, private = (counts[kind] for kind in GroupKind)
    return GroupStats(reserved[0] + dynamic[0] + private[0], reserved[0], reserved[1], dynamic[0], dynamic[1])


def pool_use(state: State, name: str) -> PoolUse:
    """The account of one pool."""
    spec = state.pools[name].spec
    used, nominated = state.charged(name), state.nominated_ask(name)

    def charged(pool: str) -> Resources:
        return state.charged(pool) + state.nominated_ask(pool)

    # A nominee's ask counts beside its victims' usage, which may exceed the quota for a while; available is never
    # shown below zero, and only usage makes a pool "over" (QL-04).
    available = {
        resource: max(0, usable(state.pools, charged, spec, resource, charged(name).get(resource)))
        for resource, _ in spec.nominal
    }
    over = {resource: max(0, used.get(resource) - nominal) for resource, nominal in spec.nominal}
    pending = active = 0
    for state_name, uids in state.jobs_by_state.items():
        if state_name in ENDED:
            continue
        inside = sum(1 for uid in uids if _is_in(state, uid, name))
        if state_name is JobState.PENDING:
            pending += inside
        else:
            active += inside
    return PoolUse(
        used, nominated, Resources.from_items(available.items()), Resources.from_items(over.items()), pending, active
    )


def _is_in(state: State, uid: str, pool: str) -> bool:
    spec = state.specs[uid].spec
    return spec.pool == pool or any(component.pool == pool for component in spec.components)
