"""The life of a placement group: made, used, idle, removed; each step is owed until an agent confirms it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from callboard.model.specs import PgPoolSpec, Strategy
from callboard.scheduler.handlers import orders
from callboard.scheduler.plan.fitting import fit
from callboard.scheduler.plan.rooms import NodeFilter, Rooms
from callboard.scheduler.plan.view import Assumption, View
from callboard.scheduler.records.asks import Slot
from callboard.scheduler.records.job_records import evolve
from callboard.scheduler.records.node_record import DeviceShare
from callboard.scheduler.records.pool_records import BundleRecord, GroupCounts, GroupRecord, PoolRecord
from callboard.scheduler.records.states import (
    GROUP_BACKOFF,
    GROUP_CREATING,
    GROUP_NOMINATED,
    GROUP_READY,
    GROUP_REMOVING,
    KIND_DYNAMIC,
    KIND_PRIVATE,
    KIND_RESERVED,
    GroupKind,
    GroupState,
    Removal,
)
from callboard.scheduler.state.state import State
from callboard.scheduler.state.transaction import Transaction

ANSWER_MARGIN_MS = 5_000
"""How much longer than a bound given to an agent the controller waits for the answer: above one reconnect of an agent
(keepalive 10 s counts as a lost agent instead), below anything a person would call hanging."""

_TAKEN_APART = (GROUP_CREATING, GROUP_READY)


def new_group(
    tx: Transaction,
    pool: str,
    kind: GroupKind,
    state: GroupState,
    bundles: tuple[BundleRecord, ...],
    *,
    reason: str,
    **fields: Any,
) -> GroupRecord:
    """Adds a group with the next id; nothing is asked of Ray."""
    number = tx.draw("next_group")
    group_id = f"pg-{number}"
    group = GroupRecord(
        group_id=group_id,
        number=number,
        pool=pool,
        group_kind=kind,
        state=state,
        bundles=bundles,
        created_ms=tx.now_ms,
        reason=reason,
        revision=tx.note_group(group_id, state, reason, pool, kind),
        **fields,
    )
    tx.put(group)
    return group


def was_planned(state: State, group_id: str) -> bool:
    """Whether a group of this id has been there: ids are given in turn, and never twice."""
    written = re.fullmatch("pg-([1-9][0-9]{0,17})", group_id)
    return written is not None and int(written[1]) < state.meta.next_group


def create(
    tx: Transaction, pool: str, kind: GroupKind, bundles: tuple[BundleRecord, ...], reason: str, **fields: Any
) -> GroupRecord:
    """Adds a group with the next id, whose room is free, and asks Ray for it."""
    timeout_ms = orders.creation_timeout_ms(tx.state, pool)
    fields |= {"executor": bundles[0].node_id, "deadline_ms": tx.now_ms + timeout_ms + ANSWER_MARGIN_MS}
    group = new_group(tx, pool, kind, GROUP_CREATING, bundles, reason=reason, **fields)
    _count(tx, pool, creations=1)
    tx.command(orders.create_group(tx.state, group, timeout_ms))
    return group


def begin_creation(tx: Transaction, group_id: str, reason: str, **fields: Any) -> None:
    """Asks Ray for a group whose room is free."""
    group = tx.state.groups[group_id]
    bundles: tuple[BundleRecord, ...] = fields.get("bundles", group.bundles)
    executor = bundles[0].node_id
    timeout_ms = orders.creation_timeout_ms(tx.state, group.pool)
    if group.state is not GROUP_CREATING:
        fields["attempt"] = group.attempt + 1 if group.state is GROUP_BACKOFF else group.attempt
    group = tx.move_group(
        group_id,
        GROUP_CREATING,
        reason,
        executor=executor,
        deadline_ms=tx.now_ms + timeout_ms + ANSWER_MARGIN_MS,
        removal=None,
        ray_id="",
        **fields,
    )
    _count(tx, group.pool, creations=1)
    tx.command(orders.create_group(tx.state, group, timeout_ms))


def ready(tx: Transaction, group_id: str, ray_id: str, ray_session: str) -> GroupRecord:
    """A group is booked in Ray."""
    group = tx.state.groups[group_id]
    idle_since_ms = 0 if group.job or group.nominee else tx.now_ms
    return tx.move_group(
        group_id,
        GROUP_READY,
        "booked in Ray",
        ray_id=ray_id,
        ray_session=ray_session,
        deadline_ms=0,
        idle_since_ms=idle_since_ms,
    )


def follow(tx: Transaction, group_id: str, got: tuple[tuple[int, ...], ...]) -> tuple[str, list[str]]:
    """Takes over which devices Ray gave to a group that is being made. Groups on which nothing can run (being made,
    planned or removed) get what it had in exchange for what it has now.

    Args:
        got: indexes of each bundle's devices.

    Returns:
        Why the ledger can't follow, empty if it did; and the nominated jobs that were promised parts of devices, or
        certain ones, among those exchanged: their plan doesn't hold any more.
    """
    group = tx.state.groups[group_id]
    exchanged: dict[str, dict[int, int]] = {}
    fits = len(got) == len(group.bundles) and not orders.must_have_its_devices(tx.state, group)
    for bundle, indexes in zip(group.bundles, got, strict=False):
        known = len(tx.state.nodes[bundle.node_id].devices)
        fits = fits and len(indexes) == len(bundle.devices)
        fits = fits and all(0 <= index < known for index in (*indexes, *[share.index for share in bundle.devices]))
        own = exchanged.setdefault(bundle.node_id, {})
        own.update(zip((share.index for share in bundle.devices), sorted(indexes), strict=False))
    if not fits or any(len(set(pairs.values())) < len(pairs) for pairs in exchanged.values()):
        return f"Ray gave it devices that it can't have: {str(got)[:200]}", []
    exchanged = {node_id: {a: b for a, b in pairs.items() if a != b} for node_id, pairs in exchanged.items()}
    if not any(exchanged.values()):
        return "", []
    moved, upset = [group], []
    for node_id, pairs in exchanged.items():
        taken = sorted(set(pairs.values()) - set(pairs))
        for other_id in list(tx.state.group_index.on_node.get(node_id, ())):
            other = tx.state.groups[other_id]
            held = {share.index for bundle in other.bundles if bundle.node_id == node_id for share in bundle.devices}
            going = other.state is GROUP_REMOVING
            if other_id == group_id or held.isdisjoint((*pairs, *taken)):
                continue
            planned = other.state is GROUP_NOMINATED
            if going or (
                (planned or other.state is GROUP_CREATING) and not orders.must_have_its_devices(tx.state, other)
            ):
                moved.append(other)
            elif planned:
                upset.append(other.nominee)
            elif not held.isdisjoint(taken):
                device = tx.state.nodes[node_id].devices[min(held.intersection(taken))].id
                return f"Ray gave it device {device} of {node_id}, which is {other_id}'s", []
        pairs.update(zip(taken, sorted(set(pairs) - set(pairs.values())), strict=True))
    for each in moved:
        _exchange(tx, each, exchanged)
    tx.event(
        "group.devices",
        f"placementGroups/{group_id}",
        group.state.value,
        "Ray gave it other devices than were planned",
        {"pool": group.pool, "kind": group.group_kind.value},
    )
    return "", list(dict.fromkeys(upset))


def _exchange(tx: Transaction, group: GroupRecord, exchanged: Mapping[str, Mapping[int, int]]) -> None:
    """Gives a group and its workers the devices that others had."""

    def on(node_id: str, devices: tuple[DeviceShare, ...]) -> tuple[DeviceShare, ...]:
        pairs, infos = exchanged.get(node_id, {}), tx.state.nodes[node_id].devices
        shares = [
            DeviceShare(pairs[share.index], infos[pairs[share.index]].id, share.milli)
            if share.index in pairs
            else share
            for share in devices
        ]
        return tuple(sorted(shares, key=lambda share: share.index)) if devices else devices

    bundles = tuple(replace(bundle, devices=on(bundle.node_id, bundle.devices)) for bundle in group.bundles)
    tx.change_group(group.group_id, bundles=bundles)
    for worker in list(tx.state.workers_in(group.group_id)):
        devices = on(worker.node_id, worker.devices)
        if devices != worker.devices:
            tx.put(evolve(worker, devices=devices))


def remove(tx: Transaction, group_id: str, removal: Removal, reason: str) -> None:
    """Takes a group that nobody holds out of Ray, or out of the plan if it was never asked for."""
    group = tx.state.groups[group_id]
    if group.state in (GROUP_NOMINATED, GROUP_BACKOFF):
        _count(tx, group.pool, removal=removal if group.state is GROUP_BACKOFF else None)
        tx.drop("group", group_id)
        tx.event("group.removed", f"placementGroups/{group_id}", "REMOVED", reason, {"pool": group.pool})
        return
    if group.state is GROUP_REMOVING:
        return
    group = tx.move_group(
        group_id,
        GROUP_REMOVING,
        reason,
        executor=orders.pick_executor(tx.state, group),
        deadline_ms=0,
        idle_since_ms=0,
        job="",
        nominee="",
        removal=removal,
    )
    if group.executor:
        tx.command(orders.remove_group(group))


def remove_stray(tx: Transaction, ray_id: str, ray_session: str, reason: str, pool: str = "") -> None:
    """Removes a group that an agent made too late: its creation was given up, and what was removed then was not there
    yet. Owed like any removal, or it would hold its devices in Ray for ever.

    Args:
        pool: pool it was made for; empty: nobody knows any more.
    """
    known = [tx.state.groups[group_id] for group_id in tx.state.group_index.by_ray_id.get(ray_id, ())]
    if not ray_id or any(group.state is GROUP_REMOVING for group in known):
        return
    fields = {"ray_id": ray_id, "ray_session": ray_session, "removal": Removal.FAILED}
    group = new_group(tx, pool, KIND_PRIVATE, GROUP_REMOVING, (), reason=reason, **fields)
    executor = orders.pick_executor(tx.state, group)
    if executor:
        tx.command(orders.remove_group(tx.change_group(group.group_id, executor=executor)))


def removed(tx: Transaction, group_id: str) -> None:
    """A group is gone from Ray. A reserved one that was lost is planned again."""
    group = tx.state.groups[group_id]
    assert group.removal is not None, "a group being removed has a reason"
    _count(tx, group.pool, removal=group.removal)
    if _is_made_again(tx, group):
        # Losing a node is no failure of the creation: the next try waits for room only.
        wait_ms = 0 if group.removal is Removal.NODE_LOST else _wait_ms(tx.state.pools[group.pool].spec.pg_pool, group)
        back_off(tx, group_id, f"made again after: {group.reason}", wait_ms)
        return
    tx.drop("group", group_id)
    tx.event("group.removed", f"placementGroups/{group_id}", "REMOVED", group.reason, {"pool": group.pool})


def back_off(tx: Transaction, group_id: str, reason: str, wait_ms: int) -> None:
    """A reserved group waits to be made: for room, or for a while after a failure."""
    tx.move_group(
        group_id,
        GROUP_BACKOFF,
        reason,
        bundles=(),
        executor="",
        ray_id="",
        ray_session="",
        job="",
        nominee="",
        users=0,
        idle_since_ms=0,
        destroy=False,
        removal=None,
        deadline_ms=tx.now_ms + wait_ms if wait_ms else 0,
    )


def failed(tx: Transaction, group_id: str, message: str) -> None:
    """A group could not be made and nothing of it is left in Ray."""
    group = tx.state.groups[group_id]
    _count(tx, group.pool, removal=Removal.FAILED)
    if _is_made_again(tx, group):
        back_off(tx, group_id, message, _wait_ms(tx.state.pools[group.pool].spec.pg_pool, group))
        return
    tx.drop("group", group_id)
    tx.event("group.failed", f"placementGroups/{group_id}", "FAILED", message, {"pool": group.pool})


def let_go(tx: Transaction, group_id: str) -> None:
    """Looks at a group after a worker left it: once nobody holds it, it is idle or goes."""
    group = tx.state.groups.get(group_id)
    if group is None or group.state not in _TAKEN_APART or tx.state.workers_in(group_id):
        return
    pool = tx.state.pools.get(group.pool)
    if group.destroy:
        remove(tx, group_id, group.removal or Removal.REQUESTED, group.reason or "asked for")
    elif pool is None or pool.deleting:
        remove(tx, group_id, Removal.POOL_DELETED, "its pool is being deleted")
    elif group.group_kind is KIND_PRIVATE:
        remove(tx, group_id, Removal.JOB_ENDED, "its job let go of it")
    elif group.group_kind is KIND_DYNAMIC and not (pool.spec.pg_pool.reuse and pool.spec.pg_pool.enable):
        remove(tx, group_id, Removal.JOB_ENDED, "its pool reuses no groups")
    elif group.job:
        idle_since_ms = tx.now_ms if group.state is GROUP_READY else 0
        tx.change_group(group_id, job="", idle_since_ms=idle_since_ms)


def doom(tx: Transaction, group_id: str, removal: Removal, reason: str) -> None:
    """Removes a group as soon as nobody holds it."""
    group = tx.state.groups[group_id]
    if group.state in _TAKEN_APART:
        tx.change_group(group_id, destroy=True, removal=removal, reason=reason)
        let_go(tx, group_id)
    elif group.state is GROUP_BACKOFF:
        remove(tx, group_id, removal, reason)


def trim(tx: Transaction, group_id: str, reason: str) -> None:
    """Removes an idle dynamic group to make room, or marks it if its last user is still on the way out."""
    doom(tx, group_id, Removal.TRIMMED, reason)


def ensure_reserved(tx: Transaction, pool: PoolRecord) -> None:
    """Makes the reserved groups that a pool lacks, as far as there is room; the others say why they wait."""
    if not pool.spec.pg_pool.enable or pool.deleting:
        return
    existing = {
        group.reserved_index: group
        for group_id in tx.state.group_index.of_pool.get(pool.spec.name, ())
        if (group := tx.state.groups[group_id]).group_kind is KIND_RESERVED
    }
    wanted = NodeFilter(pool.spec.node_selector)
    for index, shape in enumerate(pool.spec.pg_pool.reserved):
        if index in pool.destroyed_reserved:
            continue
        planned = existing.get(index)
        if planned is not None and planned.state in _TAKEN_APART and not planned.destroy:
            if not all(wanted.admits(tx.state.nodes[bundle.node_id]) for bundle in planned.bundles):
                doom(tx, planned.group_id, Removal.REQUESTED, "its node is not one of its pool's any more")
            continue
        if planned is not None and (planned.state is not GROUP_BACKOFF or planned.deadline_ms > tx.now_ms):
            continue
        rooms = Rooms(tx.state, View(tx.state, Assumption()), wanted)
        bundles = fit(rooms, [Slot("", 0, shape)], Strategy.PACK)
        if bundles is not None:
            if planned is None:
                create(tx, pool.spec.name, KIND_RESERVED, bundles, "reserved", reserved_index=index)
            else:
                begin_creation(tx, planned.group_id, "reserved", bundles=bundles)
            continue
        reason = f"no node has room for {shape}"
        if planned is None:
            new_group(tx, pool.spec.name, KIND_RESERVED, GROUP_BACKOFF, (), reason=reason, reserved_index=index)
        elif planned.reason != reason or planned.deadline_ms:
            tx.change_group(planned.group_id, reason=reason, deadline_ms=0)


def follow_pool(tx: Transaction, name: str, before: PgPoolSpec) -> None:
    """Has the groups of a pool follow its new settings: what it would not make or keep now goes once nobody holds it,
    and what waits for another try has it at once."""
    now = tx.state.pools[name].spec.pg_pool
    for group_id in list(tx.state.group_index.of_pool.get(name, ())):
        group, index = tx.state.groups[group_id], tx.state.groups[group_id].reserved_index
        if group.group_kind is KIND_RESERVED and (
            not now.enable
            or index >= min(len(now.reserved), len(before.reserved))
            or now.reserved[index] != before.reserved[index]
        ):
            doom(tx, group_id, Removal.REQUESTED, "its pool was changed")
        elif group.state is GROUP_BACKOFF and group.deadline_ms:
            tx.change_group(group_id, deadline_ms=0)
        elif group.group_kind is KIND_DYNAMIC:
            let_go(tx, group_id)
    view = View(tx.state, Assumption())
    idle = [group_id for group_id in view.trimmable() if tx.state.groups[group_id].pool == name]
    for group_id in idle[: max(0, view.dynamic_groups(name) - now.max_dynamic)]:
        trim(tx, group_id, "its pool may have fewer groups")


def lose_node(tx: Transaction, node_id: str, reason: str) -> None:
    """A node's Ray part is gone: its groups go, and what its agent still owed to Ray is asked of another."""
    for group_id in list(tx.state.group_index.on_node.get(node_id, ())):
        group = tx.state.groups[group_id]
        if group.state in _TAKEN_APART:
            doom(tx, group_id, Removal.NODE_LOST, reason)
    reassign_removals(tx, node_id)


