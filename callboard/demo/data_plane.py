"""The data plane of the demonstration: it calls workers through a child process that is a Ray driver."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from callboard.agents.system.processes import exited
from callboard.cli.local.children import kill_trees
from callboard.client.workers import WorkerHandle
from callboard.security.processes import identify

CONNECT_S = 30.0
CALL_S = 20.0
CLOSE_S = 5.0


class RayFailed(Exception):
    """Ray, or a worker through it, did not do what was asked."""

    def __init__(self, operation: str, why: str) -> None:
        super().__init__(f"{operation}: {why}")
        self.operation = operation
        self.why = why


class DataPlane:
    """The child, as an object. One request at a time."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._count = 0

    async def open(self) -> None:
        """Starts the child; it imports Ray while others are busy starting the cluster."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "callboard.demo.probe"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    async def connect(self, address: str, *, token_path: str, node_ip: str) -> None:
        await self._ask("connect", CONNECT_S, address=address, token_path=token_path, node_ip=node_ip)

    async def call(self, worker: WorkerHandle, method: str, *args: Any) -> Any:
        """Calls a method of a worker and waits for what it returns."""
        return await self._ask("call", CALL_S + 1, worker=_named(worker), method=method, args=args, limit_s=CALL_S)

    async def start(self, worker: WorkerHandle, method: str, *args: Any) -> None:
        """Calls a method of a worker and leaves it running."""
        await self._ask("start", CALL_S, worker=_named(worker), method=method, args=args)

    async def step(self, workers: Sequence[WorkerHandle], method: str, *args: Any) -> list[dict[str, Any]]:
        """Calls a method of every worker at once: {"value", "seconds"} or {"error"} of each, in their order."""
        named = [_named(worker) for worker in workers]
        answers: list[dict[str, Any]] = await self._ask(
            "step", CALL_S + 1, workers=named, method=method, args=args, limit_s=CALL_S
        )
        return answers

    async def booked(self, expected: Mapping[str, float]) -> dict[str, float]:
        """What Ray says is taken of its nodes, of the resources named in ``expected``."""
        taken: dict[str, float] = await self._ask("booked", CALL_S, expected=dict(expected))
        return taken

    async def groups(self) -> dict[str, list[dict[str, float]]]:
        """Ray's own table of placement groups."""
        table: dict[str, list[dict[str, float]]] = await self._ask("groups", CALL_S)
        return table

    async def actors(self) -> list[str]:
        """Names of all Ray actors alive."""
        names: list[str] = await self._ask("actors", CALL_S)
        return names

    async def actors_left(self, known: Collection[str]) -> list[str]:
        """Names of Ray actors that are not ``known``, after agents had the time to end their warm spares."""
        names: list[str] = await self._ask("actors_left", CALL_S, known=sorted(known))
        return names

    async def close(self) -> None:
        """Ends the child, whatever it does at the moment."""
        child = self._process
        if child is None:
            return
        self._process = None
        process = identify(child.pid)
        if process is not None and child.stdin is not None:
            child.stdin.close()  # The end of its input is the end of its work.
            try:
                async with asyncio.timeout(CLOSE_S):
                    await exited(process)
            except TimeoutError:
                await kill_trees([process])
        await child.wait()

    async def _ask(self, operation: str, timeout_s: float, **arguments: Any) -> Any:
        child = self._process
        if child is None or child.stdin is None or child.stdout is None:
            raise RayFailed(operation, "the connection to Ray is closed")
        async with self._turn:
            self._count += 1
            request = {"id": self._count, "op": operation, **arguments}
            child.stdin.write(json.dumps(request).encode() + b"\n")
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await _answer(child.stdout, self._count)
            except TimeoutError:
                raise RayFailed(operation, f"no answer within {timeout_s:g} s") from None
        if answer is None:
            raise RayFailed(operation, f"the connection to Ray ended; see {self._log}")
        if "error" in answer:
            raise RayFailed(operation, answer["error"])
        return answer["value"]


async def _answer(lines: asyncio.StreamReader, number: int) -> Mapping[str, Any] | None:
    """The answer of that number; those of requests that nobody waits for any more are passed over."""
    async for line in lines:
        answer: Mapping[str, Any] = json.loads(line)
        if answer["id"] == number:
            return answer
    return None


def _named(worker: WorkerHandle) -> dict[str, Any]:
    """What the probe needs to make the handle again. Not the id of the job: the probe asks no controller, so its calls
    don't follow a worker that is gone."""
    names = ("job", "component", "rank", "generation", "node", "devices", "actor_name")
    return {name: getattr(worker, name) for name in names}
