"""Predictions beside measurements: what `autoplace` says of a layout, and what an iteration in it really takes.

    python -m benchmarks.truth                      # on this machine's GPUs; on two simulated ones where it has none
    python -m benchmarks.truth --n 10 --json

First `examples/grpo_tiny` runs collocated on each number of GPUs, and `callboard profile` reads what each component
took there and what it took to leave a GPU's memory and come back. With these costs, and with the memory that each
component held, the search chooses a layout. Then layouts run: the chosen one, those with the best predictions, the
collocated and the split ones. Needs torch.

Components that share a GPU take turns on it, staying in its memory (which the search chooses where all of them fit) or
leaving it. Beside these the collocated ones run at once: a GPU that is always busy divides its time among its users, so
the prediction is the same as for turns without leaving, and components that leave it idle are faster than that.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.local import Local, local_cluster
from callboard import JobHandle
from callboard.autoplace import Problem, predict, search
from callboard.cli.local.machine_gpus import machine_gpus
from examples.grpo_tiny.loop import ORDER, Layout, Loop, Way, shares, spec
from examples.grpo_tiny.policy import Sizes

WARM_UP = 3
START_S = 300.0

TINY = Sizes(vocabulary=64, width=64, layers=2, heads=2, prompt=8, answer=24, group=8, prompts=4, pieces=16, rate=3e-3)
"""Without a GPU."""


@dataclass
class Run:
    """A layout and a way to share its GPUs, with what was said of it and what it took.

    Attributes:
        layout: who lies where.
        way: how components use a GPU that they share.
        predicted_seconds: by the model.
        measured_seconds: median.
        iterations: seconds of each.
        chosen: by the search.
    """

    layout: dict[str, list[int]]
    way: Way
    predicted_seconds: float = 0.0
    measured_seconds: float = 0.0
    iterations: tuple[float, ...] = ()
    chosen: bool = False

    @property
    def error(self) -> float:
        """How far the prediction is off: 0.05 is five per cent too high."""
        return self.predicted_seconds / self.measured_seconds - 1 if self.measured_seconds else 0.0


class Costs:
    """What was measured of the components, and what follows from it.

    Args:
        gpus: of the machine.
        memory_gib: of each GPU; 0: simulated ones, which have none.
        pieces: of a batch.
    """

    def __init__(self, gpus: int, memory_gib: float, pieces: int) -> None:
        self._gpus, self._memory_gib, self._pieces = gpus, memory_gib, pieces
        self.seconds: dict[tuple[str, int], list[float]] = {}
        """By component, or by its name with `_switch` for leaving and coming back, and by GPUs."""
        self.weight_sync: list[float] = []
        self.held_gib: dict[str, float] = {}
        """The most memory of a GPU that each component held."""

    def problem(self, way: Way | None = None) -> Problem:
        """The problem: with a way of sharing that is given, or with the search's own choice of it by memory."""
        costs = {each: statistics.median(seconds) for each, seconds in self.seconds.items()}
        components: dict[str, dict[str, Any]] = {}
        for each in ORDER:
            table = {count: seconds for (name, count), seconds in costs.items() if name == each}
            components[each] = {"seconds_by_gpus": table}
            # One figure for every size: what the largest pays.
            switch = max((seconds for (name, _), seconds in costs.items() if name == f"{each}_switch"), default=0.0)
            if way is Way.LEAVING:
                components[each]["switch_seconds"] = switch
            elif way is None and self._memory_gib:
                components[each] |= {"memory_gib": self.held_gib[each], "offload_seconds": switch}
        node = {"gpus": self._gpus} | ({"memory_gib": self._memory_gib} if self._memory_gib else {})
        workflow = {
            # A component on g GPUs works on g pieces at a time.
            "chunks": self._pieces // self._gpus,
            "components": components,
            "edges": [[one, other, "stream"] for one, other in itertools.pairwise(ORDER)],
        }
        return Problem.from_mapping(
            {
                "workflow": workflow,
                "cluster": {"nodes": [node]},
                "weight_sync_seconds": statistics.median(self.weight_sync),
            }
        )

    def predict(self, runs: Sequence[Run]) -> None:
        """Say of each run how long an iteration takes."""
        problems = {way: self.problem(way) for way in (Way.LEAVING, Way.STAYING)}
        for run in runs:
            run.predicted_seconds = predict(problems.get(run.way, problems[Way.STAYING]), run.layout)

    def choice(self) -> tuple[dict[str, list[int]], Way, float]:
        """The layout that the search proposes, whether its components leave their GPUs, and its prediction."""
        plan = search(self.problem())
        layout = {span.component: list(span.gpu_ranks) for span in plan.spans}
        way = Way.LEAVING if any(span.offloads for span in plan.spans) else Way.STAYING
        return layout, way, plan.iteration_seconds


