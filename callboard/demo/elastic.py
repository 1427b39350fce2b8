"""`callboard demo elastic`: a training that grows and shrinks while it runs, on a cluster of its own.

The demonstration starts two nodes with a GPU each, trains on them with an elastic component, adds a node, kills a
worker (SIGKILL of its recorded pid), drains a node and lets it go, and looks whether the training did what it must.

Guaranteed, as for `demo rlhf`: whatever happens, the cluster and the child that talks to Ray are ended, and their end
is proved, before the program ends.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from callboard.agents.system.process_tree import send_signal
from callboard.cli.cluster.start_progress import StartProgress
from callboard.cli.local.cluster import LocalCluster
from callboard.cli.local.growth import add_worker, end_worker
from callboard.cli.local.interrupts import Interrupts
from callboard.cli.local.machine_gpus import machine_gpus
from callboard.cli.local.plan import ClusterPlan
from callboard.cli.show.failures import EXPECTED, failure_of
from callboard.client.calls.cluster_calls import id_of
from callboard.client.client import Client
from callboard.client.jobs import JobHandle
from callboard.demo.data_plane import DataPlane, RayFailed
from callboard.demo.stage import own_plan, taken_down
from callboard.demo.story import Verdict
from callboard.demo.training_loop import TrainingLoop, TrainingStory
from callboard.model.frozen import dataclass
from callboard.model.requests import ComponentSpec, JobSpec, PgPoolSpec, PoolSpec
from callboard.security.processes import identify

Result = TypeVar("Result")

_EXPECTED: tuple[type[Exception], ...] = (*EXPECTED, RayFailed, TimeoutError)

READY_S = 90.0
JOIN_S = 60.0
"""How long a Ray node may take to join: 5 s on a quiet machine."""

FOLLOW_S = 40.0
"""How long the training may take to follow: detection, backoff and one cold start."""

NOTICE_S = 5.0
"""Deadline of the drain."""

STEPS = 5
"""Fewest steps before, between and after what happens to the cluster."""

POOL = "elastic"
JOB = "training"
SAMPLE = "callboard.demo.training:TrainingActor"

METHODS = {"trainer": "train_step", "inference": "generate", "environment": "rollout"}
"""Method that makes one step, by the role of the class."""

FIGURES = ("steps", "workers_start", "workers_max", "workers_end", "joins", "losses", "recoveries")
"""What `--json` says beside its verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticOptions:
    """How the demonstration runs.

    Attributes:
        actor: the class that works, "pkg.module:Class".
        role: what it is: "trainer", "inference" or "environment"; decides which method makes a step.
        agents: nodes to start with.
        pace_s: pause between steps.
    """

    actor: str = SAMPLE
    role: str = "trainer"
    agents: int = 2
    pace_s: float = 0.2


@dataclass(slots=True)
class ElasticResult(Verdict):
    """What came of it; its figures are the line of `--json` without the verdict."""

    name: str = "elastic"

    def as_plain(self) -> dict[str, Any]:
        return {**self.figures, "passed": self.passed}


async def play(options: ElasticOptions, story: TrainingStory, interrupts: Interrupts) -> ElasticResult:
    """Trains on a cluster that changes.

    Raises:
        ChildEnded, NotReady, PortTaken: no cluster could be started.
    """
    dealt = machine_gpus("auto")
    plan = own_plan(options.agents, dealt, cpus="1", memory="4GiB", gpus=1, resources=("worker_unit=1",))
    result = ElasticResult(figures=dict.fromkeys(FIGURES, 0) | {"workers_start": plan.agents})
    with StartProgress(plan.agents) as progress:
        cluster = LocalCluster(plan, progress, hurry=interrupts.hurry)
        ray = DataPlane(plan.directory / "logs" / "ray-driver.log")
        try:
            await cluster.start(READY_S, alongside=ray.open)
            progress.finish()
            async with Client(plan.controller) as client:
                await _trained(client, ray, plan, options, story, result)
        finally:
            with interrupts.cleaning():
                await ray.close()
                await taken_down(cluster, result)
    for what in result.failures():
        story.say(f"❌ {what}")
    return result


async def _trained(
    client: Client,
    ray: DataPlane,
    plan: ClusterPlan,
    options: ElasticOptions,
    story: TrainingStory,
    result: ElasticResult,
) -> None:
    try:
        job = await _submitted(client, plan, options)
        address = (await client.stats()).ray_address
        await ray.connect(address, token_path=plan.ray_token_path(), node_ip=plan.node_ip(0))
        story.begins()
        loop = TrainingLoop(client, job, ray, story, METHODS[options.role], options.pace_s)
        try:
            await _with_happenings(loop, plan, result)
        finally:
            result.figures = _figures(loop, plan)
        story.summary(loop.steps, loop.counts, len(loop.ready))
        await job.complete("the demonstration is over")
        await job.finished(FOLLOW_S)
        result.checks += [(fault, False) for fault in loop.faults]
    except _EXPECTED as error:
        said = failure_of(error)
        result.checks.append((f"{said.what} {said.why}", False))


