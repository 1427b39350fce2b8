"""What one flood does to everybody else: p99 of calls and heartbeats beside it, against those without (R7).

    python benchmarks/floods.py [--seconds 3] [--times 10] [--only NAME …] [--folder DIR] [--json]

A real controller with its journal, virtual agents, and one client that calls and submits steadily. Beside them, one
after the other and each in a process of its own: watchers that never read, an agent that never reads, submits, reports,
malformed first messages, and output of a worker that prints without end and is followed, as fast as each can, with the
lowest priority and, where there are two processors, on the last one alone, which nobody else uses: what counts is what
they take from the controller, not from the processors of this machine. Short windows with and without the flood take
turns, so that a busy machine is busy in both. Each window has its percentiles, and the figures are their medians: what
others do to the machine for a second spoils one window, and would be all that a p99 of all windows together tells. In
the same windows a bare gRPC server is asked a hundred times a second: by how much it becomes slower (the floor) is what
the flood takes from the machine, and not from the controller. Exit code 1 if the p99 of calls or beats is more than
twice the quiet one, or, where the floor itself rose, twice that.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

# Run by path, Python knows the folder of this file only.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpc.aio

from benchmarks.agents import Program, Swarm, controller_in, running, swarm_at
from benchmarks.agents_swarm import hello_of
from callboard.client.client import Client
from callboard.security.caller_roles import Role
from callboard.security.dialing import open_channel
from callboard.security.grants import grant
from callboard.v1 import agent_pb2, agent_pb2_grpc, event_pb2, event_pb2_grpc
from callboard.wire.refusals import CallboardError

AGENTS = 20
AT_ONCE = 16
CALLS_S = 100.0
"""Steady calls a second; one in ten is a submit and its cancellation."""
BEAT_S = 0.5
"""Longest between heartbeats of one agent: enough of them for a p99."""

IN_MEMORY = "/dev/shm"  # noqa: S108 - of a benchmark

READY = b"ready\n"
IN_FLOW_S = 1.0
"""How long a flood has before it is measured."""

ROOT = Path(__file__).resolve().parents[1]


def _job(name: str, **component: Any) -> dict[str, Any]:
    part = {"name": "w", "actor": "pkg.workers:Worker", "resources": {"cpu": 1, "gpu": 1}, **component}
    return {"name": name, "pool": "floods", "components": [part]}


async def steady(client: Client, seconds: float, names: Iterator[int]) -> list[float]:
    """Calls at a steady pace; seconds that each took."""
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
    return took


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
        # In memory where there is a place: a machine of its own would not write to the controller's disk.
        with tempfile.TemporaryDirectory(dir=IN_MEMORY if os.path.isdir(IN_MEMORY) else None) as folder:  # noqa: ASYNC240, PTH112
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


class Floor:
    """Heartbeats to a bare server, one after the other on one stream."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address, [("grpc.enable_http_proxy", 0)])
        stub: Any = agent_pb2_grpc.AgentServiceStub(self._channel)
        self._call = stub.Session()

    async def measure(self, seconds: float) -> list[float]:
        """Seconds of each round trip."""
        took: list[float] = []
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            await self._call.write(agent_pb2.SessionRequest(heartbeat=agent_pb2.Heartbeat(sequence=1)))
            await self._call.read()
            took.append(time.perf_counter() - began)
            await asyncio.sleep(1 / CALLS_S)
        return took

    async def close(self) -> None:
        """Ends the stream."""
        self._call.cancel()
        await self._channel.close()


