"""Does the diagnosis name what is wrong, and nothing where all is well?"""

from __future__ import annotations

from typing import Any

import pytest

from callboard.client.diagnosis import Evidence, Finding, diagnose
from callboard.v1.common_pb2 import (
    Allocation,
    DeviceProcess,
    DeviceShare,
    DeviceState,
    Reason,
    Resources,
    StateChange,
    WorkerKey,
)
from callboard.v1.inspection_pb2 import (
    CallLoad,
    DeviceUser,
    NodeInspection,
    RayActor,
    RayPlacementGroup,
    WorkerInspection,
)
from callboard.v1.job_pb2 import ComponentSpec, Job, JobSpec, JobState, Worker, WorkerState
from callboard.v1.node_pb2 import DeviceUse, Node, NodeState
from callboard.v1.placement_group_pb2 import PlacementGroup, PlacementGroupState

KEY = WorkerKey(job_id="u1", component="trainer", rank=0)


def job(*, gpus: int = 1, **fields: Any) -> Job:
    devices = [DeviceShare(index=index, id=str(index), milli=1000) for index in range(gpus)]
    worker = Worker(
        key=KEY,
        generation=3,
        state=WorkerState.WORKER_STATE_READY,
        actor_name="cb/u1/trainer/0/g3",
        allocation=Allocation(node_id="n1", devices=devices, resources=Resources(memory_bytes=1 << 30)),
    )
    spec = JobSpec(name="train", components=[ComponentSpec(name="trainer", role="trainer")])
    stated: dict[str, Any] = {
        "uid": "u1",
        "spec": spec,
        "state": JobState.JOB_STATE_RUNNING,
        "workers": [worker],
    }
    return Job(**(stated | fields))


def look(**fields: Any) -> WorkerInspection:
    stated: dict[str, Any] = {
        "worker": KEY,
        "generation": 3,
        "visible_devices": "0",
        "framework": "torch",
        "uses_device": True,
        "calls": [CallLoad(in_flight=1, limit=1)],
    }
    return WorkerInspection(**{name: value for name, value in (stated | fields).items() if value is not None})


def found(*jobs: Job, seen: dict[str, Any] | None = None, **evidence: Any) -> list[Finding]:
    stated: dict[str, Any] = {
        "nodes": [Node(name="nodes/n1", state=NodeState.NODE_STATE_READY)],
        "jobs": jobs or [job()],
        "groups": [PlacementGroup(name="placementGroups/pg-1", ray_placement_group_id="abc")],
        "seen": {"n1": NodeInspection(**({"workers": [look()]} | (seen or {})))},
        "silent": {},
    }
    return diagnose(Evidence(**(stated | evidence)))


def kinds(*jobs: Job, seen: dict[str, Any] | None = None, **evidence: Any) -> list[str]:
    return [finding.kind for finding in found(*jobs, seen=seen, **evidence)]


def test_nothing_is_found_where_all_is_well() -> None:
    actors = [
        RayActor(name="cb/u1/trainer/0/g3", state="ALIVE", ray_node_id="r1"),
        RayActor(name="cb/spare/n1/x-1", state="ALIVE", ray_node_id="r1"),
    ]
    groups = [RayPlacementGroup(id="abc", name="cb/default/pg-1/1", state="CREATED")]
    users = [DeviceUser(index=0, pid=5, worker=KEY)]
    assert found(seen={"actors": actors, "placement_groups": groups, "device_users": users}) == []


class TestAGpuThatIsNotUsed:
    """GPU not utilised: which of the three it is."""

    def test_none_is_asked_for(self) -> None:
        (finding,) = found(job(gpus=0), seen={"workers": [look(visible_devices="")]})
        assert finding.kind == "no-gpu"
        assert "asks for no GPU" in finding.what

    def test_the_wrong_ones_are_visible(self) -> None:
        (finding,) = found(seen={"workers": [look(visible_devices="0,1,2,3")]})
        assert (finding.kind, "holds GPU 0 and sees 0,1,2,3" in finding.what) == ("visible-devices", True)

    def test_the_model_is_on_the_cpu(self) -> None:
        (finding,) = found(seen={"workers": [look(uses_device=False)]})
        assert (finding.kind, "the model is on the CPU" in finding.what) == ("model-on-cpu", True)

    def test_what_can_not_be_told_is_not_guessed(self) -> None:
        assert kinds(seen={"workers": [look(framework="", uses_device=False, visible_devices=None)]}) == []

    def test_a_later_generation_is_not_judged_by_an_earlier_one(self) -> None:
        assert kinds(seen={"workers": [look(generation=2, uses_device=False)]}) == []


