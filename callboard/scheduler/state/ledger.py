"""The ledger: how much is used and free on every node and device, and what each pool is charged.

Nothing here is a truth of its own: every figure is a sum over placement groups and workers, and
:mod:`callboard.scheduler.state.invariants` computes it again from them (I2, I10).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from callboard.model.quantities import MILLI, NOTHING, Resources
from callboard.scheduler.records.job_records import WorkerRecord
from callboard.scheduler.records.node_record import DeviceShare, NodeRecord
from callboard.scheduler.records.pool_records import GroupRecord
from callboard.scheduler.records.states import BOOKED, GROUP_NOMINATED, LIVE, WORKER_QUARANTINED


class Amounts:
    """A running sum of resources on one node, its devices kept apart.

    Attributes:
        parts: how many amounts it is the sum of; most nodes have no claims at all.
    """

    __slots__ = ("cpu_milli", "custom_milli", "device_milli", "memory_bytes", "parts")

    def __init__(self, devices: int) -> None:
        self.parts = 0
        self.cpu_milli = 0
        self.memory_bytes = 0
        self.custom_milli: dict[str, int] = {}
        self.device_milli = [0] * devices

    def add(self, resources: Resources, devices: Iterable[DeviceShare], sign: int) -> None:
        """Adds (sign 1) or takes away (sign -1) resources and shares of devices."""
        self.parts += sign
        self.cpu_milli += sign * resources.cpu_milli
        self.memory_bytes += sign * resources.memory_bytes
        for name, milli in resources.custom_milli:
            amount = self.custom_milli.pop(name, 0) + sign * milli
            if amount:  # what is used up leaves no trace: sums follow from records, not from how they came about
                self.custom_milli[name] = amount
        for share in devices:
            index = share.index
            if index >= len(self.device_milli):
                # A node that came back with fewer devices still owes the shares it had given.
                self.device_milli.extend([0] * (index + 1 - len(self.device_milli)))
            self.device_milli[index] += sign * share.milli

    def resources(self) -> Resources:
        """The sum as one amount."""
        return Resources.of(
            cpu_milli=self.cpu_milli,
            gpu_milli=sum(self.device_milli),
            memory_bytes=self.memory_bytes,
            custom=self.custom_milli,
        )


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What one device is used for, in milli-GPU."""

    used_milli: int
    held_milli: int
    quarantined_milli: int


@dataclass(frozen=True, slots=True)
class NodeUse:
    """What a node is used for: ``used + held + free + quarantined = capacity`` (I10)."""

    used: Resources
    held: Resources
    free: Resources
    quarantined: Resources
    devices: tuple[DeviceUse, ...]


class NodeBook:
    """The running sums of one node.

    Attributes:
        booked: bundles of groups that may exist in Ray.
        claimed: bundles of groups planned on room that is still to come (I7).
        used: what live workers hold; a part of ``booked``.
        quarantined: what unproved workers hold; a part of ``booked``.
    """

    __slots__ = ("booked", "claimed", "node", "quarantined", "used")

    def __init__(self, node: NodeRecord) -> None:
        self.node = node
        self.booked = Amounts(len(node.devices))
        self.claimed = Amounts(len(node.devices))
        self.used = Amounts(len(node.devices))
        self.quarantined = Amounts(len(node.devices))

    def use(self) -> NodeUse:
        """The account of the node, as people see it."""
        capacity = self.node.capacity
        booked, claimed = self.booked.resources(), self.claimed.resources()
        used, quarantined = self.used.resources(), self.quarantined.resources()
        free_devices = [
            max(0, MILLI - self.booked.device_milli[i] - self.claimed.device_milli[i])
            for i in range(len(self.node.devices))
        ]
        free = (capacity - booked - claimed).clamped()
        # A claim may overlap what its victim still holds, so free GPU is counted device by device.
        free = Resources.of(
            cpu_milli=free.cpu_milli,
            gpu_milli=sum(free_devices),
            memory_bytes=free.memory_bytes,
            custom=dict(free.custom_milli),
        )
        devices = tuple(
            DeviceUse(
                self.used.device_milli[i],
                MILLI - free_devices[i] - self.used.device_milli[i] - self.quarantined.device_milli[i],
                self.quarantined.device_milli[i],
            )
            for i in range(len(self.node.devices))
        )
        return NodeUse(used, capacity - used - quarantined - free, free, quarantined, devices)


