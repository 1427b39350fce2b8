"""What one flood does to everybody else: p99 of calls and heartbeats beside it, against those without (R7).

    python benchmarks/floods.py [--seconds 6] [--times 3] [--only NAME …] [--json]

A real controller with its journal, virtual agents, and one client that calls and submits steadily. Beside them, one
after the other and each in a process of its own: watchers that never read, an agent that never reads, submits, reports,
malformed first messages, and output of a worker that prints without end and is followed, as fast as each can, with the
lowest priority: what counts is what they take from the controller, not from the processors of this machine. Windows
with and without the flood take turns, so that a busy machine is busy in both. Exit code 1 if the p99 of calls or beats
is more than twice the quiet one (medians over the turns).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

# Run by path, Python knows the folder of this file only.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpc.aio

from benchmarks.agents import Swarm, controller_in, running, swarm_at
from benchmarks.agents_swarm import hello_of
from callboard.client.client import Client
from callboard.security.dialing import open_channel
from callboard.security.grants import grant
from callboard.security.roles import Role
from callboard.v1 import agent_pb2, agent_pb2_grpc, event_pb2, event_pb2_grpc
from callboard.wire.refusals import CallboardError

AGENTS = 20
AT_ONCE = 16
CALLS_S = 100.0
"""Steady calls a second; one in ten is a submit and its cancellation."""

ROOT = Path(__file__).resolve().parents[1]


def _job(name: str, **component: Any) -> dict[str, Any]:
    part = {"name": "w", "actor": "pkg.workers:Worker", "resources": {"cpu": 1, "gpu": 1}, **component}
    return {"name": name, "pool": "floods", "components": [part]}


async def steady(client: Client, seconds: float, names: Iterator[int]) -> list[float]:
    """Calls at a steady pace; seconds that each took, sorted."""
    took: list[float] = []

    async def timed(call: Awaitable[Any]) -> Any:
        began = time.perf_counter()
        answer = await call
        took.append(time.perf_counter() - began)
        return answer

    async def one(number: int) -> None:
        if number % 10:
            await timed(client.stats())
        else:
            job = await timed(client.submit(_job(f"steady-{next(names)}")))
            await timed(job.cancel())

    async with asyncio.TaskGroup() as calls:
        end = time.perf_counter() + seconds
        for number in itertools.count():
            if time.perf_counter() > end:
                break
            calls.create_task(one(number))
            await asyncio.sleep(1 / CALLS_S)
    return sorted(took)


# ── floods; each runs until it is killed


async def slow_watchers(address: str) -> None:
    """Forty watches of all events that are never read."""
    async with open_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        stub: Any = event_pb2_grpc.EventServiceStub(channel)
        calls = [stub.Watch(event_pb2.WatchRequest(start_revision=1)) for _ in range(40)]
        await asyncio.gather(*(call.read() for call in calls))
        await asyncio.Event().wait()


async def slow_agent(address: str) -> None:
    """An agent of 64 GPUs that reads nothing after its welcome, and is given work."""
    async with open_channel(address, [("grpc.enable_http_proxy", 0)]) as channel, Client(address) as client:
        stub: Any = agent_pb2_grpc.AgentServiceStub(channel)
        for number in itertools.count():
            call = stub.Session()
            hello = hello_of(9_000, secrets.token_hex(8))
            hello.number = number + 1
            await call.write(agent_pb2.SessionRequest(hello=hello))
            await call.read()
            with contextlib.suppress(CallboardError, TimeoutError):
                async with asyncio.timeout(10):
                    for each in range(200):
                        job = await client.submit(_job(f"slow-{secrets.token_hex(4)}-{each}"))
                        await job.cancel()
                    await asyncio.Event().wait()
            call.cancel()


async def submits(address: str) -> None:
    """As many submits as the controller takes from a trainer."""
    async with Client(address, retry=0) as client:

        async def one_by_one() -> None:
            while True:
                with contextlib.suppress(CallboardError):
                    await client.submit(_job(f"flood-{secrets.token_hex(6)}"))

        await asyncio.gather(*(one_by_one() for _ in range(AT_ONCE)))


async def reports(address: str) -> None:
    """An agent that reports the end of workers that nobody knows. It joins again when its session ends, as agents do,
    and says why it ended."""
    async with open_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        stub: Any = agent_pb2_grpc.AgentServiceStub(channel)
        instance = secrets.token_hex(8)
        for number in itertools.count(1):
            call = stub.Session()
            hello = hello_of(9_001, instance)
            hello.number = number
            try:
                await call.write(agent_pb2.SessionRequest(hello=hello))
                await call.read()
                async with asyncio.TaskGroup() as both:
                    both.create_task(_read_all(call))
                    both.create_task(_report(call))
            except* grpc.aio.AioRpcError:
                # Of a write that came too late gRPC knows less than of the call.
                why = f"{await call.code()}, {await call.details()}"
                print(f"session {number} of the agent that reports ended: {why}", file=sys.stderr, flush=True)
            finally:
                call.cancel()
            await asyncio.sleep(0.1)


async def _read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def _report(call: Any) -> None:
    for generation in itertools.count(1):
        report = agent_pb2.Report(report_id=secrets.token_hex(8))
        report.worker_exited.worker.job_id = "nobody"
        report.worker_exited.worker.component = "w"
        report.worker_exited.generation = generation
        await call.write(agent_pb2.SessionRequest(report=report))


async def malformed(address: str) -> None:
    """First messages of agents that are none."""
    async with open_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        opened = channel.stream_stream("/callboard.v1.AgentService/Session")

        async def one_by_one() -> None:
            while True:
                call = opened(iter([secrets.token_bytes(200)]), timeout=30)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await call.read()
                    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT

        await asyncio.gather(*(one_by_one() for _ in range(AT_ONCE)))


async def output(address: str) -> None:
    """A worker that prints without end, and eight readers that follow it."""
    async with Client(address) as client:
        with tempfile.TemporaryDirectory() as folder:
            settings = {"node_id": "printer", "controller": address, "runtime": "process", "simulate_gpus": 1}
            settings |= {"cpu_milli": 2000, "memory_bytes": 1 << 30, "run_dir": f"{folder}/run", "cluster": "floods"}
            settings |= {"labels": {"printer": "yes"}, "exit_with_parent": os.getpid(), "log_level": "ERROR"}
            file = Path(folder) / "agent.json"
            file.write_text(json.dumps(settings))
            agent = await asyncio.create_subprocess_exec(sys.executable, "-m", "callboard.agents", str(file), cwd=ROOT)
            try:
                part = {"actor": "tests.support.actors:Printer", "entry": "loud", "kwargs": {"mebibytes": 100_000}}
                job = await client.submit(
                    _job(f"printer-{secrets.token_hex(4)}", **part, node_selector={"printer": "yes"})
                    | {"wait_for_nodes": "60s"}
                )
                await job.running(60)

                async def follow() -> None:
                    async for _ in job.logs(follow=True):
                        pass

                await asyncio.gather(*(follow() for _ in range(8)))
            finally:
                agent.terminate()
                await agent.wait()


FLOODS: dict[str, Callable[[str], Awaitable[None]]] = {
    each.__name__: each for each in (slow_watchers, slow_agent, submits, reports, malformed, output)
}


async def window(client: Client, swarm: Swarm, seconds: float, names: Iterator[int]) -> dict[str, float]:
    """p50 and p99 of calls and beats over so many seconds."""
    took, beats = await asyncio.gather(steady(client, seconds, names), swarm.ask(f"measure {seconds}"))
    return {
        "calls_p50": 1000 * took[len(took) // 2],
        "calls_p99": 1000 * took[int(len(took) * 0.99)],
        "beats_p99": beats["p99_ms"],
    }


async def measure(kinds: list[str], seconds: float, times: int) -> dict[str, dict[str, float]]:
    """The medians of every flood's windows, and of the quiet ones before each."""
    found: dict[str, dict[str, float]] = {}
    names = itertools.count()
    with tempfile.TemporaryDirectory(prefix="callboard-floods-") as folder:
        controller = controller_in(Path(folder))
        async with (
            running(controller),
            swarm_at(controller.address, AGENTS, AGENTS) as swarm,
            Client(controller.address) as client,
        ):
            await swarm.ask(f"joined {AGENTS}")
            await client.ensure_pool("floods", pg_pool={"max_dynamic": 64}, members=["flood"])
            tokens = {"submits": grant(Path(folder), "flood", Role.TRAINER)}
            await window(client, swarm, seconds, names)  # what is imported and compiled once
            for kind in kinds:
                rows: dict[str, list[dict[str, float]]] = {"quiet": [], "flood": []}
                for _ in range(times):
                    rows["quiet"].append(await window(client, swarm, seconds, names))
                    flood = await asyncio.create_subprocess_exec(
                        *(
                            "nice",
                            "-n",
                            "19",
                            sys.executable,
                            "-m",
                            "benchmarks.floods",
                            "--flood",
                            kind,
                            controller.address,
                        ),
                        cwd=ROOT,
                        env={**os.environ, **({"CALLBOARD_TOKEN": tokens[kind]} if kind in tokens else {})},
                    )
                    try:
                        await asyncio.sleep(3.0)  # for its imports, and to be in full flow
                        rows["flood"].append(await window(client, swarm, seconds, names))
                        assert flood.returncode is None, f"{kind} ended by itself"
                    finally:
                        with contextlib.suppress(ProcessLookupError):
                            flood.terminate()
                        await flood.wait()
                found[kind] = {
                    f"{which}_{name}": statistics.median(row[name] for row in rows[which])
                    for which in rows
                    for name in rows[which][0]
                }
                for job in await client.list_jobs(states=["PENDING", "RUNNING", "STARTING"]):
                    await (await client.get_job(job.uid)).cancel()
                print(json.dumps({kind: found[kind]}), file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Measures, prints, judges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="length of a window")
    parser.add_argument("--times", type=int, default=3, help="windows with and without each flood")
    parser.add_argument("--only", nargs="+", choices=list(FLOODS), default=list(FLOODS))
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    parser.add_argument("--flood", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.flood:
        kind, address = given.flood
        asyncio.run(FLOODS[kind](address))  # type: ignore[arg-type] # coroutines, all of them
        return 0
    found = asyncio.run(measure(given.only, given.seconds, given.times))
    print("| flood | calls p50 ms | calls p99 ms | beats p99 ms | ratio of p99 |\n|---|---|---|---|---|")
    worst = 0.0
    for kind, row in found.items():
        ratios = [row[f"flood_{name}"] / row[f"quiet_{name}"] for name in ("calls_p99", "beats_p99")]
        worst = max(worst, *ratios)
        pairs = [
            f"{row[f'quiet_{name}']:.1f} → {row[f'flood_{name}']:.1f}"
            for name in ("calls_p50", "calls_p99", "beats_p99")
        ]
        print(f"| {kind} | {' | '.join(pairs)} | {ratios[0]:.1f}, {ratios[1]:.1f} |")
    print(f"load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    if given.json:
        print(json.dumps(found))
    return int(worst > 2)


if __name__ == "__main__":
    sys.exit(main())
