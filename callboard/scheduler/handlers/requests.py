"""The requests of people: pools, policies and jobs, checked whole, then carried out."""

from __future__ import annotations

from dataclasses import replace

from callboard.model.quantities import format_amount
from callboard.model.specs import JobSpec, StopPolicy
from callboard.scheduler.account.explain import unschedulable
from callboard.scheduler.handlers import groups, preempting, starting, stopping
from callboard.scheduler.handlers import stopping as ending
from callboard.scheduler.plan.planning import Victim, could_ever_fit, plan_with
from callboard.scheduler.plan.quota import borrowable
from callboard.scheduler.records.asks import Ask
from callboard.scheduler.records.events import (
    GroupDeleted,
    JobCancelled,
    JobCompleted,
    JobPreempted,
    JobsRenewed,
    JobSubmitted,
    PolicySet,
    PoolCreated,
    PoolDeleted,
    PoolUpdated,
)
from callboard.scheduler.records.job_records import JobRecord, SpecRecord, evolve
from callboard.scheduler.records.pool_records import PoolRecord
from callboard.scheduler.records.refusals import Refusal, RefusalCode
from callboard.scheduler.records.states import (
    ENDED,
    GROUP_REMOVING,
    JOB_CANCELLED,
    JOB_PENDING,
    JOB_RUNNING,
    JOB_STARTING,
    JOB_STOPPING,
    JOB_SUCCEEDED,
    GroupKind,
    JobState,
    Removal,
    Rule,
    StopKind,
)
from callboard.scheduler.records.wording import asked
from callboard.scheduler.state.state import State
from callboard.scheduler.state.transaction import Transaction

# ---- pools and policy ----


def create_pool(tx: Transaction, event: PoolCreated) -> str:
    """Makes a pool; an equal one that exists is returned as it is."""
    name = event.spec.name
    old = tx.state.pools.get(name)
    if old is not None and not old.deleting and old.spec == event.spec:
        return name
    if old is not None:
        differs = [field for field in old.spec.__slots__ if getattr(old.spec, field) != getattr(event.spec, field)]
        what = f"exists and differs in {', '.join(differs)}; change it with `callboard pool set` or update_pool()"
        if old.deleting:
            what = "is being deleted; make it again once it is gone"
        raise Refusal(RefusalCode.ALREADY_EXISTS, f"pools/{name}", f"pool {name} {what}")
    revision = tx.event("pool.created", f"pools/{name}", "", "created")
    tx.put(PoolRecord(spec=event.spec, made_at=revision, revision=revision))
    return name


def update_pool(tx: Transaction, event: PoolUpdated) -> str:
    """Changes a pool. Reserved groups whose shape changed are removed as soon as they are free."""
    pool = _pool(tx, event.spec.name, event.expected_version)
    if pool.deleting:
        raise Refusal(RefusalCode.WRONG_STATE, f"pools/{event.spec.name}", f"pool {event.spec.name} is being deleted")
    if pool.spec == event.spec and not pool.destroyed_reserved:
        return event.spec.name
    revision = tx.event("pool.updated", f"pools/{event.spec.name}", "", "changed")
    tx.put(evolve(pool, spec=event.spec, spec_version=pool.spec_version + 1, destroyed_reserved=(), revision=revision))
    if event.spec.stop_policy is StopPolicy.HOLD_AND_DRAIN:
        _drain_pool(tx, event.spec.name)
    groups.follow_pool(tx, event.spec.name, pool.spec.pg_pool)
    return event.spec.name


def _drain_pool(tx: Transaction, name: str) -> None:
    """Preempts what runs in a pool that holds and drains."""
    reason = f"pool {name} drains (stop policy)"
    for uid in jobs_in(tx, name):
        if tx.state.jobs[uid].state in (JOB_RUNNING, JOB_STARTING):
            preempting.preempt(tx, Victim(uid, Rule.DRAIN, reason), None)
        stopping.hasten_job(tx, uid, reason, StopKind.DRAIN)


