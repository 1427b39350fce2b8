"""Predictions beside measurements: what `autoplace` says of a layout, and what an iteration in it really takes.

    python -m benchmarks.truth                      # on this machine's GPUs; on two simulated ones where it has none
    python -m benchmarks.truth --n 10 --json

First `examples/grpo_tiny` runs collocated on each number of GPUs, and `callboard profile` reads what each component
took there. With these costs the model predicts every layout, and the search chooses one. Then the layouts run: those
with the best predictions, the collocated and the split ones. Needs torch.

The search knows components that take turns on a GPU. Components that use one at the same time are predicted as if each
had GPUs of its own, with what they take beside each other, which a run of its own measures.

All of this is done `--passes` times, so that costs and measurements see the same machine: what it did for others once
made the same layout 19 % slower in the run that the costs came from than in the one that they were compared with.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

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
        predicted_seconds: by the model.
        measured_seconds: median.
        iterations: seconds of each.
        chosen: nothing is predicted to be faster.
    """

    layout: dict[str, list[int]]
    at_once: bool
    predicted_seconds: float = 0.0
    measured_seconds: float = 0.0
    iterations: tuple[float, ...] = ()
    chosen: bool = False

    @property
    def error(self) -> float:
        """How far the prediction is off: 0.05 is five per cent too high."""
        return self.predicted_seconds / self.measured_seconds - 1 if self.measured_seconds else 0.0


class Truth:
    """Measures on one cluster."""

    def __init__(self, local: Local, sizes: Sizes, gpus: int, rounds: int) -> None:
        self._local, self._sizes, self._gpus, self._rounds = local, sizes, gpus, rounds
        self._names = (f"truth-{number}" for number in itertools.count())
        # By whether components use a GPU at once.
        self._costs: dict[bool, dict[tuple[str, int], list[float]]] = {False: {}, True: {}}
        self._weight_sync: dict[bool, list[float]] = {False: [], True: []}

    async def profile(self) -> None:
        """Measures the costs once more: collocated on 1, 2, 4 … GPUs, and on all of them at once."""
        for gpus, at_once in [*((count, False) for count in self._counts()), (self._gpus, True)]:
            name, seconds = await self._measure(dict.fromkeys(ORDER, range(gpus)), at_once=at_once)
            print(f"  an iteration: {_seconds(seconds)}", file=sys.stderr)
            for cost in self._profile(name):
                self._costs[at_once].setdefault((cost["component"], cost["gpus"]), []).append(cost["median_seconds"])
                told = f"median {cost['median_seconds']:.3f} s, mean {cost['seconds']:.3f} s"
                print(f"  {cost['component']} on {cost['gpus']}: {told}", file=sys.stderr)
        print(f"  weight sync: {_seconds(self._weight_sync[False])}", file=sys.stderr)

    def problem(self, *, at_once: bool = False) -> Problem:
        """What the costs of all passes say; ``at_once``: every component has GPUs of its own, and is as slow there as
        beside the others."""
        costs = {each: statistics.median(seconds) for each, seconds in self._costs[at_once].items()}
        components = {}
        for each in ORDER:
            table = {count: seconds for (name, count), seconds in costs.items() if name == each}
            # One figure for every size: what the largest pays.
            switches = [seconds for (name, _), seconds in costs.items() if name == f"{each}_switch"]
            components[each] = {"seconds_by_gpus": table, "switch_seconds": max(switches, default=0.0)}
        workflow = {
            # A component on g GPUs works on g pieces at a time.
            "chunks": self._sizes.pieces // self._gpus,
            "components": components,
            "edges": [[one, other, "stream"] for one, other in itertools.pairwise(ORDER)],
        }
        return Problem.from_mapping(
            {
                "workflow": workflow,
                "cluster": {"nodes": [{"gpus": self._gpus * (len(ORDER) if at_once else 1)}]},
                "weight_sync_seconds": statistics.median(self._weight_sync[at_once]),
            }
        )

    def model(self) -> Callable[[Run], float]:
        """What predicts the seconds of an iteration, by the costs of all passes so far."""
        turns, beside = self.problem(), self.problem(at_once=True)
        apart = {name: range(at * self._gpus, (at + 1) * self._gpus) for at, name in enumerate(ORDER)}
        return lambda run: predict(beside, apart) if run.at_once else predict(turns, run.layout)

    async def run(self, run: Run) -> None:
        """Run its layout once more, and keep what it took."""
        _, seconds = await self._measure(run.layout, at_once=run.at_once)
        run.iterations += seconds
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
        self._weight_sync[at_once] += loop.weight_sync_seconds[WARM_UP:]
        await job.complete()
        await job.finished(timeout=60)
        return name, tuple(seconds[WARM_UP:])

    def _profile(self, job: str) -> list[dict[str, Any]]:
        """What each component took: medians, as layouts are measured. One iteration of 9.7 s among others of 4 once
        made the mean of five 20 % too high."""
        command = (sys.executable, "-m", "callboard.cli", "profile", job, "--warmup", str(WARM_UP), "-o", "json")
        address = ("--controller", self._local.client.address)
        said = subprocess.run([*command, *address], check=True, capture_output=True, text=True).stdout
        found: list[dict[str, Any]] = json.loads(said)["measured"]
        return found


