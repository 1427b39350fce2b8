"""Nodes as messages."""

from __future__ import annotations

from collections import defaultdict

from callboard.controller.views.common import kill_time, timestamp
from callboard.model.ray_fault import RayFault
from callboard.scheduler import State
from callboard.scheduler.records.job_records import WorkerRecord
from callboard.scheduler.records.node_record import NodeRecord
from callboard.scheduler.records.states import NodeState, WorkerState
from callboard.v1 import common_pb2, node_pb2
from callboard.wire.amounts import labels_to_proto, resources_to_proto
from callboard.wire.enums import to_wire


def node_message(node: NodeRecord, state: State) -> node_pb2.Node:
    """One node with what it is used for."""
    use = state.node_use(node.node_id)
    users = _users_of_devices(node, state)
    return node_pb2.Node(
        name=f"nodes/{node.node_id}",
        rank=node.rank,
        state=to_wire(node_pb2.NodeState, shown_state(node)),
        state_reason=_reason(node),
        labels=labels_to_proto(node.labels),
        node_group=node.node_group,
        capacity=resources_to_proto(node.capacity),
        used=resources_to_proto(use.used),
        held=resources_to_proto(use.held),
        free=resources_to_proto(use.free),
        quarantined=resources_to_proto(use.quarantined),
        devices=[
            node_pb2.DeviceUse(
                device=common_pb2.Device(
                    index=index,
                    id=device.id,
                    uuid=device.uuid,
                    bus_id=device.bus_id,
                    model=device.model,
                    memory_bytes=device.memory_bytes,
                    numa_node=device.numa_node,
                ),
                used_milli=use.devices[index].used_milli,
                held_milli=use.devices[index].held_milli,
                quarantined_milli=use.devices[index].quarantined_milli,
                workers=users[index],
            )
            for index, device in enumerate(node.devices)
        ],
        simulated=node.simulated,
        epoch=node.epoch,
        version=node.version,
        hostname=node.hostname,
        address=node.ray.node_ip if node.ray is not None else "",
        ray_node_id=node.ray.ray_node_id if node.ray is not None else "",
        ray_head=node.ray is not None and node.ray.head,
        revision=node.revision,
        join_time=timestamp(node.joined_ms),
        runtime=node.runtime,
        lost_devices=node.lost_devices,
        interpreters=node.interpreters,
        ray_fault=_fault(node.ray_fault),
        ray_version=node.ray_version,
        python_version=node.python_version,
        agent_pid=node.agent_pid,
        quarantined_workers=[
            node_pb2.QuarantinedWorker(worker=_name_of(worker, state), pid=worker.pid, reason=worker.reason)
            for worker in state.workers_on(node.node_id)
            if worker.state is WorkerState.QUARANTINED
        ],
        kill_time=kill_time(state.workers_on(node.node_id)),
        hardware=[common_pb2.Hardware(type=item.type, config_json=item.config_json) for item in node.hardware],
    )


def _fault(fault: RayFault | None) -> common_pb2.RayFault | None:
    if fault is None:
        return None
    code = to_wire(common_pb2.RayFaultCode, fault.code)
    return common_pb2.RayFault(code=code, message=fault.message, permanent=fault.permanent)


def _reason(node: NodeRecord) -> str:
    """Why it is in its state, and that devices are missing, which no state tells."""
    if not node.lost_devices:
        return node.reason
    missing = f"{node.lost_devices} of its devices are gone since it first joined; look at their driver"
    return f"{node.reason}; {missing}" if node.reason else missing


def shown_state(node: NodeRecord) -> str:
    """Name of the state that people see: a cordon is a flag to us and a state to them."""
    return "CORDONED" if node.cordoned and node.state is NodeState.READY else node.state.value


def counts_by_state(state: State) -> dict[str, int]:
    """How many nodes there are in each state that people see, those there are none of left out."""
    by_state = state.roster.by_state
    counts = {name.value: len(nodes) for name, nodes in by_state.items()}
    cordoned = sum([state.nodes[node_id].cordoned for node_id in by_state[NodeState.READY]])
    counts["CORDONED"] = cordoned
    counts[NodeState.READY.value] -= cordoned
    return {name: count for name, count in counts.items() if count}


def _name_of(worker: WorkerRecord, state: State) -> node_pb2.WorkerName:
    job = state.jobs.get(worker.job)
    return node_pb2.WorkerName(
        job=job.name if job is not None else worker.job, component=worker.component, rank=worker.rank
    )


def _users_of_devices(node: NodeRecord, state: State) -> dict[int, list[node_pb2.WorkerName]]:
    users: dict[int, list[node_pb2.WorkerName]] = defaultdict(list)
    for worker in state.workers_on(node.node_id):
        name = _name_of(worker, state)
        for share in worker.devices:
            users[share.index].append(name)
    return users