def delete_pool(tx: Transaction, event: PoolDeleted) -> str:
    """Begins to delete a pool; it is gone when nothing of it is left. Idempotent while it drains."""
    pool = _pool(tx, event.name, event.expected_version)
    if pool.deleting:
        return event.name
    inside = jobs_in(tx, event.name)
    if inside and not event.force:
        raise Refusal(
            RefusalCode.POOL_IN_USE,
            f"pools/{event.name}",
            f"pool {event.name} has jobs that have not ended ({len(inside)}); cancel them or delete with force",
        )
    revision = tx.event("pool.deleting", f"pools/{event.name}", "DELETING", "being deleted")
    tx.put(evolve(pool, deleting=True, revision=revision))
    for uid in inside:
        cancel(tx, JobCancelled(now_ms=tx.now_ms, uid=uid, reason=f"pool {event.name} is being deleted"))
    for group_id in list(tx.state.group_index.of_pool.get(event.name, ())):
        groups.doom(tx, group_id, Removal.POOL_DELETED, "its pool is being deleted")
    finish_deletion(tx, event.name)
    return event.name


def finish_deletion(tx: Transaction, name: str) -> None:
    """Drops a deleting pool once it has no job and no group left."""
    pool = tx.state.pools.get(name)
    if pool is not None and pool.deleting and not jobs_in(tx, name) and not tx.state.group_index.of_pool.get(name):
        tx.drop("pool", name)
        tx.event("pool.deleted", f"pools/{name}", "DELETED", "nothing of it is left")


def jobs_in(tx: Transaction, pool: str) -> list[str]:
    """Jobs that have not ended and are charged to a pool."""
    return [
        uid
        for state, uids in tx.state.jobs_by_state.items()
        if state not in ENDED
        for uid in uids
        if pool in (tx.state.specs[uid].spec.pool, *(c.pool for c in tx.state.specs[uid].spec.components))
    ]


def set_policy(tx: Transaction, event: PolicySet) -> int:
    """Replaces the cluster's policy and returns its version."""
    meta = tx.state.meta
    if event.expected_version and event.expected_version != meta.policy_version:
        raise _stale("policy", event.expected_version, meta.policy_version)
    if event.policy != meta.policy:
        tx.count(policy=event.policy, policy_version=meta.policy_version + 1)
        tx.event("policy.changed", "policy", "", "changed")
    return tx.state.meta.policy_version


# ---- jobs ----


def submit(tx: Transaction, event: JobSubmitted) -> str:
    """Takes a job in. Refused, with nothing kept, when it could never run."""
    spec = event.spec
    if event.request_id and event.request_id in tx.state.requests:
        uid = tx.state.requests[event.request_id]
        if tx.state.specs[uid].spec != spec:
            raise Refusal(
                RefusalCode.REQUEST_ID_REUSED,
                f"jobs/{tx.state.jobs[uid].name}",
                f"request id {event.request_id} was used for another request",
                "request_id",
            )
        return uid
    live = tx.state.live_job_named(spec.name)
    if live is not None:
        raise Refusal(
            RefusalCode.ALREADY_EXISTS,
            f"jobs/{spec.name}",
            f"job {spec.name} exists and is {live.state}; cancel it or choose another name",
            "spec.name",
        )
    check_spec(tx, spec)
    deadline_ms = 0
    if spec.wait_for_nodes_ms is None:
        refuse_unschedulable(tx, spec)
    elif not could_ever_fit(tx.state, spec):
        deadline_ms = tx.now_ms + spec.wait_for_nodes_ms
    tx.draw("total_submitted")
    tx.put(SpecRecord(uid=event.uid, spec=spec))
    tx.add_job(
        event.uid,
        spec.name,
        "submitted",
        order=tx.draw("next_order"),
        deadline_ms=deadline_ms,
        starving_ms=tx.now_ms + spec.starvation_after_ms if spec.starvation_after_ms else 0,
        session_ms=tx.now_ms + spec.session_lease_ms if spec.session_lease_ms else 0,
        request_id=event.request_id,
    )
    tx.fresh.append(event.uid)
    return event.uid


