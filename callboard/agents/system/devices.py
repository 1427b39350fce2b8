"""The accelerators that this node may offer, and the names by which a worker sees them.

One table says which variable of which vendor selects devices. The agent's own visible list bounds what it offers:
positions in that list are what placements count (GV-01), the ids in it are what workers get (GV-02).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace


class DeviceError(Exception):
    """The node's devices can't be offered as asked; the text says what to change."""


@dataclass(frozen=True)
class Vendor:
    """How one kind of accelerator is selected."""

    name: str
    variables: tuple[str, ...]
    """Variables that select devices; the first one set is the agent's visible list, and a worker gets all."""
    order: tuple[tuple[str, str], ...] = ()
    """Further variables that make indices mean the same everywhere."""
    names: str = ""
    """Pattern of the ids beside indices; empty: there are none."""
    spelling: str = "indices (0, 1, …)"
    """How people write ids."""


_UUID = "[0-9A-Fa-f-]{1,64}"
"""The beginning of one is enough."""

CUDA = Vendor(
    "cuda",
    ("CUDA_VISIBLE_DEVICES",),
    (("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),),
    names=f"GPU-{_UUID}|MIG-(?:GPU-)?{_UUID}(?:/[0-9]{{1,4}}/[0-9]{{1,4}})?",
    spelling="indices (0, 1, …), UUIDs (GPU-…) or MIG ids (MIG-…)",
)
ROCM = Vendor(
    "rocm",
    ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    names=f"GPU-{_UUID}",
    spelling="indices (0, 1, …) or UUIDs (GPU-…)",
)
ASCEND = Vendor("ascend", ("ASCEND_RT_VISIBLE_DEVICES",))
VENDORS = (CUDA, ROCM, ASCEND)


@dataclass(frozen=True)
class DeviceFacts:
    """What is known of one device."""

    id: str
    """What a worker's variable names: an index, a UUID or a MIG id."""
    uuid: str = ""
    bus_id: str = ""
    model: str = ""
    memory_bytes: int = 0
    numa_node: int = -1
    distances: tuple[tuple[str, int], ...] = ()
    """(uuid, distance) of the others of the machine, as ``callboard.v1.DeviceDistance`` numbers it."""
    fault: str = ""
    """Why nobody can compute on it; empty: one can."""


@dataclass(frozen=True)
class NodeDevices:
    """What a node offers, in the order of its visible list."""

    vendor: Vendor
    devices: tuple[DeviceFacts, ...]
    simulated: bool = False
    left_out: tuple[DeviceFacts, ...] = ()
    """What would be offered but for its fault."""


Probe = Callable[[], Sequence[DeviceFacts]]
"""Lists the devices that a driver knows, parts of partitioned ones beside the whole; empty when there is no driver."""


_INDEX = re.compile(r"0|[1-9][0-9]{0,3}")
_NEGATIVE = re.compile(r"-0*[1-9][0-9]*")
_NO_DEVICES = "NoDevFiles"
"""What Slurm sets for a step without devices."""

_SHOWN = 80
"""Characters of a refused text that are shown."""


def parse_visible(text: str, vendor: Vendor = CUDA, variable: str = "") -> tuple[str, ...]:
    """The ids in a visible list. The empty text and `NoDevFiles` stand for none, a negative number ends the list,
    blanks are ignored.

    Args:
        variable: where it stands; empty: the vendor's first one.

    Raises:
        DeviceError: an entry is not a device's id, or is named twice.
    """
    ids: list[str] = []
    for part in text.split(","):
        name = part.strip()
        if name == _NO_DEVICES or _NEGATIVE.fullmatch(name):
            break
        if not name:
            continue
        if not (_INDEX.fullmatch(name) or re.fullmatch(vendor.names or "(?!)", name)):
            raise DeviceError(
                f"{variable or vendor.variables[0]} is {text[:_SHOWN]!r}, and {name[:_SHOWN]!r} is not a device; list "
                f"{vendor.spelling} with commas between them, or nothing at all to offer none"
            )
        if name in ids:
            raise DeviceError(f"device {name} is named twice in {text!r}")
        ids.append(name)
    return tuple(ids)


def vendor_of(environment: Mapping[str, str]) -> Vendor:
    """The vendor whose variable is set; CUDA when none is."""
    return next((each for each in VENDORS if any(name in environment for name in each.variables)), CUDA)


def find_devices(
    environment: Mapping[str, str], *, count: int | None, simulate: int | None, probe: Probe
) -> NodeDevices:
    """What the node offers (GV-10).

    Args:
        environment: the agent's own.
        count: `--gpus`: offer the first so many; None: all that are visible.
        simulate: `--simulate-gpus`: so many ids without hardware; excludes `count`.
        probe: asked for what the driver knows.

    Raises:
        DeviceError: more asked for than is visible, or an impossible list.
    """
    vendor = vendor_of(environment)
    if simulate is not None:
        if count is not None:
            raise DeviceError("--gpus and --simulate-gpus exclude each other")
        return NodeDevices(vendor, _simulated(environment, vendor, simulate), simulated=True)
    visible, left_out = _visible(environment, vendor, probe)
    if count is None:
        return NodeDevices(vendor, visible, left_out=left_out)
    if count > len(visible):
        names = ", ".join(device.id for device in visible) or "none"
        faults = "".join(f"; not {device.id}: {device.fault}" for device in left_out)
        raise DeviceError(
            f"{count} GPUs asked for, {len(visible)} visible ({names}{faults}); ask for fewer, widen "
            f"{vendor.variables[0]}, or simulate them with --simulate-gpus {count}"
        )
    return NodeDevices(vendor, visible[:count], left_out=left_out)


def _listed(environment: Mapping[str, str], vendor: Vendor) -> tuple[str, ...] | None:
    """The ids that the agent's own visible list names; None: no list is set."""
    variable = next((name for name in vendor.variables if name in environment), None)
    return None if variable is None else parse_visible(environment[variable], vendor, variable)


def _simulated(environment: Mapping[str, str], vendor: Vendor, count: int) -> tuple[DeviceFacts, ...]:
    """Ids from the visible list where one is set, so that simulated nodes can number as real ones do."""
    ids = _listed(environment, vendor) or tuple(str(index) for index in range(count))
    if count > len(ids):
        raise DeviceError(f"{count} simulated GPUs asked for, but {vendor.variables[0]} names {len(ids)}")
    return tuple(DeviceFacts(id=name, model="simulated") for name in ids[:count])


def _visible(
    environment: Mapping[str, str], vendor: Vendor, probe: Probe
) -> tuple[tuple[DeviceFacts, ...], tuple[DeviceFacts, ...]]:
    """What may be offered; and, where no list says what, what the driver lists beside it that can't be."""
    ids = _listed(environment, vendor)
    if ids is None:
        known = probe()
        usable = tuple(_named(device.id, device, known) for device in known if not device.fault)
        return usable, tuple(device for device in known if device.fault)
    # The only driver that is asked knows nothing of other vendors' devices.
    known = probe() if ids and vendor is CUDA else ()
    found: dict[str, DeviceFacts] = {}
    for name in ids:
        device = _described(name, known)
        same = found.setdefault(device.uuid or name, device)
        if same is not device:
            raise DeviceError(f"{name} and {same.id} are one device, named twice in {','.join(ids)!r}")
    return tuple(found.values()), ()


def _described(name: str, known: Sequence[DeviceFacts]) -> DeviceFacts:
    """A listed id with what the driver says of it; an index or (the beginning of) a UUID."""
    matches = [device for device in known if device.id == name]
    matches = matches or [device for device in known if device.uuid and device.uuid.startswith(name)]
    if len(matches) > 1:
        raise DeviceError(f"{name} is the beginning of several: {', '.join(device.uuid for device in matches)}")
    if matches and matches[0].fault:
        raise DeviceError(f"device {name} can't be offered: {matches[0].fault}")
    if matches:
        return _named(name, matches[0], known)
    # Parts have an older name, of their whole and two numbers, which drivers take but don't tell.
    if known and "/" not in name:
        raise DeviceError(f"device {name} isn't there; the driver knows {', '.join(device.id for device in known)}")
    return DeviceFacts(id=name)


def _named(name: str, device: DeviceFacts, known: Sequence[DeviceFacts]) -> DeviceFacts:
    """A device under the name that CUDA understands. CUDA may not count devices that it can't use, so that beside one
    such the others have other indices there than in the driver: then their UUIDs are their names."""
    shifted = name == device.id and any(other.fault for other in known)
    return replace(device, id=device.uuid if shifted and device.uuid else name)


def renderers(devices: NodeDevices) -> dict[str, str]:
    """Id of a device → its number among EGL's devices, where that is known: NVIDIA's EGL lists its GPUs in the order of
    the bus, which is that of the indices that its driver gives. Of a UUID or a part of a GPU it is not known."""
    if devices.simulated or devices.vendor is not CUDA:
        return {}
    return {device.id: device.id for device in devices.devices if device.uuid and device.id.isdigit()}


def visibility_variables(vendor: Vendor, ids: Sequence[str]) -> dict[str, str]:
    """The variables that make a worker see exactly these devices; for none the empty string (GV-11)."""
    variables = {name: ",".join(ids) for name in vendor.variables}
    # A framework may look for CUDA's whatever the vendor.
    if vendor is not CUDA and not ids:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return variables | dict(vendor.order)
