"""The orders that agents are owed: commands built from records, the first time and again after a restart.

A command is owed as long as the record says so: a STARTING worker its start, a STOPPING one its stop, a CREATING group
its creation, a REMOVING one its removal. Ids depend on the record alone, so an agent recognises a repeated command.
A stop that is sent again carries the time that is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from callboard.model.quantities import MILLI
from callboard.model.specs import ComponentSpec, Fencing
from callboard.scheduler.records.commands import Command, CreateGroup, RemoveGroup, ReservePort, StartWorker, StopWorker
from callboard.scheduler.records.job_records import WorkerRecord
from callboard.scheduler.records.pool_records import GroupRecord
from callboard.scheduler.records.states import (
    GROUP_CREATING,
    GROUP_READY,
    WORKER_ASSIGNED,
    WORKER_QUARANTINED,
    WORKER_READY,
    WORKER_STARTING,
    WORKER_STOPPING,
    NodeState,
)
from callboard.scheduler.state.node_kinds import cards
from callboard.scheduler.state.state import State


@dataclass(slots=True)
class Peers:
    """The workers of one component in one attempt.

    Attributes:
        first: the one of the lowest rank, at whose node they meet.
    """

    state: State
    component: ComponentSpec
    world_size: int
    first: WorkerRecord
    _local_ranks: dict[str, Sequence[int]] = field(default_factory=dict)

    def local_ranks(self, worker: WorkerRecord) -> Sequence[int]:
        """Ranks on the node of one of them, in order."""
        if self.component.max_workers == 1:
            return (worker.rank,)
        ranks = self._local_ranks.get(worker.node_id)
        if ranks is None:
            there = self.state.workers_on(worker.node_id)
            ranks = sorted(other.rank for other in there if other.job == worker.job and _is_peer(other, worker))
            self._local_ranks[worker.node_id] = ranks
        return ranks


def peers_of(state: State, worker: WorkerRecord) -> Peers:
    """A worker and the others of its component."""
    component = next(c for c in state.specs[worker.job].spec.components if c.name == worker.component)
    # One of a fixed number that is being replaced is a peer all the same.
    first, size = worker, 0 if component.elastic else component.max_workers
    for generation in state.generations_of(worker.job):
        if first.rank == 0 and not component.elastic:
            break
        other = state.workers[generation]
        if _is_peer(other, worker):
            first = other if other.rank < first.rank else first
            size += component.elastic
    return Peers(state, component, size, first)


def _is_peer(other: WorkerRecord, worker: WorkerRecord) -> bool:
    return (
        other.component == worker.component
        and other.attempt == worker.attempt
        and (other is worker or other.state in (WORKER_ASSIGNED, WORKER_STARTING, WORKER_READY))
    )


def awaited_port(peers: Peers) -> ReservePort | None:
    """The reservation that must be answered before these are started: that of a port where they meet. None: they may
    start."""
    first = peers.first
    # A first worker that runs was started by a controller that knew of no reservations.
    if peers.component.max_workers == 1 or first.master_port or first.state is not WORKER_ASSIGNED:
        return None
    return ReservePort(command_id=f"port-g{first.generation}", node_id=first.node_id, worker=first)


def start_worker(state: State, worker: WorkerRecord, peers: Peers) -> StartWorker:
    """The start of a worker, with its place among the workers of its component."""
    job, spec = state.jobs[worker.job], state.specs[worker.job].spec
    local = peers.local_ranks(worker)
    node, master = state.nodes[worker.node_id], state.nodes[peers.first.node_id]
    return StartWorker(
        command_id=f"start-g{worker.generation}",
        node_id=worker.node_id,
        worker=worker,
        component=peers.component,
        job_name=job.name,
        strict=spec.fencing is Fencing.STRICT,
        node_group=node.node_group,
        ray_group_id=state.groups[worker.group_id].ray_id,
        world_size=peers.world_size,
        local_rank=local.index(worker.rank),
        local_world_size=len(local),
        node_rank=node.rank,
        master_node_id=peers.first.node_id,
        master_address=(master.ray.node_ip if master.ray is not None else "") or master.address or master.hostname,
        master_port=max(0, peers.first.master_port),
        start_timeout_ms=spec.start_timeout_ms,
        checkpoint=state.checkpoints.get((worker.job, worker.component, worker.rank)),
        preload=pool.spec.preload if (pool := state.pools.get(worker.pool)) is not None else (),
    )


def stop_worker(worker: WorkerRecord, now_ms: int) -> StopWorker:
    """The stop of a worker, with the time that is left of it. A shortened one is another command."""
    # A record of an earlier version doesn't say when it is killed.
    left_ms = max(0, worker.kill_ms - now_ms) if worker.kill_ms else worker.cancel_timeout_ms
    return StopWorker(
        command_id=f"stop-g{worker.generation}" + (f"-{worker.hastened}" if worker.hastened else ""),
        node_id=worker.node_id,
        generation=worker.generation,
        job=worker.job,
        component=worker.component,
        rank=worker.rank,
        cancel_timeout_ms=left_ms,
        kill_timeout_ms=worker.kill_timeout_ms,
        checkpoint=worker.checkpoint,
        reason=worker.reason,
        stop_kind=worker.stop_kind,
    )


def must_have_its_devices(state: State, group: GroupRecord) -> bool:
    """Whether a group can't take other devices than the ledger named: a placement says so, parts of them are others',
    a device of its nodes takes no work, which Ray doesn't know, or they differ in what it asks for."""
    shape = state.shapes.get(group.job or group.nominee)
    if shape is not None and shape.placed:
        return True
    node_id, ask = "", None
    for bundle in group.bundles:
        if bundle.node_id != node_id or bundle.resources is not ask:  # those of a gang are alike
            node_id, ask = bundle.node_id, bundle.resources
            node = state.nodes.get(node_id)
            if node is not None:
                picks = ask.gpu_memory_bytes or ask.selects
                if node.closed or (picks and len(set(cards(node))) > 1):
                    return True
        for share in bundle.devices:
            if share.milli < MILLI:
                return True
    return False