def check_spec(tx: Transaction, spec: JobSpec) -> None:
    """Refuses what could never be admitted by the pools there are."""
    for ask in tx.state.shapes.of(spec).asks:
        pool = tx.state.pools.get(ask.pool)
        if pool is None or pool.deleting:
            what = "is being deleted" if pool else "does not exist"
            raise Refusal(RefusalCode.NOT_FOUND, f"pools/{ask.pool}", f"pool {ask.pool} {what}", "spec.pool")
        short = _beyond_quota(tx.state, ask)
        if short is not None:
            raise Refusal(
                RefusalCode.QUOTA_EXCEEDED,
                f"pools/{ask.pool}",
                f"{spec.name} asks for more than pool {ask.pool} can have",
                "spec.components",
                about=spec,
            )


def _beyond_quota(state: State, ask: Ask) -> tuple[str, int] | None:
    """A resource of which an ask wants more than its pool can ever have, and that limit."""
    pool = state.pools[ask.pool].spec
    for resource, nominal in pool.nominal:
        limit = nominal + borrowable(state.pools, pool, resource)
        if ask.resources.get(resource) > limit:
            return resource, limit
    return None


def refuse_unschedulable(tx: Transaction, spec: JobSpec) -> None:
    """Refuses a job that no node could ever hold, unless nodes of before a restart are still on their way."""
    if tx.state.meta.reconcile_until_ms or could_ever_fit(tx.state, spec):
        return
    raise Refusal(
        RefusalCode.UNSCHEDULABLE,
        f"jobs/{spec.name}",
        f"nothing there could ever hold {spec.name}",
        "spec.components",
        about=spec,
    )


def accounted(state: State, refusal: Refusal) -> Refusal:
    """A refusal with everything that its sender is told, on the state on which it was decided."""
    spec = refusal.about
    if spec is None:
        return refusal
    account = unschedulable(state, spec)
    message = account.summary
    if refusal.code is RefusalCode.QUOTA_EXCEEDED:
        over = ((ask, _beyond_quota(state, ask)) for ask in state.shapes.of(spec).asks)
        ask, (resource, limit) = next((ask, short) for ask, short in over if short is not None)
        wanted = asked(resource, [slot.resources.get(resource) for slot in ask.slots])
        message = (
            f"{spec.name} asks for {wanted}, but pool {ask.pool} can have {format_amount(resource, limit)}; "
            "ask for less or raise the quota"
        )
    return replace(refusal, message=message, reasons=account.reasons, unblock=account.unblock)


def cancel(tx: Transaction, event: JobCancelled) -> str:
    """Cancels a job in whatever state it is. Idempotent; one that ends otherwise already goes on ending so."""
    job = _job(tx, event.uid)
    if event.destroy_groups and job.state not in ENDED:
        ending.destroy_groups_of(tx, job)
    _finish(tx, job, JOB_CANCELLED, event.reason or "cancelled", event.within_ms)
    return job.uid


def renew(tx: Transaction, event: JobsRenewed) -> int:
    """Prolongs the leases of jobs whose client is alive; returns the shortest of them in ms, 0 for none."""
    leases = []
    for uid in dict.fromkeys(event.uids):
        job = tx.state.jobs.get(uid)
        lease_ms = tx.state.specs[uid].spec.session_lease_ms if job is not None else 0
        if job is not None and job.state not in ENDED and lease_ms:
            leases.append(lease_ms)
            # Written down at most every tenth of a lease: a renewal is no news worth a commit.
            if job.session_ms < tx.now_ms + lease_ms - lease_ms // 10:
                tx.change_job(uid, session_ms=tx.now_ms + lease_ms)
    return min(leases, default=0)


def session_over(tx: Transaction, uid: str) -> None:
    """The client of a job has not been heard of for its lease."""
    tx.change_job(uid, session_ms=0)
    cancel(tx, JobCancelled(now_ms=tx.now_ms, uid=uid, reason="its client has not been heard of for its lease"))


def complete(tx: Transaction, event: JobCompleted) -> str:
    """Ends a job as succeeded in whatever state it is. Idempotent."""
    job = _job(tx, event.uid)
    _finish(tx, job, JOB_SUCCEEDED, event.reason or "completed")
    return job.uid


