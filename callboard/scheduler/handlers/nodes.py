"""The coming and going of nodes: what it means that one joins, falls silent, is lost or leaves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from callboard.model.ray_fault import RayFault
from callboard.scheduler.handlers import elastic, groups, orders, preempting, stopping, workers
from callboard.scheduler.plan.planning import Victim
from callboard.scheduler.plan.preemption import stop_timeouts
from callboard.scheduler.records.events import (
    Admission,
    NodeCordoned,
    NodeDrained,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeObserved,
    NodeRayChanged,
    NodeRemoved,
    NodeSuspected,
    RaySessionLost,
    WorkerExited,
)
from callboard.scheduler.records.job_records import Failure, WorkerRecord, evolve
from callboard.scheduler.records.node_record import NodeRecord
from callboard.scheduler.records.refusals import Refusal, RefusalCode
from callboard.scheduler.records.states import (
    HOLDING,
    LIVE,
    GroupState,
    JobState,
    NodeState,
    Removal,
    Rule,
    StopKind,
    StopOutcome,
    WorkerState,
)
from callboard.scheduler.state.roster import GONE, uuids_of
from callboard.scheduler.state.transaction import Transaction

_FACTS = {each.name for each in fields(NodeJoined)} & {each.name for each in fields(NodeRecord)} - {
    "node_id",
    "rank",
    "closed",
}
"""What a node says of itself that is written down as it is."""


def joined(tx: Transaction, event: NodeJoined) -> Admission:
    """Takes a node in: gives it a rank and an epoch, and compares what runs there with what should."""
    old = tx.state.nodes.get(event.node_id)
    _refuse_if_taken(tx, event, old)
    rank = _rank(tx, event, old)
    epoch = old.epoch + 1 if old else 1
    if old is not None and old.ray is not None:
        replaced = event.ray is None or event.ray.ray_node_id != old.ray.ray_node_id
        if replaced:
            _lose_groups(tx, event.node_id, "its Ray node was replaced")
    there = tx.state.workers_on(event.node_id)
    expected = {worker.generation for worker in there}
    ghosts = [running for running in event.running if running.generation not in expected]
    said: dict[str, Any] = {
        **{name: getattr(event, name) for name in _FACTS},
        "rank": rank,
        "epoch": epoch,
        "lost_devices": _lost_devices(old, event),
        **_devices_open(old.opened if old is not None else (), event.closed),
        "refused_preloads": (),  # of the agent's run; it tells of what it refuses with a heartbeat
        "joined_ms": tx.now_ms,
        "ghosts": tuple(ghost.generation for ghost in ghosts),
    }
    if old is not None and old.cordon_passes and event.instance != old.instance:
        said |= {"cordoned": False, "cordon_passes": False}
    ready = event.runtime != "ray" or event.ray is not None
    state = NodeState.READY if ready else NodeState.JOINING
    why = "its agent joined" if old is None else "its agent is back"
    why = why if ready else f"{why}; {_not_up(event.ray_fault)}"
    if old is None:
        tx.add_node(event.node_id, state, why, **said)
    else:
        tx.move_node(event.node_id, state, why, **said)
    keep = _compare(tx, event, there)
    for ghost in ghosts:
        tx.command(orders.ghost_stop(event.node_id, ghost.generation, ghost.job, ghost.component, ghost.rank))
    for command in orders.owed(tx.state, event.node_id, tx.now_ms):
        if command not in tx.commands:
            tx.command(command)
    if ready:
        groups.reassign_removals(tx)
    end_reconciling_if_complete(tx)
    return Admission(rank=rank, epoch=epoch, keep=keep)


def ray_changed(tx: Transaction, event: NodeRayChanged) -> None:
    """A node's Ray part is up, or down. Its agent ends and reports the workers of a dead one itself."""
    node = _current(tx, event.node_id, event.epoch)
    if node is None or node.state in GONE:
        return
    if node.ray == event.ray:
        _learn_fault(tx, node, event.fault)
        return
    if node.ray is not None:
        _lose_groups(tx, node.node_id, "its Ray node ended")
    if event.ray is None:
        why = "its Ray node ended; another is being started" if event.fault is None else _not_up(event.fault)
        tx.move_node(node.node_id, NodeState.JOINING, why, ray=None, ray_fault=event.fault)
    else:
        tx.move_node(node.node_id, NodeState.READY, "its Ray node is up", ray=event.ray, ray_fault=None)
        groups.reassign_removals(tx)
    end_reconciling_if_complete(tx)


