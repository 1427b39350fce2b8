"""What a job waits for that is on its way already: backoffs, victims, groups, workers, nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from callboard.model.frozen import dataclass
from callboard.model.specs import ComponentSpec, Fencing, JobSpec
from callboard.scheduler.account.blockers import MAX_SUBJECTS, blockers
from callboard.scheduler.account.remedies import remedies
from callboard.scheduler.plan.complement import closed_to, is_leaving, live_of, next_rank, wanted
from callboard.scheduler.plan.quota import cohort_of, shortages
from callboard.scheduler.plan.view import Assumption, Room, View
from callboard.scheduler.records.asks import asks_of
from callboard.scheduler.records.job_records import JobRecord, PreemptionRecord, WorkerRecord
from callboard.scheduler.records.pool_records import GroupRecord
from callboard.scheduler.records.refusals import Reason
from callboard.scheduler.records.states import LIVE, GroupState, JobState, WorkerState
from callboard.scheduler.records.wording import join, time_left
from callboard.scheduler.state.state import State

_LEAVING = (JobState.PREEMPTING, JobState.STOPPING)


def backoff(job: JobRecord, now_ms: int) -> tuple[Reason, ...]:
    if job.eligible_ms <= now_ms:
        return ()
    message = f"its backoff, {time_left(job.eligible_ms - now_ms)} more, after: {job.reason}"
    return (Reason("BACKOFF", f"jobs/{job.name}", message),)


def living_copies(state: State, job: JobRecord, spec: JobSpec) -> tuple[Reason, ...]:
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


def checkpoint_lost(job: JobRecord) -> tuple[Reason, ...]:
    """That a job left no checkpoint when it was last asked for one, and why."""
    if not job.checkpoint_lost:
        return ()
    return (Reason("CHECKPOINT_LOST", f"jobs/{job.name}", f"checkpoint lost: {job.checkpoint_lost}"),)


def failures(job: JobRecord) -> tuple[Reason, ...]:
    """What failed in the present attempt of a job, in order, where that is more than its reason says."""
    failed = [failure for failure in job.failed if failure.attempt == job.attempt]
    if len(failed) < 2:
        return ()
    return tuple(
        Reason("WORKER_FAILED", f"jobs/{job.name}/workers/{failure.worker}", failure.reason)
        for failure in sorted(failed, key=lambda failure: failure.at_ms)
    )


def killed_in(workers: Iterable[WorkerRecord], now_ms: int) -> str:
    """When those that are being stopped are killed at the latest; empty: none is."""
    at_ms = max((worker.kill_ms for worker in workers if worker.state is WorkerState.STOPPING), default=0)
    return f"killed at the latest in {time_left(max(0, at_ms - now_ms))}" if at_ms else ""


def awaited(state: State, job: JobRecord, now_ms: int) -> tuple[Reason, ...]:
    """What a nominated job waits for: victims with the time of their kill, groups being removed, or running jobs."""
    reasons = []
    if job.patient:
        nodes = [bundle.node_id for group_id in job.groups if (g := state.groups.get(group_id)) for bundle in g.bundles]
        message = f"running jobs on {join(sorted(set(nodes)))} to end; what they free is held for it"
        reasons.append(Reason("HOLDS_ROOM", f"jobs/{job.name}", message))
    victims = {record.victim for record in state.preemptions_for(job.uid)}
    leaving = in_the_way(state, job)
    reasons += [reason for name in leaving if (reason := _end_of(state, name, victims, now_ms)) is not None]
    return tuple(reasons[:MAX_SUBJECTS])


def in_the_way(state: State, job: JobRecord) -> list[str]:
    """Uids of jobs and ids of groups on their way out whose room or quota a nominated job waits for: what holds a
    device, or anything else that is short, of what is held for it. Not what merely leaves the same node."""
    groups = [group for group_id in job.groups if (group := state.groups.get(group_id)) is not None]
    places = dict.fromkeys(bundle.node_id for group in groups for bundle in group.bundles)
    leaving = dict.fromkeys((*job.waits_for, *_leaving(state, places, [group.pool for group in groups])))
    needs = _Needs(state, job, groups)
    return [name for name in leaving if needs.end_of(name)]


def victims_of(state: State, job: JobRecord) -> tuple[PreemptionRecord, ...]:
    """The preemptions by which the room that is held for a nominated job comes free: also of jobs that yielded to one
    that was overtaken, and none of its own whose room went to another."""
    waiting = in_the_way(state, job)
    mine = [
        record
        for record in state.preemptions_for(job.uid)
        if record.victim in waiting or (record.outcome is not None and record.victim in job.waits_for)
    ]
    others = [record for name in waiting for record in state.open_preemptions(name) if record.preemptor != job.uid]
    return (*mine, *others)


class _Needs:
    """What a nominated job lacks now of what is held for it."""

    def __init__(self, state: State, job: JobRecord, groups: Sequence[GroupRecord]) -> None:
        self._state = state
        self._kept = {group.group_id for group in groups if group.state is not GroupState.NOMINATED}
        claimed = [group for group in groups if group.state is GroupState.NOMINATED]
        rooms: dict[str, Room] = {}
        self._devices: set[tuple[str, int]] = set()
        for bundle in (bundle for group in claimed for bundle in group.bundles):
            book = state.ledger.nodes[bundle.node_id]
            rooms.setdefault(bundle.node_id, Room(book.node, book.booked)).use(bundle)
            self._devices |= {(bundle.node_id, share.index) for share in bundle.devices}
        self._short = {
            (node_id, name) for node_id, room in rooms.items() for name, amount in _overdrawn(room) if name != "gpu"
        }
        self._devices &= {
            (node_id, i)
            for node_id, room in rooms.items()
            for i, milli in enumerate(room.device_milli)
            if milli < 0 or room.free_bytes(i) < 0
        }
        spec = state.specs[job.uid].spec
        view = View(state, Assumption(subject=job.uid))
        self._quotas = {
            (other.name, short.resource)
            for ask in asks_of(spec)
            if (pool := state.pools.get(ask.pool)) is not None
            for short in shortages(state.pools, view.charged, pool.spec, ask.resources)
            for other in cohort_of(state.pools, pool.spec)
        }
        self._full = {
            group.pool
            for group in claimed
            if (pool := state.pools.get(group.pool)) is not None
            and pool.spec.pg_pool.enable
            and view.dynamic_groups(group.pool) >= pool.spec.pg_pool.max_dynamic
        }

    def end_of(self, name: str) -> bool:
        """Whether the job waits for the end of a job or a group."""
        if name in self._state.groups:
            return self._holds(self._state.groups[name]) or self._state.groups[name].pool in self._full
        workers = [worker for worker in self._state.workers_of(name) if worker.state in LIVE]
        held = [group for worker in workers if (group := self._state.groups.get(worker.group_id)) is not None]
        return any(self._holds(group) for group in held) or any(
            worker.pool == pool and worker.resources.get(resource)
            for worker in workers
            for pool, resource in self._quotas
        )

    def _holds(self, group: GroupRecord) -> bool:
        return group.group_id in self._kept or any(
            any((bundle.node_id, share.index) in self._devices for share in bundle.devices)
            or any((bundle.node_id, name) in self._short for name, amount in bundle.resources.items() if amount)
            for bundle in group.bundles
        )


def _overdrawn(room: Room) -> list[tuple[str, int]]:
    amounts = [("cpu", room.cpu_milli), ("memory", room.memory_bytes), *room.custom_milli.items()]
    return [(name, amount) for name, amount in amounts if amount < 0]


def leaving_beside(state: State, nodes: Collection[str], pools: Collection[str], now_ms: int) -> list[Reason]:
    """What is on its way out where a job would be, or uses its pools' quota."""
    leaving = dict.fromkeys(_leaving(state, nodes, pools))
    return [reason for name in leaving if (reason := _end_of(state, name, (), now_ms)) is not None][:MAX_SUBJECTS]


