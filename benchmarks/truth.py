"""Predictions beside measurements: what `autoplace` says of a layout, and what an iteration in it really takes.

    python -m benchmarks.truth                      # on this machine's GPUs; on two simulated ones where it has none
    python -m benchmarks.truth --n 10 --json

First `examples/grpo_tiny` runs collocated on each number of GPUs, and `callboard profile` reads what each component
took there. With these costs the model predicts every layout, and the search chooses one. Then the layouts run: those
with the best predictions, the collocated and the split ones. Needs torch.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import yaml

from benchmarks.local import Local, local_cluster
from callboard.autoplace import Problem, predict, search
from callboard.cli.local.machine_gpus import machine_gpus
from examples.grpo_tiny.loop import ORDER, Layout, Loop, spec
from examples.grpo_tiny.policy import Sizes

WARM_UP = 2
START_S = 300.0

TINY = Sizes(vocabulary=64, width=64, layers=2, heads=2, prompt=8, answer=24, group=8, prompts=4, pieces=16, rate=3e-3)
"""Without a GPU."""


@dataclass
class Run:
    """A layout with what was said of it and what it took.

    Attributes:
        layout: who lies where.
        at_once: components on one GPU used it at the same time.
        predicted_seconds: by the model; None: the model doesn't know such a layout.
        measured_seconds: median.
        iterations: seconds of each.
        chosen: the search chose it.
    """

    layout: dict[str, list[int]]
    at_once: bool
    predicted_seconds: float | None
    measured_seconds: float = 0.0
    iterations: tuple[float, ...] = ()
    chosen: bool = False

    @property
    def error(self) -> float | None:
        """How far the prediction is off: 0.05 is five per cent too high."""
        return None if self.predicted_seconds is None else self.predicted_seconds / self.measured_seconds - 1


class Truth:
    """Measures on one cluster."""

    def __init__(self, local: Local, sizes: Sizes, gpus: int, rounds: int) -> None:
        self._local, self._sizes, self._gpus, self._rounds = local, sizes, gpus, rounds
        self._names = (f"truth-{number}" for number in itertools.count())
        self._weight_sync: list[float] = []

    async def problem(self) -> Problem:
        """The costs, measured collocated on 1, 2, 4 … GPUs."""
        tables: dict[str, dict[int, float]] = {}
        for gpus in self._counts():
            name, seconds = await self._measure(dict.fromkeys(ORDER, range(gpus)))
            print(f"  an iteration: {_seconds(seconds)}", file=sys.stderr)
            for component, cost in self._profile(name).items():
                tables.setdefault(component, {}).update(cost["seconds_by_gpus"])
        for name, table in tables.items():
            print(f"  {name}: {table}", file=sys.stderr)
        print(f"  weight sync: {_seconds(self._weight_sync)}", file=sys.stderr)
        components = {
            each: {
                "seconds_by_gpus": tables[each],
                # One figure for every size: what the largest pays.
                "switch_seconds": max(tables[f"{each}_switch"].values()),
            }
            for each in ORDER
        }
        workflow = {
            # A component on g GPUs works on g pieces at a time.
            "chunks": self._sizes.pieces // self._gpus,
            "components": components,
            "edges": [[one, other, "stream"] for one, other in itertools.pairwise(ORDER)],
        }
        return Problem.from_mapping(
            {
                "workflow": workflow,
                "cluster": {"nodes": [{"gpus": self._gpus}]},
                "weight_sync_seconds": statistics.median(self._weight_sync),
            }
        )

    async def run(self, run: Run) -> None:
        """Run its layout, and keep what it took."""
        _, run.iterations = await self._measure(run.layout, at_once=run.at_once)
        run.measured_seconds = statistics.median(run.iterations)

    def layouts(self) -> Iterator[Layout]:
        """Every layout of ranges of measured sizes, once: those that differ in the GPUs' order only are the same."""
        ranges = [range(at, at + count) for count in self._counts() for at in range(self._gpus - count + 1)]
        seen = set()
        for chosen in itertools.product(ranges, repeat=len(ORDER)):
            mirrored = tuple(tuple(sorted(self._gpus - 1 - rank for rank in each)) for each in chosen)
            key = min(tuple(map(tuple, chosen)), mirrored)
            if key not in seen:
                seen.add(key)
                yield dict(zip(ORDER, chosen, strict=True))

    def _counts(self) -> Iterator[int]:
        count = 1
        while count <= self._gpus:
            yield count
            count *= 2

    async def _measure(self, layout: Layout, *, at_once: bool = False) -> tuple[str, tuple[float, ...]]:
        name = next(self._names)
        print(f"running {_written(layout)} …", file=sys.stderr, flush=True)
        job = await self._local.client.submit(spec(name, layout, asdict(self._sizes)))
        await job.running(timeout=START_S)
        loop = Loop(job, layout, self._sizes, at_once=at_once)
        seconds = [(await loop.iteration(number))[0] for number in range(WARM_UP + self._rounds)]
        self._weight_sync += loop.weight_sync_seconds[WARM_UP:]
        await job.complete()
        await job.finished(timeout=60)
        return name, tuple(seconds[WARM_UP:])

    def _profile(self, job: str) -> dict[str, Any]:
        command = (sys.executable, "-m", "callboard.cli", "profile", job, "--workflow", "--warmup", str(WARM_UP))
        address = ("--controller", self._local.client.address)
        said = subprocess.run([*command, *address], check=True, capture_output=True, text=True).stdout
        components: dict[str, Any] = yaml.safe_load(said)["workflow"]["components"]
        return components


