"""What happens on stage? Carries out the commands of a story on the real scheduler and tells what came of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from callboard.model.policy import Aggressiveness
from callboard.model.quantities import Resources, format_amount, format_milli
from callboard.model.specs import (
    NO_PG_POOL,
    ComponentSpec,
    JobSpec,
    OnPreempt,
    PgPoolSpec,
    PoolSpec,
    RestartPolicy,
    StopPolicy,
    Strategy,
)
from callboard.scheduler import Outcome, Refusal, State
from callboard.scheduler.account.explain import Explanation
from callboard.scheduler.account.stats import pool_use
from callboard.scheduler.records import commands as cmd
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.job_records import EventRecord
from callboard.scheduler.records.states import ENDED, JobState, StopOutcome, WorkerState
from tests.scenarios.language import (
    Block,
    Command,
    ScenarioError,
    duration_ms,
    label_rules,
    node,
    pairs,
    parse,
    repeated,
    written,
)
from tests.scheduler.twin import Twin
from tests.scheduler.world import World

_RESOURCES = ("cpu", "gpu", "memory")
_POLICY_TIMES = ("cancel_timeout", "kill_timeout", "min_runtime", "preemption_delay")
_POLICY_COUNTS = ("max_victims_per_round", "max_preemptions_per_job")
_JOB_TIMES = ("min_runtime", "wait_for_nodes", "starvation_after", "grace", "ttl_after_finished", "estimated_duration")


class Stage(World):
    """A world whose agents do as the story says, and a record of what happened since somebody last asked."""

    make_scheduler = Twin

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        self._quiet_stops: set[str] = set()
        self._quiet_creations: set[str] = set()
        self._shown: set[str] = set()
        self._processes: dict[str, dict[int, ev.RunningWorker]] = {}
        self.hold = self._is_held

    def run(self, command: Command) -> list[str]:
        """Carries out one command; the lines it led to."""
        verb = _VERBS.get(command.verb)
        if verb is None:
            raise ScenarioError(f"unknown command {command.verb!r}; there are: {', '.join(sorted(_VERBS))}")
        self.told = []
        try:
            verb(self, command)
        except Refusal as refusal:
            self.told.append(f"refused, {refusal.code}: {refusal.message}")
        return self.told

    def send(self, event: ev.Event) -> Outcome:
        """Tells what an event led to before the agents answer."""
        auto, self.auto = self.auto, False
        try:
            outcome = super().send(event)
        finally:
            self.auto = auto
        for record in outcome.events:
            self.told += [line for line in [self._line(record)] if line]
        for command in outcome.commands:
            if isinstance(command, cmd.StartWorker) and command.checkpoint is not None:
                kept = command.checkpoint.data.decode()
                self.told.append(f"{command.job_name} {_rank(command.worker)} is given its checkpoint: {kept}")
        if self.auto:
            self.answer()
        return outcome

    # ---- the given ----

    def nodes(self, command: Command) -> None:
        """nodes NAME:GPUS NAME:cpu=…,gpu=…@label=value …: nodes join; one that was there comes back."""
        for word in command.words:
            name, size, labels = node(word)
            if "rebooted" in command.options:
                self._processes.pop(name, None)
            running = tuple(self._processes.get(name, {}).values())
            self.join(name, size if isinstance(size, int) else dict(size), labels=labels, running=running)

    def set_policy(self, command: Command) -> None:
        """policy: replaces the cluster's preemption policy."""
        options = dict(command.options)
        fields: dict[str, Any] = {}
        for name in _POLICY_TIMES:
            if name in options:
                fields[f"{name}_ms"] = duration_ms(options.pop(name))
        for name in _POLICY_COUNTS:
            if name in options:
                fields[name] = int(options.pop(name))
        if "aggressiveness" in options:
            fields["aggressiveness"] = Aggressiveness(options.pop("aggressiveness"))
        if "cross_pool" in options:
            fields["enable_cross_pool"] = options.pop("cross_pool") == "on"
        if "cross_pool_threshold" in options:
            fields["cross_pool_threshold_milli"] = round(float(options.pop("cross_pool_threshold")) * 1000)
        if "protected" in options:
            fields["protected_pools"] = tuple(options.pop("protected").split(","))
        rules = label_rules(options.pop("rules")) if "rules" in options else {}
        _nothing_left(options)
        self.policy(rules, **fields)

    def make_pool(self, command: Command) -> None:
        """pool NAME: makes or changes a pool."""
        spec = _pool_spec(command)
        event = ev.PoolUpdated if spec.name in self.state.pools else ev.PoolCreated
        self.send(event(now_ms=self.now_ms, spec=spec))

    def delete_pool(self, command: Command) -> None:
        """delete-pool NAME [force]"""
        self.send(ev.PoolDeleted(now_ms=self.now_ms, name=command.words[0], force="force" in command.words))

    # ---- the when ----

    def submit_job(self, command: Command) -> None:
        """submit NAME …: one component by cpu=, gpu=, workers=, or several by NAME=2x(gpu=1)."""
        self.submit(_job_spec(command))

    def let_stop_job(self, command: Command) -> None:
        """let-stop NAME: the agents answer the stops they owe."""
        self._quiet_stops -= set(command.words)
        self.answer()

    def hold_stops(self, command: Command) -> None:
        """hold-stops NAME …: the agents stay silent about stops of these jobs."""
        self._quiet_stops |= set(command.words)

    def hold_creations(self, command: Command) -> None:
        """hold-creations NAME …: Ray doesn't answer for the placement groups of these jobs."""
        self._quiet_creations |= set(command.words)

    def fail_creations(self, command: Command) -> None:
        """fail-creations MESSAGE: every creation that waits fails."""
        for held in [item for item in self.held if isinstance(item, cmd.CreateGroup)]:
            self.held.remove(held)
            self.send(
                ev.GroupFailed(
                    now_ms=self.now_ms, group_id=held.group_id, attempt=held.attempt, message=command.words[0]
                )
            )

    def stops_are(self, command: Command) -> None:
        """stops-are NAME OUTCOME: how the stops of a job end."""
        self.outcomes[command.words[0]] = StopOutcome(command.words[1])

    def keep_checkpoint(self, command: Command) -> None:
        """checkpoint NAME TEXT: what its workers hand over when they are preempted."""
        self.checkpoints[command.words[0]] = command.words[1].encode()

    def die(self, command: Command) -> None:
        """exit NAME [RANK]: a worker dies unasked."""
        rank = int(command.words[1]) if len(command.words) > 1 else 0
        worker = self.workers(command.words[0])[rank]
        self._processes[worker.node_id].pop(worker.generation)
        self.exit(command.words[0], rank)

    def return_from_entry(self, command: Command) -> None:
        """entry-returns NAME RANK …: the entry method of these ranks returns."""
        for rank in command.words[1:]:
            worker = self.workers(command.words[0])[int(rank)]
            self.send(
                ev.WorkerFinished(
                    now_ms=self.now_ms, node_id=worker.node_id, generation=worker.generation, succeeded=True
                )
            )

    def preempt_job(self, command: Command) -> None:
        """preempt NAME [for NAME]: by hand."""
        other = self.job(command.words[2]).uid if len(command.words) > 1 else ""
        self.send(ev.JobPreempted(now_ms=self.now_ms, uid=self.job(command.words[0]).uid, for_uid=other))

    def scale_job(self, command: Command) -> None:
        """scale NAME COMPONENT WORKERS"""
        name, component, workers = command.words
        self.send(ev.JobScaled(now_ms=self.now_ms, uid=self.job(name).uid, component=component, workers=int(workers)))

    def cordon(self, command: Command) -> None:
        """cordon NODE, uncordon NODE"""
        self.send(ev.NodeCordoned(now_ms=self.now_ms, node_id=command.words[0], cordoned=command.verb == "cordon"))

    def drain(self, command: Command) -> None:
        """drain NODE [within=…]"""
        within = command.options.get("within")
        deadline_ms = self.now_ms + duration_ms(within) if within else 0
        self.send(ev.NodeDrained(now_ms=self.now_ms, node_id=command.words[0], deadline_ms=deadline_ms))

    def delete_group(self, command: Command) -> None:
        """delete-group ID"""
        self.send(ev.GroupDeleted(now_ms=self.now_ms, group_id=command.words[0]))

    def restart(self, command: Command) -> None:
        """restart-controller grace=…: another controller takes over what was journaled."""
        self.scheduler = self.make_scheduler(State.of(list(self.state.records())))
        self.held.clear()
        self.send(ev.ControllerStarted(now_ms=self.now_ms, grace_ms=duration_ms(command.options["grace"])))

    def show(self, command: Command) -> None:
        """show groups|workers …: tell of these too from now on."""
        self._shown |= set(command.words)

    # ---- the then ----

    def explain_job(self, command: Command) -> None:
        """explain NAME"""
        self.told += account(self.explain(command.words[0]))

    def ask_what_if(self, command: Command) -> None:
        """what-if NAME …: the account of a job that is not submitted."""
        self.told += account(self.what_if(_job_spec(command)))

    def jobs(self, _: Command) -> None:
        """jobs: every job that has not ended, in the order of submission."""
        for job in self.state.jobs.values():
            if job.state not in ENDED:
                more = f" on {self.where(job.name)}" if job.state is JobState.RUNNING else ""
                held = ", its room is held" if job.nominated else ""
                self.told.append(f"{job.name} {job.state}{more}{held}, attempt {job.attempt}")

    def groups(self, _: Command) -> None:
        """groups: every placement group."""
        for group in self.state.groups.values():
            holders = self.state.workers_in(group.group_id)
            use = f"used by {self.state.jobs[holders[0].job].name}" if holders else "idle"
            if group.nominee:
                use = f"held for {self.state.jobs[group.nominee].name}"
            where = " ".join(sorted({bundle.node_id for bundle in group.bundles})) or "nowhere"
            self.told.append(f"{group.group_id} {group.group_kind} {group.state} on {where}, {use}")

    def pools(self, _: Command) -> None:
        """pools: what is used of every quota."""
        for name, record in self.state.pools.items():
            use = pool_use(self.state, name)
            parts = []
            for resource, limit in record.spec.nominal:
                over = use.over.get(resource)
                parts.append(
                    f"{resource} {format_amount(resource, use.used.get(resource))} of {format_amount(resource, limit)}"
                    f", {format_amount(resource, use.available.get(resource))} available"
                    + (f", {format_amount(resource, over)} over" if over else "")
                )
            self.told.append(f"{name}: {'; '.join(parts) or 'no limits'}")

    def counts(self, command: Command) -> None:
        """counts POOL: what its placement-group pool did so far."""
        counts = self.state.pools[command.words[0]].counts
        removals = ", ".join(f"{number} {why.lower()}" for why, number in counts.removals) or "none"
        self.told.append(
            f"creations {counts.creations}, hits {counts.hits}, misses {counts.misses}, reuses {counts.reuses}, "
            f"removals {removals}"
        )

    def node_use(self, command: Command) -> None:
        """use NODE: what a node is used for."""
        use = self.state.node_use(command.words[0])
        kinds = ("used", "held", "quarantined", "free")
        parts = [f"{kind} {format_milli(getattr(use, kind).gpu_milli)}" for kind in kinds]
        self.told.append(f"GPUs of {command.words[0]}: {', '.join(parts)}")

    # ---- inside ----

    def _is_held(self, command: cmd.Command) -> bool:
        if isinstance(command, cmd.StopWorker):
            return command.job in self.state.jobs and self.state.jobs[command.job].name in self._quiet_stops
        if isinstance(command, cmd.CreateGroup):
            uid = self.state.groups[command.group_id].job
            return uid in self.state.jobs and self.state.jobs[uid].name in self._quiet_creations
        return False

    def reply(self, command: cmd.Command) -> None:
        """Keeps account of the processes, as they are whatever the controller thinks."""
        there = self._processes.setdefault(command.node_id, {})
        if isinstance(command, cmd.StartWorker):
            worker = command.worker
            there[worker.generation] = ev.RunningWorker(
                generation=worker.generation,
                job=worker.job,
                component=worker.component,
                rank=worker.rank,
                state=WorkerState.READY,
            )
        elif isinstance(command, cmd.StopWorker):
            there.pop(command.generation, None)
        super().reply(command)

    def where(self, name: str) -> str:
        """Where the workers of a job are: ``n1:0 n2:0,1``, ``4×n1`` for workers without a device."""
        places = [place.removesuffix(":") for place in self.devices(name)]
        counts = {place: places.count(place) for place in places}
        return " ".join(f"{count}×{place}" if count > 1 else place for place, count in counts.items())

    def _line(self, record: EventRecord) -> str:
        """One entry of the event log for a reader; empty: not told."""
        kind, _, what = record.type.partition(".")
        subject = record.subject.partition("/")[2]
        facts = dict(record.facts)
        if kind == "worker":
            if "workers" not in self._shown and what != "quarantined" and record.reason != "proved gone at last":
                return ""
            return f"{subject.replace('/workers/', ' ')} → {record.state}: {record.reason}"
        if kind == "group":
            return f"{subject} → {record.state}: {record.reason}" if "groups" in self._shown else ""
        if kind == "pool" or record.reason in ("submitted", "its agent joined") or what == "changed":
            return ""
        special = {
            "job.nominated": f"{subject} holds room: {record.reason}",
            "job.nomination_dropped": f"{subject} gives its room back: {record.reason}",
            "job.scaled": f"{subject}: {record.reason}",
            "job.rank_map": f"{subject} ranks ({record.reason}): "
            + ", ".join(f"{rank} on {where}" for rank, where in facts.items()),
            "preemption.decided": f"{subject} must yield: {record.reason}",
            "preemption.done": record.reason,
            "node.cordoned": f"{subject} {record.reason}",
            "node.reaped": f"{subject}: {record.reason}",
            "controller.started": f"controller: {record.reason}",
            "scheduler.reconciled": f"controller: {record.reason}",
            "job.running": f"{subject} → RUNNING on {self.where(subject)}" if kind == "job" else "",
            "job.starting": f"{subject} → STARTING, attempt {self.job(subject).attempt}" if kind == "job" else "",
        }
        return special.get(record.type, f"{subject} → {record.state}: {record.reason}")


