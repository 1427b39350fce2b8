"""The candidates for preemption, in the order in which they are asked to yield."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from callboard.model.frozen import dataclass, quick
from callboard.model.quantities import Resources, total
from callboard.model.specs import JobSpec
from callboard.scheduler.plan.preemption import Claims, Verdict, by_rules, guarded, left_ms, lost_work_ms, may_yield
from callboard.scheduler.plan.quota import borrowed
from callboard.scheduler.plan.view import Assumption, View, assuming
from callboard.scheduler.records.job_records import JobRecord, WorkerRecord
from callboard.scheduler.records.states import ENDED, JOB_RUNNING, JOB_STARTING, LIVE, WORKER_STOPPING, Rule
from callboard.scheduler.state.shapes import YieldClass
from callboard.scheduler.state.state import State

Cost = tuple[object, ...]


@quick
@dataclass(frozen=True, slots=True)
class Candidate:
    """What may be asked to yield: a whole job, or one extra worker of an elastic one (``generation`` not 0).

    Attributes:
        taken: what is taken away when it yields.
        lost: (GPU time in milli-GPU · ms, time in ms) of the work that it loses.
        left_ms: how long it is thought to go on.
        rank: of an extra worker: its rank.
        cost: what it costs that this one alone yields, see :func:`cost_of`; sorts candidates of one priority.
    """

    job: JobRecord
    generation: int
    verdict: Verdict
    priority_milli: int
    taken: Resources
    lost: tuple[int, int]
    left_ms: int
    rank: int
    cost: Cost

    @property
    def key(self) -> tuple[str, int]:
        """Tells it from others."""
        return (self.job.uid, self.generation)


def cost_of(units: Iterable[Candidate], capacity: Resources) -> Cost:
    """What it costs that all of these yield: devices taken away, then the largest share of the cluster that they hold
    of any other resource (in millionths), then lost GPU time, then lost time, then the longest left, then the youngest.

    Of one job's extra workers the highest rank goes first, so that ranks stay dense.
    """
    listed = list(units)
    whole = {unit.job.uid for unit in listed if not unit.generation}
    counted = [unit for unit in listed if not unit.generation or unit.job.uid not in whole]
    if len(counted) == 1:
        return counted[0].cost
    taken = total(unit.taken for unit in counted)
    return (
        taken.gpu_milli,
        _largest_share(taken, capacity),
        sum(unit.lost[0] for unit in counted),
        sum(unit.lost[1] for unit in counted),
        -sum(unit.left_ms for unit in counted),
        *sorted((-unit.job.order, -unit.rank) for unit in counted),
        *sorted(unit.job.uid for unit in counted),
    )


def _largest_share(taken: Resources, capacity: Resources) -> int:
    amounts = taken.items()
    shares = [amount * 1_000_000 // max(1, capacity.get(name)) for name, amount in amounts if name != "gpu" and amount]
    return max(shares, default=0)


def _candidate(
    state: State,
    job: JobRecord,
    worker: WorkerRecord | None,
    verdict: Verdict,
    *,
    taken: Resources,
    lost: tuple[int, int],
    now_ms: int,
) -> Candidate:
    """A job, or one of its extra workers, with its cost."""
    spec = state.specs[job.uid].spec
    left = left_ms(job, spec, now_ms)
    generation, rank = (0, 0) if worker is None else (worker.generation, worker.rank)
    share = _largest_share(taken, state.cluster_use.capacity)
    cost = (taken.gpu_milli, share, *lost, -left, (-job.order, -rank), job.uid)
    return Candidate(job, generation, verdict, spec.priority_milli, taken, lost, left, rank, cost)


def _whole(state: State, job: JobRecord, verdict: Verdict, now_ms: int) -> Candidate:
    lost_ms = lost_work_ms(job, now_ms)
    taken = state.shapes[job.uid].least
    lost = (lost_ms * taken.gpu_milli, lost_ms)
    if job.uid in state.elastic:
        extras = [worker for worker in state.workers_of(job.uid) if worker.extra and worker.state in LIVE]
        taken += total(worker.resources for worker in extras)
        each = [_lost_by(worker, job, now_ms) for worker in extras]
        lost = (lost[0] + sum(gpu for gpu, _ in each), lost[1] + sum(ms for _, ms in each))
    return _candidate(state, job, None, verdict, taken=taken, lost=lost, now_ms=now_ms)


def _extras(state: State, job: JobRecord, verdict: Verdict, now_ms: int) -> list[Candidate]:
    """The extra workers of an elastic job as candidates."""
    return [
        _candidate(
            state, job, worker, verdict, taken=worker.resources, lost=_lost_by(worker, job, now_ms), now_ms=now_ms
        )
        for worker in state.workers_of(job.uid)
        if worker.extra and worker.state in LIVE and worker.state is not WORKER_STOPPING
    ]


def _lost_by(worker: WorkerRecord, job: JobRecord, now_ms: int) -> tuple[int, int]:
    since_ms = max(worker.ready_ms, job.checkpoint_ms)
    lost_ms = max(0, now_ms - since_ms) if worker.ready_ms else 0
    return (lost_ms * worker.resources.gpu_milli, lost_ms)


Helps = Callable[[JobRecord], bool]
"""Whether it could be of any use that a job yields."""


def candidates(
    state: State, preemptor: JobSpec, preemptor_uid: str, now_ms: int, claims: Claims, *, helps: Helps | None = None
) -> tuple[list[Candidate], int]:
    """Who must yield to the preemptor, lowest priority first, cheapest first within one; and the earliest
    time (ms) at which there may be more, 0 if there is none.

    Args:
        helps: passes over those that could be of no use; None: any could.
    """
    found: list[Candidate] = []
    judged: dict[YieldClass, Verdict] = {}
    retry_ms = 0
    for job_state in (JOB_RUNNING, JOB_STARTING):
        for uid in state.jobs_by_state[job_state]:
            job = state.jobs[uid]
            verdict = may_yield(state, job, preemptor, preemptor_uid, now_ms, claims=claims, judged=judged)
            if verdict.rule is None:
                if verdict.retry_ms and (not retry_ms or verdict.retry_ms < retry_ms):
                    retry_ms = verdict.retry_ms
                continue
            if helps is not None and not helps(job):
                continue
            found.append(_whole(state, job, verdict, now_ms))
            if uid in state.elastic:
                found += _extras(state, job, verdict, now_ms)
    found.sort(key=lambda unit: (unit.priority_milli, unit.cost))
    return found, retry_ms


FEW = 16
"""Victims of the lowest level that are tried one by one before the general search."""


@dataclass(frozen=True, slots=True)
class LowestLevel:
    """Who must yield at the lowest priority at which anybody must.

    Attributes:
        few: the cheapest of them.
        complete: False: only the general search can tell (extra workers, lent groups, jobs guarded for a time).
        smallest_milli: the fewest milli-GPUs that one of them holds.
        alike: all of them hold the same.
    """

    few: tuple[Candidate, ...]
    complete: bool
    smallest_milli: int = 0
    alike: bool = True

    def is_least(self, unit: Candidate) -> bool:
        """Whether no two of them could take less away than the one alone."""
        return self.alike or unit.taken.gpu_milli < 2 * self.smallest_milli


_UNKNOWN = LowestLevel((), complete=False)


def lowest_level(
    state: State, preemptor: JobSpec, preemptor_uid: str, now_ms: int, claims: Claims, *, helps: Helps | None = None
) -> LowestLevel:
    """Who comes first into question, found without a look at everybody else.

    Args:
        helps: passes over those that could be of no use; None: any could.
    """
    pool = state.pools.get(preemptor.pool)
    if pool is not None and pool.spec.pg_pool.reserved_lendable and state.holders.classes:
        return _UNKNOWN
    by_priority: dict[int, list[YieldClass]] = {}
    for yielding in state.holders.classes:
        by_priority.setdefault(yielding.priority_milli, []).append(yielding)
    for priority_milli in sorted(by_priority):
        found: list[Candidate] = []
        for yielding in sorted(by_priority[priority_milli]):
            members = state.holders.classes[yielding]
            sample = state.specs[members[0][-1]].spec
            if not sample.preemptible:
                continue
            # The rules look at nothing but the class, so they are asked once for all of it.
            verdict = by_rules(state, sample, preemptor, claims)
            if verdict.rule is None:
                continue
            if yielding.elastic:
                return _UNKNOWN
            jobs = (state.jobs[order[-1]] for order in members)
            for job in islice(jobs if helps is None else filter(helps, jobs), FEW):
                spec = state.specs[job.uid].spec
                if guarded(state, job, spec, preemptor, preemptor_uid, now_ms=now_ms) is not None:
                    return _UNKNOWN
                found.append(_whole(state, job, verdict, now_ms))
        if found:
            found.sort(key=lambda unit: unit.cost)
            held = {unit.taken for unit in found}
            return LowestLevel(
                tuple(found[:FEW]),
                complete=True,
                smallest_milli=min(ask.gpu_milli for ask in held),
                alike=len(held) == 1,
            )
    return LowestLevel((), complete=True)


def takes_only_what_is_owed(state: State, preemptor_uid: str, victims: Sequence[Candidate]) -> bool:
    """Whether every pool that gives back is beyond its own quota until its last victim goes, in some order: a lender
    takes back what it lent and no more (QL-08)."""
    owing: dict[tuple[str, ...], list[Candidate]] = {}
    for victim in victims:
        if victim.verdict.rule is Rule.RECLAIM:
            owing.setdefault(state.specs[victim.job.uid].spec.pools, []).append(victim)
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
    return assuming(assumption, {"released": assumption.released | whole, "shed": assumption.shed | extras})


def overtakable(state: State, preemptor: JobSpec, preemptor_uid: str, now_ms: int, claims: Claims) -> list[str]:
    """Nominated jobs whose nomination the preemptor may take (I7), the least important first."""
    judged: dict[YieldClass, Verdict] = {}

    def yields(job: JobRecord) -> bool:
        return may_yield(state, job, preemptor, preemptor_uid, now_ms, claims=claims, judged=judged).rule is not None

    jobs = [state.jobs[uid] for uid in state.nominated if uid != preemptor_uid]
    found = [job for job in jobs if job.state not in ENDED and yields(job)]
    return [job.uid for job in sorted(found, key=state.queue_key, reverse=True)]
