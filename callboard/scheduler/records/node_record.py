"""The record of a node: what it is, what it offers, and its state."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import ClassVar

from callboard.model.frozen import dataclass, quick
from callboard.model.quantities import NOTHING, Resources
from callboard.model.ray_fault import RayFault
from callboard.model.specs import Labels
from callboard.scheduler.records.states import NODE_READY, NodeState


@quick
@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One accelerator as its node's inventory gives it; its position in the inventory is its index.

    Attributes:
        distances: of the node's devices from this one, by index, as ``callboard.v1.DeviceDistance`` numbers them: the
            smaller the nearer, 0 unknown; empty: nobody told.
    """

    id: str
    uuid: str = ""
    bus_id: str = ""
    model: str = ""
    memory_bytes: int = 0
    numa_node: int = -1
    distances: tuple[int, ...] = ()

    def suits(self, ask: Resources) -> bool:
        """Whether it is one of the GPUs that an ask is for."""
        return ask.suits(self.model, self.memory_bytes)


@dataclass(frozen=True, slots=True)
class HardwareInfo:
    """One piece of hardware that a node declares: its type and its settings, a JSON object or nothing."""

    type: str
    config_json: str = ""


@quick
@dataclass(frozen=True, slots=True)
class DeviceShare:
    """A part of one device: ``milli`` of 1000 (I1), never straddling two."""

    index: int
    id: str
    milli: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RayInfo:
    """A node's part in Ray. The authentication token is never a part of the state."""

    gcs_address: str
    session: str
    ray_node_id: str
    head: bool = False
    node_ip: str = ""


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One node.

    Attributes:
        cordon_passes: the cordon ends when another program of its agent joins.
        ghosts: generations that the agent still runs and nobody wants; the node takes no work until they are proved
            gone (I4).
        instance: id of the agent program's run; two live agents with one node id differ in it.
        hello_number: the place, among the Hellos of its run, of the last one that was let in; 0: not known.
        hello_clock_ms: the clock of its machine when that was sent, in milliseconds since 1970; 0: not known.
        lost_devices: how many devices fewer it offers than it once did (PS-13).
        ray_fault: what keeps it out of Ray, by its agent.
        address: address that its agent's stream comes from; empty: it has none.
        hardware: what the node declares beside its devices, in the order of its ranks.
        closed: (index, why) of the devices that take no new work, sorted.
        opened: (index, why) of those that an operator lets take work all the same, for as long as nothing else is said
            of them.
        refused_preloads: (modules, why) of what its spares do not import.
    """

    kind: ClassVar[str] = "node"

    node_id: str
    rank: int
    state: NodeState
    reason: str = ""
    cordoned: bool = False
    cordon_passes: bool = False
    labels: Labels = ()
    node_group: str = ""
    capacity: Resources = NOTHING
    devices: tuple[DeviceInfo, ...] = ()
    simulated: bool = False
    visibility_variable: str = "CUDA_VISIBLE_DEVICES"
    interpreters: tuple[str, ...] = ()
    runtime: str = "ray"
    ray: RayInfo | None = None
    epoch: int = 0
    instance: str = ""
    version: str = ""
    hostname: str = ""
    joined_ms: int = 0
    ghosts: tuple[int, ...] = ()
    hardware: tuple[HardwareInfo, ...] = ()
    lost_devices: int = 0
    ray_fault: RayFault | None = None
    ray_version: str = ""
    python_version: str = ""
    agent_pid: int = 0
    hello_number: int = 0
    hello_clock_ms: int = 0
    address: str = ""
    closed: tuple[tuple[int, str], ...] = ()
    refused_preloads: tuple[tuple[str, str], ...] = ()
    opened: tuple[tuple[int, str], ...] = ()
    revision: int = 0

    key = property(attrgetter("node_id"))

    def takes(self, devices: Iterable[DeviceShare]) -> bool:
        """Whether new work may be placed here, on these devices."""
        if not self.closed:
            return self.usable
        closed = {index for index, _ in self.closed}
        return self.usable and not any(share.index in closed for share in devices)

    @property
    def usable(self) -> bool:
        """Whether new work may be placed here."""
        return self.state is NODE_READY and not self.cordoned and not self.ghosts