def told(text: str) -> str:
    """A story with what really happens."""
    stage = Stage()
    blocks: list[Block] = []
    for block in parse(text):
        lines: list[str] = []
        for item in block.commands:
            try:
                lines += stage.run(item)
            except (ScenarioError, AssertionError, KeyError, ValueError) as error:
                raise AssertionError(f"line {block.line}, {item.text}: {error!r}") from error
        blocks.append(replace(block, expected=tuple(lines)))
    return written(blocks)


def account(found: Explanation) -> list[str]:
    """An explanation as lines."""
    lines = [f"{found.verdict}: {found.summary}"]
    if found.queue_position:
        lines.append(f"  place in the queue: {found.queue_position}")
    lines += [f"  {reason.code} {reason.subject}: {reason.message}" for reason in found.reasons]
    lines += [f"  would help: {change}" for change in found.unblock]
    return lines


def _rank(worker: Any) -> str:
    return f"{worker.component}/{worker.rank}"


def _pool_spec(command: Command) -> PoolSpec:
    options = dict(command.options)
    nominal = tuple((key, Resources.parse({key: options.pop(key)}).get(key)) for key in _RESOURCES if key in options)
    spec = PoolSpec(name=command.words[0], nominal=nominal, protected="protected" in command.words)
    if "cohort" in options:
        spec = replace(spec, cohort=options.pop("cohort"))
    if "borrow_limit" in options:
        spec = replace(spec, borrow_limit=_limits(options.pop("borrow_limit")))
    if "lend_limit" in options:
        spec = replace(spec, lend_limit=_limits(options.pop("lend_limit")))
    if "stop" in options:
        spec = replace(spec, stop_policy=StopPolicy(options.pop("stop").upper()))
    if "nodes" in options:
        spec = replace(spec, node_selector=pairs(options.pop("nodes")))
    kept = _pg_pool(options, command.words[1:])
    _nothing_left(options)
    return replace(spec, pg_pool=kept)


