"""The figures of pools: sums over the state for people; nothing here decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from callboard.model.frozen import dataclass
from callboard.model.quantities import Resources
from callboard.scheduler.plan.quota import usable
from callboard.scheduler.records.states import ENDED, GroupKind, GroupState, JobState
from callboard.scheduler.state.ledger import PoolUse
from callboard.scheduler.state.shapes import Shape
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


def jobs_in_pools(state: State) -> dict[str, tuple[int, int]]:
    """How many jobs wait in each pool, and how many hold something; pools that have neither are left out. Jobs that
    wait are many and of few shapes, so they are counted by shape."""
    pending: Counter[str] = Counter()
    active: Counter[str] = Counter()
    for shape, queue in state.waiting.items():
        for pool in _pools_of(shape):
            pending[pool] += len(queue)
    for state_name, uids in state.jobs_by_state.items():
        if state_name not in ENDED and state_name is not JobState.PENDING:
            for uid in uids:
                active.update(_pools_of(state.shapes[uid]))
    return {pool: (pending[pool], active[pool]) for pool in {*pending, *active}}


def _pools_of(shape: Shape) -> set[str]:
    return {shape.yield_class.pool, *shape.yield_class.pools}


def pool_use(state: State, name: str, inside: Mapping[str, tuple[int, int]] | None = None) -> PoolUse:
    """The account of one pool.

    Args:
        inside: what :func:`jobs_in_pools` counted, if several pools are asked for.
    """
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
    pending, active = (jobs_in_pools(state) if inside is None else inside).get(name, (0, 0))
    return PoolUse(
        used, nominated, Resources.from_items(available.items()), Resources.from_items(over.items()), pending, active
    )
