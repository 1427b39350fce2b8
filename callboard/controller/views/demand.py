"""Demand as messages, and as a page for autoscalers that speak HTTP."""

from __future__ import annotations

from typing import Any

from callboard.scheduler import State
from callboard.scheduler.account.demand import demand
from callboard.v1 import scheduler_pb2
from callboard.wire.alike import message_of


def demand_messages(state: State) -> list[scheduler_pb2.Demand]:
    """What is wanted beyond what there is, oldest first."""
    return [
        message_of(
            scheduler_pb2.Demand,
            entry,
            optional_count=entry.optional,
            node_selector=dict(entry.selector),
        )
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