def _pg_pool(options: dict[str, str], words: tuple[str, ...]) -> PgPoolSpec:
    """The placement-group pool, if anything is said about one."""
    fields: dict[str, Any] = {}
    if "reserved" in options:
        (count, _), shape, _ = repeated(options.pop("reserved"))
        fields["reserved"] = (Resources.parse(shape),) * count
    if "max_dynamic" in options:
        fields["max_dynamic"] = int(options.pop("max_dynamic"))
    if "idle_ttl" in options:
        fields["idle_ttl_ms"] = duration_ms(options.pop("idle_ttl"))
    if "reserved_from" in options:
        fields["reserved_min_priority_milli"] = round(float(options.pop("reserved_from")) * 1000)
    if "lendable" in words:
        fields["reserved_lendable"] = True
    if "charge_reserved" in words:
        fields["charge_reserved"] = True
    return PgPoolSpec(**fields) if fields or "groups" in words else NO_PG_POOL


def _job_spec(command: Command) -> JobSpec:
    options = dict(command.options)
    fields: dict[str, Any] = {"name": command.words[0], "pool": options.pop("pool", "pool")}
    fields["priority_milli"] = round(float(options.pop("priority", "5")) * 1000)
    for name in _JOB_TIMES:
        if name in options:
            fields[f"{name}_ms"] = duration_ms(options.pop(name))
    for name, key in (("labels", "labels"), ("node_selector", "nodes")):
        if key in options:
            fields[name] = pairs(options.pop(key))
    if "placement" in options:
        fields["placement"] = Strategy(options.pop("placement"))
    if "on_preempt" in options:
        fields["on_preempt"] = OnPreempt(options.pop("on_preempt").upper())
    if "restarts" in options:
        base_ms = duration_ms(options.pop("backoff", "1s"))
        fields["restart"] = RestartPolicy(max_restarts=int(options.pop("restarts")), backoff_base_ms=base_ms)
    fields["preemptible"] = options.pop("preemptible", "yes") == "yes"
    fields["components"] = _components(options, "entry" in command.words)
    return JobSpec(**fields)


