"""Parts that several messages share: times, reasons, planned and preempted."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.timestamp_pb2 import Timestamp

from callboard.scheduler.records.job_records import PreemptionRecord, WorkerRecord
from callboard.scheduler.records.refusals import Reason
from callboard.scheduler.records.states import WorkerState
from callboard.v1 import common_pb2, job_pb2


def timestamp(ms: int) -> Timestamp | None:
    """A time in milliseconds since 1970; None for 0, which means "never"."""
    if ms == 0:
        return None
    seconds, rest = divmod(ms, 1000)
    return Timestamp(seconds=seconds, nanos=rest * 1_000_000)


def reason_message(reason: Reason) -> common_pb2.Reason:
    """One statement of why."""
    return common_pb2.Reason(
        code=reason.code,
        subject=reason.subject,
        resource=reason.resource,
        asked=reason.asked,
        available=reason.available,
        message=reason.message,
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
    return job_pb2.Preemption(
        victim=record.victim_name,
        preemptor=record.preemptor_name,
        rule=record.rule.value,
        reason=record.reason,
        decide_time=timestamp(record.decided_ms),
        yield_ms=record.yield_ms if record.yield_ms >= 0 else None,
        outcome=_outcome(record),
        checkpoint_lost=record.checkpoint_lost,
        lost_work_ms=record.lost_work_ms,
    )