class Windows:
    """What was measured in windows of one kind."""

    def __init__(self) -> None:
        self._sorted: dict[str, list[list[float]]] = {"calls": [], "beats": [], "floor": []}

    async def add(self, client: Client, swarm: Swarm, floor: Floor, seconds: float, names: Iterator[int]) -> None:
        """Measures one more."""
        calls, beats, bare = await asyncio.gather(
            steady(client, seconds, names), swarm.ask(f"trips {seconds}"), floor.measure(seconds)
        )
        for name, found in (("calls", calls), ("beats", beats["trips_s"]), ("floor", bare)):
            self._sorted[name].append(sorted(found))

    def figures(self) -> dict[str, float]:
        """The median of the windows' p50 and p99 of each, in milliseconds."""
        return {
            f"{name}_p{part}": 1000 * median(window[len(window) * part // 100] for window in windows)
            for name, windows in self._sorted.items()
            for part in (50, 99)
        }


@contextlib.asynccontextmanager
async def flooding(
    kind: str, address: str, token: str | None, cores: list[int]
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """A flood that is ready and begins when it is told so; it has to run on until the end of the block.

    Args:
        cores: the processors that it may use.
    """
    flood = await asyncio.create_subprocess_exec(
        *("nice", "-n", "19", sys.executable, "-m", "benchmarks.floods", "--flood", kind, address),
        cwd=ROOT,
        env={**os.environ, **({"CALLBOARD_TOKEN": token} if token else {})},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    os.sched_setaffinity(flood.pid, cores)
    try:
        assert flood.stdin is not None
        assert flood.stdout is not None
        assert await flood.stdout.readline() == READY, f"{kind} did not start"
        given = flood.stdin

        async def begin() -> None:
            given.write(READY)
            await asyncio.sleep(IN_FLOW_S)

        yield begin
        assert flood.returncode is None, f"{kind} ended by itself"
    finally:
        with contextlib.suppress(ProcessLookupError):
            flood.terminate()
        await flood.wait()


async def measure(kinds: list[str], seconds: float, times: int, place: str | None) -> dict[str, dict[str, float]]:
    """The figures of every flood's windows, and of the quiet ones before each."""
    found: dict[str, dict[str, float]] = {}
    names = itertools.count()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, cores[:-1])
    with tempfile.TemporaryDirectory(prefix="callboard-floods-", dir=place) as folder:
        controller, bare = controller_in(Path(folder)), Program("-m", "benchmarks.agents", "--serve-bare")
        async with (
            running(controller),
            running(bare),
            swarm_at(controller.address, AGENTS, AGENTS, BEAT_S) as swarm,
            Client(controller.address) as client,
        ):
            await swarm.ask(f"joined {AGENTS}")
            await client.ensure_pool("floods", pg_pool={"max_dynamic": 64}, members=["flood"])
            tokens = {"submits": grant(Path(folder), "flood", Role.TRAINER)}
            floor = Floor(bare.address)
            await Windows().add(client, swarm, floor, seconds, names)  # what is imported and compiled once
            for kind in kinds:
                quiet, flooded = Windows(), Windows()
                for _ in range(times):
                    async with flooding(kind, controller.address, tokens.get(kind), cores[-1:]) as begin:
                        await quiet.add(client, swarm, floor, seconds, names)
                        await begin()
                        await flooded.add(client, swarm, floor, seconds, names)
                    for job in await client.list_jobs(states=["PENDING", "RUNNING", "STARTING"]):
                        await (await client.get_job(job.uid)).cancel()
                found[kind] = {
                    f"{which}_{name}": value
                    for which, windows in (("quiet", quiet), ("flood", flooded))
                    for name, value in windows.figures().items()
                }
                print(json.dumps({kind: found[kind]}), file=sys.stderr, flush=True)
            await floor.close()
    return found


def flood(kind: str, address: str) -> None:
    """Runs one flood, once it is told to begin."""
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    sys.stdin.buffer.readline()
    asyncio.run(FLOODS[kind](address))  # type: ignore[arg-type] # coroutines, all of them


def main() -> int:
    """Measures, prints, judges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a window")
    parser.add_argument("--times", type=int, default=10, help="windows with and without each flood")
    parser.add_argument("--only", nargs="+", choices=list(FLOODS), default=list(FLOODS))
    parser.add_argument(
        "--folder",
        metavar="DIR",
        help="where the controller's state lies, for example /dev/shm: a disk that others write to stalls each commit",
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    parser.add_argument("--flood", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.flood:
        flood(*given.flood)
        return 0
    found = asyncio.run(measure(given.only, given.seconds, given.times, given.folder))
    print("| flood | calls p50 ms | calls p99 ms | beats p99 ms | floor p99 ms | ratio of p99: calls, beats, floor |")
    print("|---|---|---|---|---|---|")
    worst = 0.0
    for kind, row in found.items():
        ratios = [row[f"flood_{name}_p99"] / row[f"quiet_{name}_p99"] for name in ("calls", "beats", "floor")]
        worst = max(worst, max(ratios[:2]) / max(1.0, ratios[2]))
        pairs = [
            f"{row[f'quiet_{name}']:.1f} → {row[f'flood_{name}']:.1f}"
            for name in ("calls_p50", "calls_p99", "beats_p99", "floor_p99")
        ]
        print(f"| {kind} | {' | '.join(pairs)} | {', '.join(f'{ratio:.1f}' for ratio in ratios)} |")
    print(f"load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    if given.json:
        print(json.dumps(found))
    return int(worst > 2)


if __name__ == "__main__":
    sys.exit(main())