def _components(options: dict[str, str], entry: bool) -> tuple[ComponentSpec, ...]:
    method = "main" if entry else ""
    several = {name: value for name, value in options.items() if "x(" in value}
    found = []
    for name, value in several.items():
        (least, most), ask, pool = repeated(value)
        found.append(
            ComponentSpec(
                name=name,
                actor="story:Actor",
                entry=method,
                min_workers=least,
                max_workers=most,
                resources=Resources.parse(ask),
                pool=pool,
            )
        )
    if found:
        _nothing_left({name: value for name, value in options.items() if name not in several})
        return tuple(found)
    count = int(options.pop("workers", "1"))
    ask = {name: options.pop(name) for name in _RESOURCES if name in options}
    _nothing_left(options)
    main = ComponentSpec(
        name="main",
        actor="story:Actor",
        entry=method,
        min_workers=count,
        max_workers=count,
        resources=Resources.parse(ask),
    )
    return (main,)


def _limits(text: str) -> tuple[tuple[str, int], ...]:
    """``gpu:2,cpu:4``; one by one, since a limit of 0 is a limit and an amount of 0 is nothing."""
    return tuple((name, Resources.parse({name: amount}).get(name)) for name, amount in pairs(text))


def _nothing_left(options: Mapping[str, str]) -> None:
    if options:
        raise ScenarioError(f"unknown options: {', '.join(options)}")