def _end_of(state: State, name: str, victims: Collection[str], now_ms: int) -> Reason | None:
    """That a job or a placement group has yet to go; None if it has."""
    other = state.jobs.get(name)
    if other is not None:
        kill = killed_in(state.workers_of(name), now_ms)
        if not kill and other.state not in _LEAVING:
            return None
        by = f" ({kill})" if kill else ""
        if name in victims:
            return Reason("WAITING_FOR_VICTIM", f"jobs/{other.name}", f"victim {other.name}{by}")
        return Reason("WAITING_FOR_JOB", f"jobs/{other.name}", f"{other.name}, which ends{by}")
    if name in state.groups:
        return Reason("WAITING_FOR_GROUP", f"placementGroups/{name}", f"placement group {name} to be removed")
    return None


def _leaving(state: State, nodes: Collection[str], pools: Collection[str]) -> list[str]:
    """Jobs and groups on their way out that hold something on some nodes, or use the quota of some pools."""
    limited = {name for name in pools if (pool := state.pools.get(name)) and pool.spec.nominal}
    # A group lets go of all its nodes at once.
    there = dict.fromkeys(group_id for node_id in nodes for group_id in state.group_index.on_node.get(node_id, ()))
    found = [
        worker.job
        for group_id in there
        for worker in state.workers_in(group_id)
        if worker.state is WorkerState.STOPPING
    ]
    leaving = [uid for job_state in _LEAVING for uid in state.jobs_by_state[job_state]]
    found += [uid for uid in leaving if any(worker.pool in limited for worker in state.workers_of(uid))]
    going = [state.groups[group_id] for group_id in state.group_index.by_state[GroupState.REMOVING]]
    found += [group.group_id for group in going if any(bundle.node_id in nodes for bundle in group.bundles)]
    # One that is doomed counts against max_dynamic until it goes.
    found += [group_id for group_id in state.group_index.doomed if state.groups[group_id].pool in pools]
    return found


