"""The preemption of a job: its victims are told to stop, and what they leave is kept for it."""

from __future__ import annotations

from callboard.scheduler.handlers.stopping import finish_if_all_returned, shed, stop
from callboard.scheduler.plan.planning import Victim
from callboard.scheduler.plan.preemption import lost_work_ms, stop_timeouts
from callboard.scheduler.records.job_records import JobRecord, PreemptionRecord
from callboard.scheduler.records.states import ENDED, JOB_PREEMPTING, Rule, StopKind
from callboard.scheduler.state.transaction import Transaction

BY_HAND, ON_REQUEST = "asked by hand", "drained on request"
"""Reasons of those who give none."""

KEPT_PREEMPTIONS = 1_000
"""Most preemption records kept; the totals go on counting."""


def preempt(tx: Transaction, victim: Victim, preemptor: JobRecord | None, *, within_ms: int | None = None) -> None:
    """Makes a job, or one extra worker of it, yield.

    Args:
        within_ms: shortens the time of its hooks (a drain's deadline).
    """
    uid, rule, reason = victim.uid, victim.rule, victim.reason
    job = tx.state.jobs[uid]
    tx.draw("total_preemptions")
    number = tx.draw("next_preemption")
    record = PreemptionRecord(
        number=number,
        victim=uid,
        victim_name=job.name,
        preemptor=preemptor.uid if preemptor else "",
        preemptor_name=preemptor.name if preemptor else "",
        pool=tx.state.specs[uid].spec.pool,
        rule=rule,
        reason=reason,
        decided_ms=tx.now_ms,
        generation=victim.generation,
        lost_work_ms=lost_work_ms(job, tx.now_ms),
    )
    tx.put(record)
    tx.drop("preemption", number - KEPT_PREEMPTIONS)
    by = f"by {preemptor.name}" if preemptor else "by hand" if rule is Rule.MANUAL else "to drain"
    kind = StopKind.DRAIN if rule is Rule.DRAIN else StopKind.PREEMPT
    # What somebody gave as reason is in the job's story; that of a rule is in the record of the preemption.
    given = rule in (Rule.DRAIN, Rule.MANUAL) and reason not in (BY_HAND, ON_REQUEST)
    why = f"preempted {by}: {reason}" if given else f"preempted {by}"
    tx.event(
        "preemption.decided",
        f"jobs/{job.name}",
        job.state.value,
        f"preempted {by}: {reason}",
        {"victim": job.name, "preemptor": record.preemptor_name, "rule": rule.value},
    )
    tx.change_job(uid, preemptions=job.preemptions + 1)
    if preemptor is not None:
        note_yield(tx, uid, preemptor.uid)
    if victim.generation:
        bounds = stop_timeouts(tx.state, tx.state.specs[uid].spec, within_ms)
        shed(tx, tx.state.workers[victim.generation], why, kind, bounds)
        finish_if_all_returned(tx, uid)
        return
    stop(tx, uid, JOB_PREEMPTING, why, kind, checkpoint=True, within_ms=within_ms)


def note_yield(tx: Transaction, uid: str, winner: str) -> None:
    """Remembers that a job yielded to another, as long as that one has not ended."""
    known = tx.state.jobs[uid].yielded_to
    live = [other for other in known if other in tx.state.jobs and tx.state.jobs[other].state not in ENDED]
    tx.change_job(uid, yielded_to=(*[other for other in live if other != winner], winner))
