"""The stage that the acts share: the cluster, its jobs, and what every act looks at."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import field
from decimal import Decimal
from typing import Any, Self

from callboard.agents.ray.ray_command import free_port
from callboard.cli.local.cluster import LocalCluster
from callboard.cli.local.machine_gpus import MachineGpus
from callboard.cli.local.plan import ClusterPlan, free_block
from callboard.cli.local.taking_down import Leftovers
from callboard.cli.show import words
from callboard.client.client import Client
from callboard.client.clusters import cluster_directory, recorded_clusters
from callboard.client.jobs import JobHandle
from callboard.demo.data_plane import DataPlane
from callboard.demo.story import Story, Verdict
from callboard.model.frozen import dataclass
from callboard.model.requests import ComponentSpec, JobSpec, PgPoolSpec, PoolSpec, PreemptionPolicy
from callboard.security.places import run_directory
from callboard.security.processes import ProcessId, identify
from callboard.v1.job_pb2 import Explanation, Job, JobState
from callboard.v1.placement_group_pb2 import PlacementGroupKind
from callboard.v1.pool_pb2 import PlacementGroupPoolStats

START_S = 40.0
"""How long a job may take to run before the act counts as failed. Far above a cold start on a busy machine."""

END_S = 30.0
"""How long a job may take to end: above cancel and kill timeouts together."""

STEPS_FOR_EVER = 1_000_000


@dataclass(slots=True)
class Stage:
    """The cluster and everything that is on it.

    Attributes:
        jobs: every job so far, by name.
        processes: every worker process so far.
        slowest_start_ms: slowest start of a worker so far.
        foreign_groups: ids of placement groups that were in Ray before.
        foreign_actors: names of actors that were in Ray before.
        foreign_booked: what was taken in Ray before.
    """

    client: Client
    ray: DataPlane
    story: Story
    setting: Setting
    jobs: dict[str, JobHandle] = field(default_factory=dict)
    processes: list[ProcessId] = field(default_factory=list)
    slowest_start_ms: int = 0
    foreign_groups: frozenset[str] = frozenset()
    foreign_actors: frozenset[str] = frozenset()
    foreign_booked: dict[str, float] = field(default_factory=dict)

    async def remember_ray(self) -> None:
        """Notes what is in Ray before the first act: on a cluster of others there may be something."""
        nothing = dict.fromkeys(self.setting.booked_in_ray(), 0.0)
        self.foreign_groups = frozenset(await self.ray.groups())
        self.foreign_actors = frozenset(await self.ray.actors())
        self.foreign_booked = await self.ray.booked(nothing) if self.foreign_groups else nothing

    async def submit(self, name: str, *, foresee: bool = False) -> JobHandle:
        """Asks for a job and tells it; with ``foresee`` also what the scheduler says it would do, asked just before."""
        spec = self.setting.job(name)
        plan = await self.client.validate(spec) if foresee else None
        job = await self.client.submit(spec)
        self.jobs[name] = job
        self.story.asked(job.job)
        if plan is not None:
            self.story.decided(account(plan))
        return job

    async def running(self, job: JobHandle) -> Job:
        """Waits until a job runs, and notes its process."""
        found = await job.running(START_S)
        for worker in found.workers:
            self.slowest_start_ms = max(self.slowest_start_ms, worker.start_ms)
            if (process := identify(worker.pid)) is not None:
                self.processes.append(process)
        return found

    async def waiting_again(self, job: JobHandle) -> Job:
        """Waits until a job that yielded waits again and says what for."""
        return await job.until(
            lambda seen: seen.state == JobState.JOB_STATE_PENDING and bool(seen.waiting_for),
            "PENDING with a reason",
            START_S,
        )

    async def ask_worker(self, job: JobHandle, verdict: Verdict) -> dict[str, Any]:
        """Calls ``run`` of a job's worker through Ray, and checks that it sees exactly its GPUs."""
        worker = job.workers()[0]
        began = time.monotonic()
        answer: dict[str, Any] = await self.ray.call(worker, "run", 3)
        took_ms = round((time.monotonic() - began) * 1000)
        given = ",".join(worker.devices)
        verdict.check(
            f"{job.name} sees {answer['visible_devices']!r}, was given {given!r}", answer["visible_devices"] == given
        )
        resumed = f", going on from step {answer['resumed_from']}" if answer["resumed_from"] else ""
        seen = f"GPU {answer['visible_devices']}" if answer["visible_devices"] else "no GPU"
        self.story.measured(
            f"{job.name}.run(3) through Ray answered in {took_ms} ms: "
            f"step {answer['steps_done']}{resumed}; it sees {seen} of {worker.node}"
        )
        return answer

    async def keep_busy(self, job: JobHandle) -> None:
        """Leaves a job's worker at work until it is asked to stop."""
        await self.ray.start(job.workers()[0], "run", STEPS_FOR_EVER)

    async def end(self, *names: str, cancelled: bool) -> None:
        """Cancels or completes jobs, and waits until they have ended."""
        handles = [self.jobs[name] for name in names]
        for job in handles:
            await (job.cancel("the act is over") if cancelled else job.complete("the act is over"))
        await asyncio.gather(*(job.finished(END_S) for job in handles))
        self.story.happened(f"{'cancelled' if cancelled else 'completed'}: {', '.join(names)}")

    async def pg_stats(self) -> PlacementGroupPoolStats:
        """Counts of the pool's placement groups."""
        return (await self.client.get_pool(POOL)).pg_stats

    async def preemptions(self) -> int:
        """How many victims yielded so far."""
        return (await self.client.stats()).total_preemptions

    async def group_kind(self, job: JobHandle) -> str:
        """Kind of the placement group that a job's worker is in: "RESERVED" or "DYNAMIC"."""
        wanted = job.job.workers[0].allocation.placement_group_id
        for group in await self.client.list_placement_groups(pool=POOL):
            if group.name.removeprefix("placementGroups/") == wanted:
                return PlacementGroupKind.Name(group.kind).removeprefix("PLACEMENT_GROUP_KIND_")
        return "NONE"

    async def tell_why(self, job: JobHandle) -> None:
        """Tells why a job waits, and what would unblock it, as the scheduler explains it."""
        explanation = await job.explain()
        self.story.decided(explanation.summary or f"{job.name} waits: {waits_for(job.job)}")
        for change in explanation.unblock[:2]:
            self.story.decided(f"what would let it start: {change}")

    async def show_gpus(self) -> None:
        self.story.gpus(await self.client.list_nodes())


