"""A gang with full cards is preempted: how long until another gang has filled the same cards?

    python -m benchmarks.gpu.handover [--n 10] [--share 0.75]

Needs real GPUs, torch and nvidia-ml-py. Uses every GPU of the machine. In each round a gang that holds most of every
card's memory yields to another one of the same size, which fills the cards at once; then the first one comes back from
its checkpoint. Also shown: the cards' UUIDs, a sum through NCCL, and the card of a Ray task that a worker starts.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from typing import Any

from benchmarks.local import Local, local_cluster
from callboard.cli.local.machine_gpus import machine_gpus
from callboard.client.jobs import JobHandle
from callboard.v1.job_pb2 import JobState

CANCEL_TIMEOUT_S = 0.5
WAIT_S = 180.0


def _spec(name: str, gpus: int, share: float, *, hangs: bool = False, **fields: Any) -> dict[str, Any]:
    component = {
        "name": "card",
        "actor": "benchmarks.gpu.workers:Card",
        "kwargs": {"share": share, "hangs": hangs},
        "entry": "run",
        "workers": gpus,
        "resources": {"cpu": 1, "gpu": 1},
        **fields.pop("component", {}),
    }
    return {"name": name, "pool": "default", "components": [component], **fields}


async def _each(job: JobHandle, method: str) -> list[Any]:
    return await asyncio.gather(*(worker.method(method).remote() for worker in job.workers("card")))


async def _end(job: JobHandle) -> None:
    await job.cancel()
    await job.finished(timeout=WAIT_S)


async def _facts(local: Local, gpus: int) -> None:
    job = await local.client.submit(_spec("facts", gpus, 0.01))
    await job.running(timeout=WAIT_S)
    cards = await _each(job, "cards")
    same = all(seen == known for seen, known in cards) and len({seen for seen, _ in cards}) == gpus
    print(f"UUIDs: {'each worker has the card that it was given' if same else f'WRONG: {cards}'}")
    expected = gpus * (gpus + 1) / 2
    sums = await _each(job, "sum_of_ranks")
    print(f"NCCL over {gpus}: {'right' if sums == [expected] * gpus else f'WRONG: {sums}'}")
    await _end(job)
    job = await local.client.submit(_spec("children", gpus, 0.01, component={"in_bundle": True}))
    await job.running(timeout=WAIT_S)
    children = await _each(job, "child")
    right = all(own == child for own, child in children) and len({own for own, _ in children}) == gpus
    print(f"Ray tasks of workers: {'on their own cards' if right else f'WRONG: {children}'}")
    await _end(job)


async def _round(local: Local, number: str, gpus: int, share: float, *, hangs: bool) -> tuple[float, float, float]:
    """(seconds from the submit until the winner ran, until it had filled the cards, until the loser was back)."""
    loser = await local.client.submit(_spec(f"loser-{number}", gpus, share, hangs=hangs))
    await loser.running(timeout=WAIT_S)
    await _each(loser, "fill")
    begun = time.perf_counter()
    winner = await local.client.submit(_spec(f"winner-{number}", gpus, share, priority=9))
    await winner.running(timeout=WAIT_S)
    ran = time.perf_counter() - begun
    await _each(winner, "fill")
    filled = time.perf_counter() - begun
    await _end(winner)
    begun = time.perf_counter()
    await loser.until(
        lambda job: job.attempt > 1 and job.state == JobState.JOB_STATE_RUNNING, "to come back", timeout=WAIT_S
    )
    back = time.perf_counter() - begun
    if not hangs:
        assert await _each(loser, "started") == [1] * gpus, "a checkpoint was lost"
    await _end(loser)
    return ran, filled, back


async def main(arguments: argparse.Namespace) -> None:
    """Measures and prints."""
    found = machine_gpus("auto")
    if not found.real:
        sys.exit("this machine has no GPU that the driver knows; see `nvidia-smi -L`")
    gpus = len(found.ids)
    async with local_cluster(machine_gpus=found.ids, cpus="12", warm_spares=2 * gpus) as local:
        await local.client.set_policy({"cancel_timeout": CANCEL_TIMEOUT_S, "kill_timeout": 3})
        await local.client.ensure_pool("default")
        await _facts(local, gpus)
        print(f"{'victim':<12} {'rounds':>6} {'ran':>8} {'cards full':>11} {'back':>8}   medians in seconds")
        for hangs in (False, True):
            name = "hanging" if hangs else "cooperative"
            rounds = [
                await _round(local, f"{name}-{number}", gpus, arguments.share, hangs=hangs)
                for number in range(arguments.n)
            ]
            ran, filled, back = (statistics.median(each) for each in zip(*rounds, strict=True))
            print(f"{name:<12} {arguments.n:>6} {ran:>8.3f} {filled:>11.3f} {back:>8.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=10, help="rounds of each kind (default: 10)")
    parser.add_argument("--share", type=float, default=0.75, help="of each card's memory to fill (default: 0.75)")
    asyncio.run(main(parser.parse_args()))