def create_group(state: State, group: GroupRecord, timeout_ms: int) -> CreateGroup:
    """The creation of a placement group."""
    return CreateGroup(
        command_id=f"create-{group.group_id}-{group.attempt}",
        node_id=group.executor,
        group_id=group.group_id,
        attempt=group.attempt,
        bundles=group.bundles,
        ray_node_ids=ray_node_ids(state, group),
        timeout_ms=timeout_ms,
        certain=must_have_its_devices(state, group),
    )


def ray_node_ids(state: State, group: GroupRecord) -> tuple[str, ...]:
    """Of each bundle of a group the id of its node in Ray; empty: it has none."""
    nodes = [state.nodes.get(bundle.node_id) for bundle in group.bundles]
    return tuple([node.ray.ray_node_id if node is not None and node.ray is not None else "" for node in nodes])


def remove_group(group: GroupRecord) -> RemoveGroup:
    """The removal of a placement group."""
    return RemoveGroup(
        command_id=f"remove-{group.group_id}-{group.attempt}",
        node_id=group.executor,
        group_id=group.group_id,
        ray_id=group.ray_id,
        attempt=group.attempt,
    )


def ghost_stop(node_id: str, generation: int, job: str, component: str, rank: int) -> StopWorker:
    """The end of a worker that nobody wants any more: no hooks, since its successor may run already."""
    return StopWorker(
        command_id=f"reap-g{generation}",
        node_id=node_id,
        generation=generation,
        job=job,
        component=component,
        rank=rank,
        cancel_timeout_ms=0,
        kill_timeout_ms=10_000,
        checkpoint=False,
        reason="nobody waits for this worker any more",
    )


def creation_timeout_ms(state: State, pool_name: str) -> int:
    """How long the creation of a group of a pool may take."""
    pool = state.pools.get(pool_name)
    return pool.spec.pg_pool.creation_timeout_ms if pool else 60_000


def pick_executor(state: State, group: GroupRecord) -> str:
    """Node whose agent acts on a group in Ray: one with a bundle, else any that is connected; empty if none is."""
    holders = [state.nodes[bundle.node_id] for bundle in group.bundles if bundle.node_id in state.nodes]
    connected = [node for node in holders if node.state in (NodeState.READY, NodeState.DRAINING)]
    if connected:
        return min(connected, key=lambda node: node.rank).node_id
    return state.roster.first_connected()


def owed(state: State, node_id: str, now_ms: int) -> Iterator[Command]:
    """Every command that the agent of a node has been or should have been told and has not answered."""
    peers: dict[tuple[str, str, int], Peers] = {}
    for worker in state.workers_on(node_id):
        if worker.state is WORKER_ASSIGNED and state.groups[worker.group_id].state is GROUP_READY:
            waits = awaited_port(peers_of(state, worker))
            if waits is not None and waits.worker is worker:
                yield waits
        elif worker.state is WORKER_STARTING:
            key = (worker.job, worker.component, worker.attempt)
            if key not in peers:
                peers[key] = peers_of(state, worker)
            yield start_worker(state, worker, peers[key])
        elif worker.state in (WORKER_STOPPING, WORKER_QUARANTINED):
            yield stop_worker(worker, now_ms)
    going: list[RemoveGroup] = []
    for group_id in state.group_index.by_executor.get(node_id, ()):
        group = state.groups[group_id]
        if group.state is GROUP_CREATING:
            yield create_group(state, group, creation_timeout_ms(state, group.pool))
        else:
            going.append(remove_group(group))
    yield from going
