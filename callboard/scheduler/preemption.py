"""Must v yield to p? The rules between two jobs (design 02, Preemption), and the order in which victims are weighed."""

from __future__ import annotations

from dataclasses import dataclass

from callboard.model.policy import LabelRules, PreemptionPolicy
from callboard.model.specs import JobSpec
from callboard.scheduler.records import ENDED, JobRecord, JobState, Rule
from callboard.scheduler.state import State


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a job must yield to another.

    Attributes:
        rule: what says yes; None: it need not yield.
        reason: why, as a sentence.
        retry_ms: when the answer may change by itself; 0: only by a change of something else.
    """

    rule: Rule | None
    reason: str
    retry_ms: int = 0


def policy_for(state: State, pool: str) -> PreemptionPolicy:
    """The cluster's policy with a pool's overrides."""
    record = state.pools.get(pool)
    return record.spec.preemption.over(state.meta.policy) if record else state.meta.policy


def may_yield(state: State, victim: JobRecord, preemptor: JobSpec, preemptor_uid: str, now_ms: int) -> Verdict:
    """Whether ``victim`` must yield to a job with the spec ``preemptor``.

    Thresholds and label rules are those of the preemptor's pool; protection, minimal runtime and the limit of
    preemptions are those of the victim's, since they protect it.
    """
    spec = state.specs[victim.uid].spec
    refused = _guarded(state, victim, spec, preemptor, preemptor_uid, now_ms=now_ms)
    if refused is not None:
        return refused
    policy = policy_for(state, preemptor.pool)
    if shielded(policy, spec, preemptor):
        return Verdict(None, f"a label rule puts {victim.name} above {preemptor.name}")
    victim_pools, own_pools = pools_of(spec), pools_of(preemptor)
    outside = [pool for pool in victim_pools if pool not in own_pools]
    guarded = [pool for pool in outside if is_protected(state, policy, pool)]
    if guarded:
        return Verdict(None, f"pool {guarded[0]} is protected")
    if outside and not policy.enable_cross_pool:
        return Verdict(None, f"{victim.name} is in pool {outside[0]} and preemption across pools is off")
    gap = preemptor.priority_milli - spec.priority_milli
    label = label_rule(policy, preemptor, spec)
    if label and gap >= policy.aggressiveness.label_threshold_milli:
        return Verdict(Rule.LABEL, f"{label} and {_gap(gap)} ≥ {_milli(policy.aggressiveness.label_threshold_milli)}")
    threshold = policy.cross_pool_threshold_milli if outside else policy.aggressiveness.same_pool_threshold_milli
    rule = Rule.CROSS_POOL if outside else Rule.SAME_POOL
    where = "another pool" if outside else "the same pool"
    if gap >= threshold:
        return Verdict(rule, f"{where} and {_gap(gap)} ≥ {_milli(threshold)}")
    return Verdict(None, f"{where} and {_gap(gap)} < {_milli(threshold)}")


def _guarded(
    state: State, victim: JobRecord, spec: JobSpec, preemptor: JobSpec, preemptor_uid: str, *, now_ms: int
) -> Verdict | None:
    """What keeps a job from yielding whoever asks, or None."""
    if victim.uid == preemptor_uid:
        return Verdict(None, "a job never preempts itself")
    if any(
        record.rule is Rule.MANUAL and record.victim == preemptor_uid for record in state.preemptions_for(victim.uid)
    ):
        # Else the job that was told to yield would take its place back at once.
        return Verdict(None, f"{preemptor.name} was told to yield to {victim.name}")
    if not spec.preemptible:
        return Verdict(None, f"{victim.name} is not preemptible")
    own = policy_for(state, spec.pool)
    if own.max_preemptions_per_job and victim.preemptions >= own.max_preemptions_per_job:
        return Verdict(None, f"{victim.name} was preempted {victim.preemptions} times already, which is the limit")
    min_runtime_ms = max(own.min_runtime_ms, spec.min_runtime_ms)
    if victim.state is JobState.RUNNING and now_ms < victim.running_ms + min_runtime_ms:
        until_ms = victim.running_ms + min_runtime_ms
        return Verdict(None, f"{victim.name} has not run for its minimal runtime yet", until_ms)
    return None


def label_rule(policy: PreemptionPolicy, winner: JobSpec, loser: JobSpec) -> str:
    """The label rule by which ``winner`` beats ``loser``, as text; empty if there is none."""
    if not policy.enable_label_preemption:
        return ""
    return _beats(policy.label_rules, dict(winner.labels), dict(loser.labels))


def shielded(policy: PreemptionPolicy, victim: JobSpec, preemptor: JobSpec) -> bool:
    """Whether a rule on any key says that the victim beats the preemptor: then no number lets it be taken."""
    return bool(label_rule(policy, victim, preemptor))


def is_protected(state: State, policy: PreemptionPolicy, pool: str) -> bool:
    """Whether nobody outside may preempt in a pool."""
    record = state.pools.get(pool)
    return pool in policy.protected_pools or bool(record and record.spec.protected)


def pools_of(spec: JobSpec) -> tuple[str, ...]:
    """Every pool that a job is charged to."""
    return tuple(dict.fromkeys(spec.pool_of(component) for component in spec.components))


def stop_timeouts(state: State, spec: JobSpec) -> tuple[int, int]:
    """(cancel, kill) timeouts in ms for a job's workers: the pool's policy, which the job's grace only shortens."""
    policy = policy_for(state, spec.pool)
    cancel_ms = policy.cancel_timeout_ms if spec.grace_ms is None else min(policy.cancel_timeout_ms, spec.grace_ms)
    return cancel_ms, policy.kill_timeout_ms


