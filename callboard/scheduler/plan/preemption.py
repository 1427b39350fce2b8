"""The rules between two jobs: whether one must yield to the other (docs/scheduling.md)."""

from __future__ import annotations

from callboard.model.frozen import dataclass
from callboard.model.policy import LabelRules, PreemptionPolicy
from callboard.model.specs import JobSpec
from callboard.scheduler.plan.quota import borrowed, borrows, cohort_of
from callboard.scheduler.plan.view import Assumption, View
from callboard.scheduler.records.job_records import JobRecord
from callboard.scheduler.records.states import ENDED, JOB_RUNNING, JOB_STARTING, GroupKind, Rule
from callboard.scheduler.records.wording import time_left
from callboard.scheduler.state.shapes import YieldClass
from callboard.scheduler.state.state import State


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a job must yield to another.

    Attributes:
        rule: what says yes; None: it need not yield.
        reason: why, as a sentence.
        retry_ms: when the answer may change by itself; 0: only by a change of something else.
        code: what protects it, in one word, where it need not yield.
    """

    rule: Rule | None
    reason: str
    retry_ms: int = 0
    code: str = ""


def _no(code: str, reason: str, retry_ms: int = 0) -> Verdict:
    return Verdict(None, reason, retry_ms, code)


@dataclass(frozen=True, slots=True)
class Claims:
    """What quota gives a job against jobs of other pools in its cohort.

    Attributes:
        reclaimable: pools that are beyond their own quota in a resource that the job needs and has a right to: they
            give back what was lent, whatever the priorities.
        owners: pools that use no more than is theirs while the job would borrow: nothing there yields to it by
            priority, else the owner would take its quota back at once, for ever.
    """

    reclaimable: frozenset[str] = frozenset()
    owners: frozenset[str] = frozenset()


NO_CLAIMS = Claims()

LOOK_AGAIN_MS = 1_000
"""At a job that is starting, and may be a victim once it has run for long enough."""


def policy_owner(state: State, pool: str, field: str) -> str:
    """ " of pool p" where a pool states a field of the policy for itself, else nothing: the cluster's value holds."""
    record = state.pools.get(pool)
    return f" of pool {pool}" if record and getattr(record.spec.preemption, field) is not None else ""


def may_yield(
    state: State,
    victim: JobRecord,
    preemptor: JobSpec,
    preemptor_uid: str,
    now_ms: int,
    *,
    claims: Claims = NO_CLAIMS,
    judged: dict[YieldClass, Verdict] | None = None,
) -> Verdict:
    """Whether ``victim`` must yield to a job with the spec ``preemptor``.

    Thresholds and label rules are those of the preemptor's pool; protection, minimal runtime and the limit of
    preemptions are those of the victim's, since they protect it.

    Args:
        claims: what quota says. Neither priorities, shields nor protection keep borrowed quota from its owner.
        judged: what the rules say of each class, kept from one victim to the next by who asks about many. The texts
            name the first of a class.
    """
    spec = state.specs[victim.uid].spec
    refused = guarded(state, victim, spec, preemptor, preemptor_uid, now_ms=now_ms)
    if refused is not None:
        return refused
    if _lent_group(state, victim, spec, preemptor):
        return Verdict(Rule.RESERVED, f"{victim.name} borrows a reserved placement group of pool {preemptor.pool}")
    judged = {} if judged is None else judged
    yielding = state.shapes[victim.uid].yield_class
    if yielding not in judged:
        judged[yielding] = by_rules(state, spec, preemptor, claims)
    return judged[yielding]


def by_rules(state: State, spec: JobSpec, preemptor: JobSpec, claims: Claims) -> Verdict:
    """What the rules say of any job with the spec ``spec``, whatever became of it since it was submitted."""
    policy = state.policy_for(preemptor.pool)
    victim_pools, own_pools = spec.pools, preemptor.pools
    # In an order that all jobs of a class share: one answer is given for all of them, and its text names the first.
    outside = sorted(pool for pool in victim_pools if pool not in own_pools)
    if outside and all(pool in claims.reclaimable for pool in outside):
        return Verdict(Rule.RECLAIM, f"pool {outside[0]} uses quota borrowed from pool {preemptor.pool}")
    if label_rule(policy, spec, preemptor):
        return _no("LABEL_SHIELD", f"a label rule puts {spec.name} above {preemptor.name}")
    closed = [pool for pool in outside if is_protected(state, policy, pool)]
    if closed:
        return _no("PROTECTED_POOL", f"pool {closed[0]} is protected")
    owners = [pool for pool in outside if pool in claims.owners]
    if owners:
        return _no("OWN_QUOTA", f"pool {owners[0]} uses only what is its own, and {preemptor.name} would borrow")
    if outside and not policy.enable_cross_pool:
        return _no("CROSS_POOL_OFF", f"{spec.name} is in pool {outside[0]} and preemption across pools is off")
    return _by_gap(policy, spec, preemptor, outside=bool(outside))


