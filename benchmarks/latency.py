"""How long from a submit to a worker's first answer, and how long does a preemption take? Beside raw Ray, in one run.

    python benchmarks/latency.py [--n 30] [--json]

Starts a cluster of its own (controller, one agent, Ray, simulated GPUs) and leaves nothing. Every case alternates with
what raw Ray takes for the same, done by hand on the same cluster, so that a busy moment hits both. Medians and
95th percentiles of `n` rounds; measured, not asserted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TextIO

# Run by path, Python knows the folder of this file only.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))

from benchmarks.latency_ours import CANCEL_TIMEOUT_MS, Ours
from benchmarks.latency_raw import Raw
from benchmarks.local import Local, local_cluster

CALLS_PER_ROUND = 20
WARM_UP = 2
"""Rounds before the first one that counts: the first start of anything reads files from disk."""

Measure = Callable[[], Awaitable[float]]


@dataclass
class Case:
    """One row of the table."""

    name: str
    ours: Measure
    raw: Measure
    by_hand: str
    ours_ms: list[float] = field(default_factory=list)
    raw_ms: list[float] = field(default_factory=list)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=30, metavar="N", help="rounds of each case")
    parser.add_argument("--json", action="store_true", help="one line of medians; the table goes to stderr")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with this in their names")
    arguments = parser.parse_args()
    cases, overhead_ms = asyncio.run(_measure(arguments.n, arguments.only))
    _print_table(cases, overhead_ms, arguments.n, sys.stderr if arguments.json else sys.stdout)
    if arguments.json:
        print(json.dumps(_figures(cases, overhead_ms)))


async def _measure(rounds: int, only: str) -> tuple[dict[str, Case], list[float]]:
    # The pools of ours have three devices, raw Ray takes up to three.
    async with local_cluster(gpus=6) as local:
        ours, raw = Ours(local), Raw()
        await ours.prepare()
        await raw.prepare()
        cases = {key: case for key, case in _cases(ours, raw).items() if only in case.name}
        for case in cases.values():
            await _run(case, local, rounds)
        overhead_ms = await _call_overhead(ours, raw, rounds)
        await raw.finish()
        return cases, overhead_ms


def _cases(ours: Ours, raw: Raw) -> dict[str, Case]:
    cooperative, hanging = "Cooperative", "Hanging"
    return {
        "cold": Case("cold, no placement group", ours.cold, raw.cold, "new actor"),
        "dynamic": Case("dynamic placement group", ours.dynamic, raw.dynamic, "new group, new actor"),
        "reserved": Case("reserved placement group", ours.reserved, raw.reused, "new actor in a kept group"),
        "reused": Case("reused placement group", ours.reused, raw.kill_start, "kill, new actor in its group"),
        "preempt_cooperative": Case(
            "preemption, cooperative victim",
            partial(ours.preempt, cooperative),
            partial(raw.preempt, cooperative),
            "cancel(), kill, new actor in its group",
        ),
        "preempt_hanging": Case(
            "preemption, hanging cancel()",
            partial(ours.preempt, hanging),
            partial(raw.preempt, hanging),
            "the same, with the same timeout",
        ),
    }


async def _run(case: Case, local: Local, rounds: int) -> None:
    for number in range(WARM_UP + rounds):
        print(f"\r{case.name}: {max(0, number - WARM_UP + 1)}/{rounds}   ", end="", file=sys.stderr, flush=True)
        ours_ms = await case.ours()
        # The making of the next spare would slow down whoever comes next.
        await local.spare_ready()
        raw_ms = await case.raw()
        if number >= WARM_UP:
            case.ours_ms.append(ours_ms)
            case.raw_ms.append(raw_ms)
    print(file=sys.stderr)


async def _call_overhead(ours: Ours, raw: Raw, rounds: int) -> list[float]:
    """What a call through a handle takes more than a plain Ray call: pairs, in milliseconds."""
    job = await ours.local.client.submit(ours.spec("dynamic", "Echo"))
    await job.running(60)
    echo = job.workers()[0].method("echo")
    actor = await raw.plain_actor()
    differences = []
    for _ in range(rounds * CALLS_PER_ROUND):
        began = time.perf_counter()
        await actor.echo.remote(7)
        between = time.perf_counter()
        await echo.remote(7)
        differences.append((time.perf_counter() - between - (between - began)) * 1000)
    await job.cancel()
    await job.finished(60)
    return differences


def _figures(cases: dict[str, Case], overhead_ms: list[float]) -> dict[str, float]:
    def median(key: str) -> float:
        return round(statistics.median(cases[key].ours_ms), 1)

    warm_ms = [*cases["reserved"].ours_ms, *cases["reused"].ours_ms]
    return {
        "cold_ms": median("cold"),
        "raw_cold_ms": round(statistics.median(cases["cold"].raw_ms), 1),
        "warm_ms": round(statistics.median(warm_ms), 1),
        "preempt_cooperative_ms": median("preempt_cooperative"),
        "raw_kill_start_ms": round(statistics.median(cases["reused"].raw_ms), 1),
        "preempt_hanging_ms": median("preempt_hanging"),
        "cancel_timeout_ms": CANCEL_TIMEOUT_MS,
        "call_overhead_ms": round(statistics.median(overhead_ms), 2),
    }


def _print_table(cases: dict[str, Case], overhead_ms: list[float], rounds: int, to: TextIO) -> None:
    load = ", ".join(f"{each:.2f}" for each in os.getloadavg())
    print(f"n = {rounds}, {os.cpu_count()} CPUs, load {load}; milliseconds from submit to first answer\n", file=to)
    print(f"{'':32} {'callboard':>17}   {'raw Ray':>17}", file=to)
    print(f"{'':32} {'median':>8} {'p95':>8}   {'median':>8} {'p95':>8}   by hand", file=to)
    for case in cases.values():
        print(f"{case.name:32} {_pair(case.ours_ms)}   {_pair(case.raw_ms)}   {case.by_hand}", file=to)
    print(f"\n{'worker call over a plain call':32} {_pair(overhead_ms, digits=2)}", file=to)


def _pair(values: list[float], *, digits: int = 0) -> str:
    p95 = statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]
    return f"{statistics.median(values):8.{digits}f} {p95:8.{digits}f}"


if __name__ == "__main__":
    main()
