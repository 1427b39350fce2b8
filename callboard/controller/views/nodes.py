"""Nodes as messages."""

from __future__ import annotations

from collections import defaultdict
from operator import is_

from callboard.controller.views.jobs import kill_time
from callboard.scheduler import State
from callboard.scheduler.records.job_records import WorkerRecord
from callboard.scheduler.records.node_record import NodeRecord
from callboard.scheduler.records.states import NodeState, WorkerState
from callboard.v1 import common_pb2, node_pb2
from callboard.wire.alike import message_of, timestamp
from callboard.wire.amounts import resources_to_proto
from callboard.wire.enums import to_wire


def node_message(node: NodeRecord, state: State) -> node_pb2.Node:
    """One node with what it is used for."""
    use = state.node_use(node.node_id)
    users = _users_of_devices(node, state)
    return message_of(
        node_pb2.Node,
        node,
        name=f"nodes/{node.node_id}",
        preloads=None,  # the service of nodes adds them: no record has them
        state=to_wire(node_pb2.NodeState, shown_state(node)),
        state_reason=_reason(node),
        used=resources_to_proto(use.used),
        held=resources_to_proto(use.held),
        free=resources_to_proto(use.free),
        quarantined=resources_to_proto(use.quarantined),
        devices=[
            message_of(
                node_pb2.DeviceUse,
                use.devices[index],
                device=message_of(common_pb2.Device, device, index=index),
                state=None,  # as its preloads
                workers=users[index],
                promised_memory_bytes=use.devices[index].promised_bytes,
            )
            for index, device in enumerate(node.devices)
        ],
        address=node.ray.node_ip if node.ray is not None else "",
        ray_node_id=node.ray.ray_node_id if node.ray is not None else "",
        ray_head=node.ray is not None and node.ray.head,
        join_time=timestamp(node.joined_ms),
        quarantined_workers=[
            message_of(node_pb2.QuarantinedWorker, worker, worker=_name_of(worker, state))
            for worker in state.workers_on(node.node_id)
            if worker.state is WorkerState.QUARANTINED
        ],
        kill_time=kill_time(state.workers_on(node.node_id)),
    )


class NodeMessages:
    """Messages of nodes, each made once per change of what it says: a screen, a picture and an autoscaler read a
    thousand nodes again and again, and most are as they were."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[tuple[object, ...], bytes]] = {}

    def of(self, node: NodeRecord, state: State) -> node_pb2.Node:
        """As :func:`node_message`; a message of the caller's own."""
        # Records are never changed, only replaced: the same ones say the same. The key keeps them, so that none of them
        # makes room for another at the same place.
        key = (node, state.ledger.nodes[node.node_id].changes, *state.workers_on(node.node_id))
        made = self._made.get(node.node_id)
        if made is not None and len(made[0]) == len(key) and all(map(is_, made[0], key)):
            return node_pb2.Node.FromString(made[1])
        message = node_message(node, state)
        if len(self._made) > 2 * len(state.nodes):
            self._made.clear()  # most are of nodes that are gone
        self._made[node.node_id] = (key, message.SerializeToString())
        return message


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
    return message_of(node_pb2.WorkerName, worker, job=job.name if job is not None else worker.job)


def _users_of_devices(node: NodeRecord, state: State) -> dict[int, list[node_pb2.WorkerName]]:
    users: dict[int, list[node_pb2.WorkerName]] = defaultdict(list)
    for worker in state.workers_on(node.node_id):
        name = _name_of(worker, state)
        for share in worker.devices:
            users[share.index].append(name)
    return users
