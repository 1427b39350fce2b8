"""The Hello, the first message of an agent: checked, and made the event :class:`NodeJoined`.

Nothing an agent says is taken on trust: a node that claims 10⁹ GPUs would get every job (SE-07).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from callboard._version import __version__
from callboard.model.faults import Fault, InvalidInput
from callboard.model.names import NAME_PATTERN, OWN_LABELS, is_custom_resource, is_label, is_name
from callboard.model.quantities import MAX_MEMORY_BYTES, MILLI, pieces
from callboard.model.ray_fault import MAX_TEXT as MAX_FAULT_TEXT
from callboard.model.ray_fault import RayFault, RayFaultCode
from callboard.scheduler.records.events import NodeJoined, RunningWorker
from callboard.scheduler.records.node_record import DeviceInfo, HardwareInfo, RayInfo
from callboard.scheduler.records.states import WorkerState
from callboard.v1 import agent_pb2, common_pb2
from callboard.wire.alike import record_of
from callboard.wire.amounts import labels_from_proto, resources_from_proto
from callboard.wire.enums import from_wire
from callboard.wire.refusals import InvalidRequest, VersionMismatch

MAX_DEVICES = 1_024
MAX_CONNECTED = 64
MAX_CPU_MILLI = 100_000 * MILLI
MAX_CUSTOM = 64
MAX_LABELS = 64
MAX_INTERPRETERS = 64
MAX_RANK = 1_000_000
MAX_WORKERS = 10_000
MAX_FOREIGN = 8
"""Processes of others that are kept of one device."""

MAX_OUTPUT_JOBS = 10_000
MAX_SPARES = 64
MAX_HARDWARE = 256
MAX_SETTINGS = 16 << 10
MAX_TEXT = 512
"""Bounds of what a node may claim: an order of magnitude above the largest machines there are."""

_RUNTIMES = {agent_pb2.RUNTIME_RAY: "ray", agent_pb2.RUNTIME_PROCESS: "process"}
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")


def minor_of(version: str) -> str:
    """The version as far as others must have the same: "3.12" of "3.12.4"."""
    return ".".join(version.split(".")[:2])


def check_version(hello: agent_pb2.Hello) -> None:
    """
    Raises:
        VersionMismatch: major or minor differ from the controller's.
    """
    if minor_of(hello.version) != minor_of(__version__):
        raise VersionMismatch(
            f"the agent of node {hello.node_id[:63]!r} is callboard {hello.version[:32]!r}, the controller "
            f"{__version__}; install the same major.minor version on both",
            metadata={"agent": hello.version, "controller": __version__},
        )


def joined(hello: agent_pb2.Hello, now_ms: int, cause: str, *, address: str, previous_alive: bool) -> NodeJoined:
    """The event of a Hello that :func:`check_hello` found good."""
    inventory = hello.inventory
    return NodeJoined(
        now_ms=now_ms,
        cause=cause,
        node_id=hello.node_id,
        instance=hello.instance,
        rank=hello.rank if hello.HasField("rank") else -1,
        labels=labels_from_proto(hello.labels),
        node_group=hello.node_group,
        capacity=replace(
            resources_from_proto(inventory.capacity) + pieces(item.type for item in hello.hardware),
            gpu_memory_bytes=sum(device.memory_bytes for device in inventory.devices),
        ),
        devices=tuple(record_of(DeviceInfo, device) for device in inventory.devices),
        simulated=inventory.simulated,
        visibility_variable=inventory.visibility_variable or "CUDA_VISIBLE_DEVICES",
        interpreters=tuple(inventory.interpreters),
        runtime=_RUNTIMES[hello.runtime],
        ray=ray_info(hello.ray),
        version=hello.version,
        hostname=hello.hostname,
        address=address,
        hardware=tuple(record_of(HardwareInfo, item) for item in hello.hardware),
        ray_fault=ray_fault(hello.ray),
        ray_version=hello.ray_version,
        python_version=hello.python_version,
        agent_pid=max(hello.pid, 0),
        running=tuple(
            record_of(
                RunningWorker,
                worker,
                job=worker.worker.job_id,
                component=worker.worker.component,
                rank=worker.worker.rank,
                state=_WORKER_STATES[worker.state],
            )
            for worker in hello.workers
        ),
        previous_alive=previous_alive,
        hello_number=max(hello.number, 0),
        hello_clock_ms=max(hello.clock_ms, 0),
        closed=closed_devices(hello.devices.states),
    )


_WORKER_STATES = {
    agent_pb2.AgentWorkerState.Value(f"AGENT_WORKER_STATE_{state}"): state
    for state in (WorkerState.STARTING, WorkerState.READY, WorkerState.STOPPING, WorkerState.QUARANTINED)
}
"""What an agent says of a worker it still answers for."""


def device_states(states: Sequence[common_pb2.DeviceState]) -> dict[int, common_pb2.DeviceState]:
    """What an agent reports of its devices, by index, as far as it can be meant."""
    found = {}
    for state in states[:MAX_DEVICES]:
        if 0 <= state.index < MAX_DEVICES:
            state.closed, state.warning = state.closed[:MAX_FAULT_TEXT], state.warning[:MAX_FAULT_TEXT]
            del state.foreign[MAX_FOREIGN:]
            found[state.index] = state
    return found


def closed_devices(states: Sequence[common_pb2.DeviceState]) -> tuple[tuple[int, str], ...]:
    """(index, why) of the devices that take no new work, sorted."""
    return tuple(sorted((index, state.closed) for index, state in device_states(states).items() if state.closed))


def ray_info(ray: agent_pb2.RayNode) -> RayInfo | None:
    """A node's part in Ray without the token; None while it has none."""
    if not ray.gcs_address or not ray.ray_node_id:
        return None
    return record_of(RayInfo, ray)


