"""Rollouts, a reward model and a trainer share one pool of GPUs, and yield to each other.

The same six acts as `callboard demo rlhf`, written with the SDK as a trainer would write them:

    callboard up --detach                 # a controller, three nodes with two simulated GPUs each, Ray
    python examples/rlhf_pg_pool.py
    callboard down
"""

from __future__ import annotations

import asyncio
import time

import ray

from callboard import Client, ComponentSpec, JobHandle, JobSpec, PgPoolSpec, PreemptionPolicy

Amounts = dict[str, int | float | str]

POOL = "rlhf"
ROLLOUT: Amounts = {"cpu": 1.5, "memory": "1GiB", "gpu": 1}
LARGE: Amounts = {"cpu": 2, "memory": "2GiB", "gpu": 1}


def job(name: str, role: str, priority: float, resources: Amounts, actor: str = "RLHFWorker") -> JobSpec:
    """One worker of one role."""
    worker = ComponentSpec(role, f"examples.rlhf_workers:{actor}", resources=resources, kwargs={"role": role})
    return JobSpec(name=name, pool=POOL, priority=priority, labels={"role": role}, components=[worker])


async def start(cb: Client, spec: JobSpec) -> JobHandle:
    """Submits a job, waits until its worker answers, and calls it."""
    began = time.monotonic()
    handle = await cb.submit(spec)
    await handle.running(timeout=60)
    took_ms = (time.monotonic() - began) * 1000
    (worker,) = handle.workers()
    answer = await worker.run.remote(3)  # a plain Ray call: callboard is not in the way
    print(f"  {handle.name} runs on {worker.node}, GPU {answer['gpus']}, {took_ms:.0f} ms after it was asked")
    for victim in handle.job.victims:
        print(f"    {victim.victim} yielded in {victim.yield_ms} ms ({victim.outcome.lower()}): {victim.reason}")
    return handle


async def end(*handles: JobHandle) -> None:
    """Completes jobs and waits until nothing of them is left."""
    for handle in handles:
        await handle.complete()
    for handle in handles:
        await handle.finished(timeout=60)


async def show(cb: Client) -> None:
    """The placement groups of the pool, and how often somebody had to yield."""
    groups, stats = (await cb.get_pool(POOL)).pg_stats, await cb.stats()
    print(
        f"  groups: {groups.reserved} reserved ({groups.reserved_idle} idle), {groups.dynamic} dynamic "
        f"({groups.dynamic_idle} idle), used again {groups.reuses} times; preemptions {stats.total_preemptions}"
    )


async def main() -> None:
    """Plays the six acts."""
    async with Client() as cb:
        await cb.connect_ray()
        await cb.set_policy(
            PreemptionPolicy(
                label_rules={"role": {"train": ["reward", "rollout"], "reward": ["rollout"]}},
                aggressiveness="MEDIUM",
                enable_cross_pool=False,
                cancel_timeout="500ms",
            )
        )
        await cb.ensure_pool(
            POOL,
            nominal={"cpu": 6, "memory": "8GiB", "gpu": 6},
            pg_pool=PgPoolSpec(reserved=[LARGE, LARGE], max_dynamic=2),
        )

        print("1. Two rollouts start on dynamic placement groups.")
        rollouts = [await start(cb, job(f"rollout-{rank:02}", "rollout", 3.0, ROLLOUT)) for rank in range(2)]
        await show(cb)

        print("2. A reward model starts on a reserved group.")
        reward = await start(cb, job("reward-00", "reward", 8.5, LARGE))
        await show(cb)

        print("3. A trainer finds its group idle, but the quota short: one rollout yields.")
        train = await start(cb, job("train-00", "train", 9.0, LARGE))
        print(f"    {(await rollouts[1].explain()).summary}")
        await show(cb)

        print("4. A more urgent rollout preempts the other one and uses the group that was left.")
        extra = await start(cb, job("rollout-extra", "rollout", 4.5, ROLLOUT))
        await show(cb)

        print("5. A rollout whose cancel() hangs must yield all the same.")
        await end(*rollouts, extra)
        slow = await start(cb, job("rollout-slow", "rollout", 3.0, ROLLOUT, "SlowCancelWorker"))
        urgent = await start(cb, job("rollout-urgent", "rollout", 6.0, ROLLOUT))
        await show(cb)

        print("6. Everything ends.")
        await end(slow, reward, train, urgent)
        await cb.delete_pool(POOL)
        print(f"  jobs left: {len(await cb.list_jobs(states=['PENDING', 'STARTING', 'RUNNING']))}")
        ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
