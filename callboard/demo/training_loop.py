"""A training loop that follows a cluster as it grows and shrinks: it looks between steps, and steps with whoever is
there.

The workers are those of one elastic component: callboard starts one on every GPU that is free, each in a placement
group of its own, and takes them away when their node is drained. The loop only notices: new nodes, new workers, lost
ones. A worker that fails in a step spoils that step's share alone: the next step asks who is there anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from rich.console import Console

from callboard.client.calls.cluster_calls import id_of
from callboard.client.client import Client
from callboard.client.jobs import JobHandle
from callboard.demo.data_plane import DataPlane
from callboard.model.frozen import dataclass
from callboard.v1.job_pb2 import Job, Worker, WorkerState
from callboard.v1.node_pb2 import Node, NodeState

ANY_WORKER_S = 40.0
"""How long there may be no worker at all: a recovery with backoff, and a cold start."""

TOTAL_EVERY = 10
"""Steps between totals."""


@dataclass(frozen=True, slots=True)
class Step:
    """What came of one step.

    Attributes:
        number: which, from 1.
        actors: workers that were asked.
        trained: workers that answered well.
        seconds: from asking to the last answer.
        at_s: when it ended, on the monotonic clock.
    """

    number: int
    actors: int
    trained: int
    seconds: float
    at_s: float


@dataclass(slots=True)
class Counts:
    """What the loop saw.

    Attributes:
        joins: nodes that joined after the first step.
        losses: workers that were lost without anybody's wish.
        drained: workers that left because their node was drained or they were asked to.
        recoveries: lost workers that came back.
    """

    joins: int = 0
    losses: int = 0
    drained: int = 0
    recoveries: int = 0
    workers_max: int = 0


@dataclass(slots=True)
class TrainingLoop:
    """The loop.

    Attributes:
        job: the job with the elastic component.
        ray: how workers are called.
        method: method of the user's class that makes a step.
        pace_s: pause between steps.
        faults: what must never be seen: two workers of one device, a component that stopped learning.
    """

    client: Client
    job: JobHandle
    ray: DataPlane
    story: TrainingStory
    method: str
    pace_s: float
    steps: list[Step] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    faults: list[str] = field(default_factory=list)
    _nodes: dict[str, Node] = field(default_factory=dict)
    _workers: dict[int, Worker] = field(default_factory=dict)
    _groups: dict[str, int] = field(default_factory=dict)
    _missing: set[int] = field(default_factory=set)

    @property
    def ready(self) -> list[Worker]:
        """Workers that can be asked, as last seen, by rank."""
        return sorted(self._workers.values(), key=lambda worker: worker.key.rank)

    async def until(self, reached: Callable[[], bool], limit_s: float) -> bool:
        """Steps until ``reached()`` is true; whether that was within ``limit_s`` seconds."""
        deadline = time.monotonic() + limit_s
        while not reached():
            if time.monotonic() > deadline:
                return False
            await self.step()
        return True

    async def step(self) -> None:
        """One step on all workers there are; then a look at what changed."""
        await self._look()
        while not self._workers:
            await self.job.until(lambda job: bool(_ready(job)), "a worker", ANY_WORKER_S)
            await self._look()
        number = len(self.steps) + 1
        workers = self.ready
        self.story.say(f"🚀 Running training step {number} on {len(workers)} actors...", apart=True)
        handles = {handle.generation: handle for handle in self.job.workers()}
        began = time.monotonic()
        answers = await self.ray.step([handles[worker.generation] for worker in workers], self.method, number)
        ended = time.monotonic()
        good = [answer for answer in answers if "value" in answer]
        self.steps.append(Step(number, len(workers), len(good), ended - began, ended))
        self.story.step_ended(number, [(w.key.rank, a) for w, a in zip(workers, answers, strict=True)])
        self._check_devices(workers, answers)
        if number % TOTAL_EVERY == 0:
            done = sum(step.trained for step in self.steps)
            now = f"{len(self._workers)} actors now, {self.counts.workers_max} at most"
            self.story.say(f"📈 Total after {number} steps: {done} actor steps, {now}", apart=True)
        await asyncio.sleep(self.pace_s)

    async def _look(self) -> None:
        """Notices who came and who went since the last look."""
        nodes = {id_of(node): node for node in await self.client.list_nodes()}
        found = {worker.generation: worker for worker in _ready(await self.job.refresh())}
        for node_id, node in nodes.items():
            self._look_at_node(node_id, node)
        for generation in [known for known in self._workers if known not in found]:
            self._gone(self._workers.pop(generation), nodes)
        for generation in [new for new in found if new not in self._workers]:
            self._came(found[generation])
        self._workers = found
        self.counts.workers_max = max(self.counts.workers_max, len(found))

    def _look_at_node(self, node_id: str, node: Node) -> None:
        known = self._nodes.get(node_id)
        if node.state == NodeState.NODE_STATE_READY and (known is None or known.epoch != node.epoch):
            gpus = node.capacity.gpu_milli / 1000
            said = f"🆕 Detected new worker: {node_id} with {gpus:.1f} GPUs"
            self.story.say(said if gpus else f"⚠️  {node_id} joined without a GPU: no actor runs there", apart=True)
            self.counts.joins += bool(self.steps)
        elif known is not None and node.state not in (known.state, NodeState.NODE_STATE_READY):
            state = NodeState.Name(node.state).removeprefix("NODE_STATE_")
            self.story.say(f"🔻 Worker {node_id} is {state}: {node.state_reason}", apart=True)
        if known is not None or node.state == NodeState.NODE_STATE_READY:
            self._nodes[node_id] = node

    def _came(self, worker: Worker) -> None:
        group = worker.allocation.placement_group_id
        if group not in self._groups:
            self._groups[group] = len(self._groups) + 1
            self.story.say(f"✅ Created placement group {self._groups[group]}")
        rank = worker.key.rank
        self.story.say(f"🎭 Spawned training actor {rank} on node {worker.allocation.node_id}")
        if rank in self._missing:
            self._missing.discard(rank)
            self.counts.recoveries += 1
            self.story.say(f"♻️  Training actor {rank} is back")

    def _gone(self, worker: Worker, nodes: dict[str, Node]) -> None:
        node_id, rank = worker.allocation.node_id, worker.key.rank
        node = nodes.get(node_id)
        asked = node is not None and (node.state == NodeState.NODE_STATE_DRAINING or self._was_drained(node))
        if asked:
            self.counts.drained += 1
            self.story.say(f"👋 Training actor {rank} left node {node_id}, which is being emptied")
        else:
            self.counts.losses += 1
            self._missing.add(rank)
            self.story.say(f"💥 Lost training actor {rank} on node {node_id}; going on without it", apart=True)

    def _was_drained(self, node: Node) -> bool:
        """A node that left while it was being emptied."""
        known = self._nodes.get(id_of(node))
        return (
            node.state == NodeState.NODE_STATE_LEFT
            and known is not None
            and known.state in (NodeState.NODE_STATE_DRAINING, NodeState.NODE_STATE_LEFT)
        )

    def _check_devices(self, workers: list[Worker], answers: list[dict[str, Any]]) -> None:
        """Nobody shares a whole device, by what workers themselves see."""
        seen: dict[tuple[str, str], int] = {}
        for worker, answer in zip(workers, answers, strict=True):
            value = answer.get("value")
            visible = value.get("visible_devices", "") if isinstance(value, dict) else ""
            for device in str(visible).split(",") if visible else ():
                other = seen.setdefault((worker.allocation.node_id, device), worker.key.rank)
                if other != worker.key.rank:
                    self.faults.append(f"actors {other} and {worker.key.rank} both see GPU {device}")


def _ready(job: Job) -> list[Worker]:
    return [worker for worker in job.workers if worker.state == WorkerState.WORKER_STATE_READY]


_RULE = "=" * 60
_BAR = 32
"""Longest bar of the chart, in characters."""

_ROWS = 12
"""Most rows of the chart."""


class TrainingStory:
    """Writes the story to a console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begins(self) -> None:
        for line in (
            "🎯 DYNAMIC TRAINING LOOP STARTED",
            _RULE,
            "💡 This training loop will:",
            "   • Run training steps on all available actors",
            "   • Monitor for new workers at each step",
            "   • Automatically scale up when new workers join",
            "   • Go on without workers that are lost or drained",
            "   • Use 1 GPU per training actor",
            "",
            "🔄 To add workers: callboard add-worker",
            _RULE,
        ):
            self.say(line)

    def step_ended(self, number: int, answers: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """A step ended: (rank, what that worker answered) of each."""
        good = [answer for _, answer in answers if "value" in answer]
        durations = [_duration(answer) for answer in good]
        self.say(f"📊 Step {number} completed:")
        self.say(f"   - {len(good)} actors trained")
        if durations:
            self.say(f"   - Average duration: {sum(durations) / len(durations):.3f}s")
        for rank, answer in answers:
            self.say(f"   - Actor {rank}: {_answer_text(answer)}")

    def summary(self, steps: Sequence[Step], counts: Counts, actors: int) -> None:
        """The end: what happened, and how much was done when."""
        self.say(_RULE, apart=True)
        self.say(
            f"🏁 {len(steps)} steps, {sum(step.trained for step in steps)} actor steps; actors: {actors} at the end, "
            f"{counts.workers_max} at most; {counts.joins} joined, {counts.losses} lost, {counts.recoveries} "
            f"recovered, {counts.drained} drained"
        )
        self.say("Throughput, in actor steps per second:")
        for line in chart(steps):
            self.say(line)

    def say(self, text: str, *, apart: bool = False) -> None:
        """One line; ``apart``: an empty one before it."""
        if apart:
            self.say("")
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def chart(steps: Sequence[Step], rows: int = _ROWS) -> list[str]:
    """A bar for each stretch of steps: how many actor steps a second were done in it."""
    if len(steps) < 2:
        return ["  (too few steps)"]
    size = -(-(len(steps) - 1) // rows)
    stretches: list[tuple[str, float, int]] = []
    # Each stretch is timed from the end of the step before it: pauses and waits count.
    for first in range(1, len(steps), size):
        within = steps[first : first + size]
        seconds = within[-1].at_s - steps[first - 1].at_s
        label = f"{within[0].number}–{within[-1].number}"
        stretches.append((label, sum(step.trained for step in within) / seconds, within[-1].actors))
    highest = max(rate for _, rate, _ in stretches) or 1.0
    return [
        f"  steps {label:>9} {'█' * max(1, round(rate / highest * _BAR)):<{_BAR}} {rate:6.1f}  {actors} actors"
        for label, rate, actors in stretches
    ]


def _duration(answer: Mapping[str, Any]) -> float:
    value = answer["value"]
    stated = value.get("duration_s") if isinstance(value, Mapping) else None
    return float(stated) if isinstance(stated, int | float) else float(answer["seconds"])


def _answer_text(answer: Mapping[str, Any]) -> str:
    if "error" in answer:
        return f"failed: {answer['error']}"
    value = answer["value"]
    if not isinstance(value, Mapping):
        return str(value)
    if "message" in value:
        return str(value["message"])
    return ", ".join(f"{name}={item}" for name, item in value.items()) or "done"
