"""The scheduler: one event in, all its changes and commands out, or nothing.

    scheduler = Scheduler()
    outcome = scheduler.handle(JobSubmitted(now_ms=…, uid=…, spec=…))

No await, clock, random number or environment inside, and no memory but the records: these and the next event determine
the changes, commands, log entries and result, byte for byte, and when time must be looked at again. A scheduler rebuilt
from the records goes on exactly as the one that lived through the history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from callboard.model.frozen import dataclass, quick
from callboard.scheduler.account import awaited
from callboard.scheduler.account import explain as explaining
from callboard.scheduler.handlers import (
    elastic,
    groups,
    nodes,
    orders,
    passes,
    placing,
    requests,
    signals,
    starting,
    stopping,
    workers,
)
from callboard.scheduler.handlers import stopping as ending
from callboard.scheduler.plan.planning import could_ever_fit
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.commands import Command
from callboard.scheduler.records.job_records import Change, EventRecord, evolve
from callboard.scheduler.records.refusals import Refusal
from callboard.scheduler.records.states import (
    ENDED,
    GROUP_BACKOFF,
    GROUP_CREATING,
    GROUP_REMOVING,
    JOB_FAILED,
    JOB_PENDING,
    JOB_RUNNING,
    JOB_STARTING,
    WORKER_STOPPED,
    NodeState,
    Removal,
    StopOutcome,
)
from callboard.scheduler.records.wording import join
from callboard.scheduler.state.roster import GONE
from callboard.scheduler.state.state import State
from callboard.scheduler.state.transaction import Transaction

HISTORY_LIMIT = 1_000
"""Most ended jobs kept; the oldest go first (NJ-11)."""


MOST_CONSIDERED = 20
"""Most jobs that a decision is explained for."""


MOST_ACCOUNTED = 1_024
"""Most nodes times workers of a job for which the reason of its end is worked out whole, in the event that ends it."""


@quick
@dataclass(frozen=True, slots=True)
class Outcome:
    """What one event led to.

    Attributes:
        changes: to be journaled before anything else happens.
        commands: for agents, once the changes are journaled.
        events: entries of the event log.
        result: what the event's sender is told.
    """

    changes: tuple[Change, ...]
    commands: tuple[Command, ...]
    events: tuple[EventRecord, ...]
    result: Any = None


class Scheduler:
    """Decides; see the module's docstring."""

    def __init__(self, state: State | None = None, history_limit: int = HISTORY_LIMIT) -> None:
        self.state = state or State()
        self._history_limit = history_limit
        self._ended = [self.state.jobs_by_state[state] for state in ENDED]

    def handle(self, event: ev.Event) -> Outcome:
        """Carries out one event.

        Raises:
            Refusal: the request is refused; nothing changed. Without the account that :meth:`accounted` adds.
            ImpossibleTransition: a defect; nothing changed.
        """
        tx = Transaction(self.state, event.now_ms, event.cause)
        try:
            result = HANDLERS[type(event)](tx, event)
            self._follow_up(tx)
        except BaseException:
            tx.fail()
            raise
        return Outcome(tuple(tx.changes), tuple(tx.commands), tuple(tx.events), result)

    # ---- questions: none leaves a trace ----

    @contextmanager
    def fork(self, event: ev.Event) -> Iterator[Transaction]:
        """The state as it would be if an event came now. Everything is taken back at the end, so that nobody can tell
        that it was asked: an undo is the identity.

        Raises:
            Refusal: the event would be refused.
        """
        tx = Transaction(self.state, event.now_ms, event.cause)
        refused: Refusal | None = None
        try:
            yield tx
        except Refusal as refusal:
            refused = refusal
        finally:
            tx.undo()
        if refused is not None:
            raise self.accounted(refused)

    def accounted(self, refusal: Refusal) -> Refusal:
        """A refusal with its account, on the state on which it was decided."""
        return requests.accounted(self.state, refusal)

    def rehearse(self, event: ev.Event) -> Outcome:
        """What an event would lead to.

        Raises:
            Refusal: it would be refused.
        """
        with self.fork(event) as tx:
            result = HANDLERS[type(event)](tx, event)
            self._follow_up(tx)
            return Outcome(tuple(tx.changes), tuple(tx.commands), tuple(tx.events), result)

    def what_if(self, event: ev.JobSubmitted) -> explaining.Explanation:
        """What would become of a job, on the way that its submission takes.

        Raises:
            Refusal: it would be refused.
        """
        with self.fork(event) as tx:
            uid = str(HANDLERS[type(event)](tx, event))
            account = explaining.explain(tx.state, uid, tx.now_ms)
            if uid == event.uid:
                self._follow_up(tx)
                job = tx.state.jobs[uid]
                if account.workers and job.state is JOB_PENDING and not job.nominated:
                    # Those who wait already take what it would have had.
                    return explaining.explain(tx.state, uid, tx.now_ms)
            return account

    def considered(self, event: ev.Event) -> list[tuple[str, explaining.Explanation]]:
        """With their names the accounts of the best-ranked jobs that wait when an event comes, before it is followed
        up."""
        with self.fork(event) as tx:
            HANDLERS[type(event)](tx, event)
            uids = [key[-1] for key in tx.state.queue[:MOST_CONSIDERED]]
            return [(tx.state.jobs[uid].name, explaining.explain(tx.state, uid, tx.now_ms)) for uid in uids]

    def _follow_up(self, tx: Transaction) -> None:
        """What comes after every event, whatever it was."""
        if tx.state.meta.starting:
            starting.go_on(tx)
        passes.run(tx)
        self._trim_history(tx)
        tx.close()

    def owed_commands(self, node_id: str) -> list[Command]:
        """What the agent of a node must still do, as far as it has not answered."""
        return list(orders.owed(self.state, node_id, self.state.meta.now_ms))

    def next_wake_ms(self) -> int | None:
        """When a :class:`Tick` is needed at the latest, in controller time; None: no time is awaited."""
        return self.state.deadlines.next_ms()

    def explain(self, uid: str, now_ms: int) -> explaining.Explanation:
        """Why a job is where it is."""
        return explaining.explain(self.state, uid, max(now_ms, self.state.meta.now_ms))

    def _trim_history(self, tx: Transaction) -> None:
        if not tx.changes:
            return
        excess = sum(map(len, self._ended)) - self._history_limit
        if excess > 0:
            oldest = sorted(
                (uid for uids in self._ended for uid in uids if uid not in self.state.jobs_holding),
                key=lambda uid: (self.state.jobs[uid].end_ms, self.state.jobs[uid].order),
            )
            # A tenth at least, so that the sort is paid seldom.
            for uid in oldest[: max(excess, self._history_limit // 10)]:
                ending.forget(tx, uid)


def _controller_started(tx: Transaction, event: ev.ControllerStarted) -> int:
    """A new term. Nodes of before count as out of touch until they are back; nothing is admitted meanwhile."""
    term = tx.state.meta.term + 1
    known = [node for node in tx.state.nodes.values() if node.state not in (NodeState.LOST, NodeState.LEFT)]
    tx.count(term=term, reconcile_until_ms=tx.now_ms + event.grace_ms if known else 0)
    for node in known:
        if node.state is not NodeState.SUSPECT:
            tx.move_node(node.node_id, NodeState.SUSPECT, "the controller restarted; waits for its agent")
    for uid in [uid for uid, job in tx.state.jobs.items() if job.session_ms]:
        # A client could not be heard while nobody listened: every lease begins anew.
        tx.change_job(uid, session_ms=tx.now_ms + tx.state.specs[uid].spec.session_lease_ms)
    # Nor could agents answer: none is overdue before it can have come back and said so.
    heard_ms = tx.now_ms + event.grace_ms + groups.ANSWER_MARGIN_MS
    for worker in list(tx.state.workers.values()):
        if 0 < worker.deadline_ms < heard_ms:
            tx.put(evolve(worker, deadline_ms=heard_ms))
    for group_id in list(tx.state.group_index.by_state[GROUP_CREATING]):
        if 0 < tx.state.groups[group_id].deadline_ms < heard_ms:
            tx.change_group(group_id, deadline_ms=heard_ms)
    tx.event("controller.started", "scheduler", "", f"term {term}")
    return term


def _tick(tx: Transaction, _event: ev.Tick) -> None:
    """Carries out what is due."""
    for deadline in tx.due():
        _at_ms, kind, key = deadline
        if not tx.state.deadlines.stands(deadline):
            continue  # its record moved on with one that was due before
        if kind == "worker":
            workers.overdue(tx, tx.state.workers[int(str(key))])
        elif kind == "eligible":
            tx.change_job(str(key), eligible_ms=0)
            tx.fresh.append(str(key))
        elif kind == "job":
            _job_due(tx, str(key))
        elif kind == "starving":
            tx.change_job(str(key), starving=True)
            tx.fresh.append(str(key))
        elif kind == "cause":
            stopping.recover(tx, str(key), tx.state.jobs[str(key)].reason, counts=True)
        elif kind == "session":
            requests.session_over(tx, str(key))
        elif kind == "group":
            _group_due(tx, str(key))
        elif kind == "idle":
            groups.doom(tx, str(key), Removal.IDLE, "idle for too long")
        elif kind == "meta":
            tx.count(reconcile_until_ms=0)
            tx.event("scheduler.reconciled", "scheduler", "", "the grace for nodes to come back is over")


def _job_due(tx: Transaction, uid: str) -> None:
    job, state = tx.state.jobs[uid], tx.state
    if job.state in ENDED:
        ending.forget(tx, uid)
        return
    spec = state.specs[uid].spec
    small = len(state.nodes) * max(stopping.fewest(spec), spec.placement_nodes) <= MOST_ACCOUNTED
    if job.state is JOB_RUNNING:
        lacking = awaited.short_of_workers(state, job, spec, tx.now_ms) if small else ()
        elastic.not_replaced(tx, uid, join([component.why for component in lacking]) or "it did not start")
    elif job.state is JOB_PENDING:
        if could_ever_fit(state, spec):
            tx.change_job(uid, deadline_ms=0)
            return
        why = f"nothing there could ever hold {spec.name}"
        if spec.placement_nodes:
            there = sum(node.state not in GONE for node in state.nodes.values())
            why = f"its placement needs {spec.placement_nodes} nodes; {there} joined"
        if small:
            short = placing.waited_in_vain(state.nodes.values(), spec) if spec.placement_nodes else ""
            why = short or explaining.unschedulable(state, spec).summary
        ending.end(tx, uid, JOB_FAILED, f"timed out waiting for nodes: {why}")


def _group_due(tx: Transaction, group_id: str) -> None:
    """A creation that nobody answered, or a reserved group whose backoff is over."""
    group = tx.state.groups[group_id]
    if group.state is GROUP_BACKOFF:
        tx.put(evolve(group, deadline_ms=0))
        pool = tx.state.pools.get(group.pool)
        if pool is not None and not tx.state.meta.reconcile_until_ms:
            groups.ensure_reserved(tx, pool)
        return
    if group.state is GROUP_CREATING:
        tx.change_group(group_id, deadline_ms=0)
        _give_up_creation(tx, group_id, "not ready in time")


def _give_up_creation(tx: Transaction, group_id: str, why: str) -> None:
    _fail_creation(tx, group_id, why)
    if group_id in tx.state.groups:
        groups.doom(tx, group_id, Removal.FAILED, why)


def _group_ready(tx: Transaction, event: ev.GroupReady) -> None:
    group = tx.state.groups.get(event.group_id)
    if group is None or group.state is not GROUP_CREATING or group.attempt != event.attempt:
        if group is None or group.ray_id != event.ray_id:
            reason = f"made for {event.group_id} when nobody waited"
            groups.remove_stray(tx, event.ray_id, event.ray_session, reason, group.pool if group is not None else "")
        return
    problem, upset = groups.follow(tx, event.group_id, event.devices) if event.devices else ("", [])
    if problem:
        tx.change_group(event.group_id, ray_id=event.ray_id, ray_session=event.ray_session, deadline_ms=0)
        _give_up_creation(tx, event.group_id, problem)
        return
    for uid in upset:
        starting.drop_nomination(tx, uid, f"Ray gave other devices to {event.group_id} than it was planned around")
    groups.ready(tx, event.group_id, event.ray_id, event.ray_session)
    starting.start_assigned(tx, event.group_id)
    groups.let_go(tx, event.group_id)


def _group_found(tx: Transaction, event: ev.GroupFound) -> None:
    """A group in Ray that no record names is left by somebody who is gone, and goes too (PG-07). One that is being made
    is not judged here: its creation finds it by its name, compares it, and takes or removes it."""
    group = tx.state.groups.get(event.group_id)
    making = group is not None and group.state is GROUP_CREATING
    if making or event.ray_id in tx.state.group_index.by_ray_id:
        return
    groups.remove_stray(tx, event.ray_id, event.ray_session, f"found in Ray as {event.group_id}; nobody knows it")


def _group_failed(tx: Transaction, event: ev.GroupFailed) -> None:
    group = tx.state.groups.get(event.group_id)
    if group is None or group.state is not GROUP_CREATING or group.attempt != event.attempt:
        return
    _fail_creation(tx, event.group_id, event.message)
    left = tx.state.groups.get(event.group_id)
    if left is not None and left.state is GROUP_CREATING:
        groups.failed(tx, event.group_id, event.message)


def _fail_creation(tx: Transaction, group_id: str, message: str) -> None:
    """The jobs that waited for a group queue again, after a backoff that grows with their attempts."""
    group = tx.state.groups[group_id]
    pool = tx.state.pools.get(group.pool)
    for worker in tx.state.workers_in(group_id):
        if worker.extra and tx.state.jobs[worker.job].state is JOB_RUNNING:
            stopped = tx.move_worker(
                worker.generation, WORKER_STOPPED, "never started", outcome=StopOutcome.ALREADY_GONE
            )
            elastic.lose(tx, worker.job, [stopped], f"placement group {group_id}: {message}", counts=True)
    for uid in dict.fromkeys(worker.job for worker in tx.state.workers_in(group_id)):
        job = tx.state.jobs[uid]
        if job.state is JOB_STARTING:
            stopping.requeue(
                tx, uid, f"placement group {group_id} could not be made: {message}", pool=pool, failed_group=group_id
            )


def _group_removed(tx: Transaction, event: ev.GroupRemoved) -> None:
    group = tx.state.groups.get(event.group_id)
    if group is not None and group.state is GROUP_REMOVING:
        groups.removed(tx, event.group_id)


Handler = Callable[[Transaction, Any], Any]
HANDLERS: Mapping[type[ev.Event], Handler] = {
    ev.ControllerStarted: _controller_started,
    ev.Tick: _tick,
    ev.PoolCreated: requests.create_pool,
    ev.PoolUpdated: requests.update_pool,
    ev.PoolDeleted: requests.delete_pool,
    ev.PolicySet: requests.set_policy,
    ev.JobSubmitted: requests.submit,
    ev.JobCancelled: requests.cancel,
    ev.JobCompleted: requests.complete,
    ev.JobPreempted: requests.preempt,
    ev.JobScaled: elastic.scale,
    ev.PlacementResolved: placing.resolved,
    ev.SignalsReported: signals.reported,
    ev.JobsRenewed: requests.renew,
    ev.GroupDeleted: requests.delete_group,
    ev.NodeJoined: nodes.joined,
    ev.NodeRayChanged: nodes.ray_changed,
    ev.NodeObserved: nodes.observed,
    ev.NodeSuspected: nodes.suspected,
    ev.NodeLost: nodes.lost,
    ev.NodeLeft: nodes.left,
    ev.NodeCordoned: nodes.cordoned,
    ev.NodeDrained: nodes.drained,
    ev.NodeRemoved: nodes.removed,
    ev.RaySessionLost: nodes.session_lost,
    ev.PortReserved: starting.port_reserved,
    ev.WorkerStarted: workers.handle,
    ev.WorkerStartFailed: workers.handle,
    ev.WorkerStopped: workers.handle,
    ev.WorkerExited: workers.handle,
    ev.WorkerFinished: workers.handle,
    ev.WorkerProgressed: workers.handle,
    ev.GroupReady: _group_ready,
    ev.GroupFailed: _group_failed,
    ev.GroupFound: _group_found,
    ev.GroupRemoved: _group_removed,
}
