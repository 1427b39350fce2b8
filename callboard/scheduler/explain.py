"""Why is a job where it is? A typed account of every node, quota, group rule and victim, and what would unblock it.

Read-only, and computed when somebody asks: the hot path keeps no reasons. CLI, web and error details only render it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from callboard.model.quantities import MILLI, Resources, format_amount
from callboard.model.specs import Fencing, JobSpec, StopPolicy, Strategy
from callboard.scheduler.fitting import NodeFilter, Rooms, could_return, fit
from callboard.scheduler.grouping import Ask, asks_of, charged_beside, new_kind, node_filter, reuse
from callboard.scheduler.planning import Blocked, Plan, could_ever_fit, plan
from callboard.scheduler.preemption import lost_work_ms, may_yield
from callboard.scheduler.quota import shortages
from callboard.scheduler.records import (
    DeviceShare,
    GroupKind,
    JobRecord,
    JobState,
    NodeRecord,
    PreemptionRecord,
    WorkerState,
)
from callboard.scheduler.refusals import Reason
from callboard.scheduler.state import State
from callboard.scheduler.view import Assumption, Room, View

MAX_SUBJECTS = 50
"""Most nodes or victims named one by one in an account; the rest is counted."""


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """Where one worker runs or would run; ``group_id`` empty: in a new group."""

    component: str
    rank: int
    node_id: str
    devices: tuple[DeviceShare, ...]
    group_id: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The account of one job.

    Attributes:
        verdict: what would happen if it were looked at now: START, WAIT, TRIM, PREEMPT, UNSCHEDULABLE; NONE for a job
            that isn't pending.
        summary: one sentence.
        reasons: everything that was considered.
        unblock: smallest changes that would let it start.
        workers: where its workers run or would run.
        victims: who yields or would yield.
        queue_position: place in the queue from 1; 0: not waiting.
    """

    verdict: str
    summary: str
    reasons: tuple[Reason, ...] = ()
    unblock: tuple[str, ...] = ()
    workers: tuple[PlannedWorker, ...] = ()
    victims: tuple[PreemptionRecord, ...] = ()
    queue_position: int = 0


def explain(state: State, uid: str, now_ms: int) -> Explanation:
    """The account of a job that was submitted."""
    job, spec = state.jobs[uid], state.specs[uid].spec
    victims = tuple(state.preemptions_for(uid))
    if job.state is not JobState.PENDING:
        workers = tuple(
            PlannedWorker(worker.component, worker.rank, worker.node_id, worker.devices, worker.group_id)
            for worker in state.workers_of(uid)
            if worker.attempt == job.attempt
        )
        summary = f"{job.name} is {job.state}: {job.reason}"
        return Explanation("NONE", summary, _waiting_workers(state, job), (), workers, victims)
    position = next(i for i, key in enumerate(state.queue, 1) if key[-1] == uid)
    if job.nominated:
        reasons = (*_backoff(job, now_ms), *_living_copies(state, job, spec), *_awaited(state, job))
        what = _join([reason.message for reason in reasons]) or "what is on its way out"
        workers = _nominated_workers(state, job, spec)
        summary = f"{job.name} holds its room and waits for {what}"
        return Explanation("WAIT", summary, reasons, (), workers, victims, position)
    found = _account(state, uid, spec, job.submit_ms, now_ms)
    backoff = (*_backoff(job, now_ms), *_living_copies(state, job, spec))
    if backoff:
        summary = f"{job.name} waits for {backoff[0].message}"
        found = replace(found, verdict="WAIT", summary=summary, reasons=(*backoff, *found.reasons))
    return replace(found, queue_position=position, victims=victims or found.victims)


def explain_spec(state: State, spec: JobSpec, now_ms: int) -> Explanation:
    """The account of a job that has not been submitted."""
    return _account(state, "", spec, now_ms, now_ms)


def unschedulable(state: State, spec: JobSpec) -> Explanation:
    """The account of a job that the nodes and quotas there are could never hold."""
    reasons = unschedulable_reasons(state, spec)
    unblock = _unblock(state, spec, View(state, Assumption(empty=True)))
    summary = f"no node could ever hold {spec.name}: {_join([reason.message for reason in reasons])}"
    return Explanation("UNSCHEDULABLE", summary, reasons, unblock)


def unschedulable_reasons(state: State, spec: JobSpec) -> tuple[Reason, ...]:
    """Why the nodes and quotas there are could never hold a job."""
    return tuple(_blockers(state, View(state, Assumption(empty=True)), spec))


