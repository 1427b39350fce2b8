"""The agent of one node as it ships, on a virtual machine, and the supervisor who starts the next one.

One object is one run of the program: a crash throws it away with all it remembers, and what it had started lives on
until the next run finds it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import cycle
from typing import Any

import grpc
import grpc.aio

from callboard.agents.agent import live
from callboard.agents.link.session import Stream
from callboard.agents.node_agent import Agent as ProductionAgent
from callboard.agents.options import AgentOptions
from callboard.agents.system.devices import CUDA, DeviceFacts, NodeDevices
from callboard.agents.system.inventory import inventory
from callboard.simulation.checks.yielding import Yielding
from callboard.simulation.world import network
from callboard.simulation.world.agent_machine import AgentMachine
from callboard.simulation.world.machines import Machine
from callboard.simulation.world.network import Message
from callboard.simulation.world.site import Site
from callboard.simulation.world.virtual_time import Process
from callboard.v1 import agent_pb2

AGAIN_MS = 5_000
"""Before an agent is started again that ended by itself with an error."""


class Agent:
    """One run of the agent of one node.

    Args:
        on_exit: told the exit code when the program ends by itself.
    """

    def __init__(self, site: Site, machine: Machine, *, is_head: bool, on_exit: Callable[[int], None]) -> None:
        self.site = site
        self.machine = machine
        self.process = Process(f"agent of {machine.node_id}")
        self.said_ms: dict[str, int] = {}
        """When it first said the reports that nobody has acknowledged."""
        self._is_head = is_head
        self._on_exit = on_exit
        self._yielding = Yielding(site, machine)
        self._call: _Call | None = None
        self.process.start(site.timeline, self._live()).add_done_callback(self._ended)

    async def _live(self) -> int:
        machine = self.machine
        options = AgentOptions(
            node_id=machine.node_id,
            labels=machine.labels,
            cpu_milli=machine.cpu_milli,
            memory_bytes=machine.memory_bytes,
            simulate_gpus=machine.gpus,
            ray_head=self._is_head,
        )
        models = cycle(machine.gpu_models)
        facts = tuple(
            DeviceFacts(str(index), model=next(models), memory_bytes=machine.gpu_memory_bytes)
            for index in range(machine.gpus)
        )
        devices = NodeDevices(CUDA, facts, simulated=True)
        offered = inventory(options, devices)
        del offered.interpreters[:]
        below = AgentMachine(self.site, machine, self.process, self._connect, self._yielding.kills)
        agent = ProductionAgent(options, devices, offered, below, machine.node_id)
        return await live(agent, below.run_dir, keep_output=False)

    def _ended(self, done: asyncio.Task[int]) -> None:
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            self.site.timeline.fail(error)
            return
        self.crash()
        self._on_exit(done.result())

    # ---- what happens to it ----

    def crash(self) -> None:
        """Killed: nothing is said, nothing is remembered; what it started lives on, but for its driver."""
        self.process.kill()
        self._hang_up()
        if self._call is not None:
            self.site.network.close(self._call.stream, "up", "the agent died")

    def lose_power(self) -> None:
        """Its machine is off: nobody is told anything."""
        self.process.kill()
        if self._call is not None:
            self.site.network.vanish(self._call.stream)

    def freeze(self, for_ms: int) -> None:
        """Stopped by SIGSTOP for a while; messages wait in its sockets."""
        self.process.freeze()
        self.site.timeline.after(for_ms, self.process.thaw)

    def leave(self) -> bool:
        """SIGTERM: it leaves on purpose, unless it has not come far enough to; whether it goes on until it has left."""
        self._yielding.leaving = True
        self.process.signal(self.site.timeline, signal.SIGTERM)
        if not self.process.alive:
            self.crash()
        return self.process.alive

    def reconnect(self) -> None:
        """Its session is cut; it opens another."""
        if self._call is not None:
            self.site.network.cut_off(self._call.stream, "asked to")

    def _hang_up(self) -> None:
        """The socket of its driver closes with it."""
        for running in list(self.machine.table.values()):
            if running.name == "driver" and running.root is self.process:
                self.site.machines.kill(self.machine, running, in_ms=10)

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Stream]:
        self._call = _Call(self.site, self.machine.node_id, self.process, self.said_ms, self._yielding)
        yield self._call


class _Call:
    """A stream as the agent's session sees it: what it uses of ``grpc.aio.StreamStreamCall``."""

    def __init__(self, site: Site, node_id: str, process: Process, said_ms: dict[str, int], yielding: Yielding) -> None:
        assert site.controller is not None
        self._network = site.network
        self._machines = site.machines
        self._process = process
        self._timeline = site.timeline
        self._said_ms = said_ms
        self._yielding = yielding
        self._answers: asyncio.Queue[agent_pb2.SessionResponse | None] = asyncio.Queue()
        self._status: asyncio.Future[tuple[grpc.StatusCode, str]] = site.timeline.create_future()
        self.stream = site.network.open(node_id, self, site.controller)

    def receive(self, stream: network.Stream, message: Message) -> None:  # noqa: ARG002 - it is ours
        self._yielding.received(message)
        if message[0] == "command" and message[1].start_worker.strict:
            self._machines.strict[message[1].start_worker.generation] = None
        known = {"ack": "report_ids", "welcome": "known_report_ids"}.get(message[0])
        for report_id in getattr(message[1], known) if known else ():
            self._said_ms.pop(report_id, None)
        self._answers.put_nowait(agent_pb2.SessionResponse(**{message[0]: message[1]}))

    def broken(self, stream: network.Stream, why: str) -> None:  # noqa: ARG002 - it is ours
        refused = why.startswith(network.REFUSED)
        code = grpc.StatusCode.FAILED_PRECONDITION if refused else grpc.StatusCode.UNAVAILABLE
        self._end(code, why)

    async def write(self, request: agent_pb2.SessionRequest, /) -> None:
        if self._status.done():
            raise asyncio.InvalidStateError("the stream is over")
        kind = request.WhichOneof("message")
        assert kind is not None
        if kind == "report":
            self._said_ms.setdefault(request.report.report_id, self._timeline.now_ms)
        message = (kind, getattr(request, kind))
        self._yielding.said(message)
        self._network.send(self.stream, "up", message)

    async def read(self) -> agent_pb2.SessionResponse | Any:
        answer = await self._answers.get()
        return grpc.aio.EOF if answer is None else answer

    async def done_writing(self) -> None:
        """Nothing more is said."""

    async def code(self) -> grpc.StatusCode:
        return (await asyncio.shield(self._status))[0]

    async def details(self) -> str | None:
        return (await asyncio.shield(self._status))[1]

    def cancel(self) -> bool:
        """Ends it, unless the program is dead that wants to."""
        if not self._process.alive or self._status.done():
            return False
        self._network.close(self.stream, "up", "cancelled")
        self._end(grpc.StatusCode.CANCELLED, "cancelled")
        return True

    def _end(self, code: grpc.StatusCode, why: str) -> None:
        if not self._status.done():
            self._status.set_result((code, why))
            self._answers.put_nowait(None)