def ray_fault(ray: agent_pb2.RayNode) -> RayFault | None:
    """What keeps a node out of Ray, by its agent. A kind of a newer version counts as any other fault."""
    if not ray.HasField("fault") or ray_info(ray) is not None:
        return None
    try:
        code = from_wire(common_pb2.RayFaultCode, ray.fault.code, RayFaultCode)
    except ValueError:
        code = None
    message = " ".join(ray.fault.message.split())[:MAX_FAULT_TEXT]
    return RayFault(code or RayFaultCode.START_FAILED, message or "its agent does not say why", ray.fault.permanent)


def check_hello(hello: agent_pb2.Hello) -> None:
    """
    Raises:
        InvalidRequest: every fault of the Hello.
    """
    faults = [*_identity_faults(hello), *_inventory_faults(hello.inventory), *_worker_faults(hello)]
    if faults:
        raise InvalidRequest.of(InvalidInput(faults))


def _identity_faults(hello: agent_pb2.Hello) -> Iterator[Fault]:
    if not is_name(hello.node_id):
        yield Fault("node_id", f"{hello.node_id[:80]!r} is not a valid name; names must match {NAME_PATTERN}")
    if not hello.instance or len(hello.instance) > MAX_TEXT:
        yield Fault("instance", f"must have 1 to {MAX_TEXT} characters")
    if hello.HasField("rank") and not 0 <= hello.rank <= MAX_RANK:
        yield Fault("rank", f"{hello.rank} is not a rank; 0 to {MAX_RANK} is allowed")
    if hello.runtime not in _RUNTIMES:
        yield Fault("runtime", "must be RUNTIME_RAY or RUNTIME_PROCESS")
    if not 0 <= hello.warm_spares <= MAX_SPARES:
        yield Fault("warm_spares", f"{hello.warm_spares} is not 0 … {MAX_SPARES}")
    yield from _label_faults(hello)
    if hello.node_group and not is_name(hello.node_group):
        yield Fault("node_group", f"{hello.node_group[:80]!r} is not a valid name; names must match {NAME_PATTERN}")
    yield from _hardware_faults(hello)
    if len(hello.output_jobs) > MAX_OUTPUT_JOBS or any(len(job) > MAX_TEXT for job in hello.output_jobs):
        yield Fault("output_jobs", f"at most {MAX_OUTPUT_JOBS} ids of at most {MAX_TEXT} characters")
    for field in ("hostname", "version", "ray_version", "python_version"):
        if len(getattr(hello, field)) > MAX_TEXT:
            yield Fault(field, f"is longer than {MAX_TEXT} characters")


def _label_faults(hello: agent_pb2.Hello) -> Iterator[Fault]:
    if len(hello.labels) > MAX_LABELS:
        yield Fault("labels", f"{len(hello.labels)} labels; at most {MAX_LABELS} are allowed")
    for key, value in list(hello.labels.items())[:MAX_LABELS]:
        if not is_label(key) or (value and not is_label(value)):
            yield Fault("labels", f"{key[:64]!r}: {value[:64]!r} is not a label")
        if key in OWN_LABELS:
            yield Fault("labels", f"{key} is a label that every node has of its own")


