"""Why other jobs make no room for a job that waits: a reason for each of them.

A job that runs need not yield (the rules say which one protects it), or it would yield, but not yet, or in vain: then
the reason is what is still in the way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from callboard.model.frozen import dataclass
from callboard.model.specs import JobSpec
from callboard.scheduler.account.blockers import MAX_SUBJECTS, blockers
from callboard.scheduler.plan.candidates import overtakable
from callboard.scheduler.plan.grouping import together
from callboard.scheduler.plan.planning import Blocked, Plan, best_case, plan
from callboard.scheduler.plan.preemption import claims_of, may_yield
from callboard.scheduler.plan.quota import cohort_of
from callboard.scheduler.plan.rooms import NodeFilter, node_closed
from callboard.scheduler.plan.view import LEAVING, Assumption, Room, View
from callboard.scheduler.records.asks import asks_of
from callboard.scheduler.records.job_records import JobRecord, WorkerRecord
from callboard.scheduler.records.node_record import NodeRecord
from callboard.scheduler.records.refusals import Reason
from callboard.scheduler.records.states import LIVE, JobState
from callboard.scheduler.records.wording import join, shown, time_left
from callboard.scheduler.state.state import State

_SHORT_ON_NODES = ("NODE_LACKS", "DEVICE_TAKEN")


@dataclass(frozen=True, slots=True)
class Later:
    """A start that time alone makes possible.

    Attributes:
        at_ms: when.
        plan: the plan that holds then.
        code, what: what has to pass until then: the policy's ``preemption_delay`` or a job's ``min_runtime``.
    """

    at_ms: int
    plan: Plan
    code: str
    what: str


_TIMES = {
    "MIN_RUNTIME": "min_runtime of ",
    "CHECKPOINT_LOST": "min_runtime since the lost checkpoint of ",
    "ABOUT_TO_STOP": "the end of ",
}
"""What time of a job has to pass, by what protects it until then."""


def start_by_time(state: State, uid: str, spec: JobSpec, since_ms: int, now_ms: int) -> Later | None:
    """The first moment at which others would yield to a blocked job although nothing else changes."""
    if spec.never_preempts:
        return None
    delay_ms = state.policy_for(spec.pool).preemption_delay_ms
    claims = claims_of(state, spec, uid)
    ends: dict[int, tuple[str, str]] = {}
    for other in _holding(state):
        verdict = may_yield(state, state.jobs[other], spec, uid, now_ms, claims=claims)
        if verdict.rule is None and verdict.retry_ms > now_ms:
            ends[verdict.retry_ms] = (verdict.code, f"{_TIMES.get(verdict.code, '')}{state.jobs[other].name}")
    if since_ms + delay_ms > now_ms:
        ends[since_ms + delay_ms] = ("PREEMPTION_DELAY", "preemption_delay")
    times = sorted(ends)
    # Who may be asked to yield may be later, too: the first moment is found by bisection.
    is_enough = lambda at_ms: isinstance(plan(state, uid, spec, since_ms, at_ms), Plan)  # noqa: E731
    first = bisect_left(times, True, key=is_enough)
    if first == len(times):
        return None
    found = plan(state, uid, spec, since_ms, times[first])
    return Later(times[first], found, *ends[times[first]]) if isinstance(found, Plan) else None


def waits_for_time(state: State, spec: JobSpec, later: Later, now_ms: int) -> tuple[str, list[Reason]]:
    """The sentence and the reasons of a job that time alone will help."""
    left = time_left(later.at_ms - now_ms)
    victims = dict.fromkeys(victim.uid for victim in later.plan.victims)
    names = [state.jobs[uid].name for uid in victims]
    then = f"then {join(names)} {'yields' if len(names) == 1 else 'yield'}" if names else "then it starts"
    reasons = [Reason(later.code, f"jobs/{spec.name}", f"waits {left} more ({later.what}), {then}")]
    for victim in {victim.uid: victim for victim in later.plan.victims}.values():
        name = state.jobs[victim.uid].name
        reasons.append(Reason("YIELDS_LATER", f"jobs/{name}", f"{name} yields in {left}: {victim.reason}"))
    return f"{spec.name} waits {left} ({later.what}), {then}", reasons


def unyielding(
    state: State, uid: str, spec: JobSpec, found: Blocked, later: Later | None, *, now_ms: int
) -> list[Reason]:
    """Running jobs that need not yield, those that would in vain or not yet, those that stop already, and those for
    which what comes free is held."""
    claims = claims_of(state, spec, uid)
    yielding = {victim.uid for victim in later.plan.victims} if later else set()
    in_vain = _InVain(state, uid, spec, found, later, now_ms=now_ms)
    reasons: list[Reason] = []
    for other in _holding(state)[:MAX_SUBJECTS]:
        job = state.jobs[other]
        verdict = may_yield(state, job, spec, uid, now_ms, claims=claims)
        if verdict.rule is None:
            reasons.append(Reason(verdict.code, f"jobs/{job.name}", f"{job.name} need not yield: {verdict.reason}"))
        elif spec.never_preempts:
            what = f"{job.name} need not yield: {spec.name} never makes others yield (never_preempts)"
            reasons.append(Reason("NEVER_PREEMPTS", f"jobs/{job.name}", what))
        elif other not in yielding:
            why = in_vain.reason(job)
            what = f"{job.name} would yield ({verdict.reason}), but {why.message}"
            reasons.append(replace(why, subject=f"jobs/{job.name}", message=what))
    return [*reasons, *_on_their_way(state), *_held_for_others(state, uid, spec, now_ms)]


def _holding(state: State) -> list[str]:
    return [*state.jobs_by_state[JobState.RUNNING], *state.jobs_by_state[JobState.STARTING]]


class _InVain:
    """Why it doesn't help a job that another would yield to it."""

    def __init__(
        self, state: State, uid: str, spec: JobSpec, found: Blocked, later: Later | None, *, now_ms: int
    ) -> None:
        self._state = state
        self._spec = spec
        self._found = found
        self._later = later
        self._now = blockers(state, View(state, Assumption(subject=uid)), spec)
        self._still = blockers(state, View(state, best_case(state, uid, spec, now_ms)), spec)
        asks = [ask for ask in asks_of(spec) if ask.pool in state.pools]
        self._wanted, self._slots = together(state, spec, asks) if asks else (NodeFilter(), ())

    def reason(self, job: JobRecord) -> Reason:
        """The first of: the job's own pool is closed; where the other runs is no help; what it holds is no help; it is
        not its turn; too many would have to yield; all of them would be too few."""
        closed = [reason for reason in self._now if reason.code in ("POOL_HELD", "NO_POOL")]
        if closed:
            return closed[0]
        workers = [worker for worker in self._state.workers_of(job.uid) if worker.state in LIVE]
        return self._wrong_place(workers) or self._wrong_kind(workers) or self._not_now() or self._too_little()

    def _wrong_place(self, workers: Sequence[WorkerRecord]) -> Reason | None:
        """Why no node that it runs on can hold any of the workers, whatever comes free there. Its quota may help."""
        if any(reason.code == "QUOTA_SHORT" for reason in self._now):
            return None
        found: list[Reason] = []
        for node_id in dict.fromkeys(worker.node_id for worker in workers):
            closed = self._closed(self._state.nodes[node_id])
            if closed is None:
                return None
            found.append(closed)
        where = "there would not help"
        return replace(found[0], message=f"{join([why.message for why in found])}: room {where}") if found else None

    def _closed(self, node: NodeRecord) -> Reason | None:
        closed = node_closed(node, self._wanted.required)
        if closed:
            return closed[0]
        here = [slot for slot in self._slots if slot.place is None or slot.place.node_id == node.node_id]
        if not here:
            return Reason("WRONG_NODE", "", f"{self._spec.name} is not placed on {node.node_id}")
        open_to = [slot for slot in here if NodeFilter(slot.selector).admits(node)]
        if not open_to:
            return node_closed(node, here[0].selector)[0]
        if not any(Room(node).fits(slot.resources) for slot in open_to):
            return Reason(
                "NODE_TOO_SMALL", "", f"{node.node_id} could not hold any of its workers even if it was empty"
            )
        return None

    def _wrong_kind(self, workers: Sequence[WorkerRecord]) -> Reason | None:
        """Why what it holds is nothing of what is short."""
        state, short = self._state, {reason.resource for reason in self._now if reason.code in _SHORT_ON_NODES}
        quotas = [reason for reason in self._now if reason.code == "QUOTA_SHORT"]
        groups = [reason for reason in self._now if reason.code in ("MAX_DYNAMIC", "NO_DYNAMIC_GROUPS")]
        if any(worker.resources.get(resource) for worker in workers for resource in short):
            return None
        for reason in quotas:
            pool = state.pools[reason.subject.split("/")[1]].spec
            lending = {other.name for other in cohort_of(state.pools, pool)}
            if any(worker.pool in lending and worker.resources.get(reason.resource) for worker in workers):
                return None
        held = {f"pools/{state.groups[worker.group_id].pool}" for worker in workers if worker.group_id in state.groups}
        if any(reason.subject in held for reason in groups):
            return None
        if quotas and not short:
            pool_name = quotas[0].subject.split("/")[1]
            message = f"it uses none of the {shown(quotas[0].resource)} quota that pool {pool_name} lacks"
            return Reason("QUOTA_NOT_HELPED", "", message)
        if short:
            message = f"it holds no {' or '.join(shown(name) for name in sorted(short))}, which is what is missing"
            return Reason("HOLDS_NONE_OF_IT", "", message)
        return Reason("GROUP_NOT_HELPED", "", "it has no placement group of that pool") if groups else None

    def _not_now(self) -> Reason | None:
        found, policy = self._found, self._state.policy_for(self._spec.pool)
        if self._later is not None:
            return Reason("NOT_NEEDED", "", "others will yield first")
        if found.too_many:
            most = policy.max_victims_per_round
            message = f"{found.too_many} would have to at once, and at most {most} may (max_victims_per_round)"
            return Reason("MAX_VICTIMS", "", message, "", found.too_many, most)
        if found.limited:
            return Reason("ONLY_WHAT_IS_OWED", "", "a pool gives back no more than it borrowed, which is too little")
        return None

    def _too_little(self) -> Reason:
        if not self._still:
            return Reason("NO_ASSIGNMENT", "", "no way was found to place its workers even then")
        still = join([reason.message for reason in self._still])
        return Reason("STILL_SHORT", "", f"that would not be enough, even together with all others: {still}")


