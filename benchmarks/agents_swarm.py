"""Many agents without a machine: each holds one session, beats, obeys, and comes back when its stream ends.

    python -m benchmarks.agents_swarm ADDRESS COUNT CHANNELS BEAT_S

Reads commands from its input, one a line: ``joined N`` answers once N agents are welcome, with the seconds since they
were started; ``measure S`` answers after S seconds with the round trips of the heartbeats in between, and ``trips S``
with each of them; ``lost`` answers how many sessions ended since the last time; ``forget`` counts nobody as welcome any
more; ``end`` ends. Answers are lines of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
import sys
import time
from typing import Any

import grpc.aio

from callboard._version import __version__
from callboard.model.durations import Backoff
from callboard.security.dialing import open_channel
from callboard.v1 import agent_pb2, agent_pb2_grpc, common_pb2

GPUS = 8
WELCOME_S = 20.0
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 5.0
"""As a real agent waits and backs off (callboard.agents.link.session): doubled each time, a random half of it taken
off."""


class _Stream:
    """One stream, which takes one write at a time."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self._writing = asyncio.Lock()

    async def say(self, **message: Any) -> None:
        """Sends one message."""
        async with self._writing:
            await self.call.write(agent_pb2.SessionRequest(**message))


class Swarm:
    """All agents of this process, on one loop."""

    def __init__(self, address: str, count: int, channels: int, beat_s: float) -> None:
        self._address = address
        self._count = count
        self._channel_count = channels
        self._beat_s = beat_s
        self._channels: list[grpc.aio.Channel] = []
        self._changed = asyncio.Condition()
        self.welcome: set[int] = set()
        self.ends = 0
        self.began = 0.0
        self.trips_s: list[float] = []

    def start(self) -> list[asyncio.Task[None]]:
        """Starts every agent."""
        self.began = time.perf_counter()
        options = (
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            # A real agent connects anew for each try; here a connection's own patience must not hold a hundred back.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 500),
        )
        self._channels = [
            open_channel(self._address, options=(*options, ("grpc.channel_number", n)))
            for n in range(self._channel_count)
        ]
        return [asyncio.create_task(self._agent(number)) for number in range(self._count)]

    async def joined(self, count: int) -> None:
        """Returns once so many are welcome."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.welcome) >= count)

    async def _agent(self, number: int) -> None:
        stub = agent_pb2_grpc.AgentServiceStub(self._channels[number % len(self._channels)])
        instance = secrets.token_hex(8)
        backoff = Backoff(FIRST_BACKOFF_S, LONGEST_BACKOFF_S, uniform=random.uniform)  # spreads reconnects
        while True:
            opened = time.perf_counter()
            # Only why it ended is of no interest here.
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._session(stub, number, instance)
            self.welcome.discard(number)
            self.ends += 1
            if time.perf_counter() - opened > LONGEST_BACKOFF_S:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _session(self, stub: Any, number: int, instance: str) -> None:
        call = stub.Session()
        sent: dict[int, float] = {}
        try:
            # As a real agent's: a write to a connection that breaks meanwhile may never return.
            async with asyncio.timeout(WELCOME_S) as patience:
                stream = _Stream(call)
                await stream.say(hello=hello_of(number, instance))
                await self._listen(stream, number, sent, patience)
        except TimeoutError:
            return
        finally:
            call.cancel()

    async def _listen(self, stream: _Stream, number: int, sent: dict[int, float], patience: asyncio.Timeout) -> None:
        beating: asyncio.Task[None] | None = None
        try:
            async for message in stream.call:
                kind = message.WhichOneof("message")
                if kind == "welcome":
                    patience.reschedule(None)
                    beating = asyncio.create_task(self._beat(stream, sent))
                    async with self._changed:
                        self.welcome.add(number)
                        self._changed.notify_all()
                elif kind == "command":
                    await stream.say(report=_answer(message.command))
                elif kind == "heartbeat_reply":
                    began = sent.pop(message.heartbeat_reply.sequence, None)
                    if began is not None:
                        self.trips_s.append(time.perf_counter() - began)
        finally:
            if beating is not None:
                beating.cancel()

    async def _beat(self, stream: _Stream, sent: dict[int, float]) -> None:
        await asyncio.sleep(random.uniform(0, self._beat_s))  # noqa: S311 - agents don't beat in step
        sequence = 0
        while True:
            sequence += 1
            sent[sequence] = time.perf_counter()
            await stream.say(heartbeat=agent_pb2.Heartbeat(sequence=sequence))
            await asyncio.sleep(self._beat_s * random.uniform(0.75, 1.0))  # noqa: S311


def _answer(command: agent_pb2.Command) -> agent_pb2.Report:
    """What an agent reports whose workers start and stop at once."""
    report = agent_pb2.Report(report_id=secrets.token_hex(8), command_id=command.command_id)
    match command.WhichOneof("action"):
        case "start_worker":
            start = command.start_worker
            report.worker_ready.worker.CopyFrom(start.worker)
            report.worker_ready.generation = start.generation
            report.worker_ready.pid = 1_000_000 + start.generation
        case "stop_worker":
            stop = command.stop_worker
            report.worker_stopped.worker.CopyFrom(stop.worker)
            report.worker_stopped.generation = stop.generation
            report.worker_stopped.outcome = agent_pb2.STOP_OUTCOME_COOPERATIVE
        case "create_placement_group":
            group = command.create_placement_group
            report.placement_group_ready.placement_group_id = group.placement_group_id
            report.placement_group_ready.attempt = group.attempt
        case "remove_placement_group":
            report.placement_group_removed.placement_group_id = command.remove_placement_group.placement_group_id
        case _:
            report.command_refused.message = "virtual agents start, stop and book"
    return report


def hello_of(number: int, instance: str) -> agent_pb2.Hello:
    """Of a node with eight simulated GPUs."""
    return agent_pb2.Hello(
        node_id=f"n{number}",
        version=__version__,
        instance=instance,
        runtime=agent_pb2.RUNTIME_PROCESS,
        hostname="swarm",
        inventory=agent_pb2.Inventory(
            capacity=common_pb2.Resources(cpu_milli=64_000, memory_bytes=1 << 38, gpu_milli=GPUS * 1000),
            devices=[common_pb2.Device(index=index, id=str(index), numa_node=-1) for index in range(GPUS)],
            simulated=True,
        ),
    )


async def main(address: str, count: int, channels: int, beat_s: float) -> None:
    """Runs until told to end."""
    swarm = Swarm(address, count, channels, beat_s)
    tasks = swarm.start()
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := (await lines.readline()).decode().split():
        answer: dict[str, Any] = {}
        match line:
            case ["joined", number]:
                await swarm.joined(int(number))
                answer = {"seconds": time.perf_counter() - swarm.began}
            case ["measure", seconds]:
                swarm.trips_s.clear()
                await asyncio.sleep(float(seconds))
                trips = sorted(swarm.trips_s)
                answer = {"beats": len(trips), "p50_ms": _ms(trips, 0.5), "p99_ms": _ms(trips, 0.99)}
            case ["trips", seconds]:
                swarm.trips_s.clear()
                await asyncio.sleep(float(seconds))
                answer = {"trips_s": swarm.trips_s}
            case ["forget"]:
                swarm.welcome.clear()
            case ["lost"]:
                answer, swarm.ends = {"ends": swarm.ends, "welcome": len(swarm.welcome)}, 0
            case _:
                break
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for task in tasks:
        task.cancel()


def _ms(ordered: list[float], part: float) -> float:
    return 1000 * ordered[min(len(ordered) - 1, int(len(ordered) * part))] if ordered else float("nan")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