Verb = Callable[[Stage, Command], None]
_VERBS: Mapping[str, Verb] = {
    "nodes": Stage.nodes,
    "policy": Stage.set_policy,
    "pool": Stage.make_pool,
    "delete-pool": Stage.delete_pool,
    "submit": Stage.submit_job,
    "cancel": lambda stage, command: stage.cancel(command.words[0], destroy_groups="destroy-groups" in command.words),
    "complete": lambda stage, command: stage.complete(command.words[0]),
    "hold-stops": Stage.hold_stops,
    "let-stop": Stage.let_stop_job,
    "hold-creations": Stage.hold_creations,
    "fail-creations": Stage.fail_creations,
    "stops-are": Stage.stops_are,
    "checkpoint": Stage.keep_checkpoint,
    "exit": Stage.die,
    "entry-returns": Stage.return_from_entry,
    "preempt": Stage.preempt_job,
    "scale": Stage.scale_job,
    "tick": lambda stage, command: stage.tick(duration_ms(command.words[0])),
    "lose": lambda stage, command: stage.lose(command.words[0]),
    "cordon": Stage.cordon,
    "uncordon": Stage.cordon,
    "drain": Stage.drain,
    "delete-group": Stage.delete_group,
    "restart-controller": Stage.restart,
    "show": Stage.show,
    "explain": Stage.explain_job,
    "what-if": Stage.ask_what_if,
    "jobs": Stage.jobs,
    "groups": Stage.groups,
    "pools": Stage.pools,
    "counts": Stage.counts,
    "use": Stage.node_use,
}
"""What may stand first in a line."""