def _on_their_way(state: State) -> list[Reason]:
    """Jobs that stop already. What they free is counted."""
    stopping = [uid for job_state in LEAVING for uid in state.jobs_by_state[job_state]]
    what = "stops already, and what it frees is counted"
    reasons = [_said("ALREADY_STOPPING", state.jobs[uid].name, what) for uid in stopping]
    restarting = state.jobs_by_state[JobState.RECOVERING]
    return [*reasons, *(_said("RECOVERING", state.jobs[uid].name, "restarts, and queues again") for uid in restarting)][
        :MAX_SUBJECTS
    ]


def _held_for_others(state: State, uid: str, spec: JobSpec, now_ms: int) -> list[Reason]:
    """Nominated jobs whose room this one may not take."""
    claims = claims_of(state, spec, uid)
    mine = overtakable(state, spec, uid, now_ms, claims)
    reasons = []
    for other in [other for other in state.nominated if other != uid and other not in mine][:MAX_SUBJECTS]:
        job = state.jobs[other]
        nodes = {b.node_id for group_id in job.groups if (g := state.groups.get(group_id)) for b in g.bundles}
        why = may_yield(state, job, spec, uid, now_ms, claims=claims).reason
        where = f"room on {', '.join(sorted(nodes))}" if nodes else "room"
        message = f"{where} is held for {job.name}, which need not yield: {why}"
        reasons.append(Reason("HELD_FOR", f"jobs/{job.name}", message))
    return reasons


def _said(code: str, name: str, what: str) -> Reason:
    return Reason(code, f"jobs/{name}", f"{name} {what}")