async def measure(gpus: Sequence[str], sizes: Sizes, rounds: int, layouts: int) -> list[Run]:
    """The runs, the best predicted first.

    Args:
        gpus: ids of real GPUs; none: two simulated ones.
        sizes: of model and batch.
        rounds: iterations that count, of each layout.
        layouts: how many of the best predicted layouts to run.
    """
    async with local_cluster(machine_gpus=gpus, cpus="12", warm_spares=4) as local:
        await local.client.ensure_pool("default")
        count = len(gpus) or 2
        truth = Truth(local, sizes, count, rounds)
        problem = await truth.problem()
        plan = search(problem)
        runs = [
            Run(_plain(layout), at_once=False, predicted_seconds=predict(problem, layout)) for layout in truth.layouts()
        ]
        runs.sort(key=lambda run: run.predicted_seconds or 0.0)
        runs[0].chosen = abs((runs[0].predicted_seconds or 0.0) / plan.iteration_seconds - 1) < 1e-3
        wanted = [run for number, run in enumerate(runs) if number < layouts or _pure(run.layout, count)]
        together = _plain(dict.fromkeys(ORDER, range(count)))
        wanted.append(Run(together, at_once=True, predicted_seconds=None))
        for run in wanted:
            await truth.run(run)
            print(_line(run), file=sys.stderr, flush=True)
        return wanted


def _seconds(measured: Sequence[float]) -> str:
    return f"{statistics.median(measured):.3f} s ({min(measured):.3f} to {max(measured):.3f})"


def _plain(layout: Layout) -> dict[str, list[int]]:
    return {name: list(ranks) for name, ranks in layout.items()}


def _pure(layout: Mapping[str, Sequence[int]], gpus: int) -> bool:
    """Whether everybody has every GPU, or nobody shares one."""
    ranks = [rank for each in layout.values() for rank in each]
    return all(len(each) == gpus for each in layout.values()) or len(ranks) == len(set(ranks)) == gpus


def _written(layout: Mapping[str, Sequence[int]]) -> str:
    return "  ".join(f"{name} {','.join(map(str, ranks))}" for name, ranks in layout.items())


def _line(run: Run) -> str:
    predicted = "–" if run.predicted_seconds is None else f"{run.predicted_seconds:.3f}"
    error = "" if run.error is None else f"{run.error:+.1%}"
    marks = " at once" * run.at_once + " chosen" * run.chosen
    return f"{_written(run.layout):<44} {predicted:>9} {run.measured_seconds:>9.3f} {error:>7}{marks}"


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=10, help="iterations of each layout (default: 10)")
    parser.add_argument("--layouts", type=int, default=4, help="best predicted layouts to run (default: 4)")
    parser.add_argument("--pieces", type=int, default=0, help="pieces of a batch")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    found = machine_gpus("auto")
    sizes = Sizes() if found.real else TINY
    sizes = replace(sizes, pieces=arguments.pieces or sizes.pieces)
    runs = asyncio.run(measure(found.ids if found.real else (), sizes, arguments.n, arguments.layouts))
    if arguments.json:
        print(json.dumps([{**asdict(run), "error": run.error} for run in runs]))
        return
    print(f"{'layout':<44} {'predicted':>9} {'measured':>9} {'error':>7}")
    for run in runs:
        print(_line(run))
    best = min(runs, key=lambda run: run.measured_seconds)
    print(f"The chosen layout is {'' if best.chosen else 'not '}the fastest of those that ran.")


if __name__ == "__main__":
    main()
