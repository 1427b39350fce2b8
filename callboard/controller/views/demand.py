"""How does demand look?"""

from __future__ import annotations

from callboard.controller.views.common import timestamp
from callboard.scheduler import State
from callboard.scheduler.demand import demand
from callboard.v1 import scheduler_pb2
from callboard.wire.amounts import labels_to_proto, resources_to_proto


def demand_messages(state: State) -> list[scheduler_pb2.Demand]:
    """What is wanted beyond what there is, oldest first."""
    return [
        scheduler_pb2.Demand(
            pool=entry.pool,
            shape=resources_to_proto(entry.shape),
            count=entry.count,
            optional_count=entry.optional,
            node_selector=labels_to_proto(entry.selector),
            jobs=entry.jobs,
            since_time=timestamp(entry.since_ms),
            quota_blocked=entry.quota_blocked,
        )
        for entry in demand(state)
    ]