async def _submitted(client: Client, plan: ClusterPlan, options: ElasticOptions) -> JobHandle:
    most = plan.places
    amounts: dict[str, int | float | str] = {"cpu": most, "gpu": most}
    await client.create_pool(PoolSpec(name=POOL, nominal=amounts, pg_pool=PgPoolSpec(max_dynamic=most, reuse=True)))
    component = ComponentSpec(
        options.role, options.actor, min_workers=1, max_workers=most, resources={"cpu": 1, "gpu": 1}
    )
    job = await client.submit(JobSpec(name=JOB, pool=POOL, labels={"role": options.role}, components=[component]))
    await job.running(READY_S)
    return job


async def _with_happenings(loop: TrainingLoop, plan: ClusterPlan, result: ElasticResult) -> None:
    """Trains, adds a node, loses a worker, drains a node, and trains on."""
    checks, start = result.checks, plan.agents
    checks.append(("every node got its actor", await loop.until(lambda: len(loop.ready) == start, FOLLOW_S)))
    await _train(loop, STEPS)

    loop.story.say("🎬 Adding a worker", apart=True)
    adding = add_worker(plan.directory, lambda _: None, timeout_s=JOIN_S, lock_pause_s=0.2)
    added, grew = await _training_on(loop, adding, lambda: len(loop.ready) > start, JOIN_S)
    checks.append((f"the training grew to {start + 1} actors", grew))
    await _train(loop, STEPS)

    victim = loop.ready[1]
    loop.story.say(f"🎬 Killing the process of actor {victim.key.rank} (kill -9 {victim.pid})", apart=True)
    process = identify(victim.pid)
    if process is not None:
        send_signal(process, signal.SIGKILL)
    recovered = await loop.until(lambda: loop.counts.recoveries == 1 and len(loop.ready) == start + 1, FOLLOW_S)
    checks.append(("the lost actor came back", recovered))
    await _train(loop, STEPS)

    node = id_of(added.node)
    loop.story.say(f"🎬 Draining {node}, with {NOTICE_S:g} s notice", apart=True)
    await loop.client.drain_node(node, within=NOTICE_S, reason="maintenance")
    shrank = await loop.until(lambda: len(loop.ready) == start, FOLLOW_S)
    checks.append((f"the training shrank to {start} actors", shrank))
    await _training_on(loop, end_worker(plan.directory, node), lambda: True, FOLLOW_S)
    await _train(loop, STEPS + -(len(loop.steps) + STEPS) % 10)

    counts = loop.counts
    spoilt = [step for step in loop.steps if step.trained < step.actors]
    checks += [
        (f"joins: {counts.joins}, expected 1", counts.joins == 1),
        (f"losses: {counts.losses}, expected 1", counts.losses == 1),
        (f"recoveries: {counts.recoveries}, expected 1", counts.recoveries == 1),
        (f"drained: {counts.drained}, expected 1", counts.drained == 1),
        (f"most actors: {counts.workers_max}, expected {start + 1}", counts.workers_max == start + 1),
        (f"actors at the end: {len(loop.ready)}, expected {start}", len(loop.ready) == start),
        # One for the killed actor, one for the drained: their last step was under way.
        (f"steps that not everybody finished: {len(spoilt)}, expected at most 2", len(spoilt) <= 2),
    ]


def _figures(loop: TrainingLoop, plan: ClusterPlan) -> dict[str, int]:
    counts = loop.counts
    seen = (
        *(len(loop.steps), plan.agents, counts.workers_max, len(loop.ready)),
        *(counts.joins, counts.losses, counts.recoveries),
    )
    return dict(zip(FIGURES, seen, strict=True))


async def _train(loop: TrainingLoop, steps: int) -> None:
    for _ in range(steps):
        await loop.step()


async def _training_on(
    loop: TrainingLoop, work: Coroutine[Any, Any, Result], reached: Callable[[], bool], limit_s: float
) -> tuple[Result, bool]:
    """Trains on while something else is done: its result, and whether it was ``reached`` in time."""
    task = asyncio.create_task(work)

    def over() -> bool:
        return task.done() and (task.cancelled() or task.exception() is not None or reached())

    try:
        in_time = await loop.until(over, limit_s)
        return await task, in_time
    finally:
        # What is half done is taken back before the cluster goes.
        task.cancel()
        await asyncio.wait([task])