def reassign_removals(tx: Transaction, left: str = "") -> None:
    """Gives removals whose agent is gone to another agent.

    Args:
        left: node whose agent can't remove any more, though it may still be there.
    """
    index = tx.state.group_index
    if not tx.state.roster.first_connected():
        return  # When all are lost, each loss would look at all that those before left behind.
    theirs = [group_id for group_id in index.by_executor.get(left, ()) if group_id in index.by_state[GROUP_REMOVING]]
    waiting = [tx.state.groups[group_id] for group_id in dict.fromkeys((*index.orphans, *theirs))]
    for group in sorted(waiting, key=lambda group: group.number):
        chosen = orders.pick_executor(tx.state, group)
        if chosen and chosen != left:
            tx.command(orders.remove_group(tx.change_group(group.group_id, executor=chosen)))


def count_use(tx: Transaction, group: GroupRecord, *, fresh: bool, reused: bool) -> None:
    """Counts that a job got a group: a fresh one, or a kept one (used before: a reuse)."""
    if group.group_kind is KIND_PRIVATE:
        return
    _count(tx, group.pool, misses=1 if fresh else 0, hits=0 if fresh else 1, reuses=1 if reused else 0)


def _is_made_again(tx: Transaction, group: GroupRecord) -> bool:
    """Whether a reserved group that is gone comes back: not when somebody wanted it gone."""
    pool = tx.state.pools.get(group.pool)
    return (
        group.group_kind is KIND_RESERVED
        and pool is not None
        and not pool.deleting
        and group.removal in (None, Removal.NODE_LOST, Removal.FAILED)
    )


def _wait_ms(pg_pool: PgPoolSpec, group: GroupRecord) -> int:
    """Backoff after a failed creation. After the last try the longest wait goes on: room may come back any time."""
    tries = min(group.attempt, pg_pool.retry_attempts)
    return pg_pool.retry_base_ms << max(0, tries - 1)


def _count(
    tx: Transaction,
    pool_name: str,
    *,
    creations: int = 0,
    reuses: int = 0,
    hits: int = 0,
    misses: int = 0,
    removal: Removal | None = None,
) -> None:
    pool = tx.state.pools.get(pool_name)
    if pool is None:
        return
    counts = pool.counts
    removals = counts.removals
    if removal is not None:
        by_reason = dict(removals)
        by_reason[removal.value] = by_reason.get(removal.value, 0) + 1
        removals = tuple(sorted(by_reason.items()))
    new = GroupCounts(
        creations=counts.creations + creations,
        reuses=counts.reuses + reuses,
        hits=counts.hits + hits,
        misses=counts.misses + misses,
        removals=removals,
    )
    if new != counts:
        tx.put(evolve(pool, counts=new))
