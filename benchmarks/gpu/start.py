"""From a submit to the first result on a card, with torch preloaded; and preemptions of a worker that holds most of it.

    python3 -m benchmarks.gpu.start [--n 20] [--gib 60] [--budget 280] [--device cpu]

Uses one GPU. Three kinds of starts in one run: a worker that takes a spare with torch imported, one that takes a spare
without, and an actor of raw Ray. Then jobs preempt each other on the card, each by a worker that fills the memory which
the one before held: cooperative victims first, then some whose `cancel()` hangs. With `--device cpu` it does the same
without a card, on a simulated one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import ray

from benchmarks.gpu.workers import GIB, Card
from benchmarks.local import Local, local_cluster
from callboard.cli.local.machine_gpus import machine_gpus
from callboard.client.jobs import JobHandle

CANCEL_TIMEOUT_S = 0.5
WAIT_S = 120.0
RESERVED = 9.0
"""Priority from which a pool's reserved group is used; each preemptor is above its victim by `STEP`."""
STEP = 5.0
SPARES = 4
SLACK_GIB = 2.0
"""Of a card, for what CUDA itself takes in each process."""


class Run:
    """One cluster, and what is measured on it."""

    def __init__(self, local: Local, arguments: argparse.Namespace) -> None:
        self.local = local
        self.device: str = arguments.device
        self.gib: float = arguments.gib
        self.rounds: int = arguments.n
        self.until = time.monotonic() + arguments.budget
        self.numbers = itertools.count(1)
        self.wrong: list[str] = []
        self.missed = 0

    def spec(self, pool: str, priority: float, *, hangs: bool = False) -> dict[str, Any]:
        """A job of one worker on the card."""
        component = {
            "name": "card",
            "actor": "benchmarks.gpu.workers:Card",
            "kwargs": {"share": 0.0, "hangs": hangs, "device": self.device},
            "entry": "run",
            "resources": {"cpu": 1, "gpu": 1},
        }
        name = f"start-{next(self.numbers)}"
        return {"name": name, "pool": pool, "priority": priority, "on_preempt": "cancel", "components": [component]}

    async def pool(self, name: str, preload: list[str]) -> None:
        """A pool whose only group is kept, so that a start is no more than a start."""
        pg_pool = {"reserved": [{"cpu": 1, "gpu": 1}], "max_dynamic": 0, "reserved_min_priority": RESERVED}
        await self.local.client.ensure_pool(name, pg_pool=pg_pool, preload=preload)

    async def started(self, pool: str, priority: float, **fields: Any) -> tuple[float, JobHandle]:
        """Seconds from a submit until the worker's first result on the card."""
        await self.spare(preloaded=pool == "preloaded")
        spec = self.spec(pool, priority, **fields)
        begun = time.perf_counter()
        job = await self.local.client.submit(spec)
        await job.running(timeout=WAIT_S)
        (worker,) = job.workers("card")
        first = await worker.method("first").remote()
        took_s = time.perf_counter() - begun
        if first != 8.0:
            self.wrong.append(f"the first result was {first}")
        (record,) = job.job.workers
        if record.preloaded is not (pool == "preloaded"):
            self.missed += 1
            print(f"  not as wanted: {record.preload_missed or record.cold_reason}", file=sys.stderr)
        return took_s, job

    async def spare(self, *, preloaded: bool) -> None:
        """Return once a spare is ready, so that it is a start that is measured and not the making of spares."""

        def ready() -> bool:
            spares = [each for each in self.local.recorded() if each["role"] == "spare" and each["pid"]]
            return any(bool(each["facts"].get("preload")) is preloaded for each in spares)  # type: ignore[attr-defined]

        try:
            await _until(ready)
        except TimeoutError:
            (node,) = await self.local.client.list_nodes()
            sys.exit(f"no spare came up; the node says of what it preloads: {list(node.preloads)}")

    async def each(self, what: str, measure: Callable[[], Awaitable[float]], most: int) -> list[float]:
        """Rounds of one measurement, as many as the budget lets."""
        measured: list[float] = []
        for number in range(most):
            if time.monotonic() > self.until and len(measured) > 1:
                break
            print(f"\r{what}: {number + 1}/{most}   ", end="", file=sys.stderr, flush=True)
            measured.append(await measure())
        print(file=sys.stderr)
        return measured

    async def start_and_end(self, pool: str) -> float:
        """One start, on the free card."""
        took_s, job = await self.started(pool, RESERVED)
        await self.check_card(job)
        await self.ended(job)
        return took_s

    async def raw(self) -> float:
        """The same by hand: an actor of Ray with the card."""
        before = _devices()
        begun = time.perf_counter()
        actor_class: Any = ray.remote(Card)
        actor = actor_class.options(num_cpus=1, num_gpus=1).remote(0.0, device=self.device)
        await actor.first.remote()
        took_s = time.perf_counter() - begun
        ray.kill(actor)
        await _until(lambda: _devices() >= before)
        return took_s

    async def preemptions(self, *, hangs: bool) -> tuple[list[float], list[float], int]:
        """(seconds until the winner's first result, GiB that were free for it, how often it got all it filled)."""
        free_gib: list[float] = []
        holder: JobHandle | None = None
        full = 0

        async def one() -> float:
            nonlocal holder, full
            priority = RESERVED + STEP * next(self.numbers)
            took_s, winner = await self.started("preloaded", priority, hangs=hangs)
            await self.check_card(winner)
            (worker,) = winner.workers("card")
            free, total = await worker.method("take").remote(self.gib)
            free_gib.append(free)
            full += free >= total - SLACK_GIB
            if holder is not None:
                await holder.finished(timeout=WAIT_S)
            holder = winner
            return took_s

        await one()  # nobody is preempted by the first
        free_gib.clear()
        full = 0
        took = await self.each(f"preemptions, {'hanging' if hangs else 'cooperative'}", one, self.rounds)
        await self.ended(holder)
        return took, free_gib, full

    @staticmethod
    async def ended(job: JobHandle | None) -> None:
        """End a job."""
        if job is not None:
            await job.cancel()
            await job.finished(timeout=WAIT_S)

    async def check_card(self, job: JobHandle) -> None:
        """Note a worker that sees another card than it was given."""
        if self.device == "cuda":
            (worker,) = job.workers("card")
            seen, known = await worker.method("cards").remote()
            if seen != known:
                self.wrong.append(f"a worker sees {seen} and was given {known}")


