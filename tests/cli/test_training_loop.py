"""What does the training loop notice between steps? With a cluster, a job and a Ray that do as the test says."""

from __future__ import annotations

import io
from typing import Any, cast

import pytest
from rich.console import Console

from callboard.client.client import Client
from callboard.client.jobs import JobHandle
from callboard.client.workers import WorkerHandle
from callboard.demo.data_plane import DataPlane
from callboard.demo.training_loop import TrainingLoop, TrainingStory
from callboard.v1.common_pb2 import Allocation, Resources, WorkerKey
from callboard.v1.job_pb2 import Job, Worker, WorkerState
from callboard.v1.node_pb2 import Node, NodeState

READY = NodeState.NODE_STATE_READY


class Scene:
    """Nodes, workers and answers, as they are now."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.workers: dict[int, Worker] = {}
        self.failing: set[int] = set()
        self.sees: dict[int, str] = {}
        self.generation = 0

    def node(self, name: str, state: NodeState.ValueType = READY, *, gpus: int = 1, epoch: int = 1) -> None:
        capacity = Resources(gpu_milli=gpus * 1000)
        self.nodes[name] = Node(name=f"nodes/{name}", state=state, epoch=epoch, capacity=capacity)

    def start(self, rank: int, node: str) -> int:
        self.generation += 1
        self.workers[self.generation] = Worker(
            key=WorkerKey(component="trainer", rank=rank),
            generation=self.generation,
            state=WorkerState.WORKER_STATE_READY,
            allocation=Allocation(node_id=node, placement_group_id=f"pg-{rank}"),
        )
        return self.generation

    # What the loop asks of client, job and Ray.

    async def list_nodes(self) -> list[Node]:
        return list(self.nodes.values())

    async def refresh(self) -> Job:
        return Job(workers=list(self.workers.values()))

    async def step(self, handles: list[WorkerHandle], method: str, number: int) -> list[dict[str, Any]]:
        assert method == "train_step"
        return [self._answer(handle) for handle in handles]

    def _answer(self, handle: WorkerHandle) -> dict[str, Any]:
        if handle.generation in self.failing:
            return {"error": "RayActorError: it died"}
        visible = self.sees.get(handle.rank, str(handle.rank))
        return {"value": {"message": f"loss of {number_of(handle)}", "visible_devices": visible}, "seconds": 0.25}


class FakeJob:
    def __init__(self, scene: Scene) -> None:
        self.refresh = scene.refresh
        self._scene = scene

    def workers(self) -> list[WorkerHandle]:
        return [
            WorkerHandle(
                job="j",
                component="trainer",
                rank=w.key.rank,
                generation=w.generation,
                node=w.allocation.node_id,
                devices=("0",),
                actor_name=f"a{w.generation}",
            )
            for w in self._scene.workers.values()
        ]


def number_of(handle: WorkerHandle) -> int:
    return handle.rank


@pytest.fixture
def scene() -> Scene:
    built = Scene()
    built.node("n0")
    built.start(0, "n0")
    return built


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def loop(scene: Scene, output: io.StringIO) -> TrainingLoop:
    story = TrainingStory(Console(file=output, width=200))
    job = cast("JobHandle", FakeJob(scene))
    return TrainingLoop(cast("Client", scene), job, cast("DataPlane", scene), story, "train_step", 0.0)


async def test_a_node_that_joins_is_told_once_and_counted_from_the_first_step_on(
    loop: TrainingLoop, scene: Scene, output: io.StringIO
) -> None:
    await loop.step()
    assert loop.counts.joins == 0
    scene.node("n1", NodeState.NODE_STATE_JOINING)
    await loop.step()
    scene.node("n1")
    scene.start(1, "n1")
    await loop.step()
    scene.node("n1", NodeState.NODE_STATE_SUSPECT)
    await loop.step()
    scene.node("n1")
    await loop.step()
    said = output.getvalue()
    assert said.count("🆕 Detected new worker: n1 with 1.0 GPUs") == 1
    assert said.count("✅ Created placement group 2") == 1
    assert "🎭 Spawned training actor 1 on node n1" in said
    assert (loop.counts.joins, loop.counts.workers_max) == (1, 2)
    scene.node("n1", epoch=2)
    await loop.step()
    assert loop.counts.joins == 2, "a node that comes back has joined again"


async def test_a_worker_that_dies_spoils_its_share_of_one_step(
    loop: TrainingLoop, scene: Scene, output: io.StringIO
) -> None:
    scene.node("n1")
    hit = scene.start(1, "n1")
    scene.failing.add(hit)
    await loop.step()
    del scene.workers[hit]
    await loop.step()
    scene.start(1, "n1")
    await loop.step()
    assert [(step.actors, step.trained) for step in loop.steps] == [(2, 1), (1, 1), (2, 2)]
    assert (loop.counts.losses, loop.counts.recoveries, loop.counts.drained) == (1, 1, 0)
    said = output.getvalue()
    assert "Actor 1: failed: RayActorError: it died" in said
    assert "💥 Lost training actor 1 on node n1" in said
    assert "Training actor 1 is back" in said
    assert said.count("Created placement group") == 2, "it came back in the group it had"


@pytest.mark.parametrize("after", [NodeState.NODE_STATE_DRAINING, NodeState.NODE_STATE_LEFT])
async def test_a_worker_that_leaves_with_a_drained_node_is_not_lost(
    loop: TrainingLoop, scene: Scene, output: io.StringIO, after: NodeState.ValueType
) -> None:
    scene.node("n1")
    leaves = scene.start(1, "n1")
    await loop.step()
    scene.node("n1", NodeState.NODE_STATE_DRAINING)
    await loop.step()
    scene.node("n1", after)
    del scene.workers[leaves]
    await loop.step()
    assert (loop.counts.losses, loop.counts.drained) == (0, 1)
    assert "👋 Training actor 1 left node n1" in output.getvalue()


async def test_a_worker_on_a_node_that_vanishes_is_lost(loop: TrainingLoop, scene: Scene) -> None:
    scene.node("n1")
    gone = scene.start(1, "n1")
    await loop.step()
    scene.node("n1", NodeState.NODE_STATE_LOST)
    del scene.workers[gone]
    await loop.step()
    assert (loop.counts.losses, loop.counts.drained) == (1, 0)


async def test_two_workers_that_see_one_device_of_a_node_are_a_fault(loop: TrainingLoop, scene: Scene) -> None:
    scene.start(1, "n0")
    scene.sees = {0: "0", 1: "0"}
    await loop.step()
    assert loop.faults == ["actors 0 and 1 both see GPU 0"]


async def test_every_ten_steps_there_is_a_total(loop: TrainingLoop, output: io.StringIO) -> None:
    assert await loop.until(lambda: len(loop.steps) == 20, 30)
    assert output.getvalue().count("📈 Total after") == 2
    assert "📈 Total after 10 steps: 10 actor steps, 1 actors now, 1 at most" in output.getvalue()
    assert not await loop.until(lambda: False, -1)


async def test_a_node_without_a_gpu_is_shown_as_such(loop: TrainingLoop, scene: Scene, output: io.StringIO) -> None:
    scene.node("bare", gpus=0)
    await loop.step()
    assert "bare joined without a GPU" in output.getvalue()
