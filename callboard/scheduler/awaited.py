"""What does a job wait for that is on its way already? Backoffs, victims, groups, workers."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from callboard.model.specs import Fencing, JobSpec
from callboard.scheduler.blockers import MAX_SUBJECTS
from callboard.scheduler.records import JobRecord, WorkerRecord
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


def checkpoint_lost(job: JobRecord) -> tuple[Reason, ...]:
    """That a job left no checkpoint when it was last asked for one, and why."""
    if not job.checkpoint_lost:
        return ()
    return (Reason("CHECKPOINT_LOST", f"jobs/{job.name}", f"checkpoint lost: {job.checkpoint_lost}"),)


def failures(job: JobRecord) -> tuple[Reason, ...]:
    """What failed in the present attempt of a job, in order, where that is more than its reason says."""
    failed = [failure for failure in job.failed if failure.attempt == job.attempt]
    if len(failed) < 2:
        return ()
    return tuple(
        Reason("WORKER_FAILED", f"jobs/{job.name}/workers/{failure.worker}", failure.reason)
        for failure in sorted(failed, key=lambda failure: failure.at_ms)
    )


def killed_in(workers: Iterable[WorkerRecord], now_ms: int) -> str:
    """When those that are being stopped are killed at the latest; empty: none is."""
    at_ms = max((worker.kill_ms for worker in workers if worker.state is WorkerState.STOPPING), default=0)
    return f"killed at the latest in {time_left(max(0, at_ms - now_ms))}" if at_ms else ""


def awaited(state: State, job: JobRecord, now_ms: int) -> tuple[Reason, ...]:
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
    reasons += [reason for name in leaving if (reason := _end_of(state, name, victims, now_ms)) is not None]
    return tuple(reasons[:MAX_SUBJECTS])


def leaving_beside(state: State, nodes: Collection[str], pools: Collection[str], now_ms: int) -> list[Reason]:
    """What is on its way out where a job would be, or uses its pools' quota."""
    leaving = dict.fromkeys(_leaving(state, nodes, pools))
    return [reason for name in leaving if (reason := _end_of(state, name, (), now_ms)) is not None][:MAX_SUBJECTS]


def _end_of(state: State, name: str, victims: Collection[str], now_ms: int) -> Reason | None:
    """That a job or a placement group has yet to go; None if it has."""
    other = state.jobs.get(name)
    if other is not None:
        kill = killed_in(state.workers_of(name), now_ms)
        if not kill and other.state not in _LEAVING:
            return None
        by = f" ({kill})" if kill else ""
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


def waiting_workers(state: State, job: JobRecord, now_ms: int) -> tuple[Reason, ...]:
    """What a starting or stopping job waits for, worker by worker."""
    code = {JobState.STARTING: "WORKER_STARTING"}.get(job.state, "WORKER_STOPPING")
    busy = (WorkerState.ASSIGNED, WorkerState.STARTING, WorkerState.STOPPING, WorkerState.QUARANTINED)
    return tuple(
        Reason(
            code,
            f"jobs/{job.name}/workers/{worker.component}/{worker.rank}",
            f"{worker.component}/{worker.rank} on {worker.node_id} is {worker.state}: {worker.reason}"
            + (f"; {kill}" if (kill := killed_in([worker], now_ms)) else ""),
        )
        for worker in state.workers_of(job.uid)[:MAX_SUBJECTS]
        if worker.state in busy
    )