class Truth:
    """Measures on one cluster."""

    def __init__(self, local: Local, sizes: Sizes, gpus: int, memory_gib: float, rounds: int) -> None:
        self._local, self._sizes, self._gpus, self._rounds = local, sizes, gpus, rounds
        self._names = (f"truth-{number}" for number in itertools.count())
        self.costs = Costs(gpus, memory_gib, sizes.pieces)

    async def measure(self, layout: Layout, runs: Sequence[Run], *, costs: bool) -> None:
        """Run a layout once more in every way that `runs` name, and keep what it took.

        Args:
            layout: the layout of all of them.
            runs: what to measure.
            costs: first take the components' costs, while they leave their GPUs to each other.
        """
        name = next(self._names)
        print(f"running {_written(layout)} …", file=sys.stderr, flush=True)
        job = await self._local.client.submit(spec(name, layout, asdict(self._sizes)))
        await job.running(timeout=START_S)
        numbers = itertools.count()
        ways = sorted({run.way: run for run in runs}, key=list(Way).index)
        if costs and Way.LEAVING not in ways:
            ways.insert(0, Way.LEAVING)
        for way in ways:
            loop = Loop(job, layout, self._sizes, way=way)
            if way is not Way.LEAVING:
                await loop.enter(next(numbers))
            seconds = [(await loop.iteration(next(numbers)))[0] for _ in range(WARM_UP + self._rounds)][WARM_UP:]
            self.costs.weight_sync += loop.weight_sync_seconds[WARM_UP:]
            print(f"  {way}: an iteration takes {_seconds(seconds)}", file=sys.stderr, flush=True)
            for run in runs:
                if run.way is way:
                    run.iterations += tuple(seconds)
                    run.measured_seconds = statistics.median(run.iterations)
            if costs and way is Way.LEAVING:
                await self._take_costs(job, name)
        await job.complete()
        await job.finished(timeout=60)

    async def _take_costs(self, job: JobHandle, name: str) -> None:
        """What each component took: medians, as layouts are measured. One iteration of 9.7 s among others of 4 once
        made the mean of five 20 % too high."""
        command = (sys.executable, "-m", "callboard.cli", "profile", name, "--warmup", str(WARM_UP), "-o", "json")
        address = ("--controller", self._local.client.address)
        told = await asyncio.to_thread(subprocess.run, [*command, *address], check=True, capture_output=True, text=True)
        for cost in json.loads(told.stdout)["measured"]:
            self.costs.seconds.setdefault((cost["component"], cost["gpus"]), []).append(cost["median_seconds"])
            print(f"  {cost['component']} on {cost['gpus']}: {cost['median_seconds']:.3f} s", file=sys.stderr)
        for each in ORDER:
            held = await asyncio.gather(*(worker.memory_gib.remote() for worker in job.workers(each)))
            self.costs.held_gib[each] = max(self.costs.held_gib.get(each, 0.0), *held)
        held_gib = ", ".join(f"{each} {held:.1f}" for each, held in self.costs.held_gib.items())
        print(f"  GiB of a GPU held: {held_gib}", file=sys.stderr)

    def layouts(self) -> Iterator[Layout]:
        """Every layout of ranges of measured sizes, once: those that differ in the GPUs' order only are the same."""
        ranges = [range(at, at + count) for count in self.counts() for at in range(self._gpus - count + 1)]
        seen = set()
        for chosen in itertools.product(ranges, repeat=len(ORDER)):
            mirrored = tuple(tuple(sorted(self._gpus - 1 - rank for rank in each)) for each in chosen)
            key = min(tuple(map(tuple, chosen)), mirrored)
            if key not in seen:
                seen.add(key)
                yield dict(zip(ORDER, chosen, strict=True))

    def runs(self) -> Iterator[Run]:
        """Each layout in each way; at once only where everybody has every GPU."""
        for layout in self.layouts():
            shared = any(shares(layout, one, other) for one, other in itertools.combinations(ORDER, 2))
            yield Run(_plain(layout), Way.STAYING)
            if shared:
                yield Run(_plain(layout), Way.LEAVING)
            if all(len(ranks) == self._gpus for ranks in layout.values()):
                yield Run(_plain(layout), Way.AT_ONCE)

    def counts(self) -> Iterator[int]:
        """Numbers of GPUs on which costs are measured."""
        count = 1
        while count <= self._gpus:
            yield count
            count *= 2


