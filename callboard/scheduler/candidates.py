"""Who may be asked to yield, and in which order?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from callboard.model.specs import JobSpec
from callboard.scheduler.preemption import (
    Claims,
    Verdict,
    by_rules,
    claims_of,
    left_ms,
    lost_work_ms,
    may_yield,
    pools_of,
)
from callboard.scheduler.quota import borrowed
from callboard.scheduler.records import JobRecord, WorkerRecord
from callboard.scheduler.shapes import YieldClass
from callboard.scheduler.state import State
from callboard.scheduler.states import ENDED, LIVE, JobState, Rule, WorkerState
from callboard.scheduler.view import Assumption, View


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may be asked to yield: a whole job, or one extra worker of an elastic one (``generation`` not 0)."""

    job: JobRecord
    generation: int
    verdict: Verdict
    priority_milli: int
    cost: tuple[int, ...]


def _cost(state: State, job: JobRecord, spec: JobSpec, worker: WorkerRecord | None, now_ms: int) -> tuple[int, ...]:
    """Key that sorts candidates of one priority: fewest workers, least lost work, longest left, youngest first."""
    if worker is None:
        count, lost_ms = len(state.jobs_holding.get(job.uid, ())), lost_work_ms(job, now_ms)
    else:
        since_ms = max(worker.ready_ms, job.checkpoint_ms)
        count, lost_ms = 1, max(0, now_ms - since_ms) if worker.ready_ms else 0
    # Of one job's extra workers the highest rank goes first, so that ranks stay dense.
    return (count, lost_ms, -left_ms(job, spec, now_ms), -job.order, 0 if worker is None else -worker.rank)


def candidates(
    state: State, preemptor: JobSpec, preemptor_uid: str, now_ms: int, claims: Claims
) -> tuple[list[Candidate], int]:
    """Who must yield to the preemptor, lowest priority first, cheapest first within one; and the earliest
    time (ms) at which there may be more, 0 if there is none."""
    found: list[Candidate] = []
    retry_ms = 0
    for job_state in (JobState.RUNNING, JobState.STARTING):
        for uid in state.jobs_by_state[job_state]:
            job, spec = state.jobs[uid], state.specs[uid].spec
            verdict = may_yield(state, job, preemptor, preemptor_uid, now_ms, claims=claims)
            if verdict.rule is None:
                if verdict.retry_ms and (not retry_ms or verdict.retry_ms < retry_ms):
                    retry_ms = verdict.retry_ms
                continue
            found.append(Candidate(job, 0, verdict, spec.priority_milli, _cost(state, job, spec, None, now_ms)))
            if uid in state.elastic:
                found += [
                    Candidate(
                        job, worker.generation, verdict, spec.priority_milli, _cost(state, job, spec, worker, now_ms)
                    )
                    for worker in state.workers_of(uid)
                    if worker.extra and worker.state in LIVE and worker.state is not WorkerState.STOPPING
                ]
    found.sort(key=lambda unit: (unit.priority_milli, unit.cost, unit.job.uid))
    return found, retry_ms


FEW = 16
"""Victims of the lowest level that are tried one by one before the general search."""


def lowest_level(
    state: State, preemptor: JobSpec, preemptor_uid: str, now_ms: int, claims: Claims
) -> tuple[list[Candidate], bool]:
    """The few cheapest candidates of the lowest priority at which anybody must yield, and whether that is a full
    answer: False where only the general search can tell (extra workers, lent groups, jobs guarded for a time)."""
    pool = state.pools.get(preemptor.pool)
    lends = pool is not None and pool.spec.pg_pool.reserved_lendable
    by_priority: dict[int, list[YieldClass]] = {}
    for yielding in state.holders.classes:
        by_priority.setdefault(yielding[0], []).append(yielding)
    for priority_milli in sorted(by_priority):
        found: list[Candidate] = []
        for yielding in sorted(by_priority[priority_milli]):
            members = state.holders.classes[yielding]
            sample = state.specs[members[0][-1]].spec
            if lends:
                return [], False
            if not sample.preemptible or by_rules(state, sample, preemptor, claims).rule is None:
                continue
            if yielding[-1]:
                return [], False
            for order in members[:FEW]:
                job = state.jobs[order[-1]]
                verdict = may_yield(state, job, preemptor, preemptor_uid, now_ms, claims=claims)
                if verdict.rule is None:
                    return [], False
                cost = _cost(state, job, state.specs[job.uid].spec, None, now_ms)
                found.append(Candidate(job, 0, verdict, priority_milli, cost))
        if found:
            found.sort(key=lambda unit: (unit.cost, unit.job.uid))
            return found[:FEW], True
    return [], True


def takes_only_what_is_owed(state: State, preemptor_uid: str, victims: Sequence[Candidate]) -> bool:
    """Whether every pool that gives back is beyond its own quota until its last victim goes, in some order: a lender
    takes back what it lent and no more (QL-08)."""
    owing: dict[tuple[str, ...], list[Candidate]] = {}
    for victim in victims:
        if victim.verdict.rule is Rule.RECLAIM:
            owing.setdefault(pools_of(state.specs[victim.job.uid].spec), []).append(victim)
    for pools, owed in owing.items():
        # What is beyond with all others gone is beyond before, so the order of the others is no matter.
        if not any(_is_beyond(state, preemptor_uid, pools, victims, last) for last in owed):
            return False
    return True


def _is_beyond(
    state: State, preemptor_uid: str, pools: Sequence[str], victims: Sequence[Candidate], last: Candidate
) -> bool:
    """Whether one of the pools still uses more than its own when every victim but the last is gone."""
    others = [victim for victim in victims if victim is not last]
    view = View(state, without(Assumption(subject=preemptor_uid, future=True), others))
    return any(name in state.pools and borrowed(view.charged, state.pools[name].spec) for name in pools)


def without(assumption: Assumption, victims: Sequence[Candidate]) -> Assumption:
    """The assumption that these are gone too."""
    whole = frozenset(victim.job.uid for victim in victims if not victim.generation)
    extras = frozenset(victim.generation for victim in victims if victim.generation)
    return replace(assumption, released=assumption.released | whole, shed=assumption.shed | extras)


def overtakable(state: State, preemptor: JobSpec, preemptor_uid: str, now_ms: int) -> list[str]:
    """Nominated jobs whose nomination the preemptor may take (I7), the least important first."""
    if not state.nominated:
        return []
    claims = claims_of(state, preemptor, preemptor_uid)
    found = [
        uid
        for uid in state.nominated
        if uid != preemptor_uid
        and state.jobs[uid].state not in ENDED
        and may_yield(state, state.jobs[uid], preemptor, preemptor_uid, now_ms, claims=claims).rule is not None
    ]
    found.sort(key=lambda uid: state.queue_key(state.jobs[uid]), reverse=True)
    return found
