"""What does a job wait for that is on its way already? Backoffs, victims, groups, workers."""

from __future__ import annotations

from collections.abc import Collection

from callboard.model.specs import Fencing, JobSpec
from callboard.scheduler.blockers import MAX_SUBJECTS
from callboard.scheduler.records import JobRecord
from callboard.scheduler.refusals import Reason
from callboard.scheduler.state import State
from callboard.scheduler.states import GroupState, JobState, WorkerState
from callboard.scheduler.wording import join, time_left

_LEAVING = (JobState.PREEMPTING, JobState.STOPPING)


def backoff(job: JobRecord, now_ms: int) -> tuple[Reason, ...]:
    if job.eligible_ms <= now_ms:
        return ()
    message = f"its backoff, {time_left(job.eligible_ms - now_ms)} more, after: {job.reason}"
    return (Reason("BACKOFF", f"jobs/{job.name}", message),)


def living_copies(state: State, job: JobRecord, spec: JobSpec) -> tuple[Reason, ...]:
    """A strict job is not started again while a worker of it may live (R5)."""
    if spec.fencing is not Fencing.STRICT:
        return ()
    return tuple(
        Reason(
            "COPY_MAY_LIVE",
            f"jobs/{job.name}/workers/{worker.component}/{worker.rank}",
            f"the proof that g{worker.generation} on {worker.node_id} is gone",
        )
        for worker in state.workers_of(job.uid)
        if worker.state is WorkerState.QUARANTINED
    )


def awaited(state: State, job: JobRecord) -> tuple[Reason, ...]:
    """What a nominated job waits for: victims with the time of their kill, groups being removed, or running jobs."""
    reasons = []
    if job.patient:
        nodes = [bundle.node_id for group_id in job.groups if (g := state.groups.get(group_id)) for bundle in g.bundles]
        message = f"running jobs on {join(sorted(set(nodes)))} to end; what they free is held for it"
        reasons.append(Reason("HOLDS_ROOM", f"jobs/{job.name}", message))
    groups = [group for group_id in job.groups if (group := state.groups.get(group_id)) is not None]
    places = dict.fromkeys(bundle.node_id for group in groups for bundle in group.bundles)
    victims = {record.victim for record in state.preemptions_for(job.uid)}
    leaving = dict.fromkeys((*job.waits_for, *_leaving(state, places, [group.pool for group in groups])))
    reasons += [reason for name in leaving if (reason := _end_of(state, name, victims)) is not None]
    return tuple(reasons[:MAX_SUBJECTS])


def leaving_beside(state: State, nodes: Collection[str], pools: Collection[str]) -> list[Reason]:
    """What is on its way out where a job would be, or uses its pools' quota."""
    leaving = dict.fromkeys(_leaving(state, nodes, pools))
    return [reason for name in leaving if (reason := _end_of(state, name, ())) is not None][:MAX_SUBJECTS]


def _end_of(state: State, name: str, victims: Collection[str]) -> Reason | None:
    """That a job or a placement group has yet to go; None if it has."""
    other = state.jobs.get(name)
    if other is not None:
        ends = [worker.deadline_ms for worker in state.workers_of(name) if worker.state is WorkerState.STOPPING]
        if not ends and other.state not in _LEAVING:
            return None
        by = f" (gone in {time_left(max(0, max(ends) - state.meta.now_ms))} at the latest)" if ends else ""
        if name in victims:
            return Reason("WAITING_FOR_VICTIM", f"jobs/{other.name}", f"victim {other.name}{by}")
        return Reason("WAITING_FOR_JOB", f"jobs/{other.name}", f"{other.name}, which ends{by}")
    if name in state.groups:
        return Reason("WAITING_FOR_GROUP", f"placementGroups/{name}", f"placement group {name} to be removed")
    return None


def _leaving(state: State, nodes: Collection[str], pools: Collection[str]) -> list[str]:
    """Jobs and groups on their way out that hold something on some nodes, or use the quota of some pools."""
    limited = {name for name in pools if (pool := state.pools.get(name)) and pool.spec.nominal}
    # A group lets go of all its nodes at once.
    there = dict.fromkeys(group_id for node_id in nodes for group_id in state.group_index.on_node.get(node_id, ()))
    found = [
        worker.job
        for group_id in there
        for worker in state.workers_in(group_id)
        if worker.state is WorkerState.STOPPING
    ]
    leaving = [uid for job_state in _LEAVING for uid in state.jobs_by_state[job_state]]
    found += [uid for uid in leaving if any(worker.pool in limited for worker in state.workers_of(uid))]
    going = [state.groups[group_id] for group_id in state.group_index.by_state[GroupState.REMOVING]]
    found += [group.group_id for group in going if any(bundle.node_id in nodes for bundle in group.bundles)]
    # One that is doomed counts against max_dynamic until it goes.
    found += [group_id for group_id in state.group_index.doomed if state.groups[group_id].pool in pools]
    return found


def waiting_workers(state: State, job: JobRecord) -> tuple[Reason, ...]:
    """What a starting or stopping job waits for, worker by worker."""
    code = {JobState.STARTING: "WORKER_STARTING"}.get(job.state, "WORKER_STOPPING")
    busy = (WorkerState.ASSIGNED, WorkerState.STARTING, WorkerState.STOPPING, WorkerState.QUARANTINED)
    return tuple(
        Reason(
            code,
            f"jobs/{job.name}/workers/{worker.component}/{worker.rank}",
            f"{worker.component}/{worker.rank} on {worker.node_id} is {worker.state}: {worker.reason}",
        )
        for worker in state.workers_of(job.uid)[:MAX_SUBJECTS]
        if worker.state in busy
    )