def _account(state: State, uid: str, spec: JobSpec, since_ms: int, now_ms: int) -> Explanation:
    if state.meta.reconcile_until_ms:
        message = "the controller restarted and counts what runs before it admits anything"
        return Explanation("WAIT", message, (Reason("RECONCILING", "scheduler", message),))
    found = plan(state, uid, spec, since_ms, now_ms)
    if isinstance(found, Plan):
        return _planned(state, uid, spec, found, now_ms)
    if not could_ever_fit(state, spec):
        return unschedulable(state, spec)
    return _waits(state, uid, spec, found, now_ms)


def _planned(state: State, uid: str, spec: JobSpec, found: Plan, now_ms: int) -> Explanation:
    workers = tuple(
        PlannedWorker(
            slot.component,
            slot.rank,
            use.bundles[index].node_id,
            use.bundles[index].devices,
            use.group_id,
        )
        for use in found.uses
        for slot, index in zip(use.ask.slots, use.bundle_of, strict=True)
    )
    victims = tuple(
        PreemptionRecord(
            number=0,
            victim=victim.uid,
            victim_name=state.jobs[victim.uid].name,
            preemptor=uid,
            preemptor_name=spec.name,
            pool=state.specs[victim.uid].spec.pool,
            rule=victim.rule,
            reason=victim.reason,
            decided_ms=now_ms,
            lost_work_ms=lost_work_ms(state.jobs[victim.uid], now_ms),
        )
        for victim in found.victims
    )
    reasons = [
        Reason("VICTIM", f"jobs/{record.victim_name}", f"{record.victim_name} yields: {record.reason}")
        for record in victims
    ]
    reasons += [
        Reason("TRIM", f"placementGroups/{group_id}", f"the idle group {group_id} is removed")
        for group_id in found.trims
    ]
    nodes = _join(sorted({worker.node_id for worker in workers}))
    if victims:
        names = _join([record.victim_name for record in victims])
        return Explanation(
            "PREEMPT", f"{spec.name} starts on {nodes} once {names} yielded", tuple(reasons), (), workers, victims
        )
    if found.waits:
        verdict = "TRIM" if found.trims else "WAIT"
        return Explanation(verdict, f"{spec.name} starts on {nodes} once its room is free", tuple(reasons), (), workers)
    return Explanation("START", f"{spec.name} starts on {nodes} at once", tuple(reasons), (), workers)


def _waits(state: State, uid: str, spec: JobSpec, found: Blocked, now_ms: int) -> Explanation:
    view = View(state, Assumption(subject=uid))
    reasons = _blockers(state, view, spec)
    reasons += _unyielding(state, uid, spec, now_ms)
    if found.retry_ms:
        message = f"is looked at again in {max(0, found.retry_ms - now_ms)} ms, when preemption may become possible"
        reasons.append(Reason("LATER", f"jobs/{spec.name}", message))
    first = [reason.message for reason in reasons if reason.code not in ("WILL_NOT_YIELD", "LATER")]
    summary = f"{spec.name} waits: {_join(first) or 'nobody yields to it'}"
    return Explanation("WAIT", summary, tuple(reasons), _unblock(state, spec, view))


def _blockers(state: State, view: View, spec: JobSpec) -> list[Reason]:
    """Quotas that are short, group rules that say no, nodes that lack something; only what is in the way."""
    reasons: list[Reason] = []
    asks = asks_of(spec)
    for ask in asks:
        pool = state.pools.get(ask.pool)
        if pool is None:
            reasons.append(Reason("NO_POOL", f"pools/{ask.pool}", f"pool {ask.pool} does not exist"))
            continue
        if pool.deleting or pool.spec.stop_policy is not StopPolicy.NONE:
            what = "is being deleted" if pool.deleting else f"admits nothing (stop policy {pool.spec.stop_policy})"
            reasons.append(Reason("POOL_HELD", f"pools/{ask.pool}", f"pool {ask.pool} {what}"))
        reasons += _quota_reasons(view, state, asks, ask)
        if reuse(state, view, spec, ask) is not None:
            continue
        reasons += _group_reasons(state, view, ask)
        reasons += _node_reasons(state, view, spec, ask)
    if not reasons and len(asks) > 1:
        # Each pool's workers find room, all together don't.
        together = Ask(spec.pool, tuple(slot for ask in asks for slot in ask.slots))
        reasons += _node_reasons(state, view, spec, together)
    return reasons


