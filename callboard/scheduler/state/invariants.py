"""The invariants, computed again from the records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from callboard.model.quantities import MILLI, NOTHING, Resources, on_each
from callboard.scheduler.records.job_records import WorkerRecord
from callboard.scheduler.records.pool_records import GroupRecord
from callboard.scheduler.records.states import BOOKED, ENDED, HOLDING, LIVE, GroupState, JobState, WorkerState
from callboard.scheduler.state.state import State


class InvariantBroken(AssertionError):
    """An invariant does not hold: a defect of the scheduler."""


def check_invariants(state: State) -> None:
    """Raises :class:`InvariantBroken` naming the first invariant that doesn't hold."""
    _device_shares(state)
    _pool_usage(state)
    _gangs(state)
    _groups(state)
    _nominations(state)
    _node_sums(state)
    _indexes(state)


def _fail(invariant: str, message: str) -> None:
    raise InvariantBroken(f"{invariant}: {message}")


def _device_shares(state: State) -> None:
    booked: Counter[tuple[str, int]] = Counter()
    for group in state.groups.values():
        if group.state in BOOKED:
            for bundle in group.bundles:
                for share in bundle.devices:
                    booked[bundle.node_id, share.index] += share.milli
    for (node_id, index), milli in booked.items():
        if milli > MILLI:
            _fail("I1", f"device {index} of {node_id} is booked {milli} milli")
    booked_groups = [group for group in state.groups.values() if group.state in BOOKED]
    _device_memory(state, "I1", booked_groups)
    worn: Counter[tuple[str, int, int]] = Counter()
    for worker in state.workers.values():
        if worker.state in HOLDING:
            _inside_its_bundle(state, worker, worn)


def _device_memory(state: State, invariant: str, groups: Iterable[GroupRecord]) -> None:
    """No more of a device's memory is promised than there is."""
    promised: Counter[tuple[str, int]] = Counter()
    for bundle in (bundle for group in groups for bundle in group.bundles):
        if bundle.resources.gpu_memory_bytes:
            for share in bundle.devices:
                promised[bundle.node_id, share.index] += on_each(bundle.resources.gpu_memory_bytes, len(bundle.devices))
    for (node_id, index), amount in promised.items():
        devices = state.nodes[node_id].devices
        if index < len(devices) and amount > devices[index].memory_bytes:
            _fail(invariant, f"{amount} bytes of device {index} of {node_id} are promised, which has less")


def _inside_its_bundle(state: State, worker: WorkerRecord, worn: Counter[tuple[str, int, int]]) -> None:
    group = state.groups.get(worker.group_id)
    if group is None or group.state not in (GroupState.CREATING, GroupState.READY):
        _fail("I4", f"worker g{worker.generation} holds {worker.group_id}, which is {group.state if group else 'gone'}")
        return
    bundle = group.bundles[worker.bundle_index]
    have = {share.index: share.milli for share in bundle.devices}
    for share in worker.devices:
        place = (worker.group_id, worker.bundle_index, share.index)
        worn[place] += share.milli
        if worn[place] > have.get(share.index, 0):
            _fail("I1", f"worker g{worker.generation} has device {share.index} beyond its bundle")
    known = state.nodes[worker.node_id].devices
    for index in (share.index for share in worker.devices if worker.resources.selects):
        if index < len(known) and not known[index].suits(worker.resources):
            _fail("I1", f"worker g{worker.generation} has device {index} and asks for {worker.resources.card}")
    if not bundle.resources.covers(worker.resources) or bundle.node_id != worker.node_id:
        _fail("I1", f"worker g{worker.generation} does not fit bundle {worker.bundle_index} of {worker.group_id}")


def _pool_usage(state: State) -> None:
    used: dict[str, Resources] = {}
    for worker in state.workers.values():
        if worker.state in HOLDING:
            used[worker.pool] = used.get(worker.pool, NOTHING) + worker.resources
    for pool in set(used) | set(state.ledger.pools):
        if state.ledger.used_by(pool) != used.get(pool, NOTHING):
            _fail("I2", f"pool {pool} shows {state.ledger.used_by(pool)}, its workers hold {used.get(pool, NOTHING)}")


def _gangs(state: State) -> None:
    active = (JobState.STARTING, JobState.RUNNING)
    for job in state.jobs.values():
        spec = state.specs[job.uid].spec
        live = [w for w in state.workers_of(job.uid) if w.state in LIVE and w.attempt == job.attempt]
        if job.state in active:
            wanted = sum(component.min_workers for component in spec.components)
            base = [w for w in live if not w.extra]
            replacing = spec.replaces and job.state is JobState.RUNNING and job.deadline_ms > 0
            if len(base) > wanted or (len(base) < wanted and not replacing):
                _fail("I3", f"{job.name} is {job.state} with {len(base)} of {wanted} workers")
            if job.state is JobState.STARTING and len(live) > len(base):
                _fail("I3", f"{job.name} is STARTING with extra workers")
        elif (job.state is JobState.PENDING or job.state in ENDED) and live:
            _fail("I3", f"{job.name} is {job.state} and has {len(live)} live workers")
        if job.state is JobState.RUNNING and any(w.state is not WorkerState.READY for w in live if not w.extra):
            _fail("I3", f"{job.name} is RUNNING with a worker that isn't READY")
        stopping = (JobState.STOPPING, JobState.PREEMPTING, JobState.RECOVERING)
        if job.state in stopping and not live:
            _fail("I6", f"{job.name} is {job.state} and nothing of it is left to wait for")
        if job.state in ENDED and (job.nominated or job.groups):
            _fail("I7", f"{job.name} has ended and still holds {job.groups}")
    for worker in state.workers.values():
        if worker.state is WorkerState.STOPPING and not worker.deadline_ms:
            _fail("I6", f"worker g{worker.generation} stops without a deadline")


