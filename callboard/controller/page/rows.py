"""Rows of the page: nodes, jobs, pools, groups and events as small plain values that a browser keeps.

They hold what the lists and pictures show, and nothing else; everything about one job or node is a call of its own
(``GetJob``, ``GetNode``). A job is named by the number of its submission, which is shorter than its uid. Times are
milliseconds since 1970, amounts milli-units and bytes, as everywhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from callboard.controller.views.nodes import counts_by_state, shown_state
from callboard.model.quantities import Resources
from callboard.scheduler import State
from callboard.scheduler.account.stats import group_stats
from callboard.scheduler.records.job_records import EventRecord, JobRecord
from callboard.scheduler.records.node_record import NodeRecord
from callboard.scheduler.records.pool_records import GroupRecord, PoolRecord
from callboard.scheduler.records.states import WorkerState

Row = dict[str, Any]
Sees = Callable[[JobRecord], bool]
"""Whether the reader may know of a job."""

STORY_SHOWN = 24
"""Newest states of a job that the timeline draws."""

TEXT_SHOWN = 300
"""Characters of a reason in a list; its page shows all of it."""


def job_row(job: JobRecord, state: State) -> Row:
    spec = state.specs[job.uid].spec
    workers = [worker for worker in state.workers_of(job.uid) if worker.attempt == job.attempt]
    row: Row = {
        "id": job.order,
        "uid": job.uid,
        "name": job.name,
        "pool": spec.pool,
        "state": job.state.value,
        "why": job.reason[:TEXT_SHOWN],
        "priority": spec.priority_milli,
        "submitted": job.submit_ms,
        "running": job.running_ms,
        "ended": job.end_ms,
        "attempt": job.attempt,
        "ready": sum(worker.state is WorkerState.READY for worker in workers),
        "workers": max(len(workers), sum(component.min_workers for component in spec.components)),
        "gpu": spec.ask().gpu_milli,
        "revision": max([job.revision, *(worker.revision for worker in workers)]),
        "story": [[line.at_ms, line.state] for line in job.story[-STORY_SHOWN:]],
    }
    further = sorted({*spec.pools} - {spec.pool})
    # Left out where there is nothing to say: there may be ten thousand of these.
    rare = {
        "pools": further,
        "preemptions": job.preemptions,
        "restarts": job.restarts,
        "nominated": job.nominated,
        "labels": dict(spec.labels),
    }
    return row | {name: value for name, value in rare.items() if value}


def node_row(node: NodeRecord, state: State, sees: Sees) -> Row:
    """One node: who has which share of which device, and how much of them is held otherwise. Of jobs that the reader
    may not know of, the amounts alone."""
    use = state.node_use(node.node_id)
    users: dict[int, list[list[Any]]] = defaultdict(list)
    on_node = state.workers_on(node.node_id)
    for worker in on_node:
        job = state.jobs.get(worker.job)
        if job is None or not sees(job):
            continue
        for share in worker.devices:
            users[share.index].append([job.order, worker.component, worker.rank, share.milli])
    row: Row = {
        "id": node.node_id,
        "rank": node.rank,
        "state": shown_state(node),
        "why": node.reason[:TEXT_SHOWN],
        "capacity": amounts(node.capacity),
        "used": amounts(use.used),
        "held": amounts(use.held),
        "lost": amounts(use.quarantined),
        "workers": len(on_node),
        "devices": [
            [device.used_milli, device.held_milli, device.quarantined_milli, *users[index]]
            for index, device in enumerate(use.devices)
        ],
    }
    rare = {
        "host": node.hostname,
        "group": node.node_group,
        "model": node.devices[0].model if node.devices else "",
        "labels": dict(node.labels),
        "head": node.ray is not None and node.ray.head,
        "joined": node.joined_ms,
    }
    return row | {name: value for name, value in rare.items() if value}


def pool_row(pool: PoolRecord, state: State, pending: int, active: int) -> Row:
    """One pool, with how many jobs wait in it and how many hold something."""
    spec = pool.spec
    used = state.charged(spec.name)
    groups = group_stats(state, spec.name)
    return {
        "id": spec.name,
        "nominal": dict(spec.nominal),
        "used": amounts(used),
        "nominated": amounts(state.nominated_ask(spec.name)),
        "cohort": spec.cohort,
        "members": list(spec.members),
        "stop": spec.stop_policy.value,
        "deleting": pool.deleting,
        "pending": pending,
        "active": active,
        "groups": [groups.total, groups.reserved, groups.reserved_idle, groups.dynamic, groups.dynamic_idle],
        "made": pool.counts.creations,
        "reused": pool.counts.reuses,
    }


def group_row(group: GroupRecord, state: State) -> Row:
    def number(uid: str) -> int:
        job = state.jobs.get(uid)
        return job.order if job is not None else 0

    return {
        "id": group.group_id,
        "number": group.number,
        "pool": group.pool,
        "kind": group.group_kind.value,
        "state": group.state.value,
        "why": group.reason[:TEXT_SHOWN],
        "job": number(group.job),
        "nominee": number(group.nominee),
        "uses": group.users,
        "bundles": [[bundle.node_id, amounts(bundle.resources)] for bundle in group.bundles[:64]],
        "size": len(group.bundles),
        "created": group.created_ms,
        "idle": group.idle_since_ms,
    }


def event_row(event: EventRecord) -> Row:
    row: Row = {
        "id": event.revision,
        "at": event.at_ms,
        "type": event.type,
        "subject": event.subject,
        "state": event.state,
        "why": event.reason[:TEXT_SHOWN],
    }
    return row | ({"facts": dict(event.facts)} if event.facts else {})


def figures(state: State) -> Row:
    """The cluster as a whole. Amounts only, so it is for everybody."""
    use = state.cluster_use
    return {
        "term": state.meta.term,
        "capacity": amounts(use.capacity),
        "used": amounts(use.used),
        "held": amounts(use.held),
        "free": amounts(use.free),
        "lost": amounts(use.quarantined),
        "nodes": counts_by_state(state),
        "jobs": {name.value: len(uids) for name, uids in state.jobs_by_state.items() if uids},
        "submitted": state.meta.total_submitted,
        "preemptions": state.meta.total_preemptions,
        "warm": state.meta.warm_starts,
        "cold": state.meta.cold_starts,
        "reconciling": bool(state.meta.reconcile_until_ms),
    }


def amounts(resources: Resources) -> Row:
    """Amounts by resource; those there are none of left out."""
    return {name: amount for name, amount in resources.items() if amount}