def waiting_workers(state: State, job: JobRecord, now_ms: int) -> tuple[Reason, ...]:
    """What a starting or stopping job waits for, worker by worker."""
    code = {JobState.STARTING: "WORKER_STARTING"}.get(job.state, "WORKER_STOPPING")
    busy = (WorkerState.ASSIGNED, WorkerState.STARTING, WorkerState.STOPPING, WorkerState.QUARANTINED)
    return tuple(
        Reason(
            code,
            f"jobs/{job.name}/workers/{worker.component}/{worker.rank}",
            f"{worker.component}/{worker.rank} on {worker.node_id} is {worker.state}: {worker.reason}"
            + (f"; {kill}" if (kill := killed_in([worker], now_ms)) else ""),
        )
        for worker in state.workers_of(job.uid)[:MAX_SUBJECTS]
        if worker.state in busy
    )


def replacing(job: JobRecord, spec: JobSpec, now_ms: int) -> tuple[Reason, ...]:
    """How long a job runs on without a worker that is being replaced."""
    if job.state is not JobState.RUNNING or not spec.replaces or not job.deadline_ms:
        return ()
    left = time_left(max(0, job.deadline_ms - now_ms))
    message = f"all of {job.name} starts again if the replacement takes longer than {left}"
    return (Reason("REPLACING", f"jobs/{job.name}", message),)


@dataclass(frozen=True, slots=True)
class Short:
    """A component of a running job with fewer workers than it should have.

    Attributes:
        wanted, there: workers that it should have, and that are there or on their way.
        why: what keeps the next ones from coming.
        lacking: those that lack room or quota, as a component; None: something else is awaited.
        closed: ids of nodes where they may not go, because of where the others are.
    """

    component: str
    wanted: int
    there: int
    why: str
    lacking: ComponentSpec | None = None
    closed: frozenset[str] = frozenset()


def short_of_workers(state: State, job: JobRecord, spec: JobSpec, now_ms: int) -> list[Short]:
    """The components of a running job that are short of workers: elastic ones, and those whose lost workers are
    replaced while the job runs on."""
    short = []
    for component in spec.components if job.state is JobState.RUNNING else ():
        live, want = live_of(state, job, component), wanted(job, component)
        if (component.elastic or spec.replaces) and len(live) < want:
            found = Short(component.name, want, len(live), _not_yet(state, job, spec, component, now_ms))
            short.append(found if found.why else _lacking(state, job, spec, component, found))
    return short


def _not_yet(state: State, job: JobRecord, spec: JobSpec, component: ComponentSpec, now_ms: int) -> str:
    """What has to happen before a further worker is looked for room for; empty: nothing."""
    if state.meta.reconcile_until_ms:
        return "the controller restarted and counts what runs first"
    before = (*backoff(job, now_ms), *living_copies(state, job, spec))
    if before:
        return f"it waits for {before[0].message}"
    if job.cause_ms:
        return "a worker of it ended, and its cause is being found out"
    rank = next_rank(live_of(state, job, component))
    return f"its worker {rank} is still stopping" if is_leaving(state, job, component, rank) else ""


def _lacking(state: State, job: JobRecord, spec: JobSpec, component: ComponentSpec, short: Short) -> Short:
    """What the workers lack that a component can't do without, or else its next one."""
    count = max(1, component.min_workers - short.there)
    taken = {worker.rank for worker in live_of(state, job, component)}
    ranks = [rank for rank in range(component.max_workers) if rank not in taken][:count]
    places = tuple(component.places[rank] for rank in ranks) if component.places else ()
    rest = replace(component, min_workers=count, max_workers=count, scaling=(), places=places)
    closed = closed_to(state, job, spec, component)
    reasons = blockers(
        state, View(state, Assumption(subject=job.uid, closed=closed)), replace(spec, components=(rest,))
    )
    why = join([reason.message for reason in reasons])
    return replace(short, why=why or "the next one is on its way", lacking=rest if reasons else None, closed=closed)


def changes_for(state: State, job: JobRecord, spec: JobSpec, short: Sequence[Short]) -> tuple[str, ...]:
    """The changes by which all components that are short would get their workers, none at another's expense."""
    parts: dict[frozenset[str], list[ComponentSpec]] = {}
    for each in short:
        if each.lacking is not None:
            parts.setdefault(each.closed, []).append(each.lacking)
    changes: dict[str, None] = {}
    for closed, components in parts.items():
        view = View(state, Assumption(subject=job.uid, closed=closed))
        changes |= dict.fromkeys(remedies(state, replace(spec, components=tuple(components)), view))
    return tuple(changes)
