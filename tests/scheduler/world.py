"""A world for the core: a scheduler, its nodes, and agents that answer commands when the test lets them.

Invariants are checked after every event, unless a large world asks for less. Time is a number that only the test moves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from callboard.model.policy import PreemptionPolicy, label_rules
from callboard.model.quantities import Number, Resources
from callboard.model.specs import NO_PG_POOL, ComponentSpec, JobSpec, PgPoolSpec, PoolSpec
from callboard.scheduler import Outcome, Refusal, Scheduler, State, check_invariants
from callboard.scheduler.account.explain import Explanation
from callboard.scheduler.handlers.placing import on_nodes
from callboard.scheduler.records import commands as cmd
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.job_records import JobRecord, WorkerRecord
from callboard.scheduler.records.node_record import DeviceInfo, RayInfo
from callboard.scheduler.records.refusals import RefusalCode
from callboard.scheduler.records.states import JobState, StopOutcome

Answer = Callable[[cmd.Command], bool]


def pool_spec(name: str = "pool", *, pg_pool: PgPoolSpec = NO_PG_POOL, **nominal: Number) -> PoolSpec:
    """A pool with human amounts: ``pool_spec("p", cpu=4, memory="8GiB")``."""
    # One by one, since a limit of 0 is a limit and an amount of 0 is nothing.
    limits = tuple((key, Resources.parse({key: value}).get(key)) for key, value in nominal.items())
    return PoolSpec(name=name, nominal=limits, pg_pool=pg_pool)


def job_spec(
    name: str,
    *,
    pool: str = "pool",
    priority: float = 5.0,
    workers: int = 1,
    labels: Mapping[str, str] | None = None,
    components: Iterable[ComponentSpec] = (),
    entry: str = "",
    ask: Mapping[str, Number] | None = None,
    **fields: Any,
) -> JobSpec:
    """A job with one component ``main`` unless ``components`` are given; asks 1 GPU a worker unless ``ask`` is."""
    main = ComponentSpec(
        name="main",
        actor="tests:Actor",
        entry=entry,
        min_workers=workers,
        max_workers=workers,
        resources=Resources.parse({"gpu": 1} if ask is None else ask),
    )
    return JobSpec(
        name=name,
        pool=pool,
        priority_milli=round(priority * 1000),
        labels=tuple(sorted((labels or {}).items())),
        components=tuple(components) or (main,),
        **fields,
    )


class World:
    """See the module's docstring.

    Attributes:
        make_scheduler: makes its scheduler, and the one that takes over from it.
        check_every: after how many events the invariants are checked: each check looks at all there is.
        sent: how many events were handled.

    Args:
        auto: answer every command at once; commands that ``hold`` says yes to wait in :attr:`held`.
    """

    make_scheduler: type[Scheduler] = Scheduler
    check_every = 1

    def __init__(self, nodes: Mapping[str, int | Mapping[str, Number]] | None = None, *, auto: bool = True) -> None:
        self.scheduler = self.make_scheduler()
        self.now_ms = 1_000_000
        self.sent = 0
        self.auto = auto
        self.hold: Answer = lambda command: False
        self.held: list[cmd.Command] = []
        self.starts: list[cmd.StartWorker] = []
        self.log: list[Any] = []
        self.outcomes: dict[str, StopOutcome] = {}
        self.checkpoints: dict[str, bytes] = {}
        self._uids = (f"u{n}" for n in itertools.count(1))
        self._sessions: dict[str, tuple[int, str]] = {}
        for node_id, size in (nodes or {}).items():
            self.join(node_id, size)

    # ---- events ----

    def send(self, event: ev.Event) -> Outcome:
        """Handles one event, checks the invariants, lets agents answer."""
        try:
            outcome = self.scheduler.handle(event)
        except Refusal as refusal:
            raise self.scheduler.accounted(refusal) from None
        self.sent += 1
        if self.sent % self.check_every == 0:
            check_invariants(self.state)
        self.log.extend(outcome.events)
        self.held.extend(outcome.commands)
        self.starts.extend(command for command in outcome.commands if isinstance(command, cmd.StartWorker))
        if self.auto:
            self.answer()
        if self.state.unplaced and isinstance(event, ev.NodeJoined):
            self.place()
        return outcome

    def place(self) -> None:
        """Resolves placements whose nodes are there now, as a controller does."""
        waiting = [(uid, self.state.specs[uid].spec) for uid in self.state.unplaced]
        for uid, spec in on_nodes(waiting, self.state.nodes.values()):
            self.send(ev.PlacementResolved(now_ms=self.now_ms, uid=uid, spec=spec))

    def tick(self, ms: int) -> None:
        """Lets time pass; what is due on the way happens at its time."""
        end_ms = self.now_ms + ms
        while True:
            wake_ms = self.scheduler.next_wake_ms()
            if wake_ms is None or wake_ms > end_ms:
                break
            self.now_ms = max(self.now_ms, wake_ms)
            self.send(ev.Tick(now_ms=self.now_ms))
        self.now_ms = end_ms
        self.send(ev.Tick(now_ms=end_ms))

    def join(self, node_id: str, size: int | Mapping[str, Number] = 1, **fields: Any) -> Any:
        """A node joins: ``size`` GPUs with plenty of CPU and memory, or exact amounts."""
        amounts: dict[str, Number] = (
            {"cpu": 64, "memory": "64GiB", "gpu": size} if isinstance(size, int) else dict(size)
        )
        capacity = Resources.parse(amounts)
        instance = fields.pop("instance", f"run-{node_id}")
        gpus = capacity.gpu_milli // 1000
        each = capacity.gpu_memory_bytes // max(1, gpus)
        fields.setdefault("devices", tuple(DeviceInfo(id=str(i), memory_bytes=each) for i in range(gpus)))
        fields.setdefault("ray", RayInfo(gcs_address="h:1", session="s", ray_node_id=f"ray-{node_id}"))
        outcome = self.send(
            ev.NodeJoined(
                now_ms=self.now_ms, node_id=node_id, instance=instance, capacity=capacity, simulated=True, **fields
            )
        )
        self._sessions[node_id] = (outcome.result.epoch, instance)
        return outcome.result

    def lose(self, node_id: str) -> None:
        """A node is given up."""
        epoch = self.state.nodes[node_id].epoch
        self.held = [command for command in self.held if command.node_id != node_id]
        self.send(ev.NodeLost(now_ms=self.now_ms, node_id=node_id, epoch=epoch, reason=f"{node_id} fell silent"))

    def pool(self, spec: PoolSpec | None = None, **nominal: Number) -> None:
        """Makes a pool."""
        self.send(ev.PoolCreated(now_ms=self.now_ms, spec=spec or pool_spec("pool", pg_pool=NO_PG_POOL, **nominal)))

    def policy(self, rules: dict[str, dict[str, list[str]]] | None = None, **fields: Any) -> None:
        """Sets the cluster's policy."""
        policy = PreemptionPolicy(label_rules=label_rules(rules or {}), **fields)
        self.send(ev.PolicySet(now_ms=self.now_ms, policy=policy))

    def submit(self, spec: JobSpec | str, **fields: Any) -> str:
        """Submits a job and returns its uid."""
        spec = spec if isinstance(spec, JobSpec) else job_spec(spec, **fields)
        self.now_ms += 1
        outcome = self.send(ev.JobSubmitted(now_ms=self.now_ms, uid=next(self._uids), spec=spec))
        return str(outcome.result)

    def what_if(self, spec: JobSpec) -> Explanation:
        """What would become of a job, as a user is told it: what it would be refused with is an account, too."""
        try:
            return self.scheduler.what_if(ev.JobSubmitted(now_ms=self.now_ms, uid="what-if", spec=spec))
        except Refusal as refusal:
            if refusal.code not in (RefusalCode.UNSCHEDULABLE, RefusalCode.QUOTA_EXCEEDED):
                raise
            return Explanation("UNSCHEDULABLE", refusal.message, refusal.reasons, refusal.unblock)

    def refused(self, spec: JobSpec | str, **fields: Any) -> Refusal:
        """Submits a job that must be refused and returns why; nothing may have changed."""
        before = list(self.state.records())
        try:
            self.submit(spec, **fields)
        except Refusal as refusal:
            assert list(self.state.records()) == before
            return refusal
        raise AssertionError("the job was accepted")

    def cancel(self, name: str, **fields: Any) -> None:
        """Cancels a job."""
        self.send(ev.JobCancelled(now_ms=self.now_ms, uid=self.job(name).uid, **fields))

    def complete(self, name: str) -> None:
        """Completes a job."""
        self.send(ev.JobCompleted(now_ms=self.now_ms, uid=self.job(name).uid))

    def exit(self, name: str, rank: int = 0, message: str = "killed by signal 9") -> None:
        """A worker of a job dies."""
        worker = self.workers(name)[rank]
        self.send(
            ev.WorkerExited(now_ms=self.now_ms, node_id=worker.node_id, generation=worker.generation, message=message)
        )

    # ---- agents ----

    def answer(self, match: Answer = lambda command: True) -> int:
        """Answers held commands that ``match`` (and that ``hold`` lets go), also those the answers lead to."""
        answered = 0
        auto, self.auto = self.auto, False
        try:
            while True:
                ready = [command for command in self.held if match(command) and not self.hold(command)]
                if not ready:
                    return answered
                self.held.remove(ready[0])
                self.reply(ready[0])
                answered += 1
        finally:
            self.auto = auto

    def reply(self, command: cmd.Command) -> None:
        """Answers one command as an agent would that meets no trouble."""
        now_ms = self.now_ms
        if isinstance(command, cmd.CreateGroup):
            self.send(
                ev.GroupReady(
                    now_ms=now_ms,
                    group_id=command.group_id,
                    attempt=command.attempt,
                    ray_id=f"ray-{command.group_id}",
                    ray_session="s",
                )
            )
        elif isinstance(command, cmd.RemoveGroup):
            self.send(ev.GroupRemoved(now_ms=now_ms, group_id=command.group_id))
        elif isinstance(command, cmd.ReservePort):
            generation = command.worker.generation
            port = 20_000 + generation
            self.send(ev.PortReserved(now_ms=now_ms, node_id=command.node_id, generation=generation, port=port))
        elif isinstance(command, cmd.StartWorker):
            devices = ",".join(share.id for share in command.worker.devices)
            self.send(
                ev.WorkerStarted(
                    now_ms=now_ms,
                    node_id=command.node_id,
                    generation=command.worker.generation,
                    pid=10_000 + command.worker.generation,
                    visible_devices=devices,
                )
            )
        else:
            name = self.state.jobs[command.job].name if command.job in self.state.jobs else command.job
            self.send(
                ev.WorkerStopped(
                    now_ms=now_ms,
                    node_id=command.node_id,
                    generation=command.generation,
                    outcome=self.outcomes.get(name, StopOutcome.COOPERATIVE),
                    checkpoint_data=self.checkpoints.get(name, b"") if command.checkpoint else b"",
                )
            )

    def hold_stops_of(self, *names: str) -> None:
        """Agents do not answer the stops of these jobs until :meth:`let_stop`."""

        def holds(command: cmd.Command) -> bool:
            return isinstance(command, cmd.StopWorker) and self.state.jobs[command.job].name in names

        self.hold = holds

    def let_stop(self, name: str) -> None:
        """The agent answers the stops of one job."""
        hold, self.hold = self.hold, lambda command: False
        uid = self.job(name).uid
        stops = [c for c in self.held if isinstance(c, cmd.StopWorker) and c.job == uid]
        for command in stops:
            self.held.remove(command)
        self.hold = hold
        for command in stops:
            self.reply(command)
        if self.auto:
            self.answer()

    # ---- questions ----

    @property
    def state(self) -> State:
        """The scheduler's state."""
        return self.scheduler.state

    def job(self, name: str) -> JobRecord:
        """The newest job of this name."""
        job = self.state.find_job(name)
        assert job is not None, f"there is no job {name}"
        return job

    def status(self, name: str) -> JobState:
        """State of a job."""
        return self.job(name).state

    def workers(self, name: str) -> list[WorkerRecord]:
        """Workers of a job's present attempt, by component and rank."""
        job = self.job(name)
        found = [worker for worker in self.state.workers_of(job.uid) if worker.attempt == job.attempt]
        return sorted(found, key=lambda worker: (worker.component, worker.rank))

    def devices(self, name: str) -> list[str]:
        """``node:ids`` of each worker."""
        return [f"{w.node_id}:{','.join(share.id for share in w.devices)}" for w in self.workers(name)]

    def explain(self, name: str) -> Explanation:
        """The account of a job."""
        return self.scheduler.explain(self.job(name).uid, self.now_ms)

    def preempted(self) -> list[tuple[str, str]]:
        """(victim, preemptor) of every preemption so far."""
        return [(p.victim_name, p.preemptor_name) for p in self.state.preemptions.values()]
