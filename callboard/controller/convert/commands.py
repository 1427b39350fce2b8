"""Commands as messages for an agent. No state is asked: it may have moved on since."""

from __future__ import annotations

import hashlib

from callboard.model.names import WORKER_PORTS
from callboard.model.specs import WorkerPlace
from callboard.scheduler.records.commands import Command, CreateGroup, RemoveGroup, ReservePort, StartWorker, StopWorker
from callboard.scheduler.records.job_records import CheckpointRecord, WorkerRecord
from callboard.scheduler.records.pool_records import BundleRecord
from callboard.v1 import agent_pb2, common_pb2
from callboard.wire.alike import message_of
from callboard.wire.enums import to_wire

_ANYWHERE = WorkerPlace(node_id="")


def command_message(command: Command, term: int) -> agent_pb2.SessionResponse:
    message = agent_pb2.Command(command_id=command.command_id, term=term)
    if isinstance(command, StartWorker):
        message.start_worker.CopyFrom(_start_worker(command))
    elif isinstance(command, ReservePort):
        message.reserve_port.CopyFrom(
            agent_pb2.ReservePort(worker=worker_key(command.worker), generation=command.worker.generation)
        )
    elif isinstance(command, StopWorker):
        message.stop_worker.CopyFrom(_stop_worker(command))
    elif isinstance(command, CreateGroup):
        message.create_placement_group.CopyFrom(_create_group(command))
    elif isinstance(command, RemoveGroup):
        message.remove_placement_group.CopyFrom(
            agent_pb2.RemovePlacementGroup(
                placement_group_id=command.group_id, ray_placement_group_id=command.ray_id, attempt=command.attempt
            )
        )
    return agent_pb2.SessionResponse(command=message)


def worker_key(worker: WorkerRecord) -> common_pb2.WorkerKey:
    return common_pb2.WorkerKey(job_id=worker.job, component=worker.component, rank=worker.rank)


def allocation(worker: WorkerRecord) -> common_pb2.Allocation:
    return message_of(common_pb2.Allocation, worker, placement_group_id=worker.group_id)


def bundle(record: BundleRecord, ray_node_id: str) -> agent_pb2.Bundle:
    """What one bundle books where."""
    return message_of(agent_pb2.Bundle, record, ray_node_id=ray_node_id)


def rendezvous_port(job: str, component: str, attempt: int) -> int:
    """A port for the workers of one attempt whose node reserved none, because its agent is older or has none left: the
    same for each of them, another for the next attempt."""
    digest = hashlib.blake2b(f"{job}/{component}/{attempt}".encode(), digest_size=4).digest()
    return WORKER_PORTS[int.from_bytes(digest) % len(WORKER_PORTS)]


def _start_worker(command: StartWorker) -> agent_pb2.StartWorker:
    worker, component = command.worker, command.component
    place = component.place_of(worker.rank) or _ANYWHERE
    return message_of(
        agent_pb2.StartWorker,
        component,
        worker=worker_key(worker),
        generation=worker.generation,
        attempt=worker.attempt,
        allocation=allocation(worker),
        ray_placement_group_id=command.ray_group_id,
        env=dict(place.env) | dict(component.env) | dict(component.secret_env),
        world_size=command.world_size,
        local_rank=command.local_rank,
        local_world_size=command.local_world_size,
        node_rank=command.node_rank,
        master_address=command.master_address,
        master_port=command.master_port or rendezvous_port(worker.job, component.name, worker.attempt),
        interpreter=component.interpreter or place.interpreter,
        start_timeout_ms=command.start_timeout_ms,
        job_name=command.job_name,
        strict=command.strict,
        observes_devices=place.observes,
        node_group=place.node_group or command.node_group,
        hardware_json=place.hardware_json,
        secret_names=[name for name, _ in component.secret_env],
        preload=command.preload,
        checkpoint=None if command.checkpoint is None else _checkpoint(command.checkpoint),
    )


def _checkpoint(record: CheckpointRecord) -> agent_pb2.Checkpoint:
    return agent_pb2.Checkpoint(uri=record.uri) if record.uri else agent_pb2.Checkpoint(data=record.data)


def _stop_worker(command: StopWorker) -> agent_pb2.StopWorker:
    return message_of(
        agent_pb2.StopWorker,
        command,
        worker=common_pb2.WorkerKey(job_id=command.job, component=command.component, rank=command.rank),
        kind=None if command.stop_kind is None else to_wire(agent_pb2.StopKind, command.stop_kind),
    )


def _create_group(command: CreateGroup) -> agent_pb2.CreatePlacementGroup:
    return agent_pb2.CreatePlacementGroup(
        placement_group_id=command.group_id,
        attempt=command.attempt,
        bundles=[bundle(*pair) for pair in zip(command.bundles, command.ray_node_ids, strict=True)],
        timeout_ms=command.timeout_ms,
        certain_devices=command.certain,
    )