def _learn_fault(tx: Transaction, node: NodeRecord, fault: RayFault | None) -> None:
    """What keeps a node out of Ray is known, or another thing than before."""
    if fault == node.ray_fault:
        return
    why = _not_up(fault)
    revision = tx.event("node.ray_fault", f"nodes/{node.node_id}", node.state.value, why)
    reason = why if node.state is NodeState.JOINING else node.reason
    tx.put(evolve(node, ray_fault=fault, reason=reason, revision=revision))


def _not_up(fault: RayFault | None) -> str:
    return "its Ray node is not up yet" if fault is None else fault.message


def suspected(tx: Transaction, event: NodeSuspected) -> None:
    """A node is late, or back in time."""
    node = _current(tx, event.node_id, event.epoch)
    if node is None:
        return
    if event.leaving and event.kill_within_ms is not None:
        for worker in tx.state.workers_on(node.node_id):
            if worker.state is WorkerState.STOPPING:
                bounds = (max(0, event.kill_within_ms), worker.kill_timeout_ms)
                kind = worker.stop_kind or StopKind.DRAIN
                stopping.hasten(tx, worker, "its agent leaves", kind, bounds, known=True)
    if event.suspected and node.state in (NodeState.READY, NodeState.JOINING, NodeState.DRAINING):
        why = "its agent leaves" if event.leaving else "not heard of lately"
        tx.move_node(node.node_id, NodeState.SUSPECT, f"{why}; nothing new is placed there")
    elif not event.suspected and node.state is NodeState.SUSPECT:
        up = node.runtime != "ray" or node.ray is not None
        why = "heard of again" if up else f"heard of again; {_not_up(node.ray_fault)}"
        tx.move_node(node.node_id, NodeState.READY if up else NodeState.JOINING, why)


def observed(tx: Transaction, event: NodeObserved) -> None:
    """What an agent sees on its node, as far as it decides where work is placed or is worth an event."""
    node = _current(tx, event.node_id, event.epoch)
    if node is None or node.state in GONE:
        return
    subject = f"nodes/{node.node_id}"
    fields: dict[str, Any] = {}

    def tell(what: str, index: int, why: str) -> None:
        name = node.devices[index].id if index < len(node.devices) else str(index)
        fields["revision"] = tx.event(what, subject, node.state.value, f"GPU {name}{why}")

    if event.closed is not None:
        opening = _devices_open(node.opened, event.closed)
        before, now = dict(node.closed), dict(opening["closed"])
        for index, why in opening["closed"]:
            if before.get(index) != why:
                tell("node.device_closed", index, f" takes no new work: {why}")
        for index in sorted(before.keys() - now.keys()):
            tell("node.device_open", index, " takes work again")
        fields |= opening
    for index, what in event.warnings:
        tell("node.device_warning", index, f": {what}")
    if event.refused_preloads is not None:
        for modules, why in event.refused_preloads:
            if dict(node.refused_preloads).get(modules) != why:
                what = f"spares here do not import {modules}: {why}"
                fields["revision"] = tx.event("node.preload_refused", subject, node.state.value, what)
        fields["refused_preloads"] = event.refused_preloads
    if fields:
        tx.put(evolve(node, **fields))


def lost(tx: Transaction, event: NodeLost) -> None:
    """A node is given up. What ran there no longer charges its pools, but the devices stay taken until it is back."""
    node = _current(tx, event.node_id, event.epoch)
    if node is None or node.state in GONE:
        return
    tx.move_node(node.node_id, NodeState.LOST, event.reason, ray=None)
    _give_up(tx, node, event.reason)
    end_reconciling_if_complete(tx)