def _quota_reasons(view: View, state: State, asks: Sequence[Ask], ask: Ask) -> list[Reason]:
    spec = state.pools[ask.pool].spec
    reasons = []
    for short in shortages(state.pools, charged_beside(view, asks, ask), spec, ask.resources):
        resource, nominal = short.resource, dict(spec.nominal)[short.resource]
        lent = f" and {format_amount(resource, short.limit - nominal)} that others may lend" if spec.cohort else ""
        message = (
            f"pool {ask.pool}: {format_amount(resource, short.used)} of {format_amount(resource, nominal)} "
            f"{resource} used{lent}, asks {format_amount(resource, short.asked)}"
        )
        reasons.append(Reason("QUOTA_SHORT", f"pools/{ask.pool}", message, resource, short.asked, short.available))
    return reasons


def _group_reasons(state: State, view: View, ask: Ask) -> list[Reason]:
    spec = state.pools[ask.pool].spec.pg_pool
    kind = new_kind(spec)
    count = view.dynamic_groups(ask.pool)
    if kind is None:
        message = f"pool {ask.pool} makes no groups on demand and no kept group is free and fits"
        return [Reason("NO_DYNAMIC_GROUPS", f"pools/{ask.pool}", message)]
    if kind is GroupKind.DYNAMIC and count >= spec.max_dynamic:
        message = f"pool {ask.pool} has {count} of {spec.max_dynamic} dynamic groups and none is free and fits"
        return [Reason("MAX_DYNAMIC", f"pools/{ask.pool}", message, "", spec.max_dynamic + 1, spec.max_dynamic)]
    return []


def _node_reasons(state: State, view: View, spec: JobSpec, ask: Ask) -> list[Reason]:
    """What each node lacks for the workers of an ask; empty when they fit."""
    wanted = node_filter(spec, state.pools[ask.pool].spec)
    if fit(Rooms(state, view, wanted), ask.slots, spec.placement) is not None:
        return []
    reasons: list[Reason] = []
    nodes = sorted(state.nodes.values(), key=lambda node: node.rank)
    if not nodes:
        return [Reason("NO_NODES", "nodes", "no node has joined")]
    for node in nodes[:MAX_SUBJECTS]:
        reasons += _one_node(view, node, wanted.required, ask, spec.placement)
    if len(nodes) > MAX_SUBJECTS:
        reasons.append(Reason("MORE_NODES", "nodes", f"and {len(nodes) - MAX_SUBJECTS} nodes more"))
    largest = _largest(state, view, ask)
    if largest is not None:
        reasons.insert(0, largest)
    placed = _most_that_fit(state, view, wanted, ask, spec.placement)
    if placed:
        count = len(ask.slots)
        reasons.insert(0, Reason("ROOM_FOR", "nodes", f"room for {placed} of {count} workers", "", count, placed))
    return reasons


def _most_that_fit(state: State, view: View, wanted: NodeFilter, ask: Ask, placement: Strategy) -> int:
    """How many of an ask's workers, from the first on, find room together; by bisection."""
    low, high = 0, len(ask.slots) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if fit(Rooms(state, view, wanted), ask.slots[:middle], placement) is None:
            high = middle - 1
        else:
            low = middle
    return low


def _one_node(
    view: View, node: NodeRecord, required: Sequence[tuple[str, str]], ask: Ask, placement: Strategy
) -> list[Reason]:
    subject = f"nodes/{node.node_id}"
    labels = dict(node.labels)
    for key, value in required:
        if labels.get(key, node.node_id if key == "node" else None) != value:
            return [Reason("LABEL_MISMATCH", subject, f"{node.node_id} lacks the label {key}={value}")]
    ever = view.assumption.empty and could_return(node)
    if node.cordoned and not ever:
        return [Reason("CORDONED", subject, f"{node.node_id} is cordoned")]
    if not node.usable and not ever:
        why = "still ends unwanted workers" if node.ghosts else f"is {node.state}"
        return [Reason("NODE_STATE", subject, f"{node.node_id} {why}")]
    room = view.room(node)
    ask_here = ask.resources if placement is Strategy.STRICT_PACK else ask.slots[0].resources
    lacking = lacks(room, ask_here)
    if not lacking and placement is Strategy.STRICT_SPREAD:
        return [Reason("ONE_EACH", subject, f"{node.node_id} can hold one worker, and by STRICT_SPREAD no more")]
    # Where one worker fits and all of them don't, what the whole ask lacks says how far the node goes.
    return [
        Reason(
            "NODE_LACKS",
            subject,
            f"{node.node_id} lacks {_missing(resource, asked, have)}{_quarantined(view, node, resource)}",
            resource,
            asked,
            have,
        )
        for resource, asked, have in lacking or lacks(room, ask.resources)
    ]


