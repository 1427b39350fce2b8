"""Parts that several messages share: times, reasons, planned and preempted."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from callboard.scheduler.records import PreemptionRecord
from callboard.scheduler.refusals import Reason
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


def preemption_message(record: PreemptionRecord) -> job_pb2.Preemption:
    """One victim that yields or yielded."""
    return job_pb2.Preemption(
        victim=record.victim_name,
        preemptor=record.preemptor_name,
        rule=record.rule.value,
        reason=record.reason,
        decide_time=timestamp(record.decided_ms),
        yield_ms=record.yield_ms if record.yield_ms >= 0 else None,
        outcome=record.outcome.value if record.outcome is not None else "",
        lost_work_ms=record.lost_work_ms,
    )
