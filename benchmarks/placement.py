"""How fast is a placement found, and does every text end well?

    python benchmarks/placement.py [--gpus 10000] [--fuzz 100000] [--seed 1] [--json]

Without ``--fuzz``: the time from a config's text to a plan, and of one strategy alone, on clusters of so many GPUs; the
best and the median of several runs, as CPU time of this process, which other programs on the machine disturb little.
With it: so many random changes of valid files, each of which must end in a plan or in located faults.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script, from anywhere

from callboard.placement import Cluster, Placement, component_placement_for, plan_placement
from tests.placement import mutations

RUNS = 9


@dataclass(frozen=True)
class Figure:
    """One row: what was placed where, and how long it took."""

    what: str
    nodes: str
    workers: int
    best_ms: float
    median_ms: float


def measured(what: str, nodes: str, workers: int, call: Callable[[], object]) -> Figure:
    """The CPU time of a call."""
    taken: list[float] = []
    for _ in range(RUNS):
        gc.collect()
        begun = time.process_time()
        call()
        taken.append((time.process_time() - begun) * 1000)
    return Figure(what, nodes, workers, min(taken), statistics.median(taken))


def _placements(text: str, cluster: Cluster) -> dict[str, list[Placement]]:
    return component_placement_for(text, cluster).resolve_all()


def config(text: str, more: str = "") -> str:
    """A config with these components."""
    return f"cluster: {{component_placement: {{{text}}}}}\n{more}"


def figures(gpus: int) -> Iterator[Figure]:
    """The rows for clusters of so many GPUs."""
    reasoning = (
        "runner: {task_type: reasoning}\nactor: {model: {tensor_model_parallel_size: 8}}\n"
        "rollout: {tensor_parallel_size: 4}\n"
    )
    last = gpus - 1
    cases = (
        ("one process per GPU", config("actor: all")),
        ("two components on every GPU", config('"actor,rollout": all')),
        ("eight GPUs per process", config(f'rollout: "0-{last}:0-{gpus // 8 - 1}"')),
        ("four processes per GPU", config(f'env: "0-{last}:0-{4 * gpus - 1}"')),
        ("collocated, strided", config('"actor,rollout": all', reasoning)),
        ("a segment per other GPU", config(f'actor: "{",".join(str(rank) for rank in range(0, gpus, 2))}"')),
    )
    for nodes in (f"{gpus // 8}x8", f"{gpus // 1000 or 1}x1000"):
        cluster = Cluster.from_nodes(nodes)
        for what, text in cases:
            if "1000" in nodes and "segment" not in what and "one process" not in what:
                continue
            plan = plan_placement(text, cluster)
            yield measured(f"{what}: text to plan", nodes, len(plan.workers), partial(plan_placement, text, cluster))
            yield measured(
                f"{what}: text to placements",
                nodes,
                len(plan.workers),
                partial(_placements, text, cluster),
            )
            strategy = plan.components[0].strategy
            size = plan.components[0].world_size
            yield measured(f"{what}: strategy alone", nodes, size, partial(strategy.resolve, plan.cluster))


def fuzz(count: int, seed: int) -> dict[str, float | int]:
    """How ``count`` random changes end. An exception other than faults ends the program."""
    chance = random.Random(seed)  # noqa: S311 - chance that can be repeated, no secret
    known = mutations.cluster()
    ends: Counter[str] = Counter()
    slowest_ms = 0.0
    begun, begun_cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        text = mutations.mutated(chance)
        started = time.process_time()
        ends[mutations.outcome(text, known)] += 1
        slowest_ms = max(slowest_ms, (time.process_time() - started) * 1000)
    return {
        "mutations": count,
        "plans": ends["plan"],
        "faults": ends["faults"],
        "seconds": round(time.perf_counter() - begun, 1),
        "cpu_seconds": round(time.process_time() - begun_cpu, 1),
        "slowest_ms": round(slowest_ms, 1),
    }


def main() -> None:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=10_000)
    parser.add_argument("--fuzz", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.fuzz:
        print(json.dumps(fuzz(options.fuzz, options.seed)))
        return
    rows = list(figures(options.gpus))
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(f"{'what':50} {'nodes':>10} {'workers':>8} {'best ms':>8} {'median ms':>9}")
    for row in rows:
        print(f"{row.what:50} {row.nodes:>10} {row.workers:>8} {row.best_ms:8.1f} {row.median_ms:9.1f}")


if __name__ == "__main__":
    main()
