"""The shapes of pools and jobs that clients ask for."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from callboard.model.policy import PreemptionPolicy, label_rules
from callboard.model.quantities import Number, Resources
from callboard.model.specs import (
    NO_PG_POOL,
    ComponentSpec,
    Fencing,
    JobSpec,
    OnPreempt,
    PgPoolSpec,
    PoolSpec,
    RestartPolicy,
    RestartScope,
    Strategy,
)
from callboard.simulation.world.machines import Machine

GPUS = (4, 4, 8, 2)
ZONES = ("east", "west")

SESSION_LEASE_MS = 20_000

POOLS = ("rlhf", "rlhf", "batch", "team-a", "team-b", "shared")
ROLES: tuple[dict[str, str], ...] = (
    {},
    {},
    {"role": "train"},
    {"role": "rollout"},
    {"role": "rollout"},
    {"role": "reward"},
)
ASKS: tuple[dict[str, Number], ...] = (
    {"gpu": 1, "cpu": 1},
    {"gpu": 1, "cpu": 1},
    {"gpu": 1, "cpu": 2, "memory": "4GiB"},
    {"gpu": 2, "cpu": 2},
    {"gpu": 0.5},
    {"gpu": 0.25, "cpu": 0.5},
    {"cpu": 2, "memory": "1GiB"},
)


MODELS = (("A100",), ("A100", "H200"), ("H200",))


def machines(count: int) -> list[Machine]:
    """The machines of a cluster, of several sizes, in two zones."""
    return [
        Machine(
            node_id=f"n{number}",
            gpus=GPUS[number % len(GPUS)],
            cpu_milli=16_000,
            memory_bytes=64 << 30,
            labels={"zone": ZONES[number % len(ZONES)]},
            gpu_models=MODELS[number % len(MODELS)],
        )
        for number in range(count)
    ]


def policy(chance: Random) -> PreemptionPolicy:
    return PreemptionPolicy(
        label_rules=label_rules({"role": {"train": ["rollout", "reward"], "reward": ["rollout"]}}),
        enable_cross_pool=chance.random() < 0.7,
        cancel_timeout_ms=chance.choice([500, 2_000, 10_000]),
        kill_timeout_ms=chance.choice([1_000, 5_000]),
        min_runtime_ms=chance.choice([0, 0, 2_000]),
        preemption_delay_ms=chance.choice([0, 0, 500]),
        max_victims_per_round=chance.choice([0, 0, 2]),
        max_preemptions_per_job=chance.choice([0, 0, 3]),
    )


def pool_spec(name: str, gpus: int, chance: Random) -> PoolSpec:
    """One of the pools, for a cluster of so many GPUs."""
    unit = Resources.parse({"cpu": 1, "gpu": 1})

    def share(part: float) -> tuple[tuple[str, int], ...]:
        return (("gpu", max(1, round(gpus * part)) * 1_000),)

    if name == "rlhf":
        pg_pool = PgPoolSpec(
            reserved=(unit,) * chance.choice([1, 2, 3]),
            max_dynamic=max(2, gpus // 2),
            reuse=chance.random() < 0.8,
            idle_ttl_ms=chance.choice([3_000, 30_000]),
            reserved_lendable=chance.random() < 0.5,
            charge_reserved=chance.random() < 0.3,
            creation_timeout_ms=chance.choice([5_000, 20_000]),
        )
        return PoolSpec(name=name, nominal=share(0.6), pg_pool=pg_pool, protected=chance.random() < 0.2)
    if name in ("team-a", "team-b"):
        groups = PgPoolSpec(max_dynamic=gpus, idle_ttl_ms=5_000) if name == "team-a" else NO_PG_POOL
        return PoolSpec(
            name=name,
            nominal=share(0.3),
            cohort="teams",
            lend_limit=chance.choice([(), share(0.1)]),
            borrow_limit=chance.choice([(), share(0.2)]),
            pg_pool=groups,
        )
    if name == "batch":
        return PoolSpec(name=name, nominal=(*share(0.5), ("cpu", gpus * 2_000)))
    return PoolSpec(name=name, nominal=())


def job_spec(name: str, chance: Random) -> JobSpec:
    fields: dict[str, Any] = {}
    if chance.random() < 0.15:
        fields["node_selector"] = (("zone", chance.choice(ZONES)),)
        fields["node_selector_soft"] = chance.random() < 0.5
    if chance.random() < 0.1:
        fields["wait_for_nodes_ms"] = 60_000
    if chance.random() < 0.1:
        fields["starvation_after_ms"] = 20_000
    if chance.random() < 0.08:
        fields["session_lease_ms"] = SESSION_LEASE_MS
    # Chance of its own, so that seeds keep the rest of their story.
    memory = Random(name)  # noqa: S311 - to be repeated by its seed
    return JobSpec(
        name=name,
        pool=chance.choice(POOLS),
        components=tuple(_asking_memory(component, memory) for component in _components(chance)),
        priority_milli=chance.choice([1_000, 2_000, 3_000, 4_500, 5_000, 6_000, 8_500, 9_000, 9_500]),
        labels=tuple(sorted(chance.choice(ROLES).items())),
        placement=chance.choice([Strategy.PACK, Strategy.PACK, *Strategy]),
        preemptible=chance.random() < 0.93,
        min_runtime_ms=chance.choice([0, 0, 3_000]),
        grace_ms=chance.choice([None, None, 300]),
        on_preempt=chance.choice([OnPreempt.REQUEUE, OnPreempt.REQUEUE, OnPreempt.REQUEUE, OnPreempt.CANCEL]),
        restart=RestartPolicy(
            max_restarts=chance.choice([0, 1, 3, 10]),
            window_ms=chance.choice([0, 60_000]),
            scope=chance.choice(list(RestartScope)),
        ),
        ttl_after_finished_ms=chance.choice([None, None, 30_000]),
        estimated_duration_ms=chance.choice([0, 20_000]),
        fencing=chance.choice([Fencing.RELAXED, Fencing.RELAXED, Fencing.STRICT]),
        start_timeout_ms=chance.choice([5_000, 20_000]),
        never_preempts=chance.random() < 0.05,
        **fields,
    )


def _asking_memory(component: ComponentSpec, chance: Random) -> ComponentSpec:
    """A component, sometimes with memory of its GPUs, or of a certain model."""
    if not component.resources.gpu_milli or chance.random() < 0.75:
        return component
    amount = chance.choice([10, 30, 60, 100]) << 30
    model = chance.choice(["", "", "A100", "H200"])
    resources = replace(component.resources, gpu_memory_bytes=amount if chance.random() < 0.7 else 0, gpu_model=model)
    return replace(component, resources=resources)


def _components(chance: Random) -> tuple[ComponentSpec, ...]:
    entry = "run" if chance.random() < 0.75 else ""
    workers = chance.choice([1, 1, 1, 2, 2, 4, 8])
    most = workers + chance.choice([1, 3]) if chance.random() < 0.2 else workers
    main = ComponentSpec(
        name="main",
        actor="simulated:Actor",
        entry=entry,
        min_workers=workers,
        max_workers=most,
        resources=Resources.parse(chance.choice(ASKS)),
    )
    if chance.random() < 0.85:
        return (main,)
    count = chance.choice([1, 2])
    side = ComponentSpec(
        name="side",
        actor="simulated:Actor",
        min_workers=count,
        max_workers=count,
        resources=Resources.parse({"cpu": 0.5, "gpu": chance.choice([0, 0.5])}),
        pool=chance.choice(["", "", "shared"]),
    )
    return (main, side)
