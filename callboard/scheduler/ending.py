"""What is left of a job that is over?"""

from __future__ import annotations

from callboard.scheduler import groups
from callboard.scheduler.evolving import evolve
from callboard.scheduler.records import JobRecord
from callboard.scheduler.starting import drop_nomination
from callboard.scheduler.states import ENDED, GroupKind, JobState, Removal, WorkerState
from callboard.scheduler.transaction import Transaction


def end(tx: Transaction, uid: str, state: JobState, reason: str) -> None:
    """Ends a job that holds nothing. Quarantined workers stay on record until they are proved gone."""
    job = tx.state.jobs[uid]
    drop_nomination(tx, uid, reason)
    ttl_ms = tx.state.specs[uid].spec.ttl_after_finished_ms
    tx.move_job(
        uid,
        state,
        reason,
        end_ms=tx.now_ms,
        groups=(),
        eligible_ms=0,
        session_ms=0,
        deadline_ms=tx.now_ms + ttl_ms if ttl_ms is not None else 0,
    )
    for worker in tx.state.workers_of(uid):
        if worker.state in (WorkerState.STOPPED, WorkerState.LOST):
            tx.drop("worker", worker.generation)
    for checkpoint in tx.state.checkpoints_of(job.uid):
        tx.drop("checkpoint", checkpoint.key)


def forget(tx: Transaction, uid: str) -> None:
    """Takes an ended job off the list."""
    assert tx.state.jobs[uid].state in ENDED
    assert uid not in tx.state.jobs_holding, "the story of a worker that nobody proved gone is still needed"
    job = tx.state.jobs[uid]
    tx.event("job.forgotten", f"jobs/{job.name}", job.state.value, "it ended long enough ago", {"uid": uid})
    tx.drop("job", uid)
    tx.drop("spec", uid)


def destroy_groups_of(tx: Transaction, job: JobRecord) -> None:
    """Marks every group of a job for removal, reserved ones too: they stay away until their pool is updated."""
    for group_id in job.groups:
        group = tx.state.groups.get(group_id)
        if group is not None and group.job == job.uid:
            groups.doom(tx, group_id, Removal.REQUESTED, f"removed with {job.name}, as asked")
            if group.group_kind is GroupKind.RESERVED:
                keep_away(tx, group.pool, group.reserved_index)


def keep_away(tx: Transaction, pool_name: str, index: int) -> None:
    """Notes that a reserved group was removed on purpose."""
    pool = tx.state.pools.get(pool_name)
    if pool is not None and index not in pool.destroyed_reserved:
        tx.put(evolve(pool, destroyed_reserved=tuple(sorted({*pool.destroyed_reserved, index}))))
