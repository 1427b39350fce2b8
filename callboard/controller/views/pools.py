"""Pools and their placement groups as messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from callboard.controller.convert.commands import bundle
from callboard.scheduler import GroupStats, State
from callboard.scheduler.account.stats import group_stats, pool_use
from callboard.scheduler.handlers.orders import ray_node_ids
from callboard.scheduler.records.pool_records import GroupCounts, GroupRecord, PoolRecord
from callboard.v1 import placement_group_pb2, pool_pb2
from callboard.wire.alike import message_of, timestamp
from callboard.wire.enums import to_wire
from callboard.wire.specs import pool_spec_to_proto


def pool_message(pool: PoolRecord, state: State, inside: Mapping[str, tuple[int, int]] | None = None) -> pool_pb2.Pool:
    """One pool with what it is used for; ``inside`` as in :func:`pool_use`."""
    use = pool_use(state, pool.spec.name, inside)
    return message_of(
        pool_pb2.Pool,
        use,
        name=f"pools/{pool.spec.name}",
        spec=pool_spec_to_proto(pool.spec),
        etag=str(pool.spec_version),
        revision=pool.revision,
        deleting=pool.deleting,
        pg_stats=group_stats_message(group_stats(state, pool.spec.name), pool.counts),
    )


def group_stats_message(stats: GroupStats, counts: GroupCounts) -> pool_pb2.PlacementGroupPoolStats:
    """Counts of one placement-group pool."""
    return message_of(pool_pb2.PlacementGroupPoolStats, stats, **asdict(counts) | {"removals": dict(counts.removals)})


def group_message(group: GroupRecord, state: State) -> placement_group_pb2.PlacementGroup:
    return message_of(
        placement_group_pb2.PlacementGroup,
        group,
        name=f"placementGroups/{group.group_id}",
        kind=to_wire(placement_group_pb2.PlacementGroupKind, group.group_kind),
        bundles=[bundle(*pair) for pair in zip(group.bundles, ray_node_ids(state, group), strict=True)],
        job=_job_name(group.job, state),
        nominee=_job_name(group.nominee, state),
        uses=group.users,
        ray_placement_group_id=group.ray_id,
        state_reason=group.reason,
        create_time=timestamp(group.created_ms),
        idle_since=timestamp(group.idle_since_ms),
    )


def _job_name(uid: str, state: State) -> str:
    job = state.jobs.get(uid)
    return job.name if job is not None else uid
