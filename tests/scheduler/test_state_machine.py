"""Any order of public events, shrunk to the shortest that fails: what must hold from the outside, whatever is inside.

``test_random_histories`` goes far; this one explains. Beside the core's own invariants (checked after every event) it
keeps a model of what the agents really run, of what was accepted and of what was journaled, and compares.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from callboard.model.quantities import Resources
from callboard.model.specs import ComponentSpec, JobSpec, PgPoolSpec, RestartPolicy, StopPolicy, Strategy
from callboard.scheduler import Outcome, Refusal, Scheduler, State
from callboard.scheduler.records import commands as cmd
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.job_records import Change, PreemptionRecord
from callboard.scheduler.records.node_record import DeviceShare, NodeRecord
from callboard.scheduler.records.states import ENDED, JobState, NodeState, Rule, StopOutcome, WorkerState
from tests.scheduler.world import World, job_spec, pool_spec

GPUS = 2
PICK = st.integers(0, 9)
"""Which of the things there are, counted round and round: a history stays valid while it shrinks."""

OUTRANKS = frozenset({Rule.SAME_POOL, Rule.CROSS_POOL, Rule.LABEL})
"""Rules by which only the more important may preempt (I5)."""


@st.composite
def jobs(draw: st.DrawFn) -> JobSpec:
    """Small jobs that are in each other's way."""
    workers = draw(st.integers(1, 3))
    main = ComponentSpec(
        name="main",
        actor="a:B",
        min_workers=1 if draw(st.booleans()) else workers,
        max_workers=workers,
        resources=Resources.parse({"gpu": draw(st.sampled_from([1, 2, 0.5]))}),
    )
    role = draw(st.sampled_from(["", "train", "rollout"]))
    return job_spec(
        "job",
        pool=draw(st.sampled_from(["a", "b"])),
        priority=draw(st.sampled_from([1, 2, 5, 9])),
        labels={"role": role} if role else {},
        components=[main],
        placement=draw(st.sampled_from(list(Strategy))),
        restart=RestartPolicy(max_restarts=draw(st.integers(0, 1)), backoff_base_ms=100),
        preemptible=draw(st.sampled_from([True, True, False])),
    )


JOBS = jobs()


class Journaled(World):
    """A world that keeps every change, as the journal does."""

    def __init__(self) -> None:
        super().__init__(auto=False)
        self.journal: list[Change] = []

    def send(self, event: ev.Event) -> Outcome:
        outcome = super().send(event)
        self.journal.extend(outcome.changes)
        return outcome