def _quarantined(view: View, node: NodeRecord, resource: str) -> str:
    """That some of what a node lacks is there, but held by a process that can't be proved gone."""
    amount = 0 if view.assumption.empty else view.state.node_use(node.node_id).quarantined.get(resource)
    return f" ({format_amount(resource, amount)} quarantined)" if amount else ""


def lacks(room: Room, ask: Resources) -> list[tuple[str, int, int]]:
    """(resource, asked, free) of everything a node is short of for one ask."""
    free = room.free()
    found = []
    for resource, asked in ask.items():
        have = max(0, free.get(resource))
        if resource == "gpu" and ask.gpu_milli >= MILLI:
            have = room.whole_devices() * MILLI
        elif resource == "gpu":
            have = max([0, *room.device_milli])
        if have < asked:
            found.append((resource, asked, have))
    return found


def _largest(state: State, view: View, ask: Ask) -> Reason | None:
    """For a worker larger than any node: "largest node has 1" (PG-08)."""
    biggest = max(ask.slots, key=lambda slot: slot.resources.gpu_milli).resources
    capacity = max((node.capacity.gpu_milli for node in state.nodes.values()), default=0)
    if not view.assumption.empty or biggest.gpu_milli <= capacity:
        return None
    message = (
        f"one worker asks {format_amount('gpu', biggest.gpu_milli)} GPU, "
        f"the largest node has {format_amount('gpu', capacity)}"
    )
    return Reason("LARGEST_NODE", "nodes", message, "gpu", biggest.gpu_milli, capacity)


def _unyielding(state: State, uid: str, spec: JobSpec, now_ms: int) -> list[Reason]:
    """Running jobs that need not yield, and why."""
    reasons = []
    holding = [*state.jobs_by_state[JobState.RUNNING], *state.jobs_by_state[JobState.STARTING]]
    for other in holding[:MAX_SUBJECTS]:
        verdict = may_yield(state, state.jobs[other], spec, uid, now_ms)
        if verdict.rule is None:
            name = state.jobs[other].name
            reasons.append(Reason("WILL_NOT_YIELD", f"jobs/{name}", f"{name} need not yield: {verdict.reason}"))
    return reasons


def _unblock(state: State, spec: JobSpec, view: View) -> tuple[str, ...]:
    """Smallest changes, each of which removes one thing that is in the way; all together let the job start."""
    changes: list[str] = []
    asks = asks_of(spec)
    for ask in asks:
        pool = state.pools.get(ask.pool)
        if pool is None:
            changes.append(f"create pool {ask.pool}")
            continue
        for short in shortages(state.pools, charged_beside(view, asks, ask), pool.spec, ask.resources):
            more = _change(short.resource, short.asked - short.available)
            changes.append(f"raise pool {ask.pool} {short.resource} by {more}")
        group_rules = _group_reasons(state, view, ask)
        if group_rules and reuse(state, view, spec, ask) is None:
            changes.append(f"raise pool {ask.pool} max_dynamic by 1")
        changes += _node_change(state, view, spec, ask)
    return tuple(dict.fromkeys(changes))


def _node_change(state: State, view: View, spec: JobSpec, ask: Ask) -> list[str]:
    wanted = node_filter(spec, state.pools[ask.pool].spec)
    if reuse(state, view, spec, ask) is not None or not _node_reasons(state, view, spec, ask):
        return []
    fitting = [node for node in state.nodes.values() if wanted.admits(node)]
    cordoned = [node for node in fitting if node.cordoned and not lacks(view.room(node), ask.slots[0].resources)]
    if cordoned:
        return [f"uncordon {min(cordoned, key=lambda node: node.rank).node_id}"]
    usable = [node for node in fitting if node.usable]
    if not usable:
        return ["add a node" + "".join(f" with the label {key}={value}" for key, value in wanted.required)]
    ask_here = ask.resources if spec.placement is not Strategy.STRICT_SPREAD else ask.slots[0].resources

    def shortage(node: NodeRecord) -> tuple[int, int, int]:
        short = lacks(view.room(node), ask_here)
        return (len(short), sum(asked - have for _, asked, have in short), node.rank)

    best = min(usable, key=shortage)
    return [
        f"{_change(resource, asked - have)} more {_shown(resource)} on {best.node_id}"
        for resource, asked, have in lacks(view.room(best), ask_here)
    ]


