"""The ledger: how much is used and free on every node and device, and what each pool is charged.

Nothing here is a truth of its own: every figure is a sum over placement groups and workers, and
:mod:`callboard.scheduler.state.invariants` computes it again from them (I2, I10).
"""

from __future__ import annotations

from collections.abc import Collection

from callboard.model.frozen import dataclass
from callboard.model.quantities import MILLI, NOTHING, Resources, on_each
from callboard.scheduler.records.job_records import WorkerRecord
from callboard.scheduler.records.node_record import DeviceShare, NodeRecord
from callboard.scheduler.records.pool_records import GroupRecord
from callboard.scheduler.records.states import BOOKED, GROUP_NOMINATED, LIVE, WORKER_QUARANTINED


class Amounts:
    """A running sum of resources on one node, its devices kept apart.

    Attributes:
        parts: how many amounts it is the sum of; most nodes have no claims at all.
        device_bytes: memory of devices that was asked for, by index; those of which none was are not in it.
    """

    __slots__ = ("cpu_milli", "custom_milli", "device_bytes", "device_milli", "memory_bytes", "parts")

    def __init__(self, devices: int) -> None:
        self.parts = 0
        self.cpu_milli = 0
        self.memory_bytes = 0
        self.custom_milli: dict[str, int] = {}
        self.device_milli = [0] * devices
        self.device_bytes: dict[int, int] = {}

    def add(self, resources: Resources, devices: Collection[DeviceShare], sign: int) -> None:
        """Adds (sign 1) or takes away (sign -1) resources and shares of devices."""
        self.parts += sign
        self.cpu_milli += sign * resources.cpu_milli
        self.memory_bytes += sign * resources.memory_bytes
        for name, milli in resources.custom_milli:
            amount = self.custom_milli.pop(name, 0) + sign * milli
            if amount:  # what is used up leaves no trace: sums follow from records, not from how they came about
                self.custom_milli[name] = amount
        if resources.gpu_memory_bytes and devices:
            each = sign * on_each(resources.gpu_memory_bytes, len(devices))
            for share in devices:
                taken = self.device_bytes.pop(share.index, 0) + each
                if taken:
                    self.device_bytes[share.index] = taken
        for share in devices:
            index = share.index
            if index >= len(self.device_milli):
                # A node that came back with fewer devices still owes the shares it had given.
                self.device_milli.extend([0] * (index + 1 - len(self.device_milli)))
            self.device_milli[index] += sign * share.milli

    def resources(self) -> Resources:
        return Resources.of(
            cpu_milli=self.cpu_milli,
            gpu_milli=sum(self.device_milli),
            memory_bytes=self.memory_bytes,
            gpu_memory_bytes=sum(self.device_bytes.values()),
            custom=self.custom_milli,
        )


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What one device is used for, in milli-GPU; and how many bytes of its memory were asked for."""

    used_milli: int
    held_milli: int
    quarantined_milli: int
    promised_bytes: int = 0


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
        changes: how often the sums changed, for those who keep what they made of them. Nothing is decided by it.
    """

    __slots__ = ("booked", "changes", "claimed", "node", "quarantined", "used")

    def __init__(self, node: NodeRecord) -> None:
        self.node = node
        self.changes = 0
        self.booked = Amounts(len(node.devices))
        self.claimed = Amounts(len(node.devices))
        self.used = Amounts(len(node.devices))
        self.quarantined = Amounts(len(node.devices))

    def sums(self) -> tuple[Resources, Resources, Resources, Resources, list[int], dict[int, int]]:
        """What is used, held, free and quarantined of the node; what is free of each device, and what would be of those
        that are closed, in milli-GPU."""
        capacity = self.node.capacity
        booked, claimed = self.booked.resources(), self.claimed.resources()
        used, quarantined = self.used.resources(), self.quarantined.resources()
        free_devices = [
            max(0, MILLI - self.booked.device_milli[i] - self.claimed.device_milli[i])
            for i in range(len(self.node.devices))
        ]
        # A closed device is as one that nobody could prove free.
        closed = {index: free_devices[index] for index, _ in self.node.closed if index < len(free_devices)}
        free_bytes: list[int] = []
        if capacity.gpu_memory_bytes:
            free_bytes = [self._free_bytes(i) if free_devices[i] else 0 for i in range(len(free_devices))]
        if closed:
            quarantined += Resources.of(
                gpu_milli=sum(closed.values()), gpu_memory_bytes=sum(free_bytes[i] for i in closed if free_bytes)
            )
            for index in closed:
                free_devices[index] = 0
                if free_bytes:
                    free_bytes[index] = 0
        free = (capacity - booked - claimed).clamped()
        # A claim may overlap what its victim still holds, so free GPU is counted device by device.
        free = Resources.of(
            cpu_milli=free.cpu_milli,
            gpu_milli=sum(free_devices),
            memory_bytes=free.memory_bytes,
            gpu_memory_bytes=sum(free_bytes),
            custom=dict(free.custom_milli),
        )
        return used, capacity - used - quarantined - free, free, quarantined, free_devices, closed

    def use(self) -> NodeUse:
        """The account of the node, as people see it."""
        used, held, free, quarantined, free_devices, closed = self.sums()
        devices = tuple(
            DeviceUse(
                self.used.device_milli[i],
                MILLI
                - free_devices[i]
                - self.used.device_milli[i]
                - self.quarantined.device_milli[i]
                - closed.get(i, 0),
                self.quarantined.device_milli[i] + closed.get(i, 0),
                self.booked.device_bytes.get(i, 0) + self.claimed.device_bytes.get(i, 0),
            )
            for i in range(len(self.node.devices))
        )
        return NodeUse(used, held, free, quarantined, devices)

    def _free_bytes(self, index: int) -> int:
        """Memory of a device that nobody was promised."""
        taken = self.booked.device_bytes.get(index, 0) + self.claimed.device_bytes.get(index, 0)
        return max(0, self.node.devices[index].memory_bytes - taken)


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
        if old is not None and len(new.devices) <= len(old.devices):
            return
        for amounts in (book.booked, book.claimed, book.used, book.quarantined):
            missing = len(new.devices) - len(amounts.device_milli)
            if missing > 0:
                amounts.device_milli.extend([0] * missing)

    def group_changed(self, old: GroupRecord | None, new: GroupRecord | None) -> None:
        """Follows a placement group's bundles."""
        if (
            old is not None
            and new is not None
            and (old.state is new.state or (old.state in BOOKED and new.state in BOOKED))
            and (old.bundles is new.bundles or old.bundles == new.bundles)
        ):
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
        booked = group.state in BOOKED
        for bundle in group.bundles if booked or group.state is GROUP_NOMINATED else ():
            book = self.nodes[bundle.node_id]
            (book.booked if booked else book.claimed).add(bundle.resources, bundle.devices, sign)
            book.changes += 1
            self.touched[bundle.node_id] = self.changed[bundle.node_id] = None

    def _charge(self, worker: WorkerRecord, sign: int) -> None:
        if worker.state in LIVE:
            amounts = self.nodes[worker.node_id].used
        elif worker.state is WORKER_QUARANTINED:
            amounts = self.nodes[worker.node_id].quarantined
        else:
            return
        amounts.add(worker.resources, worker.devices, sign)
        self.nodes[worker.node_id].changes += 1
        self.changed[worker.node_id] = None
        used = self.pools.pop(worker.pool, NOTHING)
        used = used + worker.resources if sign > 0 else used - worker.resources
        if used:
            self.pools[worker.pool] = used
