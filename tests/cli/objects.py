"""Objects as a controller would show them."""

from __future__ import annotations

from typing import Any

from callboard.v1.agent_pb2 import Bundle
from callboard.v1.common_pb2 import Allocation, Device, DeviceShare, Reason, Resources, WorkerKey
from callboard.v1.event_pb2 import Event
from callboard.v1.job_pb2 import ComponentSpec, Job, JobSpec, JobState, Preemption, Worker, WorkerState
from callboard.v1.node_pb2 import DeviceUse, Node, NodeState, WorkerName
from callboard.v1.placement_group_pb2 import PlacementGroup, PlacementGroupKind, PlacementGroupState
from callboard.v1.pool_pb2 import PlacementGroupPoolStats, Pool, PoolSpec

GIB = 1 << 30
ASK = Resources(cpu_milli=1500, gpu_milli=1000, memory_bytes=GIB)


def job(name: str = "train-00", **fields: Any) -> Job:
    spec = JobSpec(
        name=name,
        pool="rlhf",
        priority_milli=9000,
        labels={"role": "train"},
        components=[ComponentSpec(name="actor", actor="pkg.module:Class", workers=1, resources=ASK)],
    )
    allocation = Allocation(
        node_id="node-1", placement_group_id="pg-77", devices=[DeviceShare(index=0, id="0", milli=1000)], resources=ASK
    )
    worker = Worker(
        key=WorkerKey(job_id="uid-4711", component="actor", rank=0),
        state=WorkerState.WORKER_STATE_READY,
        generation=3,
        allocation=allocation,
        actor_name="cb/uid-4711/actor/0/g3",
        visible_devices="0",
        pid=99,
        start_ms=350,
    )
    given: dict[str, Any] = {
        "state": JobState.JOB_STATE_RUNNING,
        "state_reason": "every worker answered",
        "workers": [worker],
        "placement_groups": ["placementGroups/pg-77"],
    }
    return Job(name=f"jobs/{name}", uid="uid-4711", attempt=1, revision=12345, **({"spec": spec} | given | fields))


def waiting_job() -> Job:
    return job(
        "rollout-01",
        state=JobState.JOB_STATE_PENDING,
        workers=[],
        placement_groups=[],
        waiting_for=[Reason(code="QUOTA_SHORT", message="pool rlhf: 5.5 of 6 CPU used, asks 1.5")],
    )


def preempting_job() -> Job:
    victim = Preemption(
        victim="rollout-01", preemptor="train-00", rule="LABEL", reason="train beats rollout", outcome="COOPERATIVE"
    )
    victim.yield_ms = 40
    return job(victims=[victim])


def node(rank: int = 1) -> Node:
    use = DeviceUse(
        device=Device(index=0, id="0"), used_milli=1000, workers=[WorkerName(job="train-00", component="actor", rank=0)]
    )
    return Node(
        name=f"nodes/node-{rank}",
        rank=rank,
        state=NodeState.NODE_STATE_READY,
        capacity=Resources(cpu_milli=3000, gpu_milli=2000, memory_bytes=4 * GIB),
        used=ASK,
        devices=[use, DeviceUse(device=Device(index=1, id="1"), held_milli=1000)],
        simulated=True,
        ray_node_id="abcdef0123",
        address="127.0.0.11",
        epoch=5,
    )


def pool() -> Pool:
    return Pool(
        name="pools/rlhf",
        spec=PoolSpec(nominal=Resources(cpu_milli=6000, memory_bytes=8 * GIB), limited=["cpu", "memory"]),
        used=ASK,
        active_jobs=1,
        pending_jobs=1,
        etag="etag-9",
        pg_stats=PlacementGroupPoolStats(total=3, reserved=2, reserved_idle=1, dynamic=1, creations=4, reuses=2),
    )


def group() -> PlacementGroup:
    return PlacementGroup(
        name="placementGroups/pg-77",
        pool="rlhf",
        kind=PlacementGroupKind.PLACEMENT_GROUP_KIND_RESERVED,
        state=PlacementGroupState.PLACEMENT_GROUP_STATE_READY,
        bundles=[Bundle(node_id="node-1", resources=ASK, devices=[DeviceShare(index=0, id="0", milli=1000)])],
        job="train-00",
        uses=2,
        ray_placement_group_id="feedbeef",
    )


def event() -> Event:
    return Event(
        revision=12345,
        type="preemption.decided",
        subject="jobs/rollout-01",
        state="PREEMPTING",
        reason="train-00 needs 2 CPU",
        cause="cause-1",
        facts={"preemptor": "train-00"},
    )