@dataclass(frozen=True, slots=True)
class PoolUse:
    """What a pool is used for.

    Attributes:
        used: what live and quarantined workers hold, and reserved groups where the pool charges them.
        nominated: asks of nominated jobs.
        available: what can still be used, for limited resources only.
        over: by how much usage is above the quota.
    """

    used: Resources
    nominated: Resources
    available: Resources
    over: Resources
    pending_jobs: int
    active_jobs: int


class Ledger:
    """The running sums of every node and pool."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeBook] = {}
        self.pools: dict[str, Resources] = {}
        self.touched: dict[str, None] = {}
        """Nodes whose free room may have changed since somebody last asked and cleared it."""
        self.changed: dict[str, None] = {}
        """Nodes whose account may have changed since somebody last asked for that of the cluster and cleared it."""

    def node_changed(self, old: NodeRecord | None, new: NodeRecord | None) -> None:
        """Follows a node. What is booked stays: groups outlive a lost connection."""
        if new is None:
            assert old is not None
            del self.nodes[old.node_id]
            self.touched[old.node_id] = self.changed[old.node_id] = None
            return
        self.touched[new.node_id] = self.changed[new.node_id] = None
        book = self.nodes.get(new.node_id)
        if book is None:
            self.nodes[new.node_id] = NodeBook(new)
            return
        book.node = new
        for amounts in (book.booked, book.claimed, book.used, book.quarantined):
            missing = len(new.devices) - len(amounts.device_milli)
            if missing > 0:
                amounts.device_milli.extend([0] * missing)

    def group_changed(self, old: GroupRecord | None, new: GroupRecord | None) -> None:
        """Follows a placement group's bundles."""
        if old is not None and new is not None and old.state == new.state and old.bundles == new.bundles:
            return
        if old is not None:
            self._book(old, -1)
        if new is not None:
            self._book(new, 1)

    def worker_changed(self, old: WorkerRecord | None, new: WorkerRecord | None) -> None:
        """Follows a worker's allocation. A worker on a lost node charges nothing (docs/scheduling.md, Nodes)."""
        if (
            old is not None
            and new is not None
            and (old.state in LIVE) == (new.state in LIVE)
            and (old.state is WORKER_QUARANTINED) == (new.state is WORKER_QUARANTINED)
            and old.devices == new.devices
        ):
            return
        if old is not None:
            self._charge(old, -1)
        if new is not None:
            self._charge(new, 1)

    def used_by(self, pool: str) -> Resources:
        """What live and quarantined workers charged to ``pool`` hold."""
        return self.pools.get(pool, NOTHING)

    def _book(self, group: GroupRecord, sign: int) -> None:
        if group.state in BOOKED:
            for bundle in group.bundles:
                self.nodes[bundle.node_id].booked.add(bundle.resources, bundle.devices, sign)
                self.touched[bundle.node_id] = self.changed[bundle.node_id] = None
        elif group.state is GROUP_NOMINATED:
            for bundle in group.bundles:
                self.nodes[bundle.node_id].claimed.add(bundle.resources, bundle.devices, sign)
                self.touched[bundle.node_id] = self.changed[bundle.node_id] = None

    def _charge(self, worker: WorkerRecord, sign: int) -> None:
        if worker.state in LIVE:
            amounts = self.nodes[worker.node_id].used
        elif worker.state is WORKER_QUARANTINED:
            amounts = self.nodes[worker.node_id].quarantined
        else:
            return
        amounts.add(worker.resources, worker.devices, sign)
        self.changed[worker.node_id] = None
        used = self.pools.pop(worker.pool, NOTHING)
        used = used + worker.resources if sign > 0 else used - worker.resources
        if used:
            self.pools[worker.pool] = used
