"""The setting of the demonstration: pool, policy and jobs, at a scale that fits the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from callboard.model.requests import ComponentSpec, JobSpec, PgPoolSpec, PoolSpec, PreemptionPolicy

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
        role: its label.
        priority: its priority.
        cpu: CPUs of its worker, at scale 1.
        memory_mib: memory of its worker, at scale 1.
        actor: class of its worker.
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
        """Amounts at this scale."""
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