def lost_work_ms(job: JobRecord, now_ms: int) -> int:
    """Work that a job would lose: since its start or its last checkpoint."""
    if job.state is not JobState.RUNNING:
        return 0
    return max(0, now_ms - max(job.running_ms, job.checkpoint_ms))


def left_ms(job: JobRecord, spec: JobSpec, now_ms: int) -> int:
    """How long a job is thought to go on; 0 when unknown or over."""
    if not spec.estimated_duration_ms:
        return 0
    started_ms = job.running_ms or now_ms
    return max(0, started_ms + spec.estimated_duration_ms - now_ms)


def cheapness(state: State, job: JobRecord, now_ms: int) -> tuple[int, int, int, int, str]:
    """Key that sorts victims of one priority: fewest workers, least lost work, longest left, youngest first."""
    spec = state.specs[job.uid].spec
    return (
        len(state.jobs_holding.get(job.uid, ())),
        lost_work_ms(job, now_ms),
        -left_ms(job, spec, now_ms),
        -job.order,
        job.uid,
    )


def candidates(
    state: State, preemptor: JobSpec, preemptor_uid: str, now_ms: int
) -> tuple[list[tuple[JobRecord, Verdict]], int]:
    """Jobs that must yield to the preemptor, lowest priority first, cheapest first within one; and the earliest
    time (ms) at which there may be more, 0 if there is none."""
    found: list[tuple[JobRecord, Verdict]] = []
    retry_ms = 0
    for job_state in (JobState.RUNNING, JobState.STARTING):
        for uid in state.jobs_by_state[job_state]:
            job = state.jobs[uid]
            verdict = may_yield(state, job, preemptor, preemptor_uid, now_ms)
            if verdict.rule is not None:
                found.append((job, verdict))
            elif verdict.retry_ms and (not retry_ms or verdict.retry_ms < retry_ms):
                retry_ms = verdict.retry_ms
    found.sort(key=lambda pair: (state.specs[pair[0].uid].spec.priority_milli, cheapness(state, pair[0], now_ms)))
    return found, retry_ms


def overtakable(state: State, preemptor: JobSpec, preemptor_uid: str, now_ms: int) -> list[str]:
    """Nominated jobs whose nomination the preemptor may take (I7), the least important first."""
    found = [
        uid
        for uid in state.nominated
        if uid != preemptor_uid
        and state.jobs[uid].state not in ENDED
        and may_yield(state, state.jobs[uid], preemptor, preemptor_uid, now_ms).rule is not None
    ]
    found.sort(key=lambda uid: state.queue_key(state.jobs[uid]), reverse=True)
    return found


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