def _lent_group(state: State, victim: JobRecord, spec: JobSpec, preemptor: JobSpec) -> bool:
    """Whether the victim uses a reserved group that is lent to it and meant for jobs like the preemptor."""
    record = state.pools.get(preemptor.pool)
    if record is None or not record.spec.pg_pool.reserved_lendable:
        return False
    least = record.spec.pg_pool.reserved_min_priority_milli
    if spec.priority_milli >= least or preemptor.priority_milli < least:
        return False
    held = (state.groups.get(group_id) for group_id in victim.groups)
    return any(
        group is not None and group.group_kind is GroupKind.RESERVED and group.pool == preemptor.pool for group in held
    )


def _by_gap(policy: PreemptionPolicy, spec: JobSpec, preemptor: JobSpec, *, outside: bool) -> Verdict:
    """The verdict that the gap of priorities gives, by label rule, within a pool or across pools."""
    gap = preemptor.priority_milli - spec.priority_milli
    label = label_rule(policy, preemptor, spec)
    label_threshold = policy.aggressiveness.label_threshold_milli if label else 0
    if label and gap >= label_threshold:
        return Verdict(Rule.LABEL, f"{label} and {_gap(gap)} ≥ {_milli(label_threshold)}")
    threshold = policy.cross_pool_threshold_milli if outside else policy.aggressiveness.same_pool_threshold_milli
    rule = Rule.CROSS_POOL if outside else Rule.SAME_POOL
    where = "another pool" if outside else "the same pool"
    if gap >= threshold:
        return Verdict(rule, f"{where} and {_gap(gap)} ≥ {_milli(threshold)}")
    if label and label_threshold < threshold:
        return _no("GAP_TOO_SMALL", f"{label}, but {_gap(gap)} < {_milli(label_threshold)}")
    return _no("GAP_TOO_SMALL", f"{where} and {_gap(gap)} < {_milli(threshold)}")


def claims_of(state: State, preemptor: JobSpec, preemptor_uid: str) -> Claims:
    """The claims of a job, once what is on its way out is gone."""
    reclaimable: set[str] = set()
    owners: set[str] = set()
    view: View | None = None
    for ask in state.shapes.of(preemptor).asks:
        record = state.pools.get(ask.pool)
        if record is None or not record.spec.cohort:
            continue
        view = view or View(state, Assumption(subject=preemptor_uid, future=True))
        borrowing = borrows(view.charged, record.spec, ask.resources)
        own = {resource for resource, _ in record.spec.nominal if ask.resources.get(resource)}
        for other in cohort_of(state.pools, record.spec):
            if other.name == record.spec.name:
                continue
            beyond = borrowed(view.charged, other)
            if borrowing and not beyond:
                owners.add(other.name)
            elif not borrowing and own & set(beyond):
                reclaimable.add(other.name)
    return Claims(frozenset(reclaimable), frozenset(owners))


def guarded(
    state: State, victim: JobRecord, spec: JobSpec, preemptor: JobSpec, preemptor_uid: str, *, now_ms: int
) -> Verdict | None:
    """What keeps a job from yielding whoever asks, or None."""
    if victim.uid == preemptor_uid:
        return _no("OWN_JOB", "a job never preempts itself")
    if yielded_before(state, preemptor_uid, victim.uid):
        return _no(
            "YIELDED_BEFORE", f"{preemptor.name} gave way to {victim.name} before, directly or through another job"
        )
    if not spec.preemptible:
        return _no("NOT_PREEMPTIBLE", f"{victim.name} is not preemptible")
    own = state.policy_for(spec.pool)
    if own.max_preemptions_per_job and victim.preemptions >= own.max_preemptions_per_job:
        limit = f"which is the limit (max_preemptions_per_job of pool {spec.pool})"
        return _no("MAX_PREEMPTIONS", f"{victim.name} was preempted {victim.preemptions} times already, {limit}")
    if victim.cause_ms:
        why = f"a worker of {victim.name} failed just now, so it is about to stop"
        return _no("ABOUT_TO_STOP", why, victim.cause_ms)
    return _spared_for_a_time(victim, spec, max(own.min_runtime_ms, spec.min_runtime_ms), now_ms)


