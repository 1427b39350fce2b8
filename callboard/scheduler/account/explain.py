"""The explanation of a job: every node, quota, group rule and victim, and what would unblock it.

Read-only, and computed when somebody asks: the hot path keeps no reasons. CLI, web and error details only render it.
"""

from __future__ import annotations

from dataclasses import replace

from callboard.model.frozen import dataclass
from callboard.model.specs import JobSpec
from callboard.scheduler.account.awaited import (
    Short,
    awaited,
    backoff,
    changes_for,
    checkpoint_lost,
    failures,
    killed_in,
    leaving_beside,
    living_copies,
    replacing,
    short_of_workers,
    victims_of,
    waiting_workers,
)
from callboard.scheduler.account.blockers import blockers
from callboard.scheduler.account.remedies import remedies
from callboard.scheduler.account.unyielding import start_by_time, unyielding, waits_for_time
from callboard.scheduler.plan.planning import Blocked, Plan, best_case, could_ever_fit, plan
from callboard.scheduler.plan.preemption import lost_work_ms, policy_owner
from callboard.scheduler.plan.view import Assumption, View
from callboard.scheduler.records.asks import asks_of
from callboard.scheduler.records.job_records import JobRecord, PreemptionRecord
from callboard.scheduler.records.node_record import DeviceShare
from callboard.scheduler.records.refusals import Reason
from callboard.scheduler.records.states import JobState
from callboard.scheduler.records.wording import join, time_left
from callboard.scheduler.state.state import State