class Supervisor:
    """Keeps one machine's agent running."""

    def __init__(self, site: Site, machine: Machine, *, is_head: bool) -> None:
        self.machine = machine
        self.agent: Agent | None = None
        self._site = site
        self._is_head = is_head
        self._away_ms = AGAIN_MS

    @property
    def node_id(self) -> str:
        return self.machine.node_id

    def start(self) -> None:
        """Starts an agent, which first takes over from an earlier one."""
        if self.agent is None and self.machine.powered:
            self.agent = Agent(self._site, self.machine, is_head=self._is_head, on_exit=self._exited)

    def crash(self, back_after_ms: int) -> None:
        """The agent is killed; its raylet and its workers live on, and the next one goes on with them."""
        if self.agent is not None:
            agent, self.agent = self.agent, None
            agent.crash()
            self._site.timeline.after(back_after_ms, self.start)

    def leave(self, back_after_ms: int) -> None:
        """The agent leaves on purpose, and joins again later."""
        self._away_ms = back_after_ms
        if self.agent is not None and not self.agent.leave():
            self.agent = None
            self._site.timeline.after(back_after_ms, self.start)

    def power_off(self, back_after_ms: int) -> None:
        """The machine loses its power."""
        if not self.machine.powered:
            return
        if self.agent is not None:
            agent, self.agent = self.agent, None
            agent.lose_power()
        self._site.machines.power_off(self.machine)
        self._site.timeline.after(back_after_ms, self.power_on)

    def power_on(self) -> None:
        """The machine comes back, empty."""
        if not self.machine.powered:
            self.machine.powered = True
            self.start()

    def _exited(self, code: int) -> None:
        self.agent = None
        wait_ms = AGAIN_MS
        match code:
            case 0:
                wait_ms, self._away_ms = self._away_ms, AGAIN_MS
            case 2:
                self._site.count("agent refused by the controller")
            case _:
                self._site.count("agent left something behind")
        self._site.timeline.after(wait_ms, self.start)