def _spared_for_a_time(victim: JobRecord, spec: JobSpec, min_runtime_ms: int, now_ms: int) -> Verdict | None:
    """What keeps a job from yielding until it has run for long enough, or None."""
    lost = spec.require_checkpoint and victim.checkpoint_lost
    if lost and victim.state is JOB_STARTING:
        until_ms = now_ms + max(min_runtime_ms, LOOK_AGAIN_MS)
        return _no("CHECKPOINT_LOST", f"{_lost(victim)}, and it does not run yet", until_ms)
    if victim.state is JOB_RUNNING and now_ms < victim.running_ms + min_runtime_ms:
        until_ms = victim.running_ms + min_runtime_ms
        left = f"{time_left(until_ms - now_ms)} of {time_left(min_runtime_ms)}"
        if lost:
            ran = f"it has not run for its min_runtime since, {left} are left"
            return _no("CHECKPOINT_LOST", f"{_lost(victim)}, and {ran}", until_ms)
        return _no("MIN_RUNTIME", f"{victim.name} has not run for its min_runtime yet, {left} are left", until_ms)
    return None


def _lost(victim: JobRecord) -> str:
    return f"{victim.name} requires checkpoints (require_checkpoint) and lost its last one ({victim.checkpoint_lost})"


def yielded_before(state: State, uid: str, other: str) -> bool:
    """Whether a job yielded to another, directly or through jobs that have not ended."""
    job = state.jobs.get(uid)
    return job is not None and bool(job.yielded_to) and other in winners_over(state, uid)


def winners_over(state: State, uid: str) -> frozenset[str]:
    """Jobs that a job yielded to, directly or through jobs that have not ended."""
    waiting, seen = [uid], {uid}
    while waiting:
        for winner in state.jobs[waiting.pop()].yielded_to:
            record = state.jobs.get(winner)
            if winner not in seen and record is not None and record.state not in ENDED:
                seen.add(winner)
                waiting.append(winner)
    return frozenset(seen - {uid})


def label_rule(policy: PreemptionPolicy, winner: JobSpec, loser: JobSpec) -> str:
    """The label rule by which ``winner`` beats ``loser``, as text; empty if there is none."""
    if not policy.enable_label_preemption:
        return ""
    return _beats(policy.label_rules, dict(winner.labels), dict(loser.labels))


def is_protected(state: State, policy: PreemptionPolicy, pool: str) -> bool:
    """Whether nobody outside may preempt in a pool."""
    record = state.pools.get(pool)
    return pool in policy.protected_pools or bool(record and record.spec.protected)


def yield_backoff_ms(state: State, spec: JobSpec, preemptions: int) -> int:
    """How long a job waits after it yielded, where its pool limits preemptions: 60 s · 2ⁿ, at most an hour."""
    if not state.policy_for(spec.pool).max_preemptions_per_job:
        return 0
    return min(3_600_000, 60_000 << min(max(0, preemptions - 1), 16))


def stop_timeouts(state: State, spec: JobSpec, within_ms: int | None = None) -> tuple[int, int]:
    """(cancel, kill) timeouts in ms for a job's workers: the pool's policy, which the job's grace and a deadline
    (``within_ms`` from now) only shorten."""
    policy = state.policy_for(spec.pool)
    bounds = [policy.cancel_timeout_ms, spec.grace_ms, within_ms]
    return min(bound for bound in bounds if bound is not None), policy.kill_timeout_ms


def lost_work_ms(job: JobRecord, now_ms: int) -> int:
    """Work that a job would lose: since its start or its last checkpoint."""
    if job.state is not JOB_RUNNING:
        return 0
    return max(0, now_ms - max(job.running_ms, job.checkpoint_ms))


def left_ms(job: JobRecord, spec: JobSpec, now_ms: int) -> int:
    """How long a job is thought to go on; 0 when unknown or over."""
    if not spec.estimated_duration_ms:
        return 0
    started_ms = job.running_ms or now_ms
    return max(0, started_ms + spec.estimated_duration_ms - now_ms)


def _beats(rules: LabelRules, winner: dict[str, str], loser: dict[str, str]) -> str:
    for key, winners in rules:
        if key not in winner or key not in loser:
            continue
        for value, losers in winners:
            if value == winner[key] and loser[key] in losers:
                return f"label rule {key}: {value} before {loser[key]}"
    return ""


def _gap(gap_milli: int) -> str:
    return f"priority gap {_milli(gap_milli)}"


def _milli(milli: int) -> str:
    return f"{milli / 1000:g}"
