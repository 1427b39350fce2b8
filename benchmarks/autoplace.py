"""How fast is the placement search, and how close does it come? Seconds and gap by components and GPUs.

    python benchmarks/autoplace.py [--components 3 8 12] [--gpus 64 1024] [--seeds 5] [--time-limit 10]
                                   [--without-solver] [--json]

Workflows are drawn with a fixed seed: times that scale almost linearly, a serial part, switching that is always paid
(one in two), one or two predecessors per component, streams and barriers alike. Every legal count is a divisor-like
size up to all GPUs, as model-parallel jobs have them. Each row is the median and the worst of a few seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from callboard.autoplace import Problem, Status, search

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
COMPONENTS = (3, 4, 5, 6, 8, 10, 12, 16)
GPUS = (8, 64, 1024, 4096)
CHUNKS = (1, 8, 32, 64)


@dataclass(frozen=True)
class Figure:
    """One row."""

    components: int
    gpus: int
    seconds_median: float
    seconds_worst: float
    gap_median: float
    gap_worst: float
    proved: int
    runs: int


def workflow(components: int, gpus: int, seed: int) -> dict[str, Any]:
    """A drawn workflow."""
    draw = random.Random(seed)  # noqa: S311 - a fixed load, no secret
    table: dict[str, Any] = {}
    for i in range(components):
        step = draw.choice((1, 2, 4)) if gpus >= 4 else 1
        work, serial = draw.uniform(80, 700) * gpus / 8, draw.uniform(0.3, 5)
        table[f"c{i}"] = {
            "seconds_by_gpus": {g: round(work / g + serial, 3) for g in SIZES if g <= gpus and g % step == 0},
            "switch_seconds": draw.choice((0, 0, 1.5, 4.0)),
        }
    edges = [
        [f"c{i}", f"c{j}", draw.choice(("barrier", "stream"))]
        for j in range(1, components)
        for i in draw.sample(range(j), min(j, draw.choice((1, 1, 2))))
    ]
    return {"gpus": gpus, "chunks": CHUNKS[seed % len(CHUNKS)], "components": table, "edges": edges}


def measured(components: int, gpus: int, seeds: int, time_limit: float, solver: bool | None) -> Figure:
    """Searches a few workflows of one size."""
    seconds, gaps, proved = [], [], 0
    for seed in range(seeds):
        problem = Problem.from_mapping(workflow(components, gpus, seed))
        started = time.perf_counter()
        plan = search(problem, time_limit=time_limit, solver=solver)
        seconds.append(time.perf_counter() - started)
        gaps.append(plan.gap)
        proved += plan.status is Status.OPTIMAL
    return Figure(
        components, gpus, statistics.median(seconds), max(seconds), statistics.median(gaps), max(gaps), proved, seeds
    )


def main() -> None:
    """Prints one table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--components", type=int, nargs="+", default=list(COMPONENTS))
    parser.add_argument("--gpus", type=int, nargs="+", default=list(GPUS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument("--without-solver", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}, time limit {given.time_limit:g} s", file=sys.stderr)
    if not given.json:
        print(f"{'components':>10} {'GPUs':>5} {'median':>8} {'worst':>8} {'gap':>7} {'worst':>7}  proved")
    figures = []
    for components in given.components:
        for gpus in given.gpus:
            figure = measured(components, gpus, given.seeds, given.time_limit, False if given.without_solver else None)
            figures.append(figure)
            if not given.json:
                print(
                    f"{components:>10} {gpus:>5} {figure.seconds_median:>7.3f}s {figure.seconds_worst:>7.3f}s "
                    f"{figure.gap_median:>7.2%} {figure.gap_worst:>7.2%}  {figure.proved}/{figure.runs}",
                    flush=True,
                )
    if given.json:
        print(json.dumps([asdict(figure) for figure in figures]))


if __name__ == "__main__":
    main()
