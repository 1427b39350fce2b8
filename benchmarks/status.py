"""How long does `callboard status` take the controller of a large cluster?

    python benchmarks/status.py [--nodes 1000] [--jobs 10000] [--rounds 30]

A controller in a process of its own with nodes and jobs but without agents. Printed: how long each call that `status`
makes takes, from the request to the decoded answer, and the lists that it would need without an overview, each in all
of its pages. Ray's object stores, for which `status` asks an agent, aren't among them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.page import of
from callboard.cli.jobs.pending import with_reasons
from callboard.cli.show.words import LIVE_STATES
from callboard.cli.watch.status import SHOWN
from callboard.client.client import Client
from callboard.controller.logs import configure_logs
from callboard.controller.options import ControllerOptions
from callboard.controller.server import Controller
from callboard.security.tokens import TOKEN_NAME
from tests.support.crowd import Crowd


async def serve(nodes: int, jobs: int, directory: Path) -> None:
    """Runs the controller, says where it is, and ends with its standard input."""
    configure_logs("console", "error")
    controller = Controller(ControllerOptions(listen="127.0.0.1:0", page="", metrics="", state_dir=directory))
    await controller.start()
    crowd = Crowd(controller)
    await crowd.pools(nodes * 8)
    await crowd.nodes(nodes)
    await crowd.fill(jobs, gpus=nodes * 8)
    print(controller.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await controller.stop()


async def ask(address: str, token_file: Path, rounds: int, controller: psutil.Process) -> None:
    """Measures each call, and prints how long it takes and the CPU time that the controller spends on it."""
    async with Client(address, token_file=token_file) as client:
        seen = await client.overview(nodes=SHOWN, jobs=SHOWN)
        asked: dict[str, Callable[[], Awaitable[object]]] = {
            f"GetOverview, {SHOWN} nodes and {SHOWN} jobs": lambda: client.overview(nodes=SHOWN, jobs=SHOWN),
            "GetJob of one that waits": lambda: with_reasons(client, seen.jobs, most=1),
            "GetStats": client.stats,
            "ListPools": client.list_pools,
            "ListNodes, all in pages": client.list_nodes,
            "ListJobs, all that live in pages": lambda: client.list_jobs(states=LIVE_STATES),
        }
        for what, call in asked.items():
            took_ms = []
            before = controller.cpu_times()
            for _ in range(rounds):
                began = time.perf_counter()
                await call()
                took_ms.append((time.perf_counter() - began) * 1000)
            after = controller.cpu_times()
            cpu_ms = (after.user + after.system - before.user - before.system) * 1000 / rounds
            print(f"{what:36} {of(took_ms)}; CPU {cpu_ms:6.1f} ms", flush=True)


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    read = parser.parse_args()
    if read.serve:
        asyncio.run(serve(read.nodes, read.jobs, read.serve))
        return
    with tempfile.TemporaryDirectory() as folder:
        served = [sys.executable, __file__, "--nodes", str(read.nodes), "--jobs", str(read.jobs), "--serve", folder]
        with subprocess.Popen(served, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as controller:
            assert controller.stdout is not None
            address, token_file = controller.stdout.readline().strip(), Path(folder) / TOKEN_NAME
            print(f"{read.nodes} nodes of 8 GPUs, {read.jobs} jobs; load {os.getloadavg()[0]:.1f}", flush=True)
            asyncio.run(ask(address, token_file, read.rounds, psutil.Process(controller.pid)))
            print(f"load {os.getloadavg()[0]:.1f}")
            controller.communicate()


if __name__ == "__main__":
    main()
