"""Parts that several messages share: the last moment of what is being stopped, and who was preempted."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.timestamp_pb2 import Timestamp

from callboard.scheduler.records.job_records import PreemptionRecord, WorkerRecord
from callboard.scheduler.records.states import WorkerState
from callboard.v1 import job_pb2
from callboard.wire.alike import message_of, timestamp


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
