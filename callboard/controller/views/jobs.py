"""Jobs as messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from google.protobuf.timestamp_pb2 import Timestamp

from callboard.controller.convert.commands import allocation, worker_key
from callboard.model.roles import member_names
from callboard.scheduler import Explanation, State
from callboard.scheduler.handlers.stopping import cause_of
from callboard.scheduler.records.job_records import Failure, JobRecord, PreemptionRecord, WorkerRecord
from callboard.scheduler.records.refusals import Reason
from callboard.scheduler.records.states import WorkerState
from callboard.v1 import common_pb2, job_pb2
from callboard.wire.alike import message_of, timestamp
from callboard.wire.specs import job_spec_to_proto

MAX_VICTIMS = 100
"""Newest victims shown with a job."""


def job_message(job: JobRecord, state: State, waiting_for: tuple[Reason, ...] = ()) -> job_pb2.Job:
    """One job with the workers of its present attempt. Values of secret variables are masked (SE-04)."""
    spec = state.specs[job.uid].spec
    members = {component.name: member_names(component) for component in spec.components}
    return message_of(
        job_pb2.Job,
        job,
        name=f"jobs/{job.name}",
        gauges=None,  # the service of jobs adds them: no record has them
        spec=job_spec_to_proto(spec, mask=True),
        state_reason=job.reason,
        workers=[
            worker_message(worker, members.get(worker.component, ()))
            for worker in state.workers_of(job.uid)
            if worker.attempt == job.attempt
        ],
        history=[message_of(common_pb2.StateChange, line, time=timestamp(line.at_ms)) for line in job.story],
        waiting_for=[message_of(common_pb2.Reason, reason) for reason in waiting_for],
        placement_groups=job.groups,
        victims=[preemption_message(record) for record in state.preemptions_for(job.uid)[-MAX_VICTIMS:]],
        has_checkpoint=bool(state.checkpoints_of(job.uid)),
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
        message_of(
            job_pb2.WorkerFailure,
            failure,
            time=timestamp(failure.at_ms),
            message=failure.reason,
            cause=any(failure is cause for cause in causes),
        )
        for failure in sorted(job.failed, key=lambda failure: (failure.attempt, failure.at_ms))
    ]


def worker_message(worker: WorkerRecord, members: Sequence[str]) -> job_pb2.Worker:
    """One worker, with the names of those that share its process."""
    return message_of(
        job_pb2.Worker,
        worker,
        key=worker_key(worker),
        state_reason=worker.reason,
        allocation=allocation(worker),
        members=members,
        kill_time=kill_time([worker]),
    )


def explanation_message(account: Explanation) -> job_pb2.Explanation:
    return message_of(
        job_pb2.Explanation,
        account,
        workers=[
            message_of(job_pb2.PlannedWorker, worker, placement_group=worker.group_id) for worker in account.workers
        ],
        victims=[preemption_message(record) for record in account.victims[-MAX_VICTIMS:]],
    )


def kill_time(workers: Iterable[WorkerRecord]) -> Timestamp | None:
    """When those that are being stopped are killed at the latest; None: none is."""
    return timestamp(max((worker.kill_ms for worker in workers if worker.state is WorkerState.STOPPING), default=0))


def _outcome(record: PreemptionRecord) -> str:
    if record.outcome is None:
        return ""
    lost = f"; checkpoint lost: {record.checkpoint_lost}" if record.checkpoint_lost else ""
    return f"{record.outcome.value}{lost}"


def preemption_message(record: PreemptionRecord) -> job_pb2.Preemption:
    """One victim that yields or yielded."""
    return message_of(
        job_pb2.Preemption,
        record,
        victim=record.victim_name,
        preemptor=record.preemptor_name,
        rule=record.rule.value,
        decide_time=timestamp(record.decided_ms),
        yield_ms=record.yield_ms if record.yield_ms >= 0 else None,
        outcome=_outcome(record),
    )