def _groups(state: State) -> None:
    for group in state.groups.values():
        unheld = (GroupState.NOMINATED, GroupState.BACKOFF, GroupState.REMOVING)
        if group.state in unheld and state.workers_in(group.group_id):
            _fail("I4", f"{group.group_id} is {group.state} and workers hold it")
        holders = {worker.job for worker in state.workers_in(group.group_id) if worker.state in LIVE}
        if len(holders) > 1:
            _fail("I7", f"{group.group_id} is held by {sorted(holders)}")
        if group.state in (GroupState.CREATING, GroupState.READY) and holders and not group.job:
            _fail("I7", f"{group.group_id} is held by {sorted(holders)} and shown as idle")


def _nominations(state: State) -> None:
    for uid in state.nominated:
        job = state.jobs[uid]
        if job.state is not JobState.PENDING:
            _fail("I7", f"{job.name} is nominated and {job.state}")
    for group in state.groups.values():
        if group.nominee and group.group_id not in state.jobs[group.nominee].groups:
            _fail("I7", f"{group.group_id} is held for a job that doesn't know it")
    claims: Counter[tuple[str, int]] = Counter()
    for group_id in state.group_index.by_state[GroupState.NOMINATED]:
        for bundle in state.groups[group_id].bundles:
            for share in bundle.devices:
                claims[bundle.node_id, share.index] += share.milli
    nominated = [state.groups[group_id] for group_id in state.group_index.by_state[GroupState.NOMINATED]]
    _device_memory(state, "I7", nominated)
    for (node_id, index), milli in claims.items():
        if milli > MILLI:
            _fail("I7", f"device {index} of {node_id} is nominated {milli} milli")


def _node_sums(state: State) -> None:
    for node_id, node in state.nodes.items():
        use = state.node_use(node_id)
        if use.used + use.held + use.free + use.quarantined != node.capacity:
            _fail("I10", f"{node_id}: {use} does not add up to {node.capacity}")
        for index, device in enumerate(use.devices):
            free = MILLI - device.used_milli - device.held_milli - device.quarantined_milli
            if min(free, device.used_milli, device.held_milli, device.quarantined_milli) < 0:
                _fail("I10", f"device {index} of {node_id}: {device}")
        if node.state.value in ("LOST", "LEFT"):
            continue
        short = [pair for pair in use.held.items() if pair[1] < 0]
        if short:
            _fail("I10", f"{node_id} is over-booked: held {use.held}")


def _indexes(state: State) -> None:
    """Every index equals the one a fresh state would have, its order included."""
    mine, theirs = whole(state), whole(State.of(state.records()))
    for name, index in mine.items():
        if index != theirs[name]:
            _fail("index", f"{name} is {index!r}, should be {theirs[name]!r}")


def whole(state: State) -> dict[str, object]:
    """Everything a state consists of, by name, each part in the order in which decisions walk through it."""
    workers, groups, jobs = state._worker_index, state.group_index, state._job_index  # noqa: SLF001 - all of it is meant
    use = state.cluster_use
    return {
        "meta": state.meta,
        **{kind: list(table.values()) for kind, table in state._tables.items()},  # noqa: SLF001
        "deadlines": state.deadlines.all(),
        "queue": list(state.queue),
        "waiting": {shape.key: list(keys) for shape, keys in state.waiting.items()},
        "shapes": state.shapes.known(),
        "jobs_by_state": _walked(state.jobs_by_state),
        "holders": (state.holders.known(), {key: list(orders) for key, orders in state.holders.classes.items()}),
        "nominated": list(state.nominated),
        "elastic": list(state.elastic),
        "unplaced": list(state.unplaced),
        "requests": state.requests,
        "uids_of_name": _walked(jobs._uids_of_name),  # noqa: SLF001
        **{f"workers {name}": _walked(getattr(workers, name)) for name in ("of_job", "in_group", "on_node")},
        "jobs_holding": _walked(state.jobs_holding),
        "leaving_extras": list(state.leaving_extras),
        **{
            f"groups {name}": _walked(getattr(groups, name))
            for name in ("of_pool", "on_node", "by_state", "by_executor", "by_ray_id")
        },
        **{f"groups {name}": list(getattr(groups, name)) for name in ("orphans", "returning", "idle", "doomed")},
        "checkpoints": _walked(state._checkpoints_of_job),  # noqa: SLF001
        "preemptions": (_walked(state._preemptions_for), _walked(state._open_preemptions)),  # noqa: SLF001
        "roster": (state.roster.known(), _walked(state.roster.by_state)),
        "node_kinds": state.node_kinds.known(),
        "free": (state.free.keys(), state.free.gpu_milli, state.free.cpu_milli),
        "cluster": (use.capacity, use.used, use.held, use.free, use.quarantined),
        "pools": state.ledger.pools,
        "books": {
            node_id: [
                (amounts.resources(), amounts.parts, tuple(sorted(amounts.custom_milli.items())))
                for amounts in (book.booked, book.claimed, book.used, book.quarantined)
            ]
            for node_id, book in state.ledger.nodes.items()
        },
    }


def _walked(index: Mapping[Any, Iterable[Any]]) -> dict[Any, list[Any]]:
    """A one-to-many index as it is walked through."""
    return {key: list(members) for key, members in index.items()}
