"""The agent's machine: production's session, outbox and lease on the virtual loop, above workers that are virtual.

One object is one run of the agent program: a crash throws it away with all it remembers, and what it had started lives
on until the next run finds it. What the agent does with commands is still rebuilt here, by the rules of
``callboard.agents``: workers, placement groups, its part in Ray.
"""

from __future__ import annotations

import asyncio
import copy
from asyncio import TimerHandle as Timer
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from callboard._version import __version__
from callboard.agents.lease import Lease
from callboard.agents.lease_file import HeardLease
from callboard.agents.outbox import Outbox
from callboard.agents.session import Session, SessionRefused, Stream
from callboard.simulation import network
from callboard.simulation.commands import Commands
from callboard.simulation.hosting import Worker
from callboard.simulation.machines import Key, Machine
from callboard.simulation.membership import Membership
from callboard.simulation.network import Message
from callboard.simulation.site import Site
from callboard.simulation.tasks import GroupTasks
from callboard.simulation.timeline import Process
from callboard.v1 import agent_pb2, common_pb2, inspection_pb2

LEAVE_S = 15.0
FLUSH_S = 3.0
"""As in ``callboard.agents.node_agent``: for workers to end and the last reports to be acknowledged."""


class Agent:
    """One run of the agent of one node.

    Args:
        is_head: starts Ray's head.
        on_refused: called when the controller doesn't want this agent.
    """

    def __init__(
        self,
        site: Site,
        machine: Machine,
        instance: str,
        *,
        is_head: bool,
        on_refused: Callable[[], None],
    ) -> None:
        self.site = site
        self.machine = machine
        self.leaving = False
        self.process = Process(instance)
        self._instance = instance
        self._is_head = is_head
        self._on_refused = on_refused
        self._hellos = 0
        self._ray_told = agent_pb2.RayNode()
        self._call: _Call | None = None
        self._fewer = asyncio.Event()
        self.process.run(self._boot)

    def _boot(self) -> None:
        timeline, chance = self.site.timeline, self.site.chance.agents
        self.outbox = Outbox(self._instance)
        self.membership = Membership(self, is_head=self._is_head)
        self.groups = GroupTasks(self)
        self._commands = Commands(self)
        self.lease = Lease(
            on_expired=self._end_strict, on_orphaned=self._end_all, write=self._write_lease, clock=timeline.time
        )
        self._session = Session(
            "simulated",
            http_proxy=False,
            handler=self,
            outbox=self.outbox,
            lease=self.lease,
            connect=self._connect,
            uniform=chance.uniform,
            wall_ns=lambda: timeline.wall_ms * 1_000_000,
        )

    def start(self) -> None:
        """Connects, and brings up Ray."""
        timeline = self.site.timeline
        for work in (self._live(), self.lease.watch()):
            self.process.start(timeline, work).add_done_callback(self._ended)
        self.process.run(self.membership.start)

    async def _live(self) -> None:
        try:
            await self._session.run()
        except SessionRefused:
            self._on_refused()

    def _ended(self, done: asyncio.Task[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            self.site.timeline.fail(error)

    @property
    def alive(self) -> bool:
        """Whether this run goes on."""
        return self.process.alive

    @property
    def ray(self) -> agent_pb2.RayNode:
        """The node's part in Ray."""
        return self.membership.node

    @property
    def workers(self) -> dict[tuple[Key, int], Worker]:
        """The workers it answers for, by key and generation."""
        return self._commands.workers

    def later(self, wait_ms: float, do: Callable[[], None]) -> Timer:
        """Does something in a while, if this run of the agent still lives; once it is thawed, if it is frozen."""
        return self.process.run(self.site.timeline.call_later, max(0, int(wait_ms)) / 1000, do)

    # ---- what happens to it ----

    def crash(self) -> None:
        """Killed: nothing is said, nothing is remembered, what it started lives on."""
        self.process.kill()
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

    def leave(self, then: Callable[[], None]) -> None:
        """Leaves on purpose: ends its workers, says goodbye, ends."""
        self.process.start(self.site.timeline, self._leave(then)).add_done_callback(self._ended)

    async def _leave(self, then: Callable[[], None]) -> None:
        self.leaving = self._session.leaving = True
        self._session.beat()
        self._commands.end(hooks_ms=2_000)
        gone = asyncio.ensure_future(self._wait_none())
        await asyncio.wait([gone], timeout=LEAVE_S)
        gone.cancel()
        if await self._session.settled():
            flushed = asyncio.ensure_future(self.outbox.wait_empty())
            await asyncio.wait([flushed], timeout=FLUSH_S)
            flushed.cancel()
        self.membership.drop()
        if not self.workers:
            await self._session.say_goodbye("leaves")
        then()

    async def _wait_none(self) -> None:
        while self.workers:
            self._fewer.clear()
            await self._fewer.wait()

    def reconnect(self) -> None:
        """Its session is cut; it opens another."""
        if self._call is not None:
            self.site.network.cut_off(self._call.stream, "asked to")

    # ---- session ----

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Stream]:
        self._call = _Call(self.site, self.machine.node_id, self.process)
        yield self._call

    def hello(self, epoch_seen: int) -> agent_pb2.Hello:
        """Who it is and what runs here."""
        machine = self.machine
        self._hellos += 1
        self._ray_told = copy.deepcopy(self.ray)
        return agent_pb2.Hello(
            node_id=machine.node_id,
            version=__version__,
            epoch_seen=epoch_seen,
            number=self._hellos,
            labels=machine.labels,
            inventory=agent_pb2.Inventory(
                capacity=common_pb2.Resources(
                    cpu_milli=machine.cpu_milli, memory_bytes=machine.memory_bytes, gpu_milli=machine.gpus * 1_000
                ),
                devices=[common_pb2.Device(index=index, id=str(index)) for index in range(machine.gpus)],
                simulated=machine.simulated,
            ),
            ray=self.ray,
            workers=[worker.report() for worker in self.workers.values()],
            instance=self._instance,
            runtime=agent_pb2.RUNTIME_RAY,
            hostname=machine.node_id,
            clock_ms=self.site.timeline.wall_ms,
        )

    def ray_node(self) -> agent_pb2.RayNode | None:
        """The node's part in Ray, if it changed."""
        if self.ray == self._ray_told:
            return None
        self._ray_told = copy.deepcopy(self.ray)
        return self._ray_told

    def welcomed(self, welcome: agent_pb2.Welcome) -> None:
        """A session began."""
        self._commands.term = welcome.term
        self._commands.keep_only(list(welcome.keep))
        if welcome.HasField("ray_bootstrap"):
            self.membership.offer(welcome.ray_bootstrap)

    def command(self, command: agent_pb2.Command) -> None:
        """Carries it out."""
        self._commands.handle(command)

    def ray_bootstrap(self, bootstrap: agent_pb2.RayBootstrap) -> None:
        """Where Ray is."""
        self.membership.offer(bootstrap)

    def spare_target(self, count: int) -> None:
        """Simulated starts have no spares."""

    def read_output(self, ask: agent_pb2.ReadOutput) -> None:
        """Simulated workers print nothing."""

    def forget_jobs(self, jobs: Sequence[str]) -> None:
        """Simulated workers print nothing."""

    async def inspect(self, ask: inspection_pb2.InspectionAsk) -> inspection_pb2.NodeInspection:  # noqa: ARG002
        """Nobody inspects."""
        return inspection_pb2.NodeInspection()

    def beat_once(self) -> None:
        """Sends a heartbeat now."""
        self._session.beat()

    def say(self, command_id: str, **content: Any) -> None:
        """Reports something."""
        self.outbox.report(command_id, **content)

    # ---- workers ----

    def forget(self, worker: Worker) -> None:
        """A worker is gone."""
        self._commands.forget(worker)
        self._fewer.set()

    def end_actors(self, message: str) -> None:
        """Every actor of the node is dead."""
        for worker in list(self.workers.values()):
            worker.die(message)

    def _write_lease(self, heard: HeardLease) -> None:
        self.machine.lease_until_ms = int((heard.heard_s + heard.terms.lease_s) * 1000)

    def _end_strict(self) -> None:
        self._commands.end(lambda worker: worker.command.strict)

    def _end_all(self) -> None:
        self.site.count("orphans ended")
        self._commands.end()


class _Call:
    """A stream as the agent's session sees it: what it uses of ``grpc.aio.StreamStreamCall``."""

    def __init__(self, site: Site, node_id: str, process: Process) -> None:
        assert site.controller is not None
        self._network = site.network
        self._process = process
        self._answers: asyncio.Queue[agent_pb2.SessionResponse | None] = asyncio.Queue()
        self._status: asyncio.Future[tuple[grpc.StatusCode, str]] = site.timeline.create_future()
        self.stream = site.network.open(node_id, self, site.controller)

    def receive(self, stream: network.Stream, message: Message) -> None:  # noqa: ARG002 - it is ours
        """A message came."""
        self._answers.put_nowait(agent_pb2.SessionResponse(**{message[0]: message[1]}))

    def broken(self, stream: network.Stream, why: str) -> None:  # noqa: ARG002 - it is ours
        """The stream is over."""
        refused = why.startswith(network.REFUSED)
        code = grpc.StatusCode.FAILED_PRECONDITION if refused else grpc.StatusCode.UNAVAILABLE
        self._end(code, why)

    async def write(self, request: agent_pb2.SessionRequest, /) -> None:
        """Says something."""
        if self._status.done():
            raise asyncio.InvalidStateError("the stream is over")
        kind = request.WhichOneof("message")
        assert kind is not None
        self._network.send(self.stream, "up", (kind, getattr(request, kind)))

    async def read(self) -> agent_pb2.SessionResponse | Any:
        """What comes next."""
        answer = await self._answers.get()
        return grpc.aio.EOF if answer is None else answer

    async def done_writing(self) -> None:
        """Nothing more is said."""

    async def code(self) -> grpc.StatusCode:
        """How it ended."""
        return (await asyncio.shield(self._status))[0]

    async def details(self) -> str | None:
        """Why it ended."""
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
