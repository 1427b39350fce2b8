"""Jobs as messages."""

from __future__ import annotations

from collections.abc import Sequence

from callboard.controller.convert.commands import allocation, shares, worker_key
from callboard.controller.views.common import kill_time, preemption_message, reason_message, timestamp
from callboard.model.roles import member_names
from callboard.scheduler import Explanation, State
from callboard.scheduler.handlers.stopping import cause_of
from callboard.scheduler.records.job_records import Failure, JobRecord, WorkerRecord
from callboard.scheduler.records.refusals import Reason
from callboard.v1 import common_pb2, job_pb2
from callboard.wire.enums import to_wire
from callboard.wire.specs import job_spec_to_proto

MAX_VICTIMS = 100
"""Newest victims shown with a job."""


def job_message(job: JobRecord, state: State, waiting_for: tuple[Reason, ...] = ()) -> job_pb2.Job:
    """One job with the workers of its present attempt. Values of secret variables are masked (SE-04)."""
    spec = state.specs[job.uid].spec
    members = {component.name: member_names(component) for component in spec.components}
    return job_pb2.Job(
        name=f"jobs/{job.name}",
        uid=job.uid,
        spec=job_spec_to_proto(spec, mask=True),
        state=to_wire(job_pb2.JobState, job.state),
        state_reason=job.reason,
        attempt=job.attempt,
        submit_time=timestamp(job.submit_ms),
        running_time=timestamp(job.running_ms),
        end_time=timestamp(job.end_ms),
        workers=[
            worker_message(worker, members.get(worker.component, ()))
            for worker in state.workers_of(job.uid)
            if worker.attempt == job.attempt
        ],
        history=[
            common_pb2.StateChange(
                revision=line.revision,
                time=timestamp(line.at_ms),
                state=line.state,
                reason=line.reason,
                cause=line.cause,
            )
            for line in job.story
        ],
        preemptions=job.preemptions,
        restarts=job.restarts,
        traceback=job.traceback,
        waiting_for=[reason_message(reason) for reason in waiting_for],
        placement_groups=job.groups,
        nominated=job.nominated,
        victims=[preemption_message(record) for record in state.preemptions_for(job.uid)[-MAX_VICTIMS:]],
        revision=job.revision,
        has_checkpoint=bool(state.checkpoints_of(job.uid)),
        stderr_tail=job.stderr_tail,
        exit_code=job.exit_code,
        checkpoint_lost=job.checkpoint_lost,
        kill_time=kill_time(state.workers_of(job.uid)),
        failures=_failures(job),
    )


def _failures(job: JobRecord) -> list[job_pb2.WorkerFailure]:
    """What failed in a job, with the causes of its attempts."""
    by_attempt: dict[int, list[Failure]] = {}
    for failure in job.failed:
        if not failure.survived:
            by_attempt.setdefault(failure.attempt, []).append(failure)
    causes = [cause_of(failed) for failed in by_attempt.values()]
    return [
        job_pb2.WorkerFailure(
            attempt=failure.attempt,
            time=timestamp(failure.at_ms),
            worker=failure.worker,
            node_id=failure.node_id,
            message=failure.reason,
            died=failure.died,
            cause=any(failure is cause for cause in causes),
        )
        for failure in sorted(job.failed, key=lambda failure: (failure.attempt, failure.at_ms))
    ]


def worker_message(worker: WorkerRecord, members: Sequence[str]) -> job_pb2.Worker:
    """One worker, with the names of those that share its process."""
    return job_pb2.Worker(
        key=worker_key(worker),
        attempt=worker.attempt,
        generation=worker.generation,
        state=to_wire(job_pb2.WorkerState, worker.state),
        state_reason=worker.reason,
        allocation=allocation(worker),
        pid=worker.pid,
        actor_name=worker.actor_name,
        start_ms=worker.start_ms,
        visible_devices=worker.visible_devices,
        warm=worker.warm,
        cold_reason=worker.cold_reason,
        members=members,
        kill_time=kill_time([worker]),
        checkpoint_lost=worker.checkpoint_lost,
    )


def explanation_message(account: Explanation) -> job_pb2.Explanation:
    """The account of a job."""
    return job_pb2.Explanation(
        verdict=account.verdict,
        summary=account.summary,
        reasons=[reason_message(reason) for reason in account.reasons],
        unblock=account.unblock,
        workers=[
            job_pb2.PlannedWorker(
                component=worker.component,
                rank=worker.rank,
                node_id=worker.node_id,
                devices=shares(worker.devices),
                placement_group=worker.group_id,
            )
            for worker in account.workers
        ],
        victims=[preemption_message(record) for record in account.victims[-MAX_VICTIMS:]],
        queue_position=account.queue_position,
    )
