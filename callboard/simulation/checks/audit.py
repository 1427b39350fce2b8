"""The audit: each decision held against the virtual world and against books of our own.

Nothing here trusts an index of the scheduler: the books are folded from the changes, and whether a process is gone is
asked of the machines.
"""

from __future__ import annotations

from collections import Counter

from callboard.model.specs import Fencing
from callboard.scheduler import Outcome, Scheduler, State, check_invariants
from callboard.scheduler.records.events import (
    ControllerStarted,
    Event,
    NodeLeft,
    NodeLost,
    NodeRayChanged,
    NodeSuspected,
)
from callboard.scheduler.records.job_records import Change, Drop, PreemptionRecord, Put, WorkerRecord
from callboard.scheduler.records.node_record import NodeRecord
from callboard.scheduler.records.states import ENDED, HOLDING, LIVE, JobState, NodeState, Rule, WorkerState
from callboard.simulation.world.rules import RuleBroken
from callboard.simulation.world.site import Site

MILLI = 1000
OVERDUE_SLACK_MS = 5_000
"""How late a deadline may be noticed: the slowest commit, and some."""

_BY_PRIORITY = (Rule.LABEL, Rule.SAME_POOL, Rule.CROSS_POOL)


class Audit:
    """Checks every decision."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._workers: dict[int, WorkerRecord] = {}
        self._devices: Counter[tuple[str, int]] = Counter()
        self._ghosts: dict[str, tuple[int, ...]] = {}
        self._reconciling = False
        self._stale = ""
        """The node whose earlier session the event is about that is being decided."""
        self.full_checks = 0

    def started(self, state: State) -> None:
        """Opens the books anew, on a state that was replayed."""
        self._workers.clear()
        self._devices.clear()
        for worker in state.workers.values():
            self._book(worker.generation, worker)
        self._ghosts = {node.node_id: node.ghosts for node in state.nodes.values()}
        check_invariants(state)
        self.full_checks += 1

    def before(self, state: State, event: Event) -> None:
        """An event is about to be decided."""
        self._reconciling = state.meta.reconcile_until_ms > 0 or isinstance(event, ControllerStarted)
        self._stale = _about_an_earlier_session(state, event)

    def decided(self, state: State, outcome: Outcome) -> None:
        """Checks what an event led to.

        Raises:
            RuleBroken: it must not be.
        """
        still_reconciling = self._reconciling and state.meta.reconcile_until_ms > 0
        jobs: dict[str, None] = {}
        nodes: dict[str, None] = {}
        for change in outcome.changes:
            self._check_change(state, change, still_reconciling=still_reconciling)
            if isinstance(change, Put) and isinstance(change.record, WorkerRecord):
                jobs[change.record.job] = None
                nodes[change.record.node_id] = None
            elif (change.record if isinstance(change, Put) else change).kind == "job":
                jobs[str(change.record.key if isinstance(change, Put) else change.key)] = None
            elif isinstance(change, Put) and isinstance(change.record, NodeRecord):
                self._check_silent(change.record)
        for uid in jobs:
            _check_gang(state, uid)
        for node_id in nodes:
            self._check_node(state, node_id)

    def full(self, scheduler: Scheduler, now_ms: int, up_ms: int) -> None:
        """Checks everything.

        Args:
            now_ms: the controller's time.
            up_ms: how long the controller has been up.
        """
        state = scheduler.state
        check_invariants(state)
        self.full_checks += 1
        if self._workers != state.workers:
            raise RuleBroken("books", "the changes don't add up to the state")
        for worker in state.workers.values():
            late_ms = min(now_ms - worker.deadline_ms, up_ms)
            if worker.state is WorkerState.STOPPING and worker.deadline_ms and late_ms > OVERDUE_SLACK_MS:
                raise RuleBroken(
                    "I6", f"the stop of g{worker.generation} is {late_ms} ms over its deadline", worker.job
                )

    # ---- single changes ----

    def _check_change(self, state: State, change: Change, *, still_reconciling: bool) -> None:
        if isinstance(change, Drop):
            if change.kind == "worker":
                self._check_dropped(int(str(change.key)))
            return
        record = change.record
        if isinstance(record, WorkerRecord):
            self._check_worker(state, record, still_reconciling=still_reconciling)
        elif isinstance(record, NodeRecord):
            if record.node_id == self._stale:
                raise RuleBroken(
                    "I9", f"{record.node_id} is {record.state} by what is said of an earlier session of it"
                )
            self._check_ghosts(record)
            if record.state is NodeState.LOST:
                _check_given_up(state, record)
        elif isinstance(record, PreemptionRecord) and record.yield_ms < 0:
            _check_preemption(state, record)

    def _check_worker(self, state: State, new: WorkerRecord, *, still_reconciling: bool) -> None:
        old = self._workers.get(new.generation)
        if old is None and still_reconciling:
            raise RuleBroken("QL-03", f"g{new.generation} is placed while running work is still counted", new.job)
        if old is None:
            self._check_copies(state, new)
            if unwanted := state.nodes[new.node_id].ghosts:
                raise RuleBroken("R2", f"g{new.generation} is placed beside g{unwanted}, which nobody wants", new.job)
        if new.state is WorkerState.STOPPED and (old is None or old.state is not WorkerState.STOPPED):
            self._check_gone(new)
        if new.state is WorkerState.STOPPING and not new.deadline_ms:
            raise RuleBroken("I6", f"g{new.generation} stops without a deadline", new.job)
        self._book(new.generation, new)
        for share in new.devices:
            if self._devices[new.node_id, share.index] > MILLI:
                raise RuleBroken("I1", f"device {share.index} of {new.node_id} is given beyond 1000 milli", new.job)

    def _check_copies(self, state: State, new: WorkerRecord) -> None:
        if state.specs[new.job].spec.fencing is not Fencing.STRICT:
            return
        place = (new.job, new.component, new.rank)
        for other in self._workers.values():
            if other.state is WorkerState.QUARANTINED and (other.job, other.component, other.rank) == place:
                raise RuleBroken("R5", f"g{new.generation} comes while its copy g{other.generation} may live", new.job)

    def _check_dropped(self, generation: int) -> None:
        old = self._workers.get(generation)
        if old is not None and old.state in HOLDING:
            raise RuleBroken("I4", f"g{generation} is forgotten while it holds its room", old.job)
        self._book(generation, None)

    def _check_ghosts(self, node: NodeRecord) -> None:
        """A node takes work once what nobody wants there is proved gone. One that has left takes none, and says anew
        what lives there when it comes back."""
        before, self._ghosts[node.node_id] = self._ghosts.get(node.node_id, ()), node.ghosts
        if node.state is NodeState.LEFT:
            return
        for generation in before:
            if generation not in node.ghosts and self._site.machines.alive(generation) is not None:
                raise RuleBroken("R2/I4", f"{node.node_id} awaits g{generation} no more, whose processes live there")

    def _check_silent(self, node: NodeRecord) -> None:
        """When a node is given up for its silence, strict workers there have ended: their copies may start at once."""
        if node.state is not NodeState.LOST:
            return
        machine, now_ms = self._site.machines.by_node[node.node_id], self._site.timeline.now_ms
        for tree in machine.trees.values():
            if tree.strict and not tree.is_stuck(now_ms):
                raise RuleBroken(
                    "R5", f"{node.node_id} is given up, and g{tree.generation}, which is strict, lives there"
                )

    def _check_gone(self, worker: WorkerRecord) -> None:
        machine = self._site.machines.alive(worker.generation)
        if machine is not None:
            raise RuleBroken(
                "R2/I4",
                f"the room of g{worker.generation} is free ({worker.reason}), its processes live on {machine.node_id}",
                worker.job,
            )

    def _book(self, generation: int, new: WorkerRecord | None) -> None:
        old = self._workers.pop(generation, None)
        if old is not None and old.state in HOLDING:
            for share in old.devices:
                self._devices[old.node_id, share.index] -= share.milli
        if new is not None:
            self._workers[generation] = new
            if new.state in HOLDING:
                for share in new.devices:
                    self._devices[new.node_id, share.index] += share.milli

    def _check_node(self, state: State, node_id: str) -> None:
        node = state.nodes.get(node_id)
        if node is None:
            return
        use = state.node_use(node_id)
        if use.used + use.held + use.free + use.quarantined != node.capacity:
            raise RuleBroken("I10", f"{node_id}: {use} does not add up to {node.capacity}")


def _about_an_earlier_session(state: State, event: Event) -> str:
    """The node that it is about; empty: it is about something else, or about how things are."""
    if isinstance(event, NodeSuspected | NodeLost | NodeLeft | NodeRayChanged):
        node = state.nodes.get(event.node_id)
        return event.node_id if node is not None and node.epoch != event.epoch else ""
    return ""


def _check_given_up(state: State, node: NodeRecord) -> None:
    for worker in state.workers_on(node.node_id):
        if worker.state in LIVE:
            raise RuleBroken("R5", f"{node.node_id} is given up and g{worker.generation} counts as there", worker.job)


def _check_gang(state: State, uid: str) -> None:
    job = state.jobs.get(uid)
    if job is None:
        return
    live = Counter(w.component for w in state.workers_of(uid) if w.state in LIVE and w.attempt == job.attempt)
    if job.state in (JobState.STARTING, JobState.RUNNING):
        # One that is on its way out counts no more; its successor may be there already.
        live -= Counter(w.component for w in state.workers_of(uid) if w.state is WorkerState.STOPPING)
        spec = state.specs[uid].spec
        replacing = spec.replaces and job.state is JobState.RUNNING and job.deadline_ms > 0
        for component in spec.components:
            fewest = 0 if replacing else component.min_workers
            if not fewest <= live[component.name] <= component.max_workers:
                raise RuleBroken("I3", f"{job.name} is {job.state} with {live[component.name]} {component.name}", uid)
    elif live and (job.state is JobState.PENDING or job.state in ENDED):
        raise RuleBroken("I3", f"{job.name} is {job.state} and has live workers", uid)


def _check_preemption(state: State, record: PreemptionRecord) -> None:
    if record.victim == record.preemptor:
        raise RuleBroken("I5", f"{record.victim_name} is preempted for itself", record.victim)
    victim, preemptor = state.specs.get(record.victim), state.specs.get(record.preemptor)
    if record.rule in _BY_PRIORITY and victim is not None and preemptor is not None:
        if victim.spec.priority_milli >= preemptor.spec.priority_milli:
            raise RuleBroken("I5", f"{record.victim_name} yields to one that it outranks", record.victim)
        if not victim.spec.preemptible:
            raise RuleBroken("I5", f"{record.victim_name} may not be preempted", record.victim)