def left(tx: Transaction, event: NodeLeft) -> None:
    """An agent said goodbye: it ended its workers before it did."""
    node = _current(tx, event.node_id, event.epoch)
    if node is None or node.state in GONE:
        return
    why = event.reason or "its agent said goodbye"
    # What kept it out for good is why it left; what would have passed is over.
    fault = node.ray_fault if node.ray_fault is not None and node.ray_fault.permanent else None
    tx.move_node(node.node_id, NodeState.LEFT, why, ray=None, ray_fault=fault, ghosts=())
    _give_up(tx, node, f"{node.node_id} left")
    end_reconciling_if_complete(tx)


def drained(tx: Transaction, event: NodeDrained) -> None:
    """Somebody drains a node: it takes nothing new, its idle groups go, what runs there yields with notice. Neither
    shields nor ``preemptible`` bind a drain; a job's grace and the deadline only shorten its stop."""
    node = _node(tx, event.node_id)
    reason = event.reason or preempting.ON_REQUEST
    # Somebody's own cordon or drain lasts, whichever came first.
    passes = event.until_rejoin and (node.cordon_passes or not node.cordoned)
    if node.state is NodeState.READY:
        tx.move_node(node.node_id, NodeState.DRAINING, reason, cordoned=True, cordon_passes=passes)
    elif not node.cordoned or node.cordon_passes != passes:
        tx.put(evolve(node, cordoned=True, cordon_passes=passes))
    elif event.reason and node.state is NodeState.DRAINING and node.reason != event.reason:
        revision = tx.event("node.draining", f"nodes/{node.node_id}", node.state.value, reason)
        tx.put(evolve(node, reason=reason, revision=revision))
    within_ms = max(0, event.deadline_ms - tx.now_ms) if event.deadline_ms else None
    there = tx.state.workers_on(node.node_id)
    for worker in there:
        job, current = tx.state.jobs.get(worker.job), tx.state.workers.get(worker.generation)
        if job is None or current is None or current.state not in LIVE:
            continue
        if current.state is WorkerState.STOPPING:
            bounds = stop_timeouts(tx.state, tx.state.specs[job.uid].spec, within_ms)
            stopping.hasten(tx, current, f"{node.node_id} is drained: {reason}", StopKind.DRAIN, bounds)
        elif job.state is JobState.RUNNING and worker.extra:
            victim = Victim(job.uid, Rule.DRAIN, reason, worker.generation)
            preempting.preempt(tx, victim, None, within_ms=within_ms)
        elif elastic.replace_living(tx, current, reason, StopKind.DRAIN, within_ms=within_ms):
            continue
        elif job.state in (JobState.RUNNING, JobState.STARTING):
            preempting.preempt(tx, Victim(job.uid, Rule.DRAIN, reason), None, within_ms=within_ms)
    for group_id in list(tx.state.group_index.on_node.get(node.node_id, ())):
        groups.doom(tx, group_id, Removal.NODE_LOST, reason)


_Whys = tuple[tuple[int, str], ...]


def _devices_open(opened: _Whys, said: _Whys) -> dict[str, _Whys]:
    """Which devices are closed, of those of which an agent says why they should be. What an operator opened stays open
    for as long as the same is said of it."""
    if not opened:
        return {"closed": said, "opened": ()}
    return {
        "closed": tuple(each for each in said if each not in opened),
        "opened": tuple(each for each in opened if each in said),
    }


def _open_devices(tx: Transaction, node: NodeRecord, devices: tuple[int, ...]) -> None:
    """An operator lets devices take work whose agent says that they are closed. Idempotent."""
    subject = f"nodes/{node.node_id}"
    unknown = [index for index in devices if not 0 <= index < len(node.devices)]
    if unknown:
        why = f"{node.node_id} has no GPU {unknown[0]}; it has {len(node.devices)}, counted from 0"
        raise Refusal(RefusalCode.INVALID_FIELD, subject, why, "devices")
    revision = node.revision
    for index in sorted({index for index, _ in node.closed}.intersection(devices)):
        what = f"GPU {node.devices[index].id} takes work again: opened by hand"
        revision = tx.event("node.device_open", subject, node.state.value, what)
    opened = tuple(each for each in node.closed if each[0] in devices)
    closed = tuple(each for each in node.closed if each[0] not in devices)
    if opened:
        tx.put(evolve(node, closed=closed, opened=tuple(sorted({*node.opened, *opened})), revision=revision))