def _hardware_faults(hello: agent_pb2.Hello) -> Iterator[Fault]:
    if len(hello.hardware) > MAX_HARDWARE:
        yield Fault("hardware", f"{len(hello.hardware)} pieces; at most {MAX_HARDWARE} are allowed")
        return
    for index, item in enumerate(hello.hardware):
        if not is_custom_resource(item.type):
            yield Fault(f"hardware[{index}].type", f"{item.type[:80]!r} is not a type; names match {NAME_PATTERN}")
        if not _is_settings(item.config_json):
            yield Fault(f"hardware[{index}].config_json", f"must be a JSON object of at most {MAX_SETTINGS} bytes")


def _is_settings(text: str) -> bool:
    if not text:
        return True
    if len(text.encode()) > MAX_SETTINGS:
        return False
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _inventory_faults(inventory: agent_pb2.Inventory) -> Iterator[Fault]:
    capacity = inventory.capacity
    for field, most in (
        ("cpu_milli", MAX_CPU_MILLI),
        ("memory_bytes", MAX_MEMORY_BYTES),
        ("gpu_milli", MAX_DEVICES * MILLI),
    ):
        amount = getattr(capacity, field)
        if not 0 <= amount <= most:
            yield Fault(f"inventory.capacity.{field}", f"{amount} is impossible; 0 to {most} is allowed")
    if len(capacity.custom_milli) > MAX_CUSTOM:
        yield Fault("inventory.capacity.custom_milli", f"more than {MAX_CUSTOM} resources")
    for name, milli in list(capacity.custom_milli.items())[:MAX_CUSTOM]:
        if not is_custom_resource(name) or not 0 <= milli <= MAX_CPU_MILLI:
            yield Fault("inventory.capacity.custom_milli", f"{name[:64]!r}: {milli} is not an amount of a resource")
    yield from _device_faults(inventory)
    if inventory.visibility_variable and not _VARIABLE.fullmatch(inventory.visibility_variable):
        yield Fault("inventory.visibility_variable", "is not a valid name of an environment variable")
    if len(inventory.interpreters) > MAX_INTERPRETERS or any(
        not path.startswith("/") or len(path) > 4_096 for path in inventory.interpreters
    ):
        yield Fault("inventory.interpreters", f"at most {MAX_INTERPRETERS} absolute paths")


def _device_faults(inventory: agent_pb2.Inventory) -> Iterator[Fault]:
    devices, gpu_milli = inventory.devices, inventory.capacity.gpu_milli
    if len(devices) > MAX_DEVICES:
        yield Fault("inventory.devices", f"{len(devices)} devices; at most {MAX_DEVICES} are allowed")
        return
    if gpu_milli != len(devices) * MILLI:
        yield Fault("inventory.capacity.gpu_milli", f"{gpu_milli} is not 1000 for each of {len(devices)} devices")
    if [device.index for device in devices] != list(range(len(devices))):
        yield Fault("inventory.devices", "indexes must be 0, 1, … in order")
    ids = [device.id for device in devices]
    if any(not name or len(name) > MAX_TEXT or "," in name for name in ids):
        yield Fault("inventory.devices", "every device needs an id, without a comma")
    if any(not 0 <= device.memory_bytes <= MAX_MEMORY_BYTES for device in devices):
        yield Fault("inventory.devices", f"memory of a device is 0 to {MAX_MEMORY_BYTES} bytes")
    if any(len(device.model) > MAX_TEXT for device in devices):
        yield Fault("inventory.devices", f"the model of a device has at most {MAX_TEXT} characters")
    told = [device.distances for device in devices if device.distances]
    if told and (
        len(devices) > MAX_CONNECTED
        or any(len(each) != len(devices) for each in told)
        or any(each not in common_pb2.DeviceDistance.values() for distances in told for each in distances)
    ):
        why = f"a device has the distance of each device, or of none; of at most {MAX_CONNECTED} devices"
        yield Fault("inventory.devices", why)
    if len(set(ids)) != len(ids):
        yield Fault("inventory.devices", "two devices have one id")


def _worker_faults(hello: agent_pb2.Hello) -> Iterator[Fault]:
    if len(hello.workers) > MAX_WORKERS:
        yield Fault("workers", f"{len(hello.workers)} workers; at most {MAX_WORKERS} are allowed")
        return
    generations = [worker.generation for worker in hello.workers]
    if any(generation <= 0 for generation in generations) or len(set(generations)) != len(generations):
        yield Fault("workers", "generations must be positive and different")
    if any(worker.state not in _WORKER_STATES for worker in hello.workers):
        yield Fault("workers", "every worker needs a state")
