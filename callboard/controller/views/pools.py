"""Pools and their placement groups as messages."""

from __future__ import annotations

from callboard.controller.convert.commands import bundle
from callboard.controller.views.common import timestamp
from callboard.scheduler import GroupStats, State
from callboard.scheduler.account.stats import group_stats, pool_use
from callboard.scheduler.handlers.orders import ray_node_ids
from callboard.scheduler.records.pool_records import GroupCounts, GroupRecord, PoolRecord
from callboard.v1 import placement_group_pb2, pool_pb2
from callboard.wire.amounts import resources_to_proto
from callboard.wire.enums import to_wire
from callboard.wire.specs import pool_spec_to_proto


def pool_message(pool: PoolRecord, state: State) -> pool_pb2.Pool:
    """One pool with what it is used for."""
    use = pool_use(state, pool.spec.name)
    return pool_pb2.Pool(
        name=f"pools/{pool.spec.name}",
        spec=pool_spec_to_proto(pool.spec),
        used=resources_to_proto(use.used),
        nominated=resources_to_proto(use.nominated),
        available=resources_to_proto(use.available),
        over=resources_to_proto(use.over),
        pending_jobs=use.pending_jobs,
        active_jobs=use.active_jobs,
        etag=str(pool.spec_version),
        revision=pool.revision,
        deleting=pool.deleting,
        pg_stats=group_stats_message(group_stats(state, pool.spec.name), pool.counts),
    )


def group_stats_message(stats: GroupStats, counts: GroupCounts) -> pool_pb2.PlacementGroupPoolStats:
    """Counts of one placement-group pool."""
    return pool_pb2.PlacementGroupPoolStats(
        total=stats.total,
        reserved=stats.reserved,
        reserved_idle=stats.reserved_idle,
        dynamic=stats.dynamic,
        dynamic_idle=stats.dynamic_idle,
        creations=counts.creations,
        reuses=counts.reuses,
        hits=counts.hits,
        misses=counts.misses,
        removals=dict(counts.removals),
    )


def group_message(group: GroupRecord, state: State) -> placement_group_pb2.PlacementGroup:
    """One placement group."""
    return placement_group_pb2.PlacementGroup(
        name=f"placementGroups/{group.group_id}",
        pool=group.pool,
        kind=to_wire(placement_group_pb2.PlacementGroupKind, group.group_kind),
        state=to_wire(placement_group_pb2.PlacementGroupState, group.state),
        bundles=[bundle(*pair) for pair in zip(group.bundles, ray_node_ids(state, group), strict=True)],
        job=_job_name(group.job, state),
        nominee=_job_name(group.nominee, state),
        uses=group.users,
        ray_placement_group_id=group.ray_id,
        state_reason=group.reason,
        create_time=timestamp(group.created_ms),
        idle_since=timestamp(group.idle_since_ms),
        revision=group.revision,
    )


def _job_name(uid: str, state: State) -> str:
    job = state.jobs.get(uid)
    return job.name if job is not None else uid
