"""A training loop that follows its cluster: nodes join, are lost and leave while it runs.

    scripts/start_ray_cluster.sh 1                                 # a head and one worker, a GPU each; blocks
    .venv/bin/python examples/training_loop_with_autoscaling.py    # in a second terminal
    scripts/add_ray_worker.sh                                      # in a third one, as often as you like

The workers are those of one elastic component: callboard starts one on every GPU that is free, each in a placement
group of its own, replaces those that are lost, and takes them away with a node that is drained. The loop looks
between steps who is there, and steps with whoever is. Put your own class in place of `TrainingActor`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from importlib.util import find_spec
from typing import Any

from callboard import Client, ComponentSpec, JobHandle, JobSpec, PgPoolSpec
from callboard.v1.job_pb2 import Job, Worker, WorkerState
from callboard.v1.node_pb2 import Node, NodeState

POOL = "training"
JOB = "training-loop"
METHODS = {"trainer": "train_step", "inference": "generate", "environment": "rollout"}
"""Which method of your class makes a step, by its role."""

TOTAL_EVERY = 10
CHART_ROWS = 10
STEP_S = 60.0
"""How long one step of one actor may take before the loop goes on without it."""


class TrainingActor:
    """A small model, trained with PyTorch where it is installed, else with NumPy, else by hand.

    It needs no Ray and no callboard.
    """

    def __init__(self) -> None:
        if find_spec("torch"):
            self.step_of = self._with_torch()
        else:
            self.step_of = self._with_numpy() if find_spec("numpy") else self._by_hand()

    def train_step(self, step: int) -> dict[str, Any]:
        """Step number `step`: what there is to say, how long it took, which GPUs it saw."""
        began = time.perf_counter()
        where, loss = self.step_of()
        return {
            "step": step,
            "message": f"{where} training: loss={loss:.4f}",
            "duration_s": time.perf_counter() - began,
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        }

    @staticmethod
    def _with_torch() -> Any:
        import torch  # noqa: PLC0415 - only in the worker, and only with the extra `torch`

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1)).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        inputs = torch.randn(1024, 64, device=device)
        targets = inputs.sum(dim=1, keepdim=True).sin()

        def step() -> tuple[str, float]:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            return ("GPU" if device.type == "cuda" else "CPU"), float(loss.item())

        return step

    @staticmethod
    def _with_numpy() -> Any:
        import numpy as np  # noqa: PLC0415 - only where there is no PyTorch

        chance = np.random.default_rng(7)
        inputs = chance.standard_normal((1024, 64))
        targets = inputs @ chance.standard_normal(64)
        weights = np.zeros(64)

        def step() -> tuple[str, float]:
            nonlocal weights
            miss = inputs @ weights - targets
            weights = weights - 0.05 * inputs.T @ miss / len(inputs)
            return "CPU", float(miss @ miss / len(inputs))

        return step

    @staticmethod
    def _by_hand() -> Any:
        chance = random.Random(7)  # noqa: S311 - the same data in every run
        inputs = [[chance.gauss(0, 1) for _ in range(8)] for _ in range(1024)]
        targets = [sum(row) for row in inputs]
        weights = [0.0] * 8

        def step() -> tuple[str, float]:
            nonlocal weights
            misses = [
                sum(w * x for w, x in zip(weights, row, strict=True)) - target
                for row, target in zip(inputs, targets, strict=True)
            ]
            slopes = [
                sum(miss * x for miss, x in zip(misses, column, strict=True)) for column in zip(*inputs, strict=True)
            ]
            weights = [w - 0.05 * slope / len(inputs) for w, slope in zip(weights, slopes, strict=True)]
            return "CPU", sum(miss * miss for miss in misses) / len(inputs)

        return step


class Loop:
    """What the loop knows of the cluster, and the steps it makes."""

    def __init__(self, cb: Client, job: JobHandle, method: str) -> None:
        self.cb = cb
        self.job = job
        self.method = method
        self.done: list[tuple[float, int]] = [(time.perf_counter(), 0)]  # when each step ended, actors that trained
        self.nodes: dict[str, Node] = {}
        self.actors: dict[int, Worker] = {}  # by generation: every new process of a rank has another
        self.groups: dict[str, int] = {}
        self.steps = 0
        self.actor_steps = 0

    async def look(self) -> None:
        """Who came and who went since the last step?"""
        for node in await self.cb.list_nodes():
            known = self.nodes.get(node.name)
            if node.state == NodeState.NODE_STATE_READY and (known is None or known.epoch != node.epoch):
                print(f"\n🆕 Detected new worker: {short(node)} with {node.capacity.gpu_milli / 1000:.1f} GPUs")
                if not node.capacity.gpu_milli:
                    print(f"⚠️  {short(node)} joined without a GPU: no actor runs there")
            elif known is not None and node.state not in (known.state, NodeState.NODE_STATE_READY):
                print(f"\n🔻 Worker {short(node)} is {NodeState.Name(node.state)[11:]}: {node.state_reason}")
            if known is not None or node.state == NodeState.NODE_STATE_READY:  # one that joins is not there yet
                self.nodes[node.name] = node
        found = {worker.generation: worker for worker in ready(await self.job.refresh())}
        for generation in self.actors.keys() - found.keys():
            gone = self.actors[generation]
            print(f"\n💥 Training actor {gone.key.rank} on node {gone.allocation.node_id} is gone; going on without it")
        for generation in sorted(found.keys() - self.actors.keys()):
            worker = found[generation]
            group = worker.allocation.placement_group_id
            if group not in self.groups:
                self.groups[group] = len(self.groups) + 1
                print(f"✅ Created placement group {self.groups[group]}")
            print(f"🎭 Spawned training actor {worker.key.rank} on node {worker.allocation.node_id}")
        self.actors = found

    async def step(self) -> None:
        """One step on every actor there is."""
        await self.look()
        while not self.actors:
            await self.job.until(lambda job: bool(ready(job)), "a worker", timeout=300)
            await self.look()
        self.steps += 1
        handles = [handle for handle in self.job.workers() if handle.generation in self.actors]
        print(f"\n🚀 Running training step {self.steps} on {len(handles)} actors...")
        calls = (self._train(handle) for handle in handles)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        good = [seconds for answer, seconds in map(told, answers) if not isinstance(answer, BaseException)]
        self.actor_steps += len(good)
        self.done.append((time.perf_counter(), len(good)))
        print(f"📊 Step {self.steps} completed:\n   - {len(good)} actors trained")
        if good:
            print(f"   - Average duration: {sum(good) / len(good):.3f}s")
        for handle, (answer, _) in zip(handles, map(told, answers), strict=True):
            text = f"failed: {type(answer).__name__}" if isinstance(answer, BaseException) else answer
            print(f"   - Actor {handle.rank}: {text}", flush=True)
        if self.steps % TOTAL_EVERY == 0:
            print(f"\n📈 Total after {self.steps} steps: {self.actor_steps} actor steps, {len(self.actors)} actors now")

    async def _train(self, handle: Any) -> tuple[Any, float]:
        # This very process, not its successor: the loop notices a new one itself.
        began = time.perf_counter()
        async with asyncio.timeout(STEP_S):
            answer = await getattr(handle.options(follow=False), self.method).remote(self.steps)
        return answer, time.perf_counter() - began

    def chart(self) -> None:
        """How much was done when."""
        size = max(1, -(-self.steps // CHART_ROWS))
        rows = []
        for first in range(0, self.steps, size):
            steps = self.done[first + 1 : first + 1 + size]
            rows.append(
                (first + 1, first + len(steps), sum(n for _, n in steps) / (steps[-1][0] - self.done[first][0]))
            )
        most = max((rate for *_, rate in rows), default=0.0) or 1.0
        for start, end, rate in rows:
            print(f"   steps {f'{start}–{end}':>9} {'█' * round(rate / most * 30):<30} {rate:6.1f} actor steps/s")


def told(result: Any) -> tuple[Any, float]:
    """What to say of an actor's answer, and how long its step took: as it says itself, else as it took here."""
    if isinstance(result, BaseException):
        return result, 0.0
    answer, seconds = result
    if isinstance(answer, dict):
        return answer.get("message", answer), float(answer.get("duration_s", seconds))
    return answer, seconds