class TestWhatRayLost:
    ACTOR = RayActor(name="cb/u1/trainer/0/g3", state="ALIVE", ray_node_id="r1")
    GROUP = RayPlacementGroup(id="abc", name="cb/default/pg-1/1", state="CREATED")
    READY = PlacementGroup(
        name="placementGroups/pg-1",
        ray_placement_group_id="abc",
        state=PlacementGroupState.PLACEMENT_GROUP_STATE_READY,
    )

    def kinds(self, **seen: Any) -> list[str]:
        return kinds(seen={"ray_listed": True, **seen}, groups=[self.READY])

    def test_is_nothing_where_it_has_both(self) -> None:
        assert self.kinds(actors=[self.ACTOR], placement_groups=[self.GROUP]) == []

    def test_is_an_actor_whose_worker_runs(self) -> None:
        other = RayActor(name="cb/u1/trainer/0/g4", state="ALIVE", ray_node_id="r1")
        assert self.kinds(actors=[], placement_groups=[self.GROUP]) == ["missing-actor"]
        assert self.kinds(actors=[other], placement_groups=[self.GROUP]) == ["leftover-actor", "missing-actor"]

    def test_is_a_group_that_the_ledger_has(self) -> None:
        assert self.kinds(actors=[self.ACTOR]) == ["missing-group"]

    def test_is_not_guessed_where_ray_listed_nothing(self) -> None:
        assert self.kinds(ray_listed=False) == []
        assert self.kinds(actors=[self.ACTOR], placement_groups=[self.GROUP], workers=[]) == []


class TestForeigners:
    def test_actors_that_are_not_ours(self) -> None:
        actors = [
            RayActor(id="1", class_name="Stray", pid=9, state="ALIVE", ray_node_id="r1"),
            RayActor(id="2", name="waiting", state="PENDING_CREATION"),
            RayActor(id="3", name="cb/u0/x/0/g1", pid=10, state="ALIVE", ray_node_id="r1"),
        ]
        assert kinds(seen={"actors": actors}) == ["foreign-actor", "pending-actor", "leftover-actor"]

    def test_groups_that_are_not_ours(self) -> None:
        groups = [
            RayPlacementGroup(id="x", name="theirs", state="CREATED"),
            RayPlacementGroup(id="y", name="cb/default/pg-9/1", state="CREATED"),
            RayPlacementGroup(id="z", name="cb/default/pg-1/2", state="PENDING"),
        ]
        assert kinds(seen={"placement_groups": groups}) == ["foreign-group", "leftover-group"]

    def test_processes_on_devices(self) -> None:
        users = [
            DeviceUser(index=0, pid=5, worker=KEY),
            DeviceUser(index=1, pid=5, worker=KEY),
            DeviceUser(index=0, pid=7),
        ]
        whats = [finding.what for finding in found(seen={"device_users": users})]
        assert whats == [
            "trainer/0 uses GPU 1 of n1, which nobody was given",
            "process 7 uses GPU 0 of n1 and is no worker",
        ]
        strange = DeviceState(index=0, foreign=[DeviceProcess(pid=7)], closed="process 7 of alice uses it")
        node = Node(name="nodes/n1", state=NodeState.NODE_STATE_READY, devices=[DeviceUse(state=strange)])
        whats = [finding.what for finding in found(nodes=[node], seen={"device_users": users})]
        assert len(whats) == 2
        assert [what for what in whats if "process 7" in what] == [
            "GPU  of n1: takes no new work: process 7 of alice uses it"
        ], "once"


class TestTroubles:
    def test_what_waits_says_why(self) -> None:
        waiting = job(state=JobState.JOB_STATE_PENDING, workers=[], waiting_for=[Reason(message="n1 lacks 1 GPU")])
        (finding,) = found(waiting)
        assert finding.what == "train waits, so its actors are not created yet: n1 lacks 1 GPU"

    def test_a_worker_lost_for_lack_of_memory(self) -> None:
        story = [StateChange(reason="trainer/0: out of memory: the kernel ended it; its processes held up to 3GiB")]
        (finding,) = found(job(history=story))
        assert (finding.kind, "3GiB" in finding.what) == ("out-of-memory", True)

    def test_calls_that_queue(self) -> None:
        calls = [CallLoad(member="pool", in_flight=120, limit=100), CallLoad(member="t", in_flight=1, limit=1)]
        (finding,) = found(seen={"workers": [look(calls=calls)]})
        assert finding.what == "train/trainer/0 (pool) has 20 calls waiting: max_concurrency is 100"

    def test_memory_beyond_what_was_asked_for(self) -> None:
        (finding,) = found(seen={"workers": [look(memory_bytes=2 << 30)]})
        assert finding.what == "train/trainer/0 holds 2GiB and asked for 1GiB"

    def test_a_worker_that_does_not_answer(self) -> None:
        assert kinds(seen={"workers": [look(silent="it did not answer within 2 s")]}) == ["worker-silent"]

    @pytest.mark.parametrize(
        ("state", "expected"),
        [
            ("READY", []),
            ("LEFT", []),
            ("SUSPECT", ["node-state"]),
            ("LOST", ["node-state"]),
            ("CORDONED", ["node-state"]),
        ],
    )
    def test_nodes(self, state: str, expected: list[str]) -> None:
        nodes = [Node(name="nodes/n1", state=NodeState.Value(f"NODE_STATE_{state}"))]
        assert kinds(nodes=nodes) == expected

    def test_a_node_that_could_not_be_asked(self) -> None:
        nodes = [Node(name=f"nodes/{name}", state=NodeState.NODE_STATE_READY) for name in ("n1", "n2")]
        silent = {"n2": "its agent is not connected"}
        assert kinds(nodes=nodes, seen={"unknown": ["Ray can't be asked"]}, silent=silent) == ["node-silent", "unknown"]
