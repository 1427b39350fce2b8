"""The records of pools and of placement groups."""

from __future__ import annotations

from operator import attrgetter
from typing import ClassVar

from callboard.model.frozen import dataclass, quick
from callboard.model.quantities import Resources
from callboard.model.specs import PoolSpec
from callboard.scheduler.records.node_record import DeviceShare
from callboard.scheduler.records.states import GroupKind, GroupState, Removal


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts:
    """What a placement-group pool did so far."""

    creations: int = 0
    reuses: int = 0
    hits: int = 0
    misses: int = 0
    removals: tuple[tuple[str, int], ...] = ()


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRecord:
    """One pool.

    Attributes:
        made_at: revision at which it was made; pools are gone through in this order.
        spec_version: counts the changes of the spec; the etag of the API.
        destroyed_reserved: indexes of reserved groups removed on purpose: they stay away until the spec changes.
    """

    kind: ClassVar[str] = "pool"

    spec: PoolSpec
    made_at: int = 0
    spec_version: int = 1
    deleting: bool = False
    destroyed_reserved: tuple[int, ...] = ()
    counts: GroupCounts = GroupCounts()
    revision: int = 0

    key = property(attrgetter("spec.name"))


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class BundleRecord:
    """What one bundle of a placement group books on one node."""

    node_id: str
    resources: Resources
    devices: tuple[DeviceShare, ...] = ()


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """One placement group.

    Attributes:
        pool: pool that it belongs to; empty: a stray in Ray of which nobody knows whose it was.
        job: uid of the job whose workers hold it; empty: idle.
        nominee: uid of the job it is held for (I7); empty: none.
        users: jobs that used it so far.
        attempt: creation attempt, a part of its name in Ray.
        reserved_index: position of its shape in the pool's reserved list; -1 for other kinds.
        executor: node whose agent creates or removes it in Ray.
        deadline_ms: end of the creation, or time of the next try; 0: none.
        destroy: remove it as soon as it is free.
        removal: why it is being removed; None: it isn't.
    """

    kind: ClassVar[str] = "group"

    group_id: str
    number: int
    pool: str
    group_kind: GroupKind
    state: GroupState
    bundles: tuple[BundleRecord, ...]
    job: str = ""
    nominee: str = ""
    users: int = 0
    attempt: int = 1
    reserved_index: int = -1
    executor: str = ""
    ray_id: str = ""
    ray_session: str = ""
    reason: str = ""
    created_ms: int = 0
    idle_since_ms: int = 0
    deadline_ms: int = 0
    destroy: bool = False
    removal: Removal | None = None
    revision: int = 0

    key = property(attrgetter("group_id"))
