"""How many agents can one controller hold? Sessions on real gRPC streams, beside bare streams in the same run.

    python benchmarks/agents.py [--agents 1000 5000 10000] [--seconds 30] [--channels 100] [--json]

For each number: the controller's CPU (per cent of one core), resident memory and the round trip of heartbeats while
nothing else happens; the same for a bare grpc.aio server that only answers heartbeats; then the server is killed and
started again: how long until every agent is welcome, and whether one was dropped. Agents are virtual
(:mod:`benchmarks.agents_swarm`), in one process on the same machine, several on one connection (``--channels``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

# Run by path, Python knows the folder of this file only.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpc.aio
import psutil

from callboard.v1 import agent_pb2, agent_pb2_grpc

ROOT = Path(__file__).resolve().parents[1]
BEAT_S = 5.0
JOIN_S = 300.0


class Bare(agent_pb2_grpc.AgentServiceServicer):
    """What streams and heartbeats cost by themselves."""

    async def Session(self, request_iterator: Any, _context: Any) -> AsyncIterator[agent_pb2.SessionResponse]:  # noqa: N802
        """Welcomes whoever comes and answers every heartbeat."""
        async for request in request_iterator:
            if request.WhichOneof("message") == "hello":
                yield agent_pb2.SessionResponse(welcome=agent_pb2.Welcome(epoch=1))
            else:
                reply = agent_pb2.HeartbeatReply(sequence=request.heartbeat.sequence)
                yield agent_pb2.SessionResponse(heartbeat_reply=reply)

    async def SendOutput(self, _requests: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """Nobody asks for output here."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server reads no output")

    async def AttachExec(self, _requests: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """Nobody asks for programs here."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server runs no programs")

    async def GetPackage(self, _request: Any, context: Any) -> agent_pb2.GetPackageResponse:  # noqa: N802
        """No code travels here."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server keeps no packages")
        raise AssertionError

    async def Join(self, _request: Any, context: Any) -> agent_pb2.JoinResponse:  # noqa: N802
        """Nobody needs a token here."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server asks for no token")
        raise AssertionError


async def serve_bare(address: str) -> None:
    """The floor: a server of its own, like the controller's in its options."""
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0), ("grpc.keepalive_permit_without_calls", 1)))
    agent_pb2_grpc.add_AgentServiceServicer_to_server(Bare(), server)
    port = server.add_insecure_port(address)
    await server.start()
    sys.stderr.write(json.dumps({"event": "listening", "address": f"127.0.0.1:{port}"}) + "\n")
    sys.stderr.flush()
    await server.wait_for_termination()


class Swarm:
    """The process of the virtual agents."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, command: str) -> dict[str, Any]:
        """Says one line and returns the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n".encode())
        line = await asyncio.wait_for(self._process.stdout.readline(), JOIN_S)
        answer: dict[str, Any] = json.loads(line)
        return answer


@asynccontextmanager
async def swarm_at(address: str, count: int, channels: int, beat_s: float = BEAT_S) -> AsyncIterator[Swarm]:
    """Agents that join ``address``."""
    arguments = (address, str(count), str(min(channels, count)), str(beat_s))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.agents_swarm", *arguments),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    try:
        yield Swarm(process)
    finally:
        process.kill()
        await process.wait()