class SchedulerMachine(RuleBasedStateMachine):
    """See the module's docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.world = Journaled()
        self.names = 0
        self.accepted: dict[str, JobState] = {}
        self.processes: dict[int, tuple[str, tuple[DeviceShare, ...], ev.RunningWorker]] = {}
        self.known_preemptions = 0

    @initialize(
        nodes=st.integers(1, 3),
        kept=st.booleans(),
        quota=st.sampled_from([2, 4, 9]),
        specs=st.lists(JOBS, min_size=1, max_size=6),
    )
    def begin(self, nodes: int, kept: bool, quota: int, specs: list[JobSpec]) -> None:
        for n in range(nodes):
            self.world.join(f"n{n}", {"cpu": 4, "memory": "8GiB", "gpu": GPUS})
        self.world.policy({"role": {"train": ["rollout"]}}, cancel_timeout_ms=500, kill_timeout_ms=1000)
        shape = Resources.parse({"cpu": 1, "gpu": 1})
        pg_pool = PgPoolSpec(reserved=(shape,), max_dynamic=2, idle_ttl_ms=2000, reserved_lendable=True)
        self.world.pool(pool_spec("a", gpu=quota, pg_pool=pg_pool) if kept else pool_spec("a", gpu=quota))
        self.world.pool(pool_spec("b"))
        for spec in specs:
            self.submit(spec)
            self.agents_do_all_they_were_told()

    # ---- people ----

    @rule(spec=JOBS)
    def submit(self, spec: JobSpec) -> None:
        self.names += 1
        try:
            uid = self.world.submit(replace(spec, name=f"j{self.names}"))
        except Refusal:
            return
        self.accepted[uid] = JobState.PENDING

    @rule(specs=st.lists(JOBS, min_size=2, max_size=5))
    def a_crowd_comes(self, specs: list[JobSpec]) -> None:
        for spec in specs:
            self.submit(spec)

    @precondition(lambda self: self.live())
    @rule(pick=PICK, destroy=st.booleans())
    def cancel(self, pick: int, destroy: bool) -> None:
        uid = self.picked(self.live(), pick)
        self.send(ev.JobCancelled(now_ms=self.now, uid=uid, destroy_groups=destroy))

    @precondition(lambda self: self.live())
    @rule(pick=PICK)
    def complete(self, pick: int) -> None:
        self.send(ev.JobCompleted(now_ms=self.now, uid=self.picked(self.live(), pick)))

    @precondition(lambda self: self.live())
    @rule(pick=PICK, other=PICK, to_somebody=st.booleans())
    def preempt_by_hand(self, pick: int, other: int, to_somebody: bool) -> None:
        uid, for_uid = self.picked(self.live(), pick), self.picked(self.live(), other)
        if uid != for_uid:
            self.send(ev.JobPreempted(now_ms=self.now, uid=uid, for_uid=for_uid if to_somebody else ""))

    @precondition(lambda self: self.live())
    @rule(pick=PICK, workers=st.integers(1, 3))
    def scale(self, pick: int, workers: int) -> None:
        uid = self.picked(self.live(), pick)
        self.send(ev.JobScaled(now_ms=self.now, uid=uid, component="main", workers=workers))

    @rule(policy=st.sampled_from(list(StopPolicy)), quota=st.sampled_from([1, 4, 9]))
    def change_pool(self, policy: StopPolicy, quota: int) -> None:
        old = self.world.state.pools["a"].spec
        spec = pool_spec("a", gpu=quota, pg_pool=old.pg_pool)
        fields = {name: getattr(spec, name) for name in spec.__slots__} | {"stop_policy": policy}
        self.send(ev.PoolUpdated(now_ms=self.now, spec=type(spec)(**fields)))

    @rule(pick=PICK, cordoned=st.booleans())
    def cordon(self, pick: int, cordoned: bool) -> None:
        node_id = self.picked(list(self.world.state.nodes), pick)
        self.send(ev.NodeCordoned(now_ms=self.now, node_id=node_id, cordoned=cordoned))

    @rule(pick=PICK, within_ms=st.sampled_from([0, 200]))
    def drain(self, pick: int, within_ms: int) -> None:
        node_id = self.picked(list(self.world.state.nodes), pick)
        deadline_ms = self.now + within_ms if within_ms else 0
        self.send(ev.NodeDrained(now_ms=self.now, node_id=node_id, deadline_ms=deadline_ms))

    @precondition(lambda self: self.world.state.groups)
    @rule(pick=PICK)
    def delete_group(self, pick: int) -> None:
        self.send(ev.GroupDeleted(now_ms=self.now, group_id=self.picked(list(self.world.state.groups), pick)))

    # ---- agents ----

    @precondition(lambda self: self.world.held)
    @rule(pick=PICK)
    def agent_does_as_told(self, pick: int) -> None:
        command = self.taken(pick)
        if isinstance(command, cmd.StartWorker):
            self.runs(command)
        elif isinstance(command, cmd.StopWorker):
            self.ends(command.generation)
        self.world.reply(command)

    @rule()
    def agents_do_all_they_were_told(self) -> None:
        while self.world.held:
            self.agent_does_as_told(0)

    @precondition(lambda self: self.world.held)
    @rule(pick=PICK, unproved=st.booleans(), user_fault=st.booleans())
    def agent_fails(self, pick: int, unproved: bool, user_fault: bool) -> None:
        command = self.taken(pick)
        where: dict[str, Any] = {"now_ms": self.now, "node_id": command.node_id}
        if isinstance(command, cmd.StartWorker):
            if unproved:
                self.runs(command)
            generation = command.worker.generation
            self.send(
                ev.WorkerStartFailed(
                    **where, generation=generation, message="no luck", quarantined=unproved, user_fault=user_fault
                )
            )
        elif isinstance(command, cmd.StopWorker):
            if not unproved:
                self.ends(command.generation)
            outcome = StopOutcome.QUARANTINED if unproved else StopOutcome.KILLED
            self.send(ev.WorkerStopped(**where, generation=command.generation, outcome=outcome))
            if unproved and command.generation in self.processes:
                self.world.held.append(command)  # the agent goes on trying
        elif isinstance(command, cmd.CreateGroup):
            self.send(
                ev.GroupFailed(now_ms=self.now, group_id=command.group_id, attempt=command.attempt, message="no luck")
            )
        else:
            self.world.reply(command)

    @precondition(lambda self: self.connected())
    @rule(pick=PICK, twice=st.booleans())
    def worker_dies(self, pick: int, twice: bool) -> None:
        generation = self.picked(self.connected(), pick)
        node_id, _, _ = self.processes[generation]
        self.ends(generation)
        event = ev.WorkerExited(now_ms=self.now, node_id=node_id, generation=generation, message="killed by signal 9")
        for _ in range(1 + twice):
            self.send(event)

    # ---- time, nodes, the controller ----

    @rule(ms=st.sampled_from([1, 150, 1000, 8000]))
    def time_passes(self, ms: int) -> None:
        self.world.tick(ms)

    @precondition(lambda self: self.present())
    @rule(pick=PICK, goodbye=st.booleans())
    def node_goes(self, pick: int, goodbye: bool) -> None:
        node = self.world.state.nodes[self.picked(self.present(), pick)]
        self.world.held = [command for command in self.world.held if command.node_id != node.node_id]
        fields: dict[str, Any] = {"now_ms": self.now, "node_id": node.node_id, "epoch": node.epoch, "reason": "gone"}
        if goodbye:
            self.forget_processes(node.node_id)
            self.send(ev.NodeLeft(**fields))
        else:
            self.send(ev.NodeLost(**fields))

    @rule(pick=PICK, rebooted=st.booleans())
    def agent_reconnects(self, pick: int, rebooted: bool) -> None:
        self.reconnect(self.picked(list(self.world.state.nodes), pick), rebooted=rebooted)

    @rule()
    def controller_restarts(self) -> None:
        """What was journaled is all that another controller knows."""
        state = State()
        for change in self.world.journal:
            state.apply(change)
        assert sorted(map(repr, state.records())) == sorted(map(repr, self.world.state.records()))
        for node_id in state.nodes:
            assert Scheduler(state).owed_commands(node_id) == self.world.scheduler.owed_commands(node_id)
        self.world.scheduler = Scheduler(state)
        self.world.held.clear()
        self.send(ev.ControllerStarted(now_ms=self.now, grace_ms=1000))

    # ---- what must hold ----

    @invariant()
    def an_accepted_job_is_never_lost_and_an_ended_one_stays_ended(self) -> None:
        for uid, before in self.accepted.items():
            job = self.world.state.jobs.get(uid)
            assert job is not None, f"I8: job {uid} is lost"
            assert before not in ENDED or job.state is before, f"{job.name} was {before} and is {job.state}"
            self.accepted[uid] = job.state

    @invariant()
    def no_device_is_given_to_two_processes(self) -> None:
        """By what the agents really run: also processes nobody wants any more, or nobody can kill (I1, I4)."""
        shares: Counter[tuple[str, int]] = Counter()
        for node_id, devices, _ in self.processes.values():
            for share in devices:
                shares[node_id, share.index] += share.milli
        assert [device for device, milli in shares.items() if milli > 1000] == []

    @invariant()
    def nobody_yields_to_one_it_outranks(self) -> None:
        for number in sorted(self.world.state.preemptions):
            if number > self.known_preemptions:
                self.known_preemptions = number
                self._check_preemption(self.world.state.preemptions[number])

    @invariant()
    def every_waiting_job_explains_itself(self) -> None:
        for uid in self.live():
            assert self.world.scheduler.explain(uid, self.now).summary

    def _check_preemption(self, record: PreemptionRecord) -> None:
        assert record.victim != record.preemptor, "I5: a job preempts itself"
        victim = self.world.state.specs[record.victim].spec
        if record.rule in OUTRANKS:
            preemptor = self.world.state.specs[record.preemptor].spec
            assert victim.preemptible, f"{victim.name} is not preemptible"
            assert preemptor.priority_milli > victim.priority_milli, f"I5: {record}"
            roles = (dict(victim.labels).get("role"), dict(preemptor.labels).get("role"))
            assert roles != ("train", "rollout"), f"{victim.name} is shielded"

    def teardown(self) -> None:
        """Everything heals, everybody leaves: nothing is left."""
        if "a" not in self.world.state.pools:
            return
        for node_id in list(self.world.state.nodes):
            self.reconnect(node_id, rebooted=False)
            self.send(ev.NodeCordoned(now_ms=self.now, node_id=node_id, cordoned=False))
        for uid in self.live():
            self.send(ev.JobCancelled(now_ms=self.now, uid=uid))
        self.settle()
        for name in ("a", "b"):
            self.send(ev.PoolDeleted(now_ms=self.now, name=name))
        self.settle()
        state = self.world.state
        assert not self.live()
        assert not state.groups
        assert not state.pools
        assert not self.processes, "a process is left that nobody stops"
        for node_id, node in state.nodes.items():
            assert state.node_use(node_id).free == node.capacity

    # ---- helpers ----

    def settle(self) -> None:
        for _ in range(4):
            self.agents_do_all_they_were_told()
            self.world.tick(20_000)

    @property
    def now(self) -> int:
        return self.world.now_ms

    def send(self, event: ev.Event) -> None:
        """Sends an event; a request may be refused, then nothing changed."""
        before = self.world.state.meta
        try:
            self.world.send(event)
        except Refusal:
            assert self.world.state.meta == before

    def live(self) -> list[str]:
        return [uid for uid, job in self.world.state.jobs.items() if job.state not in ENDED]

    def present(self) -> list[str]:
        return [node.node_id for node in self.world.state.nodes.values() if not _is_gone(node)]

    def connected(self) -> list[int]:
        """Processes whose agent is heard."""
        here = set(self.present())
        return [generation for generation, (node_id, _, _) in self.processes.items() if node_id in here]

    def picked(self, items: list[Any], pick: int) -> Any:
        return items[pick % len(items)]

    def taken(self, pick: int) -> cmd.Command:
        return self.world.held.pop(pick % len(self.world.held))

    def runs(self, command: cmd.StartWorker) -> None:
        worker = command.worker
        report = ev.RunningWorker(
            generation=worker.generation,
            job=worker.job,
            component=worker.component,
            rank=worker.rank,
            state=WorkerState.READY,
        )
        self.processes[worker.generation] = (command.node_id, worker.devices, report)

    def ends(self, generation: int) -> None:
        """A process is gone, and its agent won't start it any more nor stop it again."""
        self.processes.pop(generation, None)
        self.world.held = [command for command in self.world.held if _generation(command) != generation]

    def forget_processes(self, node_id: str) -> None:
        for generation in [g for g, (where, _, _) in self.processes.items() if where == node_id]:
            del self.processes[generation]

    def reconnect(self, node_id: str, *, rebooted: bool) -> None:
        if rebooted:
            self.forget_processes(node_id)
        running = tuple(report for where, _, report in self.processes.values() if where == node_id)
        self.world.held = [command for command in self.world.held if command.node_id != node_id]
        try:
            self.world.join(node_id, {"cpu": 4, "memory": "8GiB", "gpu": GPUS}, running=running)
        except Refusal:
            return
        if rebooted:
            self.agents_do_all_they_were_told_about_what_is_gone(node_id)

    def agents_do_all_they_were_told_about_what_is_gone(self, node_id: str) -> None:
        """A fresh agent answers at once that what it is to stop isn't there."""
        for command in [held for held in self.world.held if isinstance(held, cmd.StopWorker)]:
            if command.node_id == node_id and command in self.world.held:
                self.world.held.remove(command)
                self.world.reply(command)


def _is_gone(node: NodeRecord) -> bool:
    return node.state in (NodeState.LOST, NodeState.LEFT)


def _generation(command: cmd.Command) -> int:
    if isinstance(command, cmd.StartWorker):
        return command.worker.generation
    return command.generation if isinstance(command, cmd.StopWorker) else 0


SchedulerMachine.TestCase.settings = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestWhateverHappens = SchedulerMachine.TestCase