async def _until(condition: Callable[[], bool]) -> None:
    """Wait for what has no event for a client."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def _devices() -> float:
    return float(ray.available_resources().get("GPU", 0.0))  # type: ignore[no-untyped-call]


def _row(name: str, seconds: list[float], more: str = "") -> str:
    worst = max(seconds)
    return (
        f"{name:<44} {len(seconds):>3} {statistics.median(seconds):>8.3f} {min(seconds):>8.3f} {worst:>8.3f}   {more}"
    )


async def main(arguments: argparse.Namespace) -> int:
    """Measures and prints; 1 if something was wrong."""
    found = machine_gpus("auto")
    if arguments.device == "cuda" and not found.real:
        sys.exit("this machine has no GPU that the driver knows; see `nvidia-smi -L`, or say --device cpu")
    ids = found.ids[:1] if arguments.device == "cuda" else ()
    cpus = str(max(4, (os.cpu_count() or 4) - 2))
    memory = "48GiB" if arguments.device == "cuda" else "8GiB"
    spares = SPARES if arguments.device == "cuda" else 1
    begun = time.monotonic()
    async with local_cluster(gpus=1, machine_gpus=ids, cpus=cpus, memory=memory, warm_spares=spares) as local:
        run, client = Run(local, arguments), local.client
        await client.set_policy({"cancel_timeout": CANCEL_TIMEOUT_S, "kill_timeout": 5})
        await run.pool("preloaded", ["torch"])
        await run.start_and_end("preloaded")  # the first reads torch's files from disk
        preloaded = await run.each("starts, torch preloaded", lambda: run.start_and_end("preloaded"), run.rounds)
        cooperative = await run.preemptions(hangs=False)
        hanging = await run.preemptions(hangs=True)
        (node,) = await client.list_nodes()
        state = next(iter(node.preloads), None)
        await client.delete_pool("preloaded")
        await run.pool("unloaded", [])
        few = max(3, run.rounds // 4)
        unloaded = await run.each("starts, spare without torch", lambda: run.start_and_end("unloaded"), few)
        await client.delete_pool("unloaded")
        await _until(lambda: _devices() >= 1)
        raw = await run.each("starts, raw Ray", run.raw, few)
    card = node.devices[0].device.model or "simulated"
    print(f"{card}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}; seconds")
    print(f"{'from the submit to the first result':<44} {'n':>3} {'median':>8} {'least':>8} {'most':>8}")
    print(_row("start, spare with torch preloaded", preloaded))
    print(_row("start, spare without", unloaded))
    print(_row("raw Ray: actor, import torch", raw))
    for name, (took, free_gib, full) in (("cooperative", cooperative), ("hanging", hanging)):
        said = f"card free {full} of {len(took)}, least {min(free_gib):.1f} GiB" if arguments.device == "cuda" else ""
        print(_row(f"preemption, {name}, {run.gib:g} GiB held", took, said))
    if state is not None:
        print(f"spares with torch at the end: {state.ready}, {state.memory_bytes / GIB:.2f} GiB of their own")
    starts = len(preloaded) + len(cooperative[0]) + len(hanging[0])
    print(f"starts that took another spare than wanted: {run.missed} of about {starts + len(unloaded)}")
    if arguments.device == "cuda":
        print(f"UUIDs: {'each worker had the card that it was given' if not run.wrong else ''}")
    for each in dict.fromkeys(run.wrong):
        print(f"WRONG: {each}")
    print(f"took {time.monotonic() - begun:.0f} s")
    return int(bool(run.wrong))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=20, help="rounds of each kind; a quarter of them for slow kinds")
    parser.add_argument("--gib", type=float, default=60.0, help="memory that each worker holds on the card")
    parser.add_argument("--budget", type=float, default=280.0, help="seconds after which rounds are left out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where the workers compute")
    sys.exit(asyncio.run(main(parser.parse_args())))