def cordoned(tx: Transaction, event: NodeCordoned) -> None:
    """Somebody cordons a node, or takes that back. Idempotent."""
    node = _node(tx, event.node_id)
    if event.devices:
        _open_devices(tx, node, event.devices)
        return
    if node.cordoned == event.cordoned and not node.cordon_passes:
        return
    if not event.cordoned and node.state is NodeState.DRAINING:
        node = tx.move_node(node.node_id, NodeState.READY, "uncordoned")
    what = "cordoned: nothing new starts here" if event.cordoned else "uncordoned"
    revision = tx.event("node.cordoned", f"nodes/{node.node_id}", node.state.value, what)
    why = what if node.state is NodeState.READY else node.reason
    tx.put(evolve(node, cordoned=event.cordoned, cordon_passes=False, reason=why, revision=revision))


def removed(tx: Transaction, event: NodeRemoved) -> None:
    """Somebody has a node forgotten. Only one that is gone, and of which nothing is owed any more: should its agent
    come back after all, it is refused as the agent of a state that is no more, and ends what it runs."""
    subject = f"nodes/{event.node_id}"
    node = _node(tx, event.node_id)
    if node.state not in GONE:
        message = (
            f"node {event.node_id} is {node.state}, so its agent is there; drain it, end its agent, then remove it"
        )
        raise Refusal(RefusalCode.WRONG_STATE, subject, message, "name")
    owed = sorted(tx.state.group_index.on_node.get(event.node_id, ()))
    if owed:
        message = (
            f"on node {event.node_id} {', '.join(owed)} must still be removed; that needs an agent in its Ray cluster"
        )
        raise Refusal(RefusalCode.WRONG_STATE, subject, message, "name")
    assert not tx.state.workers_on(event.node_id), "a node that is gone holds no worker (see _give_up)"
    tx.event("node.removed", subject, "REMOVED", f"forgotten on request; it was {node.state}")
    tx.drop("node", event.node_id)


def session_lost(tx: Transaction, event: RaySessionLost) -> None:
    """Ray's head died: the groups of its session are void. Their workers are reported by their agents."""
    for group_state in (GroupState.CREATING, GroupState.READY, GroupState.REMOVING):
        for group_id in list(tx.state.group_index.by_state[group_state]):
            group = tx.state.groups[group_id]
            if group.ray_session and group.ray_session != event.session:
                continue
            if group_state is GroupState.REMOVING:
                groups.removed(tx, group_id)
            else:
                reason = event.reason or "Ray's head died"
                _requeue_assigned(tx, group_id, reason)
                groups.doom(tx, group_id, Removal.NODE_LOST, reason)


def end_reconciling_if_complete(tx: Transaction) -> None:
    """Work is admitted again once every node that was there before the restart is back or given up (QL-03)."""
    if not tx.state.meta.reconcile_until_ms:
        return
    if not tx.state.roster.awaited:
        tx.count(reconcile_until_ms=0)
        tx.event("scheduler.reconciled", "scheduler", "", "every known node is back or given up")


def _refuse_if_taken(tx: Transaction, event: NodeJoined, old: NodeRecord | None) -> None:
    if old is not None and event.previous_alive and old.instance != event.instance:
        raise Refusal(
            RefusalCode.NODE_TAKEN,
            f"nodes/{event.node_id}",
            f"a live agent has the node id {event.node_id} already (on {old.hostname}); stop it or choose another id",
            "hello.node_id",
        )
    taken = tx.state.roster.taken(uuids_of(event), event.node_id)
    if taken:
        uuid = min(taken)
        owner = tx.state.roster.owner_of(uuid)
        raise Refusal(
            RefusalCode.NODE_TAKEN,
            f"nodes/{event.node_id}",
            f"node {owner} offers the device {uuid} already; give each agent devices of its own",
            "hello.inventory.devices",
        )