def ready(job: Job) -> list[Worker]:
    """Workers that can be called."""
    return [worker for worker in job.workers if worker.state == WorkerState.WORKER_STATE_READY]


def short(node: Node) -> str:
    """Id of a node."""
    return node.name.removeprefix("nodes/")


async def main(steps: int, pause_s: float, actor: str, role: str) -> None:
    """Submits the job, trains, and ends the job."""
    async with Client() as cb:
        await cb.connect_ray()
        await cb.ensure_pool(POOL, pg_pool=PgPoolSpec(max_dynamic=64))
        component = ComponentSpec(role, actor, min_workers=1, max_workers=64, resources={"cpu": 1, "gpu": 1})
        job = await cb.submit(JobSpec(name=JOB, pool=POOL, components=[component]))
        try:
            await job.running(timeout=120)
            print("🎯 DYNAMIC TRAINING LOOP STARTED", "=" * 60, sep="\n")
            print("💡 This training loop will:")
            print("   • Run training steps on all available actors")
            print("   • Monitor for new workers at each step")
            print("   • Automatically scale up when new workers join")
            print("   • Use 1 GPU per training actor")
            print("\n🔄 To add workers: scripts/add_ray_worker.sh", "=" * 60, sep="\n")
            loop = Loop(cb, job, METHODS[role])
            while not steps or loop.steps < steps:
                await loop.step()
                await asyncio.sleep(pause_s)
        finally:
            await job.complete("the training loop ended")
            await job.finished(timeout=60)
        print(f"\n🏁 {loop.steps} steps, {loop.actor_steps} actor steps")
        loop.chart()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=0, help="steps to make; 0: until Ctrl-C")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between steps")
    parser.add_argument("--actor", default="examples.training_loop_with_autoscaling:TrainingActor", help="your class")
    parser.add_argument("--role", choices=METHODS, default="trainer", help="what it is; decides which method is called")
    arguments = parser.parse_args()
    try:
        asyncio.run(main(arguments.steps, arguments.pause, arguments.actor, arguments.role))
    except KeyboardInterrupt:
        print("\nInterrupted; the job has ended.")
