"""A framework of roles: rollout workers, trainer, trajectory pool, data loader, weight sync, validator.

The trainer, its trajectory pool and the weight sync share one actor (a colocation group) where three would be, and keep
what each needs: one training step at a time, a hundred putters at once.

    callboard up --detach --agents 1 --gpus-per-node 1 --cpus-per-node 8
    python examples/nexrl_style.py
    callboard down

What each size of cluster needs is in examples/plans: `callboard plan examples/plans/small.yaml`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

import ray

from callboard import Client, ComponentSpec, JobHandle, JobSpec

PUTTERS = 100
STEPS = 20
GROUP = "training"


def spec(folder: Path) -> JobSpec:
    """The job. Roles say what the components don't: CPUs, GPUs and calls at once."""
    env = {"EXPERIMENT_PATH": str(folder)}

    def component(name: str, actor: str, **fields: object) -> ComponentSpec:
        return ComponentSpec(name, f"examples.nexrl_workers:{actor}", env=env, **fields)  # type: ignore[arg-type]

    return JobSpec(
        name="nexrl",
        pool="nexrl",
        components=[
            component("rollout", "Rollout", role="rollout_worker", workers=2),
            component("trainer", "Trainer", role="trainer", colocation_group=GROUP),
            component("trajectory_pool", "TrajectoryPool", role="trajectory_pool", colocation_group=GROUP),
            component("weight_sync", "WeightSync", role="weight_sync", colocation_group=GROUP),
            component("data_loader", "DataLoader", role="data_loader", kwargs={"items": 10_000}),
            component("validator", "Validator", role="validator"),
        ],
    )


async def train(job: JobHandle) -> None:
    """Rounds of rollouts, steps and new weights, while a hundred putters crowd the pool."""
    rollouts = job.workers("rollout")
    (trainer,) = job.workers("trainer")
    (pool,) = job.workers("trajectory_pool")
    (sync,) = job.workers("weight_sync")
    (loader,) = job.workers("data_loader")
    (validator,) = job.workers("validator")

    # A put waits until all hundred are inside: with fewer calls at once this would never end.
    await pool.expect.remote(PUTTERS)
    prompts = await loader.next.remote(PUTTERS)
    played = [rollouts[i % len(rollouts)].generate.remote(prompt) for i, prompt in enumerate(prompts)]
    steps = [trainer.step.remote([]) for _ in range(STEPS)]
    # References travel, not values: Ray hands each trajectory from the rollout to the pool.
    puts = [pool.put.remote(trajectory) for trajectory in played]
    await asyncio.gather(*puts)
    await asyncio.gather(*steps)

    for _ in range(3):
        outcome = await trainer.step.remote(pool.take.remote(PUTTERS // 4))
        published = await sync.publish.remote(outcome["weights"])
        await asyncio.gather(*(rollout.load.remote(published["weights"]) for rollout in rollouts))
        print(
            f"  step {outcome['step']}: mean reward {outcome['mean_reward']:.3f}, "
            f"weights {published['weights']:.3f} (version {published['version']}) on {len(rollouts)} rollouts"
        )
    print(f"  the validator says: {await validator.judge.remote(await trainer.state.remote())}")
    at_once, served = await trainer.at_once.remote(), await pool.served.remote()
    print(f"measured: {served} putters were in the pool at once, and never more than {at_once} step ran")


async def end(job: JobHandle, folder: Path) -> None:
    """Cancels the job while a step is busy."""
    (trainer,) = job.workers("trainer")
    step = trainer.options(stream=True).long_step.remote()
    assert await (await anext(step)) == "begun"
    await job.cancel("the example is over")
    print(f"cancelled in the middle of a step, which ended as: {await (await anext(step))}")
    await job.finished(timeout=60)
    reached = sorted((folder / "cancelled.txt").read_text(encoding="utf-8").split())
    print(f"cancel() reached: {', '.join(reached)}")


async def main() -> int:
    """Runs the job and says what was seen."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with Client() as cb:
            await cb.connect_ray()
            await cb.ensure_pool("nexrl")
            job = await cb.submit(spec(folder))
            await job.running(timeout=120)
            workers = {worker.actor_name: worker for _, worker in await cb.list_workers(job="nexrl")}
            for actor, worker in workers.items():
                members = f" ({', '.join(worker.members)})" if worker.members else ""
                print(f"  {worker.key.component}/{worker.key.rank}{members}: {actor}")
            status = [sys.executable, "-m", "callboard.cli", "status", "--controller", cb.address, "-o", "wide"]
            print((await asyncio.to_thread(subprocess.run, status, capture_output=True, text=True, check=True)).stdout)
            # Ray's own list; a worker that took a warm spare keeps the spare's name there.
            listed = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
            actors = [workers[each] for each in listed if each in workers]
            group = [each for each in actors if each.key.component == GROUP]
            asked = len(job.job.spec.components)
            print(f"{asked} components: Ray lists {len(actors)} actors, {len(group)} for the three of {GROUP}")
            await train(job)
            await end(job, folder)
    return 0 if len(group) == 1 else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