def _finish(tx: Transaction, job: JobRecord, target: JobState, reason: str, within_ms: int | None = None) -> None:
    kind = StopKind.CANCEL if target is JOB_CANCELLED else StopKind.COMPLETE
    if job.state in ENDED:
        return
    if job.state is JOB_STOPPING:
        stopping.hasten_job(tx, job.uid, reason, kind, within_ms)
    elif job.state is JOB_PENDING:
        ending.end(tx, job.uid, target, reason)
    else:
        stopping.stop(tx, job.uid, JOB_STOPPING, reason, kind, target=target, within_ms=within_ms)


def preempt(tx: Transaction, event: JobPreempted) -> str:
    """Makes a job yield by hand. The rules of the policy don't bind a person."""
    job = _job(tx, event.uid)
    if job.state not in (JOB_RUNNING, JOB_STARTING):
        raise Refusal(
            RefusalCode.WRONG_STATE, f"jobs/{job.name}", f"job {job.name} is {job.state} and holds nothing to yield"
        )
    preemptor = None
    if event.for_uid:
        preemptor = _job(tx, event.for_uid)
        if preemptor.state is not JOB_PENDING:
            raise Refusal(
                RefusalCode.WRONG_STATE,
                f"jobs/{preemptor.name}",
                f"job {preemptor.name} is {preemptor.state} and waits for nothing",
                "for_job",
            )
        reason = event.reason or preempting.BY_HAND
        spec = tx.state.specs[preemptor.uid].spec
        found = plan_with(tx.state, preemptor.uid, spec, Victim(job.uid, Rule.MANUAL, reason))
        if found is None:
            raise Refusal(
                RefusalCode.PREEMPTION_REFUSED,
                f"jobs/{job.name}",
                f"{preemptor.name} could not start even without {job.name}; see job explain {preemptor.name}",
                "for_job",
            )
        starting.drop_nomination(tx, preemptor.uid, "planned again")
        starting.nominate(tx, preemptor.uid, found)
        for group_id in found.trims:
            groups.trim(tx, group_id, f"makes room for {preemptor.name}")
    preempting.preempt(tx, Victim(job.uid, Rule.MANUAL, event.reason or preempting.BY_HAND), preemptor)
    return job.uid


def delete_group(tx: Transaction, event: GroupDeleted) -> str:
    """Removes an idle placement group; a reserved one stays away. Idempotent, also when it is gone."""
    group = tx.state.groups.get(event.group_id)
    if group is None and groups.was_planned(tx.state, event.group_id):
        return event.group_id
    if group is None:
        raise Refusal(
            RefusalCode.NOT_FOUND,
            f"placementGroups/{event.group_id}",
            f"there is no placement group {event.group_id}",
            "name",
        )
    if group.state is GROUP_REMOVING:
        return event.group_id
    holders = tx.state.workers_in(event.group_id)
    if (holders or group.nominee) and not event.when_free:
        uid = holders[0].job if holders else group.nominee
        name = tx.state.jobs[uid].name if uid in tx.state.jobs else uid
        what = "is used by" if holders else "is held for"
        raise Refusal(
            RefusalCode.WRONG_STATE,
            f"placementGroups/{event.group_id}",
            f"placement group {event.group_id} {what} job {name}; cancel that first, or remove it when it is free",
        )
    if group.group_kind is GroupKind.RESERVED:
        ending.keep_away(tx, group.pool, group.reserved_index)
    groups.doom(tx, event.group_id, Removal.REQUESTED, "deleted on request")
    return event.group_id


def _pool(tx: Transaction, name: str, expected_version: int) -> PoolRecord:
    pool = tx.state.pools.get(name)
    if pool is None:
        raise Refusal(RefusalCode.NOT_FOUND, f"pools/{name}", f"there is no pool {name}", "name")
    if expected_version and expected_version != pool.spec_version:
        raise _stale(f"pools/{name}", expected_version, pool.spec_version)
    return pool


def _job(tx: Transaction, uid: str) -> JobRecord:
    job = tx.state.jobs.get(uid)
    if job is None:
        raise Refusal(RefusalCode.NOT_FOUND, f"jobs/{uid}", f"there is no job {uid}", "name")
    return job


def _stale(subject: str, expected: int, found: int) -> Refusal:
    return Refusal(
        RefusalCode.ETAG_MISMATCH,
        subject,
        f"{subject} changed since it was read (etag {expected}, now {found}); read it again",
        "etag",
    )