LAST_WORDS = 5
"""Lines of stderr in an account; the job itself has more."""


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """Where one worker runs or would run; ``group_id`` empty: in a new group."""

    component: str
    rank: int
    node_id: str
    devices: tuple[DeviceShare, ...]
    group_id: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The account of one job.

    Attributes:
        verdict: what would happen if it were looked at now: START, WAIT, TRIM, PREEMPT, UNSCHEDULABLE; NONE for a job
            that isn't pending.
        summary: one sentence.
        reasons: everything that was considered.
        unblock: smallest changes that would let it start.
        workers: where its workers run or would run.
        victims: who yields or would yield.
        queue_position: place in the queue from 1; 0: not waiting.
    """

    verdict: str
    summary: str
    reasons: tuple[Reason, ...] = ()
    unblock: tuple[str, ...] = ()
    workers: tuple[PlannedWorker, ...] = ()
    victims: tuple[PreemptionRecord, ...] = ()
    queue_position: int = 0


def explain(state: State, uid: str, now_ms: int) -> Explanation:
    """The account of a job that was submitted."""
    job, spec = state.jobs[uid], state.specs[uid].spec
    if job.state is not JobState.PENDING:
        victims = tuple(state.preemptions_for(uid))
        workers = tuple(
            PlannedWorker(worker.component, worker.rank, worker.node_id, worker.devices, worker.group_id)
            for worker in state.workers_of(uid)
            if worker.attempt == job.attempt
        )
        kill = killed_in(state.workers_of(uid), now_ms)
        short = short_of_workers(state, job, spec, now_ms)
        lacking = [_is_short(job, component) for component in short]
        said = [
            f"{job.name} is {job.state}: {job.reason}",
            *([kill] if kill else []),
            *(why.message for why in lacking),
        ]
        waiting = waiting_workers(state, job, now_ms)
        patience = replacing(job, spec, now_ms)
        reasons = (*checkpoint_lost(job), *failures(job), *waiting, *patience, *lacking, *_last_words(job))
        changes = changes_for(state, job, spec, short)
        return Explanation("NONE", "; ".join(said), reasons, changes, workers, victims)
    position = next(i for i, key in enumerate(state.queue, 1) if key[-1] == uid)
    if job.nominated:
        reasons = (
            *_reconciling(state),
            *backoff(job, now_ms),
            *living_copies(state, job, spec),
            *awaited(state, job, now_ms),
            *checkpoint_lost(job),
        )
        what = join([reason.message for reason in reasons]) or "what is on its way out"
        workers = _nominated_workers(state, job, spec)
        summary = f"{job.name} holds its room and waits for {what}"
        return Explanation("WAIT", summary, reasons, (), workers, victims_of(state, job), position)
    found = _account(state, uid, spec, job.submit_ms, now_ms)
    if found.verdict == "UNSCHEDULABLE" and job.deadline_ms > now_ms:
        found = _waits_for_nodes(job, found, now_ms)
    held_back = (*backoff(job, now_ms), *living_copies(state, job, spec))
    if held_back:
        summary = f"{job.name} waits for {held_back[0].message}"
        found = replace(found, verdict="WAIT", summary=summary, reasons=(*held_back, *found.reasons))
    reasons = (*found.reasons, *checkpoint_lost(job))
    return replace(found, reasons=reasons, queue_position=position)


def _is_short(job: JobRecord, short: Short) -> Reason:
    message = f"{short.component} has {short.there} of {short.wanted} workers: {short.why}"
    return Reason("SHORT_OF_WORKERS", f"jobs/{job.name}", message, "", short.wanted, short.there)


def _waits_for_nodes(job: JobRecord, found: Explanation, now_ms: int) -> Explanation:
    """The account of a job that nothing there could hold and that said how long it waits for what could (PG-17)."""
    message = f"waits {time_left(job.deadline_ms - now_ms)} more for nodes or quotas that could hold it"
    reason = Reason("WAITS_FOR_NODES", f"jobs/{job.name}", message)
    return replace(
        found, verdict="WAIT", summary=f"{job.name} {message}; {found.summary}", reasons=(reason, *found.reasons)
    )


def _last_words(job: JobRecord) -> tuple[Reason, ...]:
    """The end of what the worker that failed the job wrote to stderr: often the cause that its exception only hints
    at."""
    if job.state not in (JobState.FAILED, JobState.RECOVERING, JobState.STOPPING) or not job.stderr_tail:
        return ()
    lines = "".join(f"\n    {line}" for line in job.stderr_tail.splitlines()[-LAST_WORDS:])
    return (Reason("STDERR", f"jobs/{job.name}", f"the worker that failed it wrote last to stderr:{lines}"),)


def explain_spec(state: State, spec: JobSpec, now_ms: int) -> Explanation:
    """The account of a job that nobody can submit: on nodes that are described only. What would become of one on a
    real cluster, its scheduler says by deciding its submission (``Scheduler.what_if``)."""
    return _account(state, "", spec, now_ms, now_ms)


def unschedulable(state: State, spec: JobSpec) -> Explanation:
    """The account of a job that the nodes and quotas there are could never hold."""
    reasons = tuple(blockers(state, View(state, Assumption(empty=True)), spec))
    unblock = remedies(state, spec, View(state, Assumption(empty=True)))
    # Where only quotas or group rules stand in the way, the nodes are not to blame.
    by_nodes = any(reason.subject.split("/")[0] == "nodes" for reason in reasons)
    what = f"no node could ever hold {spec.name}" if by_nodes else f"{spec.name} could never start"
    summary = f"{what}: {join([reason.message for reason in reasons])}"
    return Explanation("UNSCHEDULABLE", summary, reasons, unblock)


def _account(state: State, uid: str, spec: JobSpec, since_ms: int, now_ms: int) -> Explanation:
    recounting = _reconciling(state)
    if recounting:
        return Explanation("WAIT", recounting[0].message, recounting)
    found = plan(state, uid, spec, since_ms, now_ms)
    if isinstance(found, Plan):
        return _planned(state, uid, spec, found, now_ms)
    if not could_ever_fit(state, spec):
        return unschedulable(state, spec)
    return _waits(state, uid, spec, found, since_ms, now_ms=now_ms)


def _reconciling(state: State) -> tuple[Reason, ...]:
    if not state.meta.reconcile_until_ms:
        return ()
    message = "the controller restarted and counts what runs before it admits anything"
    return (Reason("RECONCILING", "scheduler", message),)


def _planned(state: State, uid: str, spec: JobSpec, found: Plan, now_ms: int) -> Explanation:
    workers = tuple(
        PlannedWorker(slot.component, slot.rank, use.bundles[index].node_id, use.bundles[index].devices, use.group_id)
        for use in found.uses
        for slot, index in zip(use.ask.slots, use.bundle_of, strict=True)
    )
    victims = _victims(state, uid, spec, found, now_ms)
    reasons = [
        Reason("VICTIM", f"jobs/{record.victim_name}", f"{record.victim_name} yields: {record.reason}")
        for record in victims
    ]
    reasons += [
        Reason("TRIM", f"placementGroups/{group_id}", f"the idle group {group_id} is removed")
        for group_id in found.trims
    ]
    if found.waits:
        bundles = [bundle for use in found.uses for bundle in use.bundles]
        places, pools = dict.fromkeys(bundle.node_id for bundle in bundles), [use.ask.pool for use in found.uses]
        reasons += leaving_beside(state, places, pools, now_ms)
    nodes = join(sorted({worker.node_id for worker in workers}))
    if victims:
        names = join([record.victim_name for record in victims])
        return Explanation(
            "PREEMPT", f"{spec.name} starts on {nodes} once {names} yielded", tuple(reasons), (), workers, victims
        )
    if found.waits:
        verdict = "TRIM" if found.trims else "WAIT"
        return Explanation(verdict, f"{spec.name} starts on {nodes} once its room is free", tuple(reasons), (), workers)
    return Explanation("START", f"{spec.name} starts on {nodes} at once", tuple(reasons), (), workers)


def _victims(state: State, uid: str, spec: JobSpec, found: Plan, now_ms: int) -> tuple[PreemptionRecord, ...]:
    """The preemptions that a plan would decide."""
    return tuple(
        PreemptionRecord(
            number=0,
            victim=victim.uid,
            victim_name=state.jobs[victim.uid].name,
            preemptor=uid,
            preemptor_name=spec.name,
            pool=state.specs[victim.uid].spec.pool,
            rule=victim.rule,
            reason=victim.reason,
            decided_ms=now_ms,
            lost_work_ms=lost_work_ms(state.jobs[victim.uid], now_ms),
        )
        for victim in found.victims
    )


def _waits(state: State, uid: str, spec: JobSpec, found: Blocked, since_ms: int, *, now_ms: int) -> Explanation:
    view = View(state, Assumption(subject=uid))
    reasons = blockers(state, view, spec)
    later = start_by_time(state, uid, spec, since_ms, now_ms)
    if later is not None:
        summary, why = waits_for_time(state, spec, later, now_ms)
        reasons = [*why, *reasons, *unyielding(state, uid, spec, found, later, now_ms=now_ms)]
        change = f"wait {time_left(later.at_ms - now_ms)}"
        return Explanation(
            "WAIT", summary, tuple(reasons), (change,), (), _victims(state, uid, spec, later.plan, now_ms)
        )
    first = join([reason.message for reason in reasons])
    changes = remedies(state, spec, View(state, best_case(state, uid, spec, now_ms)))
    if found.too_many:
        most = state.policy_for(spec.pool).max_victims_per_round
        message = f"{found.too_many} would have to yield to {spec.name}, and by the policy at most {most} may at once"
        reasons.append(Reason("TOO_MANY_VICTIMS", "policy", message, "", found.too_many, most))
        whose = policy_owner(state, spec.pool, "max_victims_per_round")
        changes = (*changes, f"raise max_victims_per_round{whose} to {found.too_many}")
    reasons += unyielding(state, uid, spec, found, None, now_ms=now_ms)
    if not changes:
        # Time alone may help. Whoever can't wait may make room.
        changes = remedies(state, spec, view)
    return Explanation("WAIT", f"{spec.name} waits: {first or 'nobody yields to it'}", tuple(reasons), changes)


def _nominated_workers(state: State, job: JobRecord, spec: JobSpec) -> tuple[PlannedWorker, ...]:
    workers = []
    for ask, group_id in zip(asks_of(spec), job.groups, strict=True):
        group = state.groups.get(group_id)
        if group is None:
            continue
        for slot, bundle in zip(ask.slots, group.bundles, strict=False):
            workers.append(PlannedWorker(slot.component, slot.rank, bundle.node_id, bundle.devices, group_id))
    return tuple(workers)
