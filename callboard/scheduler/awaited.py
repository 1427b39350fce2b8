"""What does a job wait for that is on its way already? Backoffs, victims, groups, workers."""

from __future__ import annotations

from callboard.model.specs import Fencing, JobSpec
from callboard.scheduler.blockers import MAX_SUBJECTS
from callboard.scheduler.records import (
    JobRecord,
    JobState,
    WorkerState,
)
from callboard.scheduler.refusals import Reason
from callboard.scheduler.state import State
from callboard.scheduler.wording import join


def backoff(job: JobRecord, now_ms: int) -> tuple[Reason, ...]:
    if job.eligible_ms <= now_ms:
        return ()
    message = f"its backoff, {job.eligible_ms - now_ms} ms more, after: {job.reason}"
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
    for awaited in job.waits_for:
        other = state.jobs.get(awaited)
        if other is not None and other.state in (JobState.PREEMPTING, JobState.STOPPING):
            ends = [worker.deadline_ms for worker in state.workers_of(awaited) if worker.state is WorkerState.STOPPING]
            by = f" (gone in {max(0, max(ends) - state.meta.now_ms)} ms at the latest)" if ends else ""
            reasons.append(Reason("WAITING_FOR_VICTIM", f"jobs/{other.name}", f"victim {other.name}{by}"))
        elif awaited in state.groups:
            message = f"placement group {awaited} to be removed"
            reasons.append(Reason("WAITING_FOR_GROUP", f"placementGroups/{awaited}", message))
    return tuple(reasons)


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