async def measure(
    gpus: Sequence[str], memory_gib: float, sizes: Sizes, *, rounds: int, layouts: int, passes: int
) -> list[Run]:
    """The runs, the best predicted first.

    Args:
        gpus: ids of real GPUs; none: two simulated ones.
        memory_gib: of each of them.
        sizes: of model and batch.
        rounds: iterations that count, of each layout.
        layouts: how many of the best predicted layouts to run.
        passes: how often to measure costs and layouts, one after the other.
    """
    async with local_cluster(machine_gpus=gpus, cpus="12", warm_spares=4) as local:
        await local.client.ensure_pool("default")
        count = len(gpus) or 2
        truth = Truth(local, sizes, count, memory_gib, rounds)
        runs = list(truth.runs())
        everywhere = [run for run in runs if all(len(ranks) == count for ranks in run.layout.values())]
        wanted: list[Run] = []
        for _ in range(passes):
            for number in truth.counts():
                layout = _plain(dict.fromkeys(ORDER, range(number)))
                await truth.measure(layout, everywhere if number == count else (), costs=True)
            if not wanted:
                truth.costs.predict(runs)
                runs.sort(key=lambda run: run.predicted_seconds)
                others = [run for run in runs if run not in everywhere]
                wanted = [run for n, run in enumerate(others) if n < layouts or _split(run.layout, count)]
            for layout in [run.layout for n, run in enumerate(wanted) if run.layout not in _layouts(wanted[:n])]:
                await truth.measure(layout, [run for run in wanted if run.layout == layout], costs=False)
        wanted += everywhere
        truth.costs.predict(wanted)
        layout, way, predicted = truth.costs.choice()
        print(f"  weight sync: {_seconds(truth.costs.weight_sync)}", file=sys.stderr)
        print(f"the search proposes {_written(layout)} {way}, {predicted:.3f} s", file=sys.stderr)
        for run in wanted:
            run.chosen = run.way is way and run.layout == layout
        if not any(run.chosen for run in wanted):
            sys.exit("that one did not run; ask for more --layouts")
        return sorted(wanted, key=lambda run: run.predicted_seconds)


def _layouts(runs: Sequence[Run]) -> list[dict[str, list[int]]]:
    return [run.layout for run in runs]


def _seconds(measured: Sequence[float]) -> str:
    each = " ".join(f"{seconds:.2f}" for seconds in measured)
    return f"{statistics.median(measured):.3f} s, the median of {each}"


def _plain(layout: Layout) -> dict[str, list[int]]:
    return {name: list(ranks) for name, ranks in layout.items()}


def _split(layout: Mapping[str, Sequence[int]], gpus: int) -> bool:
    """Whether nobody shares a GPU, and none is left over."""
    ranks = [rank for each in layout.values() for rank in each]
    return len(ranks) == len(set(ranks)) == gpus


def _written(layout: Mapping[str, Sequence[int]]) -> str:
    return "  ".join(f"{name} {','.join(map(str, ranks))}" for name, ranks in layout.items())


def _line(run: Run) -> str:
    seconds = f"{run.predicted_seconds:>9.3f} {run.measured_seconds:>9.3f} {run.error:>+7.1%}"
    return f"{_written(run.layout):<42} {run.way:<8} {seconds}{' chosen' * run.chosen}"


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=10, help="iterations of each layout in a pass (default: 10)")
    parser.add_argument("--layouts", type=int, default=3, help="best predicted layouts to run (default: 3)")
    parser.add_argument("--passes", type=int, default=2, help="how often to do all of it (default: 2)")
    parser.add_argument("--sizes", default="{}", help='JSON: fields of Sizes, such as {"layers": 4}')
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    found = machine_gpus("auto")
    sizes = replace(Sizes() if found.real else TINY, **json.loads(arguments.sizes))
    gpus = found.ids if found.real else ()
    memory_gib = _memory_gib() if found.real else 0.0
    asked = {"rounds": arguments.n, "layouts": arguments.layouts, "passes": arguments.passes}
    runs = asyncio.run(measure(gpus, memory_gib, sizes, **asked))
    if arguments.json:
        print(json.dumps([{**asdict(run), "error": run.error} for run in runs]))
        return
    print(f"{'layout':<42} {'':<8} {'predicted':>9} {'measured':>9} {'error':>7}")
    for run in runs:
        print(_line(run))
    best = min(runs, key=lambda run: run.measured_seconds)
    print(f"The chosen layout is {'' if best.chosen else 'not '}the fastest of those that ran.")


def _memory_gib() -> float:
    import pynvml  # noqa: PLC0415 - only where there are GPUs

    pynvml.nvmlInit()
    return float(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total) / (1 << 30)


if __name__ == "__main__":
    main()
