"""Who asks for what, and when? Clients that submit, cancel, complete, preempt, and change pools and cordons.

A client retries what it has no answer to, a submission under the same request id; it tells :mod:`promises` of every
answer it got.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from callboard.model.specs import JobSpec, StopPolicy
from callboard.scheduler import Outcome, Refusal
from callboard.scheduler import events as ev
from callboard.scheduler.records import ENDED, JobState
from callboard.simulation import shapes
from callboard.simulation.controller import Controller, Make, Unavailable
from callboard.simulation.options import Fault
from callboard.simulation.promises import Promises
from callboard.simulation.site import Site

RETRY_MS = 2_000

MOST_WAITING = 8
"""Jobs that wait until no more are submitted: enough for every rule of the queue; each is planned at each change."""


class Workload:
    """All clients."""

    def __init__(self, site: Site, controller: Controller, promises: Promises, gpus: int) -> None:
        self._site = site
        self._controller = controller
        self._promises = promises
        self._gpus = gpus
        self._chance = site.chance.workload
        self.asked = 0
        self.open = True
        # One job per 30 s and four GPUs asks for somewhat more than there is.
        self._gap_ms = max(1, 30_000 * 4 // gpus)
        self._recreated: dict[str, None] = {}

    def start(self) -> None:
        """Makes the pools, then asks and asks."""
        self._call(lambda now_ms, cause: ev.PolicySet(now_ms=now_ms, cause=cause, policy=shapes.policy(self._chance)))
        for name in dict.fromkeys(shapes.POOLS):
            self._create_pool(name)
        self._again(self._submit, lambda: self._gap_ms)
        for act, every in (
            (self._cancel, 8),
            (self._complete, 4),
            (self._preempt, 30),
            (self._change_pool, 40),
            (self._cordon, 60),
            (self._delete_group, 60),
            (self._recreate_pool, 200),
            (self._change_policy, 400),
        ):
            self._again(act, lambda every=every: self._gap_ms * every)  # type: ignore[misc]

    def _again(self, act: Callable[[], None], gap_ms: Callable[[], float]) -> None:
        def go() -> None:
            if not self.open:
                return
            act()
            self._again(act, gap_ms)

        self._site.timeline.after(1 + self._chance.expovariate(1 / gap_ms()), go)

    # ---- jobs ----

    @property
    def finished(self) -> bool:
        """Whether every job that was to be submitted was."""
        most = self._site.options.jobs
        return most is not None and self.asked >= most

    def _submit(self) -> None:
        state = self._controller.scheduler.state
        if self.finished or len(state.jobs_by_state[JobState.PENDING]) >= MOST_WAITING:
            return
        self.asked += 1
        spec = shapes.job_spec(f"job-{self.asked}", self._chance, elastic=True)
        self._submit_spec(spec, f"j-{self.asked}", f"request-{self.asked}", 1)

    def _submit_spec(self, spec: JobSpec, uid: str, request_id: str, times: int) -> None:
        # Another uid with every try, as a controller would mint: the request id alone tells that it is the same.
        fresh = uid if times == 1 else f"{uid}.{times}"

        def make(now_ms: int, cause: str) -> ev.Event:
            return ev.JobSubmitted(now_ms=now_ms, cause=cause, uid=fresh, spec=spec, request_id=request_id)

        def answered(outcome: Outcome) -> None:
            accepted = str(outcome.result)
            self._promises.submitted(accepted, request_id, accepted in self._controller.scheduler.state.jobs)

        self._call(
            make, answered, again=lambda: self._submit_spec(spec, uid, request_id, times + 1) if times < 20 else None
        )

    def _cancel(self) -> None:
        uid = self._some_job()
        destroy = self._chance.random() < 0.2

        def make(now_ms: int, cause: str) -> ev.Event:
            return ev.JobCancelled(now_ms=now_ms, cause=cause, uid=uid, destroy_groups=destroy)

        self._end(make, uid)

    def _complete(self) -> None:
        uid = self._some_job(JobState.RUNNING)

        def make(now_ms: int, cause: str) -> ev.Event:
            return ev.JobCompleted(now_ms=now_ms, cause=cause, uid=uid)

        self._end(make, uid)

    def _end(self, make: Make, uid: str) -> None:
        if uid:
            self._call(make, lambda _: self._promises.over(uid), again=lambda: self._end(make, uid))

    def _preempt(self) -> None:
        uid, other = self._some_job(JobState.RUNNING), self._chance.choice([self._some_job(JobState.PENDING), ""])
        if uid:
            self._call(lambda now_ms, cause: ev.JobPreempted(now_ms=now_ms, cause=cause, uid=uid, for_uid=other))

    def _some_job(self, state: JobState | None = None) -> str:
        known = self._controller.scheduler.state
        if state is not None:
            uids = list(known.jobs_by_state[state])
        else:
            uids = [uid for each, members in known.jobs_by_state.items() if each not in ENDED for uid in members]
        return self._chance.choice(uids) if uids else ""

    # ---- pools, groups, nodes ----

    def _create_pool(self, name: str) -> None:
        spec = shapes.pool_spec(name, self._gpus, self._chance)
        self._call(
            lambda now_ms, cause: ev.PoolCreated(now_ms=now_ms, cause=cause, spec=spec),
            lambda _: self._promises.pool_created(name),
            again=lambda: self._create_pool(name),
        )

    def _change_pool(self) -> None:
        pools = self._controller.scheduler.state.pools
        if not pools:
            return
        name = self._chance.choice(list(pools))
        old, fresh = pools[name].spec, shapes.pool_spec(name, self._gpus, self._chance)
        stop = self._chance.choice([*StopPolicy, StopPolicy.NONE, StopPolicy.NONE, StopPolicy.NONE])
        spec = replace(fresh if self._chance.random() < 0.5 else old, stop_policy=stop)

        def answered(_: Outcome) -> None:
            pool = self._controller.scheduler.state.pools.get(name)
            if pool is not None and pool.spec == spec:
                self._promises.pool_changed(name, pool.spec_version)

        self._call(lambda now_ms, cause: ev.PoolUpdated(now_ms=now_ms, cause=cause, spec=spec), answered)

    def _recreate_pool(self) -> None:
        """A pool is deleted with force, and made again when it is gone."""
        name = self._chance.choice(["batch", "team-b"])
        if name in self._recreated:
            return
        self._recreated[name] = None
        self._promises.pool_goes(name)

        def make(now_ms: int, cause: str) -> ev.Event:
            return ev.PoolDeleted(now_ms=now_ms, cause=cause, name=name, force=True)

        def wait() -> None:
            if not self.open:
                return
            if name in self._controller.scheduler.state.pools:
                self._site.timeline.after(RETRY_MS, wait)
            else:
                del self._recreated[name]
                self._create_pool(name)

        def answered(_: Outcome) -> None:
            self._promises.pool_deleted(name)
            wait()

        self._call(make, answered, again=lambda: self._call(make, answered, again=wait))

    def _change_policy(self) -> None:
        policy = shapes.policy(self._chance)
        self._call(lambda now_ms, cause: ev.PolicySet(now_ms=now_ms, cause=cause, policy=policy))

    def _delete_group(self) -> None:
        groups = list(self._controller.scheduler.state.groups)
        if groups:
            group_id = self._chance.choice(groups)
            self._call(lambda now_ms, cause: ev.GroupDeleted(now_ms=now_ms, cause=cause, group_id=group_id))

    def _cordon(self) -> None:
        nodes = list(self._controller.scheduler.state.nodes)
        if nodes:
            node_id = self._chance.choice(nodes)
            self.set_cordon(node_id, cordoned=True)
            wait_ms = self._chance.randint(5_000, 60_000)
            self._site.timeline.after(wait_ms, lambda: self.set_cordon(node_id, cordoned=False))

    def set_cordon(self, node_id: str, *, cordoned: bool) -> None:
        """Cordons a node, or takes that back, whatever it takes."""
        self._call(
            lambda now_ms, cause: ev.NodeCordoned(now_ms=now_ms, cause=cause, node_id=node_id, cordoned=cordoned),
            again=lambda: self.set_cordon(node_id, cordoned=cordoned),
        )

    # ---- the end ----

    def close(self) -> None:
        """Asks for nothing more."""
        self.open = False

    def cancel_all(self) -> None:
        """Cancels every job."""
        for uid, job in list(self._controller.scheduler.state.jobs.items()):
            if job.state not in ENDED:
                self._end(
                    lambda now_ms, cause, uid=uid: ev.JobCancelled(now_ms=now_ms, cause=cause, uid=uid),  # type: ignore[misc]
                    uid,
                )

    def delete_pools(self) -> None:
        """Deletes every pool."""
        for name in list(self._controller.scheduler.state.pools):
            self._promises.pool_goes(name)
            self._call(
                lambda now_ms, cause, name=name: ev.PoolDeleted(now_ms=now_ms, cause=cause, name=name, force=True),  # type: ignore[misc]
                lambda _, name=name: self._promises.pool_deleted(name),  # type: ignore[misc]
            )

    # ---- calls ----

    def _call(
        self,
        make: Make,
        answered: Callable[[Outcome], None] = lambda _: None,
        again: Callable[[], None] | None = None,
    ) -> None:
        """One call; ``again`` when no answer came."""
        lost = self._chance.random() < 0.02 and Fault.CLIENT in self._site.faults

        def then(outcome: Outcome) -> None:
            if not lost:
                answered(outcome)
                return
            self._site.count("answer of a call lost")
            if again is not None:
                self._site.timeline.after(RETRY_MS, again)

        def fail(error: Exception) -> None:
            if again is not None and isinstance(error, Unavailable) and not isinstance(error, Refusal):
                self._site.timeline.after(RETRY_MS, again)

        self._site.timeline.after(
            self._chance.randint(1, 20), lambda: self._controller.ask(make, then, fail, source="call")
        )
