"""The quota of a pool: what it may still use of its own, and what its cohort lends.

The model is that of Kueue's cohorts: a pool's guaranteed part is what it does not lend; the rest of every pool is one
pot, used by whoever goes beyond its guaranteed part. A pool can use ``guaranteed left + pot left``, and never more than
``nominal + borrow_limit``.

Every function takes the pools there are and ``charged``, which tells what counts against a pool: of the state as it
is, or of a view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from callboard.model.frozen import dataclass
from callboard.model.quantities import NOTHING, Resources
from callboard.model.specs import PoolSpec
from callboard.scheduler.records.pool_records import PoolRecord

Pools = Mapping[str, PoolRecord]
Charged = Callable[[str], Resources]

_UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Shortage:
    """A limited resource of which a pool has too little for an ask; amounts in the units of Resources.

    Attributes:
        available: what the pool can still use, borrowing included.
        used: what counts against it already.
        limit: most it could use: its nominal quota and what the others could lend.
    """

    resource: str
    asked: int
    available: int
    used: int
    limit: int


def shortages(
    pools: Pools, charged: Charged, pool: PoolSpec, ask: Resources, refund: Resources = NOTHING
) -> list[Shortage]:
    """Every limited resource that an ask is short of; empty when the quota holds it.

    Only resources that are asked for count: one that nobody is short of never blocks (PC-16).
    """
    if not pool.nominal:
        return []
    asked = [(resource, nominal) for resource, nominal in pool.nominal if ask.get(resource)]
    if not asked:
        return []
    used = charged(pool.name) - refund
    short = []
    for resource, nominal in asked:
        here = used.get(resource)
        available = max(0, usable(pools, charged, pool, resource, here))
        if ask.get(resource) > available:
            limit = nominal + borrowable(pools, pool, resource)
            short.append(Shortage(resource, ask.get(resource), available, here, limit))
    return short


def borrows(charged: Charged, pool: PoolSpec, ask: Resources) -> bool:
    """Whether an ask takes a pool beyond its own nominal quota."""
    used = charged(pool.name)
    return any(
        ask.get(resource) and used.get(resource) + ask.get(resource) > nominal for resource, nominal in pool.nominal
    )


def borrowed(charged: Charged, pool: PoolSpec) -> dict[str, int]:
    """How much of each resource a pool uses beyond its nominal quota; only what is above zero."""
    used = charged(pool.name)
    over = {resource: used.get(resource) - nominal for resource, nominal in pool.nominal}
    return {resource: amount for resource, amount in over.items() if amount > 0}


def borrowable(pools: Pools, pool: PoolSpec, resource: str) -> int:
    """Most that a pool could ever borrow of a resource: what the others lend, within its own limit."""
    lent = sum(_lendable(other, resource) for other in cohort_of(pools, pool) if other.name != pool.name)
    return min(dict(pool.borrow_limit).get(resource, _UNLIMITED), lent)


def cohort_of(pools: Pools, pool: PoolSpec) -> list[PoolSpec]:
    """Pools that lend to each other, the given one included. A pool that is being deleted lends nothing (QL-05)."""
    if not pool.cohort:
        return [pool]
    return [
        record.spec
        for record in pools.values()
        if record.spec.cohort == pool.cohort and (not record.deleting or record.spec.name == pool.name)
    ]


def usable(pools: Pools, charged: Charged, pool: PoolSpec, resource: str, used: int) -> int:
    """What a pool that uses ``used`` of a limited resource can still use; negative when it is over."""
    nominal = dict(pool.nominal)[resource]
    if not pool.cohort:
        return nominal - used
    pot = 0
    for other in cohort_of(pools, pool):
        limit = dict(other.nominal).get(resource)
        if limit is None:
            continue  # not limited there, so neither lent nor borrowed
        lendable = _lendable(other, resource)
        there = used if other.name == pool.name else charged(other.name).get(resource)
        pot += lendable - max(0, there - (limit - lendable))
    own_left = max(0, nominal - _lendable(pool, resource) - used)
    cap = nominal + dict(pool.borrow_limit).get(resource, _UNLIMITED) - used
    # A pot that is overdrawn (a quota was lowered under use) takes nothing from what a pool never lends.
    return min(own_left + max(0, pot), cap)


def _lendable(pool: PoolSpec, resource: str) -> int:
    nominal = dict(pool.nominal).get(resource, 0)
    return min(nominal, dict(pool.lend_limit).get(resource, nominal)) if pool.cohort else 0