async def measure(gpus: Sequence[str], sizes: Sizes, rounds: int, layouts: int, passes: int) -> list[Run]:
    """The runs, the best predicted first.

    Args:
        gpus: ids of real GPUs; none: two simulated ones.
        sizes: of model and batch.
        rounds: iterations that count, of each layout.
        layouts: how many of the best predicted layouts to run.
        passes: how often to measure costs and layouts, one after the other.
    """
    async with local_cluster(machine_gpus=gpus, cpus="12", warm_spares=4) as local:
        await local.client.ensure_pool("default")
        count = len(gpus) or 2
        truth = Truth(local, sizes, count, rounds)
        runs = [Run(_plain(layout), at_once=False) for layout in truth.layouts()]
        wanted: list[Run] = []
        for _ in range(passes):
            await truth.profile()
            if not wanted:
                runs.sort(key=truth.model())
                wanted = [run for number, run in enumerate(runs) if number < layouts or _pure(run.layout, count)]
                wanted.append(Run(_plain(dict.fromkeys(ORDER, range(count))), at_once=True))
            for run in wanted:
                await truth.run(run)
                print(f"  an iteration: {_seconds(run.iterations[-rounds:])}", file=sys.stderr, flush=True)
        predicted = truth.model()
        for run in (*runs, wanted[-1]):
            run.predicted_seconds = predicted(run)
        best = min((*runs, wanted[-1]), key=lambda run: run.predicted_seconds)
        best.chosen = True
        found = search(truth.problem()).iteration_seconds
        turns = min(run.predicted_seconds for run in runs)
        print(f"taking turns, the search predicts {found:.3f} s, and so does the model: {turns:.3f} s", file=sys.stderr)
        if best not in wanted:
            sys.exit(f"the costs of all passes choose {_line(best)}, which did not run; ask for more --layouts")
        return wanted


def _seconds(measured: Sequence[float]) -> str:
    each = " ".join(f"{seconds:.2f}" for seconds in measured)
    return f"{statistics.median(measured):.3f} s, the median of {each}"


def _plain(layout: Layout) -> dict[str, list[int]]:
    return {name: list(ranks) for name, ranks in layout.items()}


def _pure(layout: Mapping[str, Sequence[int]], gpus: int) -> bool:
    """Whether everybody has every GPU, or nobody shares one."""
    ranks = [rank for each in layout.values() for rank in each]
    return all(len(each) == gpus for each in layout.values()) or len(ranks) == len(set(ranks)) == gpus


def _written(layout: Mapping[str, Sequence[int]]) -> str:
    return "  ".join(f"{name} {','.join(map(str, ranks))}" for name, ranks in layout.items())


def _line(run: Run) -> str:
    marks = " at once" * run.at_once + " chosen" * run.chosen
    seconds = f"{run.predicted_seconds:>9.3f} {run.measured_seconds:>9.3f} {run.error:>+7.1%}"
    return f"{_written(run.layout):<44} {seconds}{marks}"


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=10, help="iterations of each layout in a pass (default: 10)")
    parser.add_argument("--layouts", type=int, default=4, help="best predicted layouts to run (default: 4)")
    parser.add_argument("--passes", type=int, default=2, help="how often to do all of it (default: 2)")
    parser.add_argument("--sizes", default="{}", help='JSON: fields of Sizes, such as {"layers": 4}')
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    found = machine_gpus("auto")
    sizes = replace(Sizes() if found.real else TINY, **json.loads(arguments.sizes))
    gpus = found.ids if found.real else ()
    runs = asyncio.run(measure(gpus, sizes, arguments.n, arguments.layouts, arguments.passes))
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