class Program:
    """A server that can be killed and started again at the same address."""

    def __init__(self, *arguments: str) -> None:
        """
        Args:
            arguments: of the interpreter, less where to listen. The program says on its errors where it does.
        """
        self._arguments = arguments
        self.address = f"127.0.0.1:{_lasting_port()}"
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> int:
        """Starts it and returns its pid once it listens."""
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, *self._arguments, "--listen", self.address), cwd=ROOT, stderr=asyncio.subprocess.PIPE
        )
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            said = json.loads(line) if line.startswith(b"{") else {}
            if said.get("event") == "listening":
                self.address = said["address"]
                break
        else:
            raise RuntimeError(f"{' '.join(self._arguments)} ended with {await self.process.wait()}")
        self._drain = asyncio.create_task(self._read())
        return self.process.pid

    async def _read(self) -> None:
        assert self.process is not None
        assert self.process.stderr is not None
        while await self.process.stderr.readline():
            pass

    async def kill(self) -> None:
        """Kills it."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


def _lasting_port() -> int:
    """A free port that nobody is given by chance while a server is down: the kernel hands out those from 32768 on, also
    to agents that try to connect, and one that by chance connects to itself keeps the port."""
    while True:
        port = random.randrange(20_000, 32_768)  # noqa: S311 - no secret
        with contextlib.suppress(OSError), socket.socket() as trial:
            trial.bind(("127.0.0.1", port))
            return port


def controller_in(folder: Path) -> Program:
    """A controller with its state in a folder."""
    options = ("--log-format", "json", "--log-level", "info", "--state-dir", str(folder))
    return Program("-m", "callboard.controller", *options)


@asynccontextmanager
async def running(program: Program) -> AsyncIterator[int]:
    """Its pid."""
    try:
        yield await program.start()
    finally:
        await program.kill()


async def watched(swarm: Swarm, pid: int, seconds: float) -> dict[str, float]:
    """CPU in per cent of one core, memory in MiB, and round trips over so many seconds."""
    process = psutil.Process(pid)
    before = process.cpu_times()
    began = time.perf_counter()
    trips = await swarm.ask(f"measure {seconds}")
    took_s = time.perf_counter() - began
    after = process.cpu_times()
    cpu_s = after.user + after.system - before.user - before.system
    return {"cpu_percent": 100 * cpu_s / took_s, "rss_mib": process.memory_info().rss / (1 << 20), **trips}


async def storm(program: Program, swarm: Swarm, count: int) -> dict[str, float]:
    """The server dies and is started again: seconds until it listens and until every agent is welcome, and the seconds
    of CPU that took it."""
    await swarm.ask("lost")
    await program.kill()
    began = time.perf_counter()
    # Agents that have not noticed yet are not back.
    await swarm.ask("forget")
    starts = time.perf_counter()
    pid = await program.start()
    restart_s = time.perf_counter() - starts
    await swarm.ask(f"joined {count}")
    back_s = time.perf_counter() - began
    times = psutil.Process(pid).cpu_times()
    return {"restart_s": restart_s, "back_s": back_s, "back_cpu_s": times.user + times.system}


async def measure(count: int, seconds: float, channels: int) -> dict[str, Any]:
    """Everything about one number of agents."""
    found: dict[str, Any] = {"agents": count}
    bare = Program(str(Path(__file__)), "--serve-bare")
    async with running(bare) as pid, swarm_at(bare.address, count, channels) as swarm:
        found["bare_join_s"] = (await swarm.ask(f"joined {count}"))["seconds"]
        found["bare"] = await watched(swarm, pid, seconds)
        found["bare_storm"] = await storm(bare, swarm, count)
    with tempfile.TemporaryDirectory(prefix="callboard-bench-") as folder:
        controller = controller_in(Path(folder))
        async with running(controller) as pid, swarm_at(controller.address, count, channels) as swarm:
            found["join_s"] = (await swarm.ask(f"joined {count}"))["seconds"]
            await swarm.ask("lost")
            found["ours"] = await watched(swarm, pid, seconds)
            found["dropped"] = (await swarm.ask("lost"))["ends"]
            found["storm"] = await storm(controller, swarm, count)
            await swarm.ask("lost")
            await swarm.ask("measure 20")
            again = await swarm.ask("lost")
            found["dropped_after"] = again["ends"]
            found["missing_after"] = count - again["welcome"]
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """The figures for people."""
    pairs = ("CPU", "RSS MiB", "beat p50 ms", "beat p99 ms", "all joined s", "all back s")
    heads = ["agents", *(head for what in pairs for head in (what, "bare")), "dropped"]
    lines = [f"| {' | '.join(heads)} |", f"{'|---' * len(heads)}|"]
    for row in rows:
        ours, bare = row["ours"], row["bare"]
        lines.append(
            f"| {row['agents']} | {ours['cpu_percent']:.0f} % | {bare['cpu_percent']:.0f} % "
            f"| {ours['rss_mib']:.0f} | {bare['rss_mib']:.0f} | {ours['p50_ms']:.1f} | {bare['p50_ms']:.1f} "
            f"| {ours['p99_ms']:.1f} | {bare['p99_ms']:.1f} | {row['join_s']:.1f} | {row['bare_join_s']:.1f} "
            f"| {row['storm']['back_s']:.1f} | {row['bare_storm']['back_s']:.1f} "
            f"| {row['dropped'] + row['dropped_after'] + row['missing_after']} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="+", default=[1_000, 5_000, 10_000], help="numbers of agents")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long each is watched")
    parser.add_argument("--channels", type=int, default=100, help="connections that the agents share")
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout, the table on stderr")
    parser.add_argument("--serve-bare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--listen", default="127.0.0.1:0", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_bare:
        asyncio.run(serve_bare(arguments.listen))
        return 0
    rows = []
    for count in arguments.agents:
        rows.append(asyncio.run(measure(count, arguments.seconds, arguments.channels)))
        print(f"{count} agents: {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
    print(f"load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    print(table(rows), file=sys.stderr if arguments.json else sys.stdout)
    if arguments.json:
        print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
