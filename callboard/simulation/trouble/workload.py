"""Trainers that submit, scale, renew, preempt, cancel and complete jobs, and when they do.

A client retries what it has no answer to, a submission under the same request id; it tells :mod:`acknowledged` of every
answer it got.
"""

from __future__ import annotations

from functools import partial

from callboard.model.specs import JobSpec
from callboard.scheduler import Outcome
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.events import Make
from callboard.scheduler.records.states import ENDED, JobState
from callboard.simulation.checks.acknowledged import Acknowledged
from callboard.simulation.trouble import shapes
from callboard.simulation.trouble.calls import Calls
from callboard.simulation.world.rules import RuleBroken

MOST_WAITING = 8
"""Jobs that wait until no more are submitted: enough for every rule of the queue; each is planned at each change."""

MOST_TRIES = 20


class Workload:
    """All trainers."""

    def __init__(self, calls: Calls, acknowledged: Acknowledged, gpus: int) -> None:
        self._calls = calls
        self._controller = calls.controller
        self._chance = calls.chance
        self._acknowledged = acknowledged
        self._asked = 0
        self._owned: dict[str, None] = {}
        """Jobs owned by a client that still lives."""
        # One job per 30 s and four GPUs asks for somewhat more than there is.
        self.gap_ms = max(1, 30_000 * 4 // gpus)

    def start(self) -> None:
        for act, every in (
            (self._submit, 1),
            (self._complete, 4),
            (self._cancel, 8),
            (self._scale, 8),
            (self._preempt, 30),
            (self._client_dies, 30),
        ):
            self._calls.repeat(act, self.gap_ms * every)
        self._calls.repeat(self._renew, shapes.SESSION_LEASE_MS / 5)

    @property
    def finished(self) -> bool:
        """Whether every job that was to be submitted was."""
        most = self._calls.site.options.jobs
        return most is not None and self._asked >= most

    def cancel_all(self) -> None:
        for uid, job in list(self._controller.scheduler.state.jobs.items()):
            if job.state not in ENDED:
                self._cancel_one(uid, destroy=False)

    def _submit(self) -> None:
        waiting = self._controller.scheduler.state.jobs_by_state[JobState.PENDING]
        if self.finished or len(waiting) >= MOST_WAITING:
            return
        self._asked += 1
        spec = shapes.job_spec(f"job-{self._asked}", self._chance)
        self._submit_spec(spec, f"j-{self._asked}", f"request-{self._asked}", 1)

    def _submit_spec(self, spec: JobSpec, uid: str, request_id: str, times: int) -> None:
        # Another uid with every try, as a controller would mint: the request id alone tells that it is the same.
        fresh = uid if times == 1 else f"{uid}.{times}"

        def answered(outcome: Outcome) -> None:
            accepted = str(outcome.result)
            self._acknowledged.submitted(accepted, request_id, accepted in self._controller.scheduler.state.jobs)
            if spec.session_lease_ms:
                self._owned[accepted] = None

        def again() -> None:
            if times < MOST_TRIES:
                self._submit_spec(spec, uid, request_id, times + 1)

        def refused() -> None:
            jobs = self._controller.scheduler.state.jobs.values()
            if times > 1 and any(job.request_id == request_id for job in jobs):
                raise RuleBroken("R6", f"request {request_id} was accepted, and is refused when it is repeated")

        self._calls.call(
            partial(ev.JobSubmitted, uid=fresh, spec=spec, request_id=request_id), answered, again, refused
        )

    def _cancel(self) -> None:
        destroy = self._chance.random() < 0.2
        if uid := self._some_job(*(state for state in JobState if state not in ENDED)):
            self._cancel_one(uid, destroy=destroy)

    def _cancel_one(self, uid: str, *, destroy: bool) -> None:
        self._end(partial(ev.JobCancelled, uid=uid, destroy_groups=destroy), uid)

    def _complete(self) -> None:
        if uid := self._some_job(JobState.RUNNING):
            self._end(partial(ev.JobCompleted, uid=uid), uid)

    def _end(self, make: Make, uid: str) -> None:
        self._calls.call(make, lambda _: self._acknowledged.over(uid), again=lambda: self._end(make, uid))

    def _preempt(self) -> None:
        uid, other = self._some_job(JobState.RUNNING), self._chance.choice([self._some_job(JobState.PENDING), ""])
        if uid:
            self._calls.call(partial(ev.JobPreempted, uid=uid, for_uid=other))

    def _scale(self) -> None:
        uid = self._some_job(JobState.RUNNING)
        if not uid:
            return
        component = self._controller.scheduler.state.specs[uid].spec.components[0]
        if component.elastic:
            workers = self._chance.randint(component.min_workers, component.max_workers)
            self._calls.call(partial(ev.JobScaled, uid=uid, component=component.name, workers=workers))

    def _renew(self) -> None:
        jobs = self._controller.scheduler.state.jobs
        uids = tuple(uid for uid in self._owned if uid in jobs and jobs[uid].state not in ENDED)
        self._owned = dict.fromkeys(uids)
        if uids:
            self._calls.call(partial(ev.JobsRenewed, uids=uids))

    def _client_dies(self) -> None:
        if self._owned:
            del self._owned[self._chance.choice(list(self._owned))]

    def _some_job(self, *states: JobState) -> str:
        known = self._controller.scheduler.state.jobs_by_state
        uids = [uid for state in states for uid in known[state]]
        return self._chance.choice(uids) if uids else ""
