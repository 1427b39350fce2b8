"""A view over the state: what would be free if some jobs and groups were gone. Nothing is copied or changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import sub

from callboard.model.frozen import quick
from callboard.model.quantities import MILLI, NOTHING, Resources, total
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

    __slots__ = ("cpu_milli", "custom_milli", "device_milli", "memory_bytes", "node")

    def __init__(self, node: NodeRecord, *sums: Amounts) -> None:
        """Capacity less the given sums: what is booked, and what is claimed where claims count."""
        capacity = node.capacity
        self.node = node
        self.cpu_milli = capacity.cpu_milli
        self.memory_bytes = capacity.memory_bytes
        self.custom_milli = dict(capacity.custom_milli)
        self.device_milli = [MILLI] * len(node.devices)
        for amounts in sums:
            if not amounts.parts:
                continue
            self.cpu_milli -= amounts.cpu_milli
            self.memory_bytes -= amounts.memory_bytes
            for name, milli in amounts.custom_milli.items():
                self.custom_milli[name] = self.custom_milli.get(name, 0) - milli
            # A node that came back with fewer devices has sums of more than it has now.
            self.device_milli = list(map(sub, self.device_milli, amounts.device_milli))

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
        if gpu_milli == MILLI:
            return max(self.device_milli, default=0) >= MILLI
        if gpu_milli > MILLI:
            return self.whole_devices() * MILLI >= gpu_milli
        return gpu_milli == 0 or max(self.device_milli, default=0) >= gpu_milli

    def whole_devices(self) -> int:
        """Devices nobody has a share of."""
        return len([free for free in self.device_milli if free >= MILLI])

    def devices_for(self, ask: Resources) -> list[int]:
        """Devices that a share could be taken from, the fullest first, one for each amount that is free; for other
        asks there is nothing to choose, which -1 stands for."""
        if not 0 < ask.gpu_milli < MILLI:
            return [-1]
        by_free: dict[int, int] = {}
        for index, free in enumerate(self.device_milli):
            if free >= ask.gpu_milli:
                by_free.setdefault(free, index)
        return [index for _, index in sorted(by_free.items())]

    def take(self, ask: Resources, device: int = -1) -> tuple[DeviceShare, ...]:
        """Uses room for one worker that :meth:`fits` and names its devices: the lowest whole ones, or for a share
        the fullest device that still has it, so that whole devices stay whole.

        Args:
            device: the device to take a share from; -1: the one described.
        """
        shares: list[tuple[int, int]] = []
        if ask.gpu_milli >= MILLI:
            whole = [index for index, free in enumerate(self.device_milli) if free >= MILLI]
            shares = [(index, MILLI) for index in whole[: ask.gpu_milli // MILLI]]
        elif ask.gpu_milli > 0:
            fitting = [(free, index) for index, free in enumerate(self.device_milli) if free >= ask.gpu_milli]
            shares = [(device if device >= 0 else min(fitting)[1], ask.gpu_milli)]
        self._move(ask, shares, -1)
        return tuple(DeviceShare(index, self.node.devices[index].id, milli) for index, milli in shares)

    def untake(self, ask: Resources, devices: Iterable[DeviceShare]) -> None:
        """The inverse of :meth:`take`."""
        self._move(ask, [(share.index, share.milli) for share in devices], 1)

    def free(self) -> Resources:
        """What is free, as one amount."""
        return Resources.of(
            cpu_milli=self.cpu_milli,
            gpu_milli=sum(max(0, free) for free in self.device_milli),
            memory_bytes=self.memory_bytes,
            custom=self.custom_milli,
        )

    def _move(self, resources: Resources, shares: Iterable[tuple[int, int]], sign: int) -> None:
        self.cpu_milli += sign * resources.cpu_milli
        self.memory_bytes += sign * resources.memory_bytes
        for name, milli in resources.custom_milli:
            self.custom_milli[name] = self.custom_milli.get(name, 0) + sign * milli
        for index, milli in shares:
            if index < len(self.device_milli):
                self.device_milli[index] += sign * milli


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


class View:
    """The state under an assumption."""

    def __init__(self, state: State, assumption: Assumption) -> None:
        self.state = state
        self.assumption = assumption
        self._gone = assumption.released
        if assumption.future:
            leaving = {uid for job_state in LEAVING for uid in state.jobs_by_state[job_state]}
            self._gone = assumption.released | leaving
        self._ignored = {*assumption.overtaken, *assumption.passed, assumption.subject}
        self._returns = self._returned_bundles()

    def room(self, node: NodeRecord) -> Room:
        """What is free on a node."""
        if self.assumption.empty:
            return Room(node)
        book = self.state.ledger.nodes[node.node_id]
        room = Room(node, book.booked, book.claimed)
        for bundle in self._returns.get(node.node_id, ()):
            room.give_back(bundle)
        return room

    def may_hold(self, ask: Resources) -> bool:
        """Whether all nodes together have enough GPUs and CPUs; whether an ask fits on them is another matter."""
        free = self.state.free
        gpu_milli, cpu_milli = ask.gpu_milli - free.gpu_milli, ask.cpu_milli - free.cpu_milli
        if gpu_milli <= 0 and cpu_milli <= 0:
            return True
        for bundles in self._returns.values():
            for bundle in bundles:
                gpu_milli -= bundle.resources.gpu_milli
                cpu_milli -= bundle.resources.cpu_milli
        return gpu_milli <= 0 and cpu_milli <= 0

    def changed_nodes(self) -> Iterable[str]:
        """Nodes on which more is free than the ledger says."""
        return self._returns.keys()

    def open_to_subject(self, group: GroupRecord) -> bool:
        """Whether the subject may use a placement group once what is assumed has happened."""
        closed = self.assumption.closed
        nodes = (self.state.nodes[bundle.node_id] for bundle in group.bundles)
        return self.unused(group) and all(node.usable and node.node_id not in closed for node in nodes)

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
        for uid in self.state.nominated:
            if uid not in self._ignored:
                spec = self.state.specs[uid].spec
                for component in spec.components:
                    if spec.pool_of(component) == pool:
                        amount = amount + component.resources_of_first(component.min_workers)
        return amount

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
        ids = dict.fromkeys(self.state.group_index.idle)
        ids |= dict.fromkeys(worker.group_id for worker in self._gone_workers())
        groups = [self.state.groups[group_id] for group_id in ids]
        found = [group for group in groups if group.group_kind is KIND_DYNAMIC and self.unused(group)]
        found.sort(key=lambda group: (group.idle_since_ms or self.state.meta.now_ms, group.number))
        return [group.group_id for group in found]

    def _is_gone(self, worker: WorkerRecord) -> bool:
        """Whether a worker is taken as gone. One that is quarantined is not on its way out."""
        if worker.state not in LIVE:
            return False
        if worker.job in self._gone or worker.generation in self.assumption.shed:
            return True
        return self.assumption.future and worker.extra and worker.state is WORKER_STOPPING

    def _gone_workers(self) -> Iterator[WorkerRecord]:
        for uid in self._gone:
            for generation in self.state.jobs_holding.get(uid, ()):
                worker = self.state.workers[generation]
                if worker.state in LIVE:
                    yield worker
        extras = dict.fromkeys(self.assumption.shed)
        if self.assumption.future:
            extras |= self.state.leaving_extras
        for generation in extras:
            worker = self.state.workers[generation]
            if worker.job not in self._gone and worker.state in LIVE:
                yield worker

    def _returned_bundles(self) -> dict[str, list[BundleRecord]]:
        """Bundles by node that the assumption counts as free although the ledger does not."""
        state, assumption = self.state, self.assumption
        if not assumption.patient and not state.nominated:
            return {}
        back: list[GroupRecord] = [state.groups[group_id] for group_id in assumption.trimmed]
        if assumption.future:
            back += [state.groups[group_id] for group_id in state.group_index.by_state[GROUP_REMOVING]]
        for uid in self._ignored:
            job = state.jobs.get(uid)
            if job is not None and job.nominated:
                held = (state.groups.get(group_id) for group_id in job.groups)
                back += [group for group in held if group is not None and group.state is GROUP_NOMINATED]
        left = dict.fromkeys(worker.group_id for worker in self._gone_workers())
        for group_id in left:
            group = state.groups[group_id]
            if (
                group_id not in assumption.trimmed
                and (group.group_kind is KIND_PRIVATE or group.destroy)
                and all(self._is_gone(worker) for worker in state.workers_in(group_id))
            ):
                back.append(group)
        by_node: dict[str, list[BundleRecord]] = {}
        for group in back:
            for bundle in group.bundles:
                by_node.setdefault(bundle.node_id, []).append(bundle)
        return by_node
