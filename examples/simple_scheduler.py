"""An RLHF pool in the words of SimpleScheduler: reserved groups for training and reward, dynamic ones for rollouts.

    python examples/simple_scheduler.py [--runtime process]

It uses the cluster that runs on this machine, or starts one for itself. Only the import line differs from a program
written for that scheduler. Every line that it prints is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import threading
from typing import Any

from callboard.compat import PreemptionAggressiveness, SimpleScheduler, SimpleTaskSpec

WORKER = {"cpu": 2.0, "memory": 2048.0}


class RLHFWorker:
    """A worker of any role. It is defined in this script, and workers get the script's text."""

    def __init__(self, task_id: str) -> None:
        self.task_id = task_id
        self.cancelled = threading.Event()

    def run(self, steps: int = 3) -> str:
        """Some work."""
        done = sum(not self.cancelled.is_set() for _ in range(steps))
        return f"{self.task_id}: {done} of {steps} steps"

    def cancel(self) -> None:
        """Told to yield."""
        self.cancelled.set()


def task(task_id: str, role: str, priority: float) -> dict[str, Any]:
    """The fields of one task."""
    return {
        "task_id": task_id,
        "pool": "rlhf-pg-pool",
        "actor_class": RLHFWorker,
        "resources": WORKER,
        "priority": priority,
        "labels": {"role": role},
        "estimated_duration": 25.0,
        "actor_kwargs": {"task_id": task_id},
    }


def show(what: str, answer: object) -> None:
    """One line of the output."""
    print(json.dumps({"what": what, "answer": answer}), flush=True)


def main() -> None:
    """The acts of the guide."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", choices=["ray", "process"], default="ray")
    runtime = parser.parse_args().runtime

    with SimpleScheduler(runtime=runtime, cpus_per_node=8, memory_per_node="9GiB", gpus_per_node=0) as scheduler:
        scheduler.configure_preemption(
            enable_label_preemption=True,
            label_preemption_rules={"role": {"train": ["reward", "rollout"], "reward": ["rollout"]}},
            preemption_aggressiveness=PreemptionAggressiveness.MEDIUM,
            cancel_timeout=0.5,
            enable_cross_pool_preemption=False,
        )
        made = scheduler.ensure_pool(
            name="rlhf-pg-pool",
            resources={"cpu": 6.0, "memory": 8192.0},
            pg_pool_config={
                "enable": True,
                "high_priority_pg_specs": [WORKER, WORKER],
                "enable_dynamic_pgs": True,
                "max_dynamic_pgs": 2,
                "enable_pg_reuse": True,
            },
        )
        show("ensure_pool", made)
        if runtime == "ray":
            scheduler.client.connect_ray()
        show("rollout-00", scheduler.submit_with_pg_preemption(**task("rollout-00", "rollout", 5.0)))
        show("rollout-01", scheduler.submit_with_pg_preemption(**task("rollout-01", "rollout", 5.0)))
        show("reward-00", scheduler.submit_with_pg_preemption(**task("reward-00", "reward", 8.5)))
        show("train-00", scheduler.submit_with_pg_preemption(**task("train-00", "train", 9.0)))
        show("too-much", scheduler.submit(**task("rollout-02", "rollout", 5.0)))
        show("rollout-extra-00", scheduler.submit_spec(SimpleTaskSpec(**task("rollout-extra-00", "rollout", 6.5))))
        if runtime == "ray":
            import ray  # noqa: PLC0415 - only this runtime needs it

            show("train-00.run", ray.get(scheduler.worker("train-00").run.remote()))
        show("stats", scheduler.stats())
        show("pg_pool_stats", scheduler.pg_pool_stats())
        show("complete", scheduler.complete("train-00"))
        show("delete_agent", scheduler.delete_agent("rollout-extra-00", destroy_pg=True))
        show("no such task", scheduler.complete("train-00"))


if __name__ == "__main__":
    main()
