"""Does a controller stay as it was while jobs come and go? Memory and heartbeats over ten thousand of them (R8, NJ-11).

    python benchmarks/soak.py [--jobs 10000] [--agents 2] [--at-once 16] [--json]

A real controller with its journal, virtual agents (:mod:`benchmarks.agents_swarm`) that start and stop workers at once,
and a client that submits jobs and completes each as soon as it runs. Exit code 1 if resident memory or the median round
trip of heartbeats grew by more than a fifth once the history of ended jobs is full.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Run by path, Python knows the folder of this file only.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from benchmarks.agents import Swarm, controller_in, running, swarm_at
from callboard.client.client import Client

GROWTH = 1.2
BEAT_S = 5.0
SAMPLE_S = 12.0
"""Two beats of each agent and a bit."""


async def soak(jobs: int, agents: int, at_once: int) -> list[dict[str, Any]]:
    """Samples after each tenth of the jobs."""
    samples: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="callboard-soak-") as folder:
        controller = controller_in(Path(folder))
        async with (
            running(controller) as pid,
            swarm_at(controller.address, agents, agents) as swarm,
            Client(controller.address) as client,
        ):
            await swarm.ask(f"joined {agents}")
            await client.ensure_pool("soak", pg_pool={"max_dynamic": 64})
            done = 0
            for part in range(11):
                samples.append(await _sample(swarm, pid, done))
                print(json.dumps(samples[-1]), file=sys.stderr, flush=True)
                if part < 10:
                    done += await _run(client, f"part-{part}", jobs // 10, at_once)
    return samples


async def _sample(swarm: Swarm, pid: int, done: int) -> dict[str, Any]:
    trips = await swarm.ask(f"measure {SAMPLE_S}")
    return {"jobs": done, "rss_mib": psutil.Process(pid).memory_info().rss / (1 << 20), "at_s": time.time(), **trips}


async def _run(client: Client, prefix: str, count: int, at_once: int) -> int:
    numbers = iter(range(count))

    async def one_after_the_other() -> None:
        for number in numbers:
            job = await client.submit(
                {
                    "name": f"{prefix}-{number}",
                    "pool": "soak",
                    "components": [{"name": "w", "actor": "pkg.workers:Worker", "resources": {"cpu": 1, "gpu": 1}}],
                }
            )
            await job.running(60)
            await job.complete()

    await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
    return count


def main() -> int:
    """Soaks, prints, judges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000, help="jobs in all")
    parser.add_argument("--agents", type=int, default=2, help="virtual agents")
    parser.add_argument("--at-once", type=int, default=16, help="jobs at a time")
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    arguments = parser.parse_args()
    samples = asyncio.run(soak(arguments.jobs, arguments.agents, arguments.at_once))
    # The first fifth fills the history of ended jobs and events; from then on nothing may grow.
    base, last = samples[2], samples[-1]
    grown = [name for name in ("rss_mib", "p50_ms") if last[name] > GROWTH * base[name]]
    took_s = last["at_s"] - samples[0]["at_s"] - 10 * SAMPLE_S
    print(
        f"{arguments.jobs} jobs in {took_s:.0f} s: memory {samples[0]['rss_mib']:.0f} → {base['rss_mib']:.0f} → "
        f"{last['rss_mib']:.0f} MiB, heartbeats {base['p50_ms']:.2f} → {last['p50_ms']:.2f} ms (p50), "
        f"{base['p99_ms']:.1f} → {last['p99_ms']:.1f} ms (p99); load {os.getloadavg()[0]:.1f}",
        file=sys.stderr if arguments.json else sys.stdout,
    )
    if arguments.json:
        print(json.dumps(samples))
    if grown:
        print(f"grown by more than a fifth: {', '.join(grown)}")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
