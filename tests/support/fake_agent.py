"""An agent that speaks the real stream and does what the test says.

    async with FakeAgent(address, "n1", gpus=2) as agent:      # joined
        command = await agent.command("start_worker")          # waits for it
        await agent.reported(worker_ready(command))            # returns once acknowledged

By default it obeys: every command is answered as a good agent would. ``hold={"stop_worker"}`` leaves commands of a kind
to the test. What it runs is kept in ``workers`` and reported when it joins again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from types import TracebackType
from typing import Any, Self

import grpc.aio

from callboard._version import __version__
from callboard.security.dialing import open_channel
from callboard.v1 import agent_pb2, agent_pb2_grpc, common_pb2

GIB = 1 << 30


class FakeAgent:
    """One agent.

    Attributes:
        hello: what it says first; change it before joining.
        welcome: what it was told.
        commands: every command it got, in order.
        workers: what it runs, by generation.
        hold: kinds of commands it does not answer by itself.
    """

    def __init__(
        self,
        address: str,
        node_id: str = "n0",
        *,
        cpu_milli: int = 3000,
        memory_bytes: int = 4 * GIB,
        gpus: int = 2,
        rank: int | None = None,
        instance: str = "",
        labels: Mapping[str, str] | None = None,
        runtime: agent_pb2.Runtime.ValueType = agent_pb2.RUNTIME_PROCESS,
        ray: agent_pb2.RayNode | None = None,
        uuids: Collection[str] = (),
        hold: Collection[str] = (),
        warm_spares: int = 0,
        hardware: Collection[str] = (),
    ) -> None:
        self.address = address
        self.node_id = node_id
        self.hold = set(hold)
        self.hello = agent_pb2.Hello(
            node_id=node_id,
            version=__version__,
            instance=instance or secrets.token_hex(8),
            rank=rank,
            labels=labels or {},
            runtime=runtime,
            ray=ray,
            hostname="fake",
            warm_spares=warm_spares,
            hardware=[common_pb2.Hardware(type=each) for each in hardware],
            inventory=agent_pb2.Inventory(
                capacity=common_pb2.Resources(cpu_milli=cpu_milli, memory_bytes=memory_bytes, gpu_milli=1000 * gpus),
                devices=[
                    common_pb2.Device(index=index, id=str(index), uuid=uuid, numa_node=-1)
                    for index, uuid in itertools.zip_longest(range(gpus), uuids, fillvalue="")
                    if isinstance(index, int)
                ],
                simulated=not uuids,
            ),
        )
        self.welcome = agent_pb2.Welcome()
        self.commands: list[agent_pb2.Command] = []
        self.workers: dict[int, agent_pb2.WorkerReport] = {}
        self.bootstraps: list[agent_pb2.RayBootstrap] = []
        self.spare_targets: list[int] = []
        self.inquiries: list[agent_pb2.Inquiry] = []
        self.reads: list[agent_pb2.ReadOutput] = []
        self.forgotten: list[str] = []
        self.acked: set[str] = set()
        self.replies: set[int] = set()
        self.ended: asyncio.Future[grpc.StatusCode] | None = None
        self._changed = asyncio.Condition()
        self._run = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._taken = 0
        self._channel: grpc.aio.Channel | None = None
        self._call: Any = None
        self._writing = asyncio.Lock()  # a stream takes one write at a time, and a test may report while it beats
        self._reader: asyncio.Task[None] | None = None

    # ---- life ----

    async def join(self) -> agent_pb2.Welcome:
        """Opens a session and returns the Welcome.

        Raises:
            grpc.aio.AioRpcError: it was refused.
        """
        await self.cut()
        self.hello.epoch_seen = self.welcome.epoch
        del self.hello.workers[:]
        self.hello.workers.extend(self.workers.values())
        self._channel = open_channel(self.address, options=(("grpc.enable_http_proxy", 0),))
        stub = agent_pb2_grpc.AgentServiceStub(self._channel)
        self._call = stub.Session()
        await self.say(hello=self.hello)
        first = await self._call.read()
        if first is grpc.aio.EOF:
            raise AssertionError(f"the stream ended with {await self._call.code()}")
        assert first.WhichOneof("message") == "welcome"
        self.welcome = first.welcome
        self.ended = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read())
        return self.welcome

    async def cut(self) -> None:
        """Ends the stream without a goodbye."""
        if self._call is not None:
            self._call.cancel()
        if self._reader is not None:
            await asyncio.wait({self._reader})
            self._reader = None
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def goodbye(self, reason: str = "") -> grpc.StatusCode:
        """Leaves and returns the status that the stream ended with."""
        await self.say(goodbye=agent_pb2.Goodbye(reason=reason))
        await self._call.done_writing()
        return await self.over()

    async def over(self) -> grpc.StatusCode:
        """Waits for the end of the stream and returns its status."""
        assert self.ended is not None
        return await asyncio.shield(self.ended)

    async def __aenter__(self) -> Self:
        await self.join()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cut()

    # ---- speaking ----

    async def say(self, **message: Any) -> None:
        """Sends one message: one field of SessionRequest."""
        async with self._writing:
            await self._call.write(agent_pb2.SessionRequest(**message))

    async def heartbeat(self, **fields: Any) -> None:
        """Sends a heartbeat and waits for its answer."""
        sequence = next(self._numbers)
        await self.say(heartbeat=agent_pb2.Heartbeat(sequence=sequence, **fields))
        await self.until(lambda: sequence in self.replies)

    async def beat(self, every_s: float) -> None:
        """Sends heartbeats for ever."""
        while True:
            await self.heartbeat()
            await asyncio.sleep(every_s)

    async def report(self, report: agent_pb2.Report) -> str:
        """Sends a report and returns its id, a fresh one unless it has one."""
        if not report.report_id:
            report.report_id = f"{self._run}-{next(self._numbers)}"
        await self.say(report=report)
        return report.report_id

    async def reported(self, report: agent_pb2.Report) -> str:
        """Sends a report and waits until it is acknowledged."""
        report_id = await self.report(report)
        await self.until(lambda: report_id in self.acked)
        return report_id

    @contextlib.asynccontextmanager
    async def sending(self, read_id: str) -> AsyncIterator[Any]:
        """A stream of output that answers a read."""
        channel = open_channel(self.address, options=(("grpc.enable_http_proxy", 0),))
        async with channel:
            call = agent_pb2_grpc.AgentServiceStub(channel).SendOutput()
            await call.write(agent_pb2.SendOutputRequest(read_id=read_id))
            yield call

    # ---- waiting ----

    async def until(self, true: Callable[[], bool]) -> None:
        """Waits until ``true()``, looking whenever something was said."""
        async with self._changed:
            await self._changed.wait_for(true)

    async def command(self, kind: str) -> agent_pb2.Command:
        """The next command of a kind that this method has not returned yet."""
        found: list[agent_pb2.Command] = []

        def look() -> bool:
            for place in range(self._taken, len(self.commands)):
                if self.commands[place].WhichOneof("action") == kind:
                    self._taken = place + 1
                    found.append(self.commands[place])
                    return True
            return False

        await self.until(look)
        return found[0]

    def got(self, kind: str) -> list[agent_pb2.Command]:
        """Every command of a kind so far."""
        return [command for command in self.commands if command.WhichOneof("action") == kind]

    # ---- inside ----

    async def _read(self) -> None:
        assert self.ended is not None
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                await self._take(message)
        except (grpc.aio.AioRpcError, asyncio.CancelledError, asyncio.InvalidStateError):
            pass
        if not self.ended.done():
            code = grpc.StatusCode.CANCELLED if self._call.cancelled() else await self._call.code()
            self.ended.set_result(code)
        async with self._changed:
            self._changed.notify_all()

    async def _take(self, message: agent_pb2.SessionResponse) -> None:
        what = message.WhichOneof("message")
        if what == "command":
            self.commands.append(message.command)
            if message.command.WhichOneof("action") not in self.hold:
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await self.report(self.obey(message.command))
        elif what == "ack":
            self.acked.update(message.ack.report_ids)
        elif what == "heartbeat_reply":
            self.replies.add(message.heartbeat_reply.sequence)
        elif what == "ray_bootstrap":
            self.bootstraps.append(message.ray_bootstrap)
        elif what == "spare_target":
            self.spare_targets.append(message.spare_target.count)
        elif what == "inquiry":
            self.inquiries.append(message.inquiry)
        elif what == "read_output":
            self.reads.append(message.read_output)
        elif what == "forget_jobs":
            self.forgotten += message.forget_jobs.job_ids
        async with self._changed:
            self._changed.notify_all()

    def obey(self, command: agent_pb2.Command) -> agent_pb2.Report:
        """What a good agent reports; ``workers`` is kept in step."""
        if command.HasField("start_worker"):
            report = worker_ready(command)
            self.workers[command.start_worker.generation] = agent_pb2.WorkerReport(
                worker=command.start_worker.worker,
                generation=command.start_worker.generation,
                state=agent_pb2.AGENT_WORKER_STATE_READY,
                pid=report.worker_ready.pid,
            )
            return report
        if command.HasField("stop_worker"):
            known = self.workers.pop(command.stop_worker.generation, None)
            outcome = agent_pb2.STOP_OUTCOME_KILLED if known else agent_pb2.STOP_OUTCOME_ALREADY_GONE
            return worker_stopped(command, outcome)
        if command.HasField("reserve_port"):
            asked = command.reserve_port
            reserved = agent_pb2.PortReserved(worker=asked.worker, generation=asked.generation, port=20_001)
            return agent_pb2.Report(command_id=command.command_id, port_reserved=reserved)
        if command.HasField("create_placement_group"):
            return group_ready(command, self.hello.ray.session)
        return group_removed(command)


def worker_ready(command: agent_pb2.Command) -> agent_pb2.Report:
    """The start went well."""
    start = command.start_worker
    ready = agent_pb2.WorkerReady(
        worker=start.worker,
        generation=start.generation,
        pid=10_000 + start.generation,
        start_ms=5,
        visible_devices=",".join(share.id for share in start.allocation.devices),
    )
    return agent_pb2.Report(command_id=command.command_id, worker_ready=ready)


def start_failed(
    command: agent_pb2.Command,
    failure: agent_pb2.StartFailure.ValueType = agent_pb2.START_FAILURE_DIED,
    message: str = "it died",
) -> agent_pb2.Report:
    """The start went wrong."""
    start = command.start_worker
    failed = agent_pb2.WorkerStartFailed(
        worker=start.worker, generation=start.generation, failure=failure, message=message
    )
    return agent_pb2.Report(command_id=command.command_id, worker_start_failed=failed)


def worker_stopped(
    command: agent_pb2.Command,
    outcome: agent_pb2.StopOutcome.ValueType = agent_pb2.STOP_OUTCOME_KILLED,
    **fields: Any,
) -> agent_pb2.Report:
    """The stop ended."""
    stop = command.stop_worker
    stopped = agent_pb2.WorkerStopped(worker=stop.worker, generation=stop.generation, outcome=outcome, **fields)
    return agent_pb2.Report(command_id=command.command_id, worker_stopped=stopped)


def worker_exited(command: agent_pb2.Command, message: str = "killed by signal 9") -> agent_pb2.Report:
    """The worker of a start died by itself."""
    start = command.start_worker
    exited = agent_pb2.WorkerExited(worker=start.worker, generation=start.generation, message=message)
    return agent_pb2.Report(worker_exited=exited)


def group_ready(command: agent_pb2.Command, ray_session: str = "") -> agent_pb2.Report:
    """The placement group is booked."""
    create = command.create_placement_group
    ready = agent_pb2.PlacementGroupReady(
        placement_group_id=create.placement_group_id, attempt=create.attempt, ray_session=ray_session
    )
    return agent_pb2.Report(command_id=command.command_id, placement_group_ready=ready)


def group_removed(command: agent_pb2.Command) -> agent_pb2.Report:
    """The placement group is gone."""
    group_id = command.remove_placement_group.placement_group_id
    removed = agent_pb2.PlacementGroupRemoved(placement_group_id=group_id)
    return agent_pb2.Report(command_id=command.command_id, placement_group_removed=removed)


def refused(command: agent_pb2.Command, message: str = "not now", *, report_id: str = "") -> agent_pb2.Report:
    """The command was refused."""
    why = agent_pb2.CommandRefused(message=message)
    return agent_pb2.Report(report_id=report_id, command_id=command.command_id, command_refused=why)