def _backoff(job: JobRecord, now_ms: int) -> tuple[Reason, ...]:
    if job.eligible_ms <= now_ms:
        return ()
    message = f"its backoff, {job.eligible_ms - now_ms} ms more, after: {job.reason}"
    return (Reason("BACKOFF", f"jobs/{job.name}", message),)


def _living_copies(state: State, job: JobRecord, spec: JobSpec) -> tuple[Reason, ...]:
    """A strict job is not started again while a worker of it may live (R5)."""
    if spec.fencing is not Fencing.STRICT:
        return ()
    return tuple(
        Reason(
            "COPY_MAY_LIVE",
            f"jobs/{job.name}/workers/{worker.component}/{worker.rank}",
            f"the proof that g{worker.generation} on {worker.node_id} is gone",
        )
        for worker in state.workers_of(job.uid)
        if worker.state is WorkerState.QUARANTINED
    )


def _awaited(state: State, job: JobRecord) -> tuple[Reason, ...]:
    """What a nominated job waits for: victims with the time of their kill, groups being removed, or running jobs."""
    reasons = []
    if job.patient:
        nodes = [bundle.node_id for group_id in job.groups if (g := state.groups.get(group_id)) for bundle in g.bundles]
        message = f"running jobs on {_join(sorted(set(nodes)))} to end; what they free is held for it"
        reasons.append(Reason("HOLDS_ROOM", f"jobs/{job.name}", message))
    for awaited in job.waits_for:
        other = state.jobs.get(awaited)
        if other is not None and other.state in (JobState.PREEMPTING, JobState.STOPPING):
            ends = [worker.deadline_ms for worker in state.workers_of(awaited) if worker.state is WorkerState.STOPPING]
            by = f" (gone in {max(0, max(ends) - state.meta.now_ms)} ms at the latest)" if ends else ""
            reasons.append(Reason("WAITING_FOR_VICTIM", f"jobs/{other.name}", f"victim {other.name}{by}"))
        elif awaited in state.groups:
            message = f"placement group {awaited} to be removed"
            reasons.append(Reason("WAITING_FOR_GROUP", f"placementGroups/{awaited}", message))
    return tuple(reasons)


def _waiting_workers(state: State, job: JobRecord) -> tuple[Reason, ...]:
    """What a starting or stopping job waits for, worker by worker."""
    code = {JobState.STARTING: "WORKER_STARTING"}.get(job.state, "WORKER_STOPPING")
    busy = (WorkerState.ASSIGNED, WorkerState.STARTING, WorkerState.STOPPING, WorkerState.QUARANTINED)
    return tuple(
        Reason(
            code,
            f"jobs/{job.name}/workers/{worker.component}/{worker.rank}",
            f"{worker.component}/{worker.rank} on {worker.node_id} is {worker.state}: {worker.reason}",
        )
        for worker in state.workers_of(job.uid)[:MAX_SUBJECTS]
        if worker.state in busy
    )


def _nominated_workers(state: State, job: JobRecord, spec: JobSpec) -> tuple[PlannedWorker, ...]:
    workers = []
    for ask, group_id in zip(asks_of(spec), job.groups, strict=True):
        group = state.groups.get(group_id)
        if group is None:
            continue
        for slot, bundle in zip(ask.slots, group.bundles, strict=False):
            workers.append(PlannedWorker(slot.component, slot.rank, bundle.node_id, bundle.devices, group_id))
    return tuple(workers)


def _missing(resource: str, asked: int, have: int) -> str:
    return f"{format_amount(resource, asked - have)} {_shown(resource)}"


def _shown(resource: str) -> str:
    return resource.upper() if resource in ("cpu", "gpu") else resource


def _change(resource: str, amount: int) -> str:
    if resource in ("cpu", "gpu") and amount % MILLI:
        return f"{amount}m"
    return format_amount(resource, amount)


def _join(parts: Sequence[str]) -> str:
    shown = list(dict.fromkeys(parts))
    more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
    return "; ".join(shown[:5]) + more