def _rank(tx: Transaction, event: NodeJoined, old: NodeRecord | None) -> int:
    """The rank asked for, the one the node had, or the lowest free one. A node that is gone holds no rank."""
    roster = tx.state.roster
    if event.rank >= 0:
        holder = roster.holder_of(event.rank)
        if holder is not None and holder != event.node_id:
            raise Refusal(
                RefusalCode.NODE_TAKEN,
                f"nodes/{event.node_id}",
                f"rank {event.rank} belongs to node {holder}; ask for another or for none",
                "hello.rank",
            )
        return event.rank
    if old is not None and roster.holder_of(old.rank) in (None, event.node_id):
        return old.rank
    return roster.lowest_free_rank()


def _compare(tx: Transaction, event: NodeJoined, there: Iterable[WorkerRecord]) -> tuple[int, ...]:
    """Generations that go on. One we hold for READY that the agent doesn't know has died; one it runs that we don't
    want is a ghost, ended before the node takes work (I4)."""
    reported = {worker.generation for worker in event.running}
    keep: list[int] = []
    for worker in there:
        if worker.generation in reported:
            keep.append(worker.generation)
        elif worker.state is WorkerState.READY:
            workers.handle(
                tx,
                WorkerExited(
                    now_ms=tx.now_ms,
                    node_id=event.node_id,
                    generation=worker.generation,
                    message="not there any more when its agent came back",
                ),
            )
    return tuple(keep)


def _give_up(tx: Transaction, node: NodeRecord, reason: str) -> None:
    gone = tx.state.workers_on(node.node_id)
    for worker in gone:
        if worker.state is WorkerState.STOPPING:
            workers.miss_checkpoint(tx, worker, reason)
        tx.move_worker(worker.generation, WorkerState.LOST, reason, outcome=StopOutcome.ALREADY_GONE, deadline_ms=0)
    for uid in dict.fromkeys(worker.job for worker in gone):
        _lose_workers(tx, uid, gone, node)
    _lose_groups(tx, node.node_id, reason)


def _lose_groups(tx: Transaction, node_id: str, reason: str) -> None:
    for group_id in list(tx.state.group_index.on_node.get(node_id, ())):
        _requeue_assigned(tx, group_id, f"placement group {group_id}: {reason}")
    groups.lose_node(tx, node_id, reason)


def _requeue_assigned(tx: Transaction, group_id: str, reason: str) -> None:
    """Jobs that wait for a group which will never be ready queue again."""
    for worker in tx.state.workers_in(group_id):
        current = tx.state.workers.get(worker.generation)
        if current is None or current.state is not WorkerState.ASSIGNED:
            continue
        if worker.extra and tx.state.jobs[worker.job].state is JobState.RUNNING:
            stopping.cancel_assigned(tx, worker, reason)
        else:
            stopping.requeue(tx, worker.job, reason)


def _lose_workers(tx: Transaction, uid: str, gone: list[WorkerRecord], node: NodeRecord) -> None:
    job = tx.state.jobs.get(uid)
    if job is None:
        return
    hit = [worker for worker in gone if worker.job == uid and worker.attempt == job.attempt and worker.state in HOLDING]
    if hit:
        reason = f"node {node.node_id} is gone, with {len(hit)} of its workers"
        ran = [worker for worker in hit if worker.state in (WorkerState.STARTING, WorkerState.READY)]
        if ran:
            name = f"{ran[0].component}/{ran[0].rank}"
            failure = Failure(job.attempt, tx.now_ms, name, node.node_id, died=True, reason=reason, counts=False)
            stopping.note_failure(tx, uid, failure)
        elastic.lose(tx, uid, hit, reason, counts=False)


def _node(tx: Transaction, node_id: str) -> NodeRecord:
    """The node that somebody names."""
    node = tx.state.nodes.get(node_id)
    if node is None:
        raise Refusal(RefusalCode.NOT_FOUND, f"nodes/{node_id}", f"there is no node {node_id}", "name")
    return node


def _current(tx: Transaction, node_id: str, epoch: int) -> NodeRecord | None:
    """The node, if the message is from its current session (I9)."""
    node = tx.state.nodes.get(node_id)
    return node if node is not None and node.epoch == epoch else None


def _lost_devices(old: NodeRecord | None, event: NodeJoined) -> int:
    """How many devices fewer a node offers than it once did. One that comes back whole has lost none."""
    return 0 if old is None else max(0, len(old.devices) + old.lost_devices - len(event.devices))
