"""A view over the state: what would be free if some jobs and groups were gone. Nothing is copied or changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from operator import sub

from callboard.model.frozen import dataclass, evolver, quick
from callboard.model.quantities import MILLI, NOTHING, Resources, on_each, total
from callboard.scheduler.plan.nearness import nearest
from callboard.scheduler.records.job_records import WorkerRecord
from callboard.scheduler.records.node_record import DeviceShare, NodeRecord
from callboard.scheduler.records.pool_records import BundleRecord, GroupRecord
from callboard.scheduler.records.states import (
    GROUP_CREATING,
    GROUP_NOMINATED,
    GROUP_READY,
    GROUP_REMOVING,
    JOB_PREEMPTING,
    JOB_STOPPING,
    KIND_DYNAMIC,
    KIND_PRIVATE,
    KIND_RESERVED,
    LIVE,
    WORKER_STOPPING,
)
from callboard.scheduler.state.ledger import Amounts
from callboard.scheduler.state.state import State

LEAVING = (JOB_STOPPING, JOB_PREEMPTING)
"""Jobs whose room is free-to-come. A RECOVERING job is not among them: it queues for its own room again."""


class Room:
    """What is free on one node in a view; :meth:`take` uses it up while a plan is made."""

    __slots__ = ("cpu_milli", "custom_milli", "device_milli", "memory_bytes", "near", "node", "taken_bytes")

    def __init__(self, node: NodeRecord, *sums: Amounts) -> None:
        """Capacity less the given sums: what is booked, and what is claimed where claims count."""
        capacity = node.capacity
        self.node = node
        self.cpu_milli = capacity.cpu_milli
        self.memory_bytes = capacity.memory_bytes
        self.custom_milli = dict(capacity.custom_milli)
        self.device_milli = [MILLI] * len(node.devices)
        self.taken_bytes: dict[int, int] = {}
        self.near: Sequence[int] = ()
        """Devices in the order in which whole ones are taken; empty: by index."""
        for index, _ in node.closed if sums else ():
            if index < len(self.device_milli):
                # Not cut off at zero: whoever gives a device back doesn't open it.
                self.device_milli[index] -= MILLI
        for amounts in sums:
            if not amounts.parts:
                continue
            self.cpu_milli -= amounts.cpu_milli
            self.memory_bytes -= amounts.memory_bytes
            for name, milli in amounts.custom_milli.items():
                self.custom_milli[name] = self.custom_milli.get(name, 0) - milli
            # A node that came back with fewer devices has sums of more than it has now.
            self.device_milli = list(map(sub, self.device_milli, amounts.device_milli))
            for index, taken in amounts.device_bytes.items():
                self.taken_bytes[index] = self.taken_bytes.get(index, 0) + taken

    def copy(self) -> Room:
        """The same once more: what is taken from one is still free in the other."""
        same = Room.__new__(Room)
        same.node, same.near = self.node, self.near
        same.cpu_milli, same.memory_bytes = self.cpu_milli, self.memory_bytes
        same.custom_milli, same.taken_bytes = dict(self.custom_milli), dict(self.taken_bytes)
        same.device_milli = list(self.device_milli)
        return same

    @property
    def tells_distances(self) -> bool:
        """Whether it is known which devices of the node are connected with each other."""
        devices = self.node.devices
        return bool(devices) and bool(devices[0].distances)

    def prefer_near(self, asks: Collection[Resources]) -> None:
        """From now on, whole devices are taken so that those of these workers are connected with each other, as far as
        it is known what is. Which of them is taken decides nothing else, or it is left alone."""
        devices = self.node.devices
        self.near = ()
        if len(devices) < 3 or not devices[0].distances:
            return
        whole = sum(ask.gpu_milli // MILLI for ask in asks)
        if whole and (not any(ask.gpu_memory_bytes or ask.selects for ask in asks) or len(set(asks)) == 1):
            first = next(iter(asks))
            free = [i for i in self.holding(first) if self.device_milli[i] >= MILLI and i < len(devices)]
            self.near = near = nearest(devices, free, whole)
            if all(ask.gpu_milli <= MILLI for ask in asks):
                self.near = [*sorted(near[:whole]), *near[whole:]]  # so that ranks follow devices

    def give_back(self, bundle: BundleRecord) -> None:
        """Counts a bundle as free."""
        self._move(bundle.resources, [(share.index, share.milli) for share in bundle.devices], 1)

    def use(self, bundle: BundleRecord) -> None:
        """The inverse of :meth:`give_back`."""
        self._move(bundle.resources, [(share.index, share.milli) for share in bundle.devices], -1)

    def holds(self, bundle: BundleRecord) -> bool:
        """Whether exactly this bundle, on its very devices, finds room."""
        if any(self.device_milli[share.index] < share.milli for share in bundle.devices):
            return False
        ask = bundle.resources
        if ask.selects and not all(self.suits(share.index, ask) for share in bundle.devices):
            return False
        if ask.gpu_memory_bytes and bundle.devices:
            each = on_each(ask.gpu_memory_bytes, len(bundle.devices))
            if any(self.free_bytes(share.index) < each for share in bundle.devices):
                return False
        return (
            ask.cpu_milli <= max(0, self.cpu_milli)
            and ask.memory_bytes <= max(0, self.memory_bytes)
            and all(milli <= self.custom_milli.get(name, 0) for name, milli in ask.custom_milli)
        )

    def fits(self, ask: Resources) -> bool:
        """Whether a worker that asks this finds room, a share never straddling devices (I1)."""
        if ask.cpu_milli > 0 and ask.cpu_milli > self.cpu_milli:
            return False
        if ask.memory_bytes > 0 and ask.memory_bytes > self.memory_bytes:
            return False
        for name, milli in ask.custom_milli:
            if milli > self.custom_milli.get(name, 0):
                return False
        gpu_milli = ask.gpu_milli
        if ask.gpu_memory_bytes or ask.gpu_model or ask.gpu_memory_min_bytes:
            return gpu_milli > 0 and len(self.holding(ask)) * MILLI >= gpu_milli
        if gpu_milli == MILLI:
            return max(self.device_milli, default=0) >= MILLI
        if gpu_milli > MILLI:
            return self.whole_devices() * MILLI >= gpu_milli
        return gpu_milli == 0 or max(self.device_milli, default=0) >= gpu_milli

    def whole_devices(self) -> int:
        """Devices nobody has a share of."""
        return len([free for free in self.device_milli if free >= MILLI])

    def free_bytes(self, index: int) -> int:
        """Memory of a device that nobody was promised; 0 where its node doesn't tell how much it has."""
        if not self.node.capacity.gpu_memory_bytes or index >= len(self.node.devices):
            return 0
        return self.node.devices[index].memory_bytes - self.taken_bytes.get(index, 0)

    def suits(self, index: int, ask: Resources) -> bool:
        """Whether a device is one of those that an ask is for. A node may owe shares of some that it has no more."""
        devices = self.node.devices
        return index < len(devices) and devices[index].suits(ask)

    def holding(self, ask: Resources) -> list[int]:
        """Devices each of which could hold the part of a worker that lies on one."""
        need, each = min(ask.gpu_milli, MILLI), ask.each_gpu_memory_bytes
        found = [i for i, free in enumerate(self.device_milli) if free >= need]
        if each:
            found = [i for i in found if self.free_bytes(i) >= each]
        return [i for i in found if self.suits(i, ask)] if ask.selects else found

    def card(self, index: int) -> tuple[int, int, int, str]:
        """What tells one device from another: what is free of it and its memory, and what it is."""
        device = self.node.devices[index]
        return (self.device_milli[index], self.free_bytes(index), device.memory_bytes, device.model)

    def devices_for(self, ask: Resources, *, by_card: bool) -> list[tuple[int, ...] | None]:
        """Devices that an ask could be given, the fullest first, of those that are alike one choice for all; None:
        there is nothing to choose.

        Args:
            by_card: some worker that is placed with it can't have all devices, so it matters which this one takes.
        """
        if not ask.gpu_milli or (ask.gpu_milli >= MILLI and not by_card):
            return [None]
        alike: dict[tuple[object, ...], list[int]] = {}
        for index in self.holding(ask):
            if index < len(self.node.devices):
                kind = self.card(index) if by_card else (self.device_milli[index],)
                alike.setdefault(kind, []).append(index)
        kinds = [members for _, members in sorted(alike.items())]
        if ask.gpu_milli <= MILLI:
            return [(members[0],) for members in kinds]
        return list(islice(_choices(kinds, ask.gpu_milli // MILLI), MAX_CHOICES))

    def take(self, ask: Resources, devices: tuple[int, ...] | None = None) -> tuple[DeviceShare, ...]:
        """Uses room for one worker that :meth:`fits` and names its devices: the lowest whole ones, or for a share
        the fullest device that still has it, so that whole devices stay whole. Who asks for memory gets the devices
        with the least of it that is enough.

        Args:
            devices: those to take it from; None: the ones described.
        """
        shares: list[tuple[int, int]] = []
        if devices is not None:
            shares = [(index, min(ask.gpu_milli, MILLI)) for index in devices]
        elif ask.gpu_memory_bytes or ask.gpu_model or ask.gpu_memory_min_bytes:
            by_memory = bool(ask.gpu_memory_bytes)
            fitting = self._nearest_first(self.holding(ask)) if self.near else self.holding(ask)
            fitting.sort(key=lambda i: (self.device_milli[i], by_memory and self.free_bytes(i)))
            chosen = sorted(fitting[: max(1, ask.gpu_milli // MILLI)])
            shares = [(index, min(ask.gpu_milli, MILLI)) for index in chosen]
        elif ask.gpu_milli >= MILLI:
            whole = [index for index, free in enumerate(self.device_milli) if free >= MILLI]
            if self.near:
                whole = sorted(self._nearest_first(whole)[: ask.gpu_milli // MILLI])
            shares = [(index, MILLI) for index in whole[: ask.gpu_milli // MILLI]]
        elif ask.gpu_milli > 0:
            having = [(free, index) for index, free in enumerate(self.device_milli) if free >= ask.gpu_milli]
            shares = [(min(having)[1], ask.gpu_milli)]
        self._move(ask, shares, -1)
        return tuple(DeviceShare(index, self.node.devices[index].id, milli) for index, milli in shares)

    def _nearest_first(self, devices: list[int]) -> list[int]:
        order = {index: place for place, index in enumerate(self.near)}
        return sorted(devices, key=lambda index: (order.get(index, len(order)), index))

    def untake(self, ask: Resources, devices: Iterable[DeviceShare]) -> None:
        """The inverse of :meth:`take`."""
        self._move(ask, [(share.index, share.milli) for share in devices], 1)

    def free(self) -> Resources:
        """What is free, as one amount."""
        return Resources.of(
            cpu_milli=self.cpu_milli,
            gpu_milli=sum(max(0, free) for free in self.device_milli),
            memory_bytes=self.memory_bytes,
            gpu_memory_bytes=sum(
                max(0, self.free_bytes(index)) for index, free in enumerate(self.device_milli) if free > 0
            )
            if self.node.capacity.gpu_memory_bytes
            else 0,
            custom=self.custom_milli,
        )

    def _move(self, resources: Resources, shares: Collection[tuple[int, int]], sign: int) -> None:
        self.cpu_milli += sign * resources.cpu_milli
        self.memory_bytes += sign * resources.memory_bytes
        for name, milli in resources.custom_milli:
            self.custom_milli[name] = self.custom_milli.get(name, 0) + sign * milli
        if resources.gpu_memory_bytes and shares:
            each = sign * on_each(resources.gpu_memory_bytes, len(shares))
            for index, _ in shares:
                taken = self.taken_bytes.pop(index, 0) - each
                if taken:
                    self.taken_bytes[index] = taken
        for index, milli in shares:
            if index < len(self.device_milli):
                self.device_milli[index] += sign * milli


MAX_CHOICES = 64
"""Most choices of several devices for one worker that a search tries."""


def _choices(kinds: Sequence[Sequence[int]], count: int) -> Iterator[tuple[int, ...]]:
    """Every way to take so many devices, of those that are alike the first ones; as many as can be of the first."""
    if not kinds:
        yield from [()] if not count else []
        return
    for here in range(min(count, len(kinds[0])), -1, -1):
        for rest in _choices(kinds[1:], count - here):
            yield tuple(sorted((*kinds[0][:here], *rest)))


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """What a view takes for granted.

    Attributes:
        subject: uid of the job the plan is for; its own nomination is no obstacle to it.
        released: uids of jobs taken as gone.
        shed: generations of extra workers taken as gone.
        passed: uids of jobs whose nomination is no obstacle, because this job ends before they can start.
        trimmed: ids of placement groups taken as removed.
        overtaken: uids of nominated jobs whose nomination is taken as dropped.
        closed: ids of nodes that don't come into question, whatever is free there.
        future: count what is on its way out (jobs that are stopping, groups being removed) as gone.
        empty: count nothing as used: what could ever fit?
    """

    subject: str = ""
    released: frozenset[str] = frozenset()
    shed: frozenset[int] = frozenset()
    passed: frozenset[str] = frozenset()
    trimmed: frozenset[str] = frozenset()
    overtaken: frozenset[str] = frozenset()
    closed: frozenset[str] = frozenset()
    future: bool = False
    empty: bool = False

    @property
    def patient(self) -> bool:
        """Whether something has to end before it holds."""
        return self.future or bool(self.released) or bool(self.shed) or bool(self.trimmed)


assuming = evolver(Assumption)
"""Takes some more or less for granted."""


class View:
    """The state under an assumption.

    Args:
        basis: a view that takes less of the same for granted, and looks ahead as this one does. What it found out of
            everything that is on its way out is not found out again: a plan tries several assumptions.
    """

    def __init__(self, state: State, assumption: Assumption, basis: View | None = None) -> None:
        self.state = state
        self.assumption = assumption
        self._basis = basis
        self.pristine: dict[str, Room] = {}
        self._ignored = {*assumption.overtaken, *assumption.passed, assumption.subject}
        self._back: dict[str, list[BundleRecord]] | None = None
        self._left: frozenset[str] | None = None if assumption.future else assumption.released

    @property
    def _gone(self) -> frozenset[str]:
        """Jobs that are taken as gone. Found when it is asked for first, too."""
        if self._left is None:
            by_state = self.state.jobs_by_state
            self._left = self.assumption.released.union(*(by_state[job_state] for job_state in LEAVING))
        return self._left

    @property
    def returns(self) -> dict[str, list[BundleRecord]]:
        """Found when it is asked for first: who asks about quota alone never does."""
        if self._back is None:
            self._back = self._returned_bundles()
        return self._back

    def room(self, node: NodeRecord) -> Room:
        """What is free on a node."""
        if self.assumption.empty:
            return Room(node)
        node_id, basis = node.node_id, self._basis
        back = self.returns.get(node_id)
        if basis is not None and basis.returns.get(node_id) is back:
            known = basis.pristine.get(node_id)
            if known is None:
                known = basis.pristine[node_id] = basis.room(node)
            return known.copy()
        book = self.state.ledger.nodes[node_id]
        room = Room(node, book.booked, book.claimed)
        for bundle in back or ():
            room.give_back(bundle)
        return room

    def room_alone(self, node: NodeRecord) -> Room:
        """The same for one who asks about few nodes: looks at what is on this one, not at all that comes back."""
        book = self.state.ledger.nodes[node.node_id]
        room = Room(node, book.booked, book.claimed)
        for group_id in self.state.group_index.on_node.get(node.node_id, ()):
            group = self.state.groups[group_id]
            if self.comes_back(group):
                for bundle in group.bundles:
                    if bundle.node_id == node.node_id:
                        room.give_back(bundle)
        return room

    def may_hold(self, ask: Resources) -> bool:
        """Whether all nodes together have enough GPUs and CPUs; whether an ask fits on them is another matter."""
        free = self.state.free
        gpu_milli, cpu_milli = ask.gpu_milli - free.gpu_milli, ask.cpu_milli - free.cpu_milli
        if gpu_milli <= 0 and cpu_milli <= 0:
            return True
        for bundles in self.returns.values():
            for bundle in bundles:
                gpu_milli -= bundle.resources.gpu_milli
                cpu_milli -= bundle.resources.cpu_milli
        return gpu_milli <= 0 and cpu_milli <= 0

    def changed_nodes(self) -> Iterable[str]:
        """Nodes on which more is free than the ledger says."""
        return self.returns.keys()

    def open_to_subject(self, group: GroupRecord) -> bool:
        """Whether the subject may use a placement group once what is assumed has happened."""
        closed = self.assumption.closed
        nodes = self.state.nodes
        return self.unused(group) and all(
            bundle.node_id not in closed and nodes[bundle.node_id].takes(bundle.devices) for bundle in group.bundles
        )

    def unused(self, group: GroupRecord) -> bool:
        """Whether nobody holds a group, nor has it promised, once what is assumed has happened."""
        if group.state not in (GROUP_READY, GROUP_CREATING) or group.destroy:
            return False
        if group.group_id in self.assumption.trimmed or (group.nominee and group.nominee not in self._ignored):
            return False
        return all(self._is_gone(worker) for worker in self.state.workers_in(group.group_id))

    def charged(self, pool: str) -> Resources:
        """What counts against a pool's quota beside the subject: usage and other nominations."""
        if self.assumption.empty:
            return NOTHING
        amount = self.state.charged(pool)
        if self.assumption.patient:
            for worker in self._gone_workers():
                if worker.pool == pool:
                    amount = amount - worker.resources
            amount = amount + self._reserved_left_idle(pool)
        return amount + self.state.nominated_ask(pool, self._ignored) if self.state.nominated else amount

    def _reserved_left_idle(self, pool: str) -> Resources:
        """What a pool that charges idle reserved groups is charged once those who use them are gone."""
        record = self.state.pools.get(pool)
        if record is None or not record.spec.pg_pool.charge_reserved:
            return NOTHING
        return total(
            bundle.resources
            for group_id in self.state.group_index.of_pool.get(pool, ())
            if (group := self.state.groups[group_id]).group_kind is KIND_RESERVED
            and (holders := self.state.workers_in(group_id))
            and all(self._is_gone(worker) for worker in holders)
            for bundle in group.bundles
        )

    def dynamic_groups(self, pool: str) -> int:
        """Dynamic groups that count against ``max_dynamic``."""
        if self.assumption.empty:
            return 0
        return sum(
            1
            for group_id in self.state.group_index.of_pool.get(pool, ())
            if (group := self.state.groups[group_id]).group_kind is KIND_DYNAMIC
            and group.state is not GROUP_REMOVING
            and group_id not in self.assumption.trimmed
            and not (group.state is GROUP_NOMINATED and group.nominee in self._ignored)
            and not (group.destroy and self.assumption.future)
        )

    def trimmable(self) -> list[str]:
        """Dynamic groups nobody uses (once what is assumed has happened), oldest idle first."""
        ids = dict.fromkeys(self.state.group_index.idle) | self.left_groups
        groups = [self.state.groups[group_id] for group_id in ids]
        found = [group for group in groups if group.group_kind is KIND_DYNAMIC and self.unused(group)]
        found.sort(key=lambda group: (group.idle_since_ms or self.state.meta.now_ms, group.number))
        return [group.group_id for group in found]

    def _is_gone(self, worker: WorkerRecord) -> bool:
        """Whether a worker is taken as gone. One that is quarantined is not on its way out."""
        if worker.state not in LIVE:
            return False
        assumption = self.assumption
        if worker.job in assumption.released or worker.generation in assumption.shed:
            return True
        return assumption.future and (
            self.state.jobs[worker.job].state in LEAVING or (worker.extra and worker.state is WORKER_STOPPING)
        )

    def _gone_workers(self, basis: View | None = None) -> Iterator[WorkerRecord]:
        """Workers that are taken as gone; with a basis, those that it does not take as gone, and perhaps some more."""
        gone = self._gone
        for uid in gone if basis is None else self.assumption.released:
            for generation in self.state.jobs_holding.get(uid, ()):
                worker = self.state.workers[generation]
                if worker.state in LIVE:
                    yield worker
        extras = dict.fromkeys(self.assumption.shed)
        if self.assumption.future and basis is None:
            extras |= self.state.leaving_extras
        for generation in extras:
            worker = self.state.workers[generation]
            if worker.job not in gone and worker.state in LIVE:
                yield worker

    @cached_property
    def left_groups(self) -> dict[str, None]:
        """Groups that a worker leaves that is taken as gone."""
        basis = self._basis
        further = dict.fromkeys([worker.group_id for worker in self._gone_workers(basis)])
        return further if basis is None else basis.left_groups | further

    def _returned_bundles(self) -> dict[str, list[BundleRecord]]:
        """Bundles by node that the assumption counts as free although the ledger does not."""
        state, assumption, basis = self.state, self.assumption, self._basis
        if not assumption.patient and not state.nominated:
            return {}
        may: dict[str, None] = dict.fromkeys(assumption.trimmed)
        if assumption.future and basis is None:
            may |= dict.fromkeys(state.group_index.returning)
        for uid in self._ignored:
            job = state.jobs.get(uid)
            if job is not None and job.nominated:
                may |= dict.fromkeys(job.groups)
        may |= dict.fromkeys([worker.group_id for worker in self._gone_workers(basis)])
        before = basis.returns if basis is not None else {}
        by_node = dict(before)
        for group_id in may:
            group = state.groups.get(group_id)
            if group is None or not self.comes_back(group) or (basis is not None and basis.comes_back(group)):
                continue
            for bundle in group.bundles:
                back = by_node.get(bundle.node_id)
                if back is None or back is before.get(bundle.node_id):
                    back = by_node[bundle.node_id] = list(back or ())
                back.append(bundle)
        return by_node

    def comes_back(self, group: GroupRecord) -> bool:
        """Whether the assumption counts a group's room as free although the ledger does not."""
        assumption = self.assumption
        if group.state is GROUP_NOMINATED:
            return group.nominee in self._ignored
        if group.group_id in assumption.trimmed or (assumption.future and group.state is GROUP_REMOVING):
            return True
        if not (group.group_kind is KIND_PRIVATE or group.destroy):
            return False
        holders = self.state.workers_in(group.group_id)
        return bool(holders) and all(map(self._is_gone, holders))
