"""Figures and demand of the cluster as messages, made from the state in memory at the moment of the call; the demand
also as a page for autoscalers that speak HTTP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from callboard.controller.views.nodes import counts_by_state
from callboard.controller.views.pools import group_stats_message
from callboard.scheduler import GroupStats, State
from callboard.scheduler.account.demand import demand
from callboard.scheduler.account.stats import group_stats
from callboard.scheduler.records.pool_records import GroupCounts
from callboard.v1 import pool_pb2, scheduler_pb2
from callboard.wire.alike import message_of
from callboard.wire.amounts import resources_to_proto


def stats_message(state: State) -> scheduler_pb2.Stats:
    """Figures of the whole cluster, but for revision and uptime, which depend on the moment of the call."""
    use = state.cluster_use
    return scheduler_pb2.Stats(
        term=state.meta.term,
        nodes=counts_by_state(state),
        jobs={name.value: len(uids) for name, uids in state.jobs_by_state.items() if uids},
        workers={str(name): count for name, count in Counter([w.state for w in state.workers.values()]).items()},
        capacity=resources_to_proto(use.capacity),
        used=resources_to_proto(use.used),
        held=resources_to_proto(use.held),
        free=resources_to_proto(use.free),
        quarantined=resources_to_proto(use.quarantined),
        total_preemptions=state.meta.total_preemptions,
        preemption_outcomes=dict(state.meta.preemption_outcomes),
        placement_groups=_all_groups(state),
        total_submitted=state.meta.total_submitted,
        ray_address=_ray_address(state),
        reconciling=bool(state.meta.reconcile_until_ms),
        warm_starts=state.meta.warm_starts,
        cold_starts=state.meta.cold_starts,
        preloaded_starts=state.meta.preloaded_starts,
        free_whole_gpus=use.free_gpus.whole,
        free_gpu_parts_milli=use.free_gpus.parts_milli,
    )


def _all_groups(state: State) -> pool_pb2.PlacementGroupPoolStats:
    stats = [group_stats(state, name) for name in state.pools]
    counts = [pool.counts for pool in state.pools.values()]
    return group_stats_message(
        GroupStats(**{each.name: sum(getattr(one, each.name) for one in stats) for each in fields(GroupStats)}),
        GroupCounts(
            **{name: sum(getattr(one, name) for one in counts) for name in ("creations", "reuses", "hits", "misses")},
            removals=_summed(one.removals for one in counts),
        ),
    )


def _summed(tables: Iterable[tuple[tuple[str, int], ...]]) -> tuple[tuple[str, int], ...]:
    found: Counter[str] = Counter()
    for table in tables:
        found.update(dict(table))
    return tuple(sorted(found.items()))


def _ray_address(state: State) -> str:
    return next((node.ray.gcs_address for node in state.nodes.values() if node.ray is not None), "")


def demand_messages(state: State) -> list[scheduler_pb2.Demand]:
    """What is wanted beyond what there is, oldest first."""
    return [
        message_of(scheduler_pb2.Demand, entry, optional_count=entry.optional, node_selector=dict(entry.selector))
        for entry in demand(state)
    ]


def demand_page(state: State) -> list[dict[str, Any]]:
    """The same as plain values, with the names and units of `callboard demand -o json`."""
    return [
        {
            "pool": message.pool,
            "shape": {
                "cpu_milli": message.shape.cpu_milli,
                "gpu_milli": message.shape.gpu_milli,
                "memory_bytes": message.shape.memory_bytes,
                "gpu_memory_bytes": message.shape.gpu_memory_bytes,
                "gpu_model": message.shape.gpu_model,
                "gpu_memory_min_bytes": message.shape.gpu_memory_min_bytes,
                "custom_milli": dict(sorted(message.shape.custom_milli.items())),
            },
            "count": message.count,
            "node_selector": dict(sorted(message.node_selector.items())),
            "jobs": list(message.jobs),
            "since_time": message.since_time.ToJsonString(),
            "optional_count": message.optional_count,
            "quota_blocked": message.quota_blocked,
        }
        for message in demand_messages(state)
    ]