def where(job: JobHandle) -> str:
    return words.places_of(job.job)


def account(explanation: Explanation) -> str:
    """What the scheduler says it would do, and why, in its own words."""
    parts = [explanation.summary or explanation.verdict]
    parts += [f"{victim.victim}: {victim.reason} (rule {victim.rule})" for victim in explanation.victims]
    return "; ".join(part for part in parts if part)


def waits_for(job: Job) -> str:
    """What a job waits for, in the scheduler's words."""
    return "; ".join(reason.message for reason in job.waiting_for)


PAUSE_S = 0.005


class Responsiveness:
    """Measures from entering the block until :meth:`stop`, or its end.

    Attributes:
        count: calls so far.
    """

    def __init__(self, address: str) -> None:
        self._client = Client(address)
        self._times_ms: list[float] = []
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def count(self) -> int:
        return len(self._times_ms)

    async def __aenter__(self) -> Self:
        await self._client.stats()  # The connection is not what is measured.
        self._task = asyncio.create_task(self._sample())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        await self._client.close()

    async def stop(self) -> None:
        self._stopping.set()
        if self._task is not None:
            await self._task

    @property
    def p99_ms(self) -> float:
        """The time within which 99 % of the calls were answered, in milliseconds."""
        ordered = sorted(self._times_ms)
        return ordered[len(ordered) * 99 // 100] if ordered else float("inf")

    async def _sample(self) -> None:
        while not self._stopping.is_set():
            began = time.perf_counter()
            await self._client.stats()
            self._times_ms.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(PAUSE_S)


POOL = "rlhf"
FACTORS = ("1", "0.75", "0.5", "0.25", "0.1")
"""Scales that are tried, the largest first."""

CANCEL_TIMEOUT_S = 0.5
KILL_TIMEOUT_S = 3.0

WORKERS = "callboard.demo.workers"

POLICY = PreemptionPolicy(
    label_rules={"role": {"train": ["reward", "rollout"], "reward": ["rollout"]}},
    aggressiveness="MEDIUM",
    enable_cross_pool=False,
    cancel_timeout=CANCEL_TIMEOUT_S,
    kill_timeout=KILL_TIMEOUT_S,
)


@dataclass(frozen=True, slots=True)
class Role:
    """One kind of job.

    Attributes:
        cpu: CPUs of its worker, at scale 1.
        memory_mib: memory of its worker, at scale 1.
    """

    role: str
    priority: float
    cpu: str
    memory_mib: int
    actor: str = "RLHFWorker"


ROLES = {
    "rollout-00": Role("rollout", 3.0, "1.5", 1024),
    "rollout-01": Role("rollout", 3.0, "1.5", 1024),
    "reward-00": Role("reward", 8.5, "2", 2048),
    "train-00": Role("train", 9.0, "2", 2048),
    "rollout-extra": Role("rollout", 4.5, "1.5", 1024),
    "rollout-slow": Role("rollout", 3.0, "1.5", 1024, "SlowCancelWorker"),
    "rollout-urgent": Role("rollout", 6.0, "1.5", 1024),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything at one scale.

    Attributes:
        factor: the scale, as text.
    """

    factor: str = "1"

    def pool(self) -> PoolSpec:
        """The pool: 6 CPU, 8 GiB and 6 GPUs; two reserved placement groups, up to two dynamic ones."""
        return PoolSpec(
            name=POOL,
            nominal=self.amounts("6", 8192, "6"),
            pg_pool=PgPoolSpec(reserved=[self.amounts("2", 2048, "1")] * 2, max_dynamic=2, reuse=True),
        )

    def job(self, name: str) -> JobSpec:
        """The job of that name: one worker with one GPU."""
        role = ROLES[name]
        return JobSpec(
            name=name,
            pool=POOL,
            priority=role.priority,
            labels={"role": role.role},
            components=[self._component(role.role, role)],
        )

    def everything_at_once(self, pool: str) -> JobSpec:
        """One job as large as the demonstration ever gets: two reserved groups and two dynamic ones."""
        parts = [
            ("train", "train-00"),
            ("reward", "reward-00"),
            ("rollout-a", "rollout-00"),
            ("rollout-b", "rollout-01"),
        ]
        return JobSpec(
            name="rehearsal",
            pool=pool,
            components=[self._component(component, ROLES[name]) for component, name in parts],
        )

    def amounts(self, cpu: str, memory_mib: int, gpu: str) -> dict[str, str]:
        factor = Decimal(self.factor)
        return {"cpu": str(Decimal(cpu) * factor), "memory": f"{int(memory_mib * factor)}MiB", "gpu": _gpu(gpu, factor)}

    def booked_in_ray(self) -> dict[str, float]:
        """What Ray must say is taken while both reserved and both dynamic groups exist."""
        factor = Decimal(self.factor)
        memory = sum(int(mib * factor) for mib in (2048, 2048, 1024, 1024)) << 20
        return {"CPU": float(7 * factor), "GPU": float(4 * min(factor, Decimal(1))), "memory": float(memory)}

    def _component(self, name: str, role: Role) -> ComponentSpec:
        return ComponentSpec(
            name,
            f"{WORKERS}:{role.actor}",
            resources=self.amounts(role.cpu, role.memory_mib, "1"),
            kwargs={"role": role.role},
        )


def settings() -> Iterator[Setting]:
    """Every scale, the largest first."""
    return (Setting(factor) for factor in FACTORS)


def cpu_only(pool: str) -> dict[str, Any]:
    """A job without a GPU, as a plain mapping."""
    return {
        "name": "cpu-only",
        "pool": pool,
        "components": [
            {"name": "cpu", "actor": f"{WORKERS}:RLHFWorker", "resources": {"cpu": "0.1"}, "kwargs": {"role": "cpu"}}
        ],
    }


def _gpu(count: str, factor: Decimal) -> str:
    # A worker's one GPU becomes a share; a quota above one device must stay whole.
    scaled = Decimal(count) * factor
    return str(scaled if scaled <= 1 else max(1, int(scaled)))


def own_plan(agents: int, dealt: MachineGpus, **more: Any) -> ClusterPlan:
    """The plan of a demonstration's own cluster: beside all others, and gone with the program.

    Args:
        dealt: GPUs that its nodes are dealt; none: each has simulated ones of its own.
        more: further fields of the plan.
    """
    base, name = run_directory(), f"demo-{os.getpid()}"
    return ClusterPlan(
        name=name,
        directory=cluster_directory(name, base),
        port=free_port(),
        agents=agents,
        machine_gpus=dealt.ids,
        real_gpus=dealt.real,
        block=free_block(record.block for record in recorded_clusters(base)),
        **more,
    )


async def taken_down(cluster: LocalCluster, verdict: Verdict) -> tuple[str, ...]:
    """Ends a cluster, and notes that nothing of it is left; returns what is."""
    left: tuple[str, ...] = ()
    try:
        await cluster.stop()
    except Leftovers as error:
        left = error.what
    verdict.check(f"left on the machine: {', '.join(left) or 'nothing'}", not left)
    verdict.check("files of the cluster are left", not cluster.plan.directory.exists())
    return left
