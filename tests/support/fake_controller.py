"""A controller for tests of agents: keeps what agents say, and says what the test wants."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from callboard.v1 import agent_pb2, agent_pb2_grpc, common_pb2, inspection_pb2


class FakeSession:
    """One stream of one agent."""

    def __init__(self, hello: agent_pb2.Hello, context: Any) -> None:
        self.hello = hello
        self.heartbeats: list[agent_pb2.Heartbeat] = []
        self.ended = asyncio.Event()
        self.goodbye: str | None = None
        self._context = context
        self._writing = asyncio.Lock()

    async def send(self, **message: Any) -> None:
        """Say something: one field of SessionResponse."""
        async with self._writing:  # gRPC allows one write at a time.
            await self._context.write(agent_pb2.SessionResponse(**message))


class FakeController(agent_pb2_grpc.AgentServiceServicer):
    """Accepts agents. Change its fields to make it behave otherwise."""

    def __init__(self) -> None:
        self.term = 1
        self.epoch = itertools.count(1)
        self.welcome: dict[str, Any] = {"lease_ms": 15_000, "heartbeat_ms": 200, "orphan_grace_ms": 60_000}
        self.keep_all = True
        self.acknowledge = True
        self.refuse: tuple[grpc.StatusCode, str] | None = None
        self.greets = asyncio.Event()
        """Whether a Hello is answered at once."""
        self.greets.set()
        self.ungreeted = 0
        self.sessions: dict[str, FakeSession] = {}
        self.opened: list[FakeSession] = []
        self.reports: list[agent_pb2.Report] = []
        self.answers: dict[str, inspection_pb2.NodeInspection] = {}
        self.output: dict[str, list[agent_pb2.SendOutputRequest]] = {}
        self.output_ended: set[str] = set()
        self.packages: dict[str, bytes] = {}
        self.fetched: list[str] = []
        """Packages that were asked for and given."""
        self.piece_bytes = 1 << 20
        self.away = 0
        """Calls for packages that fail as if nobody were there."""
        self.reading = asyncio.Event()
        """Whether output is read as it comes."""
        self.reading.set()
        self.finish = False
        """Whether a follower is told to end once it has caught up."""
        self.changed = asyncio.Condition()
        self.server: grpc.aio.Server | None = None
        self.port = 0
        self._commands = itertools.count(1)
        self._inquiries = itertools.count(1)
        self._outputs = itertools.count(1)

    # The service.

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """Not a generator, as the stub would have it: answers are written whenever there is something to say."""
        hello = (await anext(request_iterator)).hello
        if self.refuse is not None:
            await context.abort(*self.refuse)
        await self._change(lambda: setattr(self, "ungreeted", self.ungreeted + 1))
        await self.greets.wait()
        self.ungreeted -= 1
        session = FakeSession(hello, context)
        keep = [
            agent_pb2.WorkerRef(worker=each.worker, generation=each.generation)
            for each in hello.workers
            if self.keep_all
        ]
        welcome = {"epoch": next(self.epoch), "term": self.term, "keep": keep, **self.welcome}
        await session.send(welcome=agent_pb2.Welcome(**welcome))
        await self._change(lambda: self._open(session))
        try:
            async for request in request_iterator:
                await self._take(session, request)
                if session.goodbye is not None:
                    break
        finally:
            session.ended.set()
            await self._change(lambda: None)

    async def AttachExec(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[agent_pb2.AttachExecRequest], context: Any
    ) -> None:
        """No test asks for a program here."""
        await context.abort(grpc.StatusCode.NOT_FOUND, "nobody waits for this program")

    async def SendOutput(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """Take output of workers; read no faster than the test lets it."""
        read_id = (await anext(request_iterator)).read_id
        async for request in request_iterator:
            await self.reading.wait()
            async with self.changed:
                self.output.setdefault(read_id, []).append(request)
                self.changed.notify_all()
            if request.caught_up and self.finish:
                await context.write(agent_pb2.SendOutputResponse(finish=True))
        await self._change(lambda: self.output_ended.add(read_id))

    def _open(self, session: FakeSession) -> None:
        self.sessions[session.hello.node_id] = session
        self.opened.append(session)

    async def Join(self, request: agent_pb2.JoinRequest, context: Any) -> agent_pb2.JoinResponse:  # noqa: N802
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "nobody joins here")
        raise AssertionError

    async def GetPackage(  # noqa: N802
        self, request: agent_pb2.GetPackageRequest, context: Any
    ) -> agent_pb2.GetPackageResponse:
        data = self.packages.get(request.package)
        if self.away:
            self.away -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the controller is away")
        if data is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "it is not kept here")
            raise AssertionError
        self.fetched.append(request.package)
        data_of_it = data[request.offset :][: self.piece_bytes]
        return agent_pb2.GetPackageResponse(size_bytes=len(data), data=data_of_it)

    async def _take(self, session: FakeSession, request: agent_pb2.SessionRequest) -> None:
        match request.WhichOneof("message"):
            case "heartbeat":
                reply = agent_pb2.HeartbeatReply(sequence=request.heartbeat.sequence)
                await session.send(heartbeat_reply=reply)
                await self._change(lambda: session.heartbeats.append(request.heartbeat))
            case "report":
                await self._change(lambda: self.reports.append(request.report))
                if self.acknowledge:
                    await session.send(ack=agent_pb2.Ack(report_ids=[request.report.report_id]))
            case "inquiry_answer":
                answer = request.inquiry_answer
                await self._change(lambda: self.answers.update({answer.inquiry_id: answer.inspection}))
            case "goodbye":
                session.goodbye = request.goodbye.reason
            case _:
                raise AssertionError(f"not after Hello: {request}")

    async def _change(self, change: Callable[[], None]) -> None:
        async with self.changed:
            change()
            self.changed.notify_all()

    # For tests.

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[FakeController]:
        """Listen on loopback."""
        await self.start(port)
        try:
            yield self
        finally:
            await self.stop()

    async def start(self, port: int = 0) -> None:
        """Listen on loopback, at the same port when started again."""
        self.server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ]
        )
        agent_pb2_grpc.add_AgentServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port or self.port}")
        await self.server.start()

    async def stop(self) -> None:
        """Cut every stream."""
        assert self.server is not None
        await self.server.stop(None)

    @property
    def address(self) -> str:
        """Where agents find it."""
        return f"127.0.0.1:{self.port}"

    async def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until the condition is true, looked at whenever something was said.

        Raises:
            AssertionError: it did not come true for longer than any agent takes; with what was said meanwhile.
        """
        try:
            async with asyncio.timeout(90), self.changed:
                await self.changed.wait_for(condition)
        except TimeoutError:
            said = "\n".join(str(report) for report in self.reports)
            raise AssertionError(f"{len(self.opened)} sessions were opened, and their agents said:\n{said}") from None
        return condition()

    async def session(self, node_id: str = "n0", number: int = 1) -> FakeSession:
        """The `number`-th session of a node."""

        def found() -> FakeSession | None:
            sessions = [each for each in self.opened if each.hello.node_id == node_id]
            return sessions[number - 1] if len(sessions) >= number else None

        session: FakeSession = await self.until(found)
        return session

    async def command(
        self, node_id: str = "n0", *, command_id: str = "", term: int | None = None, **action: Any
    ) -> str:
        """Send a command; returns its id."""
        command_id = command_id or f"c{next(self._commands)}"
        term = self.term if term is None else term
        command = agent_pb2.Command(command_id=command_id, term=term, **action)
        await self.sessions[node_id].send(command=command)
        return command_id

    async def report(self, command_id: str, number: int = 1) -> agent_pb2.Report:
        """The `number`-th report that answers a command."""

        def found() -> agent_pb2.Report | None:
            matching = [each for each in self.reports if each.command_id == command_id]
            return matching[number - 1] if len(matching) >= number else None

        report: agent_pb2.Report = await self.until(found)
        return report

    async def said(self, content: str, number: int = 1) -> Any:
        """The `number`-th report with this content, whatever it answers."""

        def found() -> Any:
            matching = [getattr(each, content) for each in self.reports if each.WhichOneof("content") == content]
            return matching[number - 1] if len(matching) >= number else None

        return await self.until(found)

    async def inspect(self, node_id: str = "n0", **ask: Any) -> inspection_pb2.NodeInspection:
        """What a node sees now."""
        inquiry = f"inquiry-{next(self._inquiries)}"
        message = agent_pb2.Inquiry(inquiry_id=inquiry, ask=inspection_pb2.InspectionAsk(**ask))
        await self.sessions[node_id].send(inquiry=message)
        seen: inspection_pb2.NodeInspection = await self.until(lambda: self.answers.get(inquiry))
        return seen

    async def read_output(self, job: str, node_id: str = "n0", *, follow: bool = False, **selection: Any) -> str:
        """Ask for output; returns the id of the read."""
        read_id = f"read-{next(self._outputs)}"
        ask = agent_pb2.ReadOutput(
            read_id=read_id, job_id=job, follow=follow, selection=common_pb2.OutputSelection(**selection)
        )
        await self.sessions[node_id].send(read_output=ask)
        return read_id

    async def all_output(self, job: str, node_id: str = "n0", **selection: Any) -> list[common_pb2.OutputChunk]:
        """What a node has of a job."""
        read_id = await self.read_output(job, node_id, **selection)
        await self.until(lambda: read_id in self.output_ended)
        return [each.chunk for each in self.output.get(read_id, []) if each.HasField("chunk")]

    async def do(self, node_id: str = "n0", **action: Any) -> agent_pb2.Report:
        """Send a command and wait for its answer."""
        return await self.report(await self.command(node_id, **action))


def start_worker(
    actor: str,
    *,
    job: str = "job-1",
    component: str = "main",
    rank: int = 0,
    generation: int = 1,
    devices: tuple[str, ...] = (),
    start_timeout_ms: int = 20_000,
    **fields: Any,
) -> agent_pb2.StartWorker:
    """A start command with the fields most tests don't care for."""
    shares = [common_pb2.DeviceShare(index=int(each), id=each, milli=1000) for each in devices]
    return agent_pb2.StartWorker(
        worker=common_pb2.WorkerKey(job_id=job, component=component, rank=rank),
        generation=generation,
        attempt=1,
        allocation=common_pb2.Allocation(
            devices=shares, resources=common_pb2.Resources(cpu_milli=1000, gpu_milli=1000 * len(shares))
        ),
        actor=f"tests.support.actors:{actor}",
        max_concurrency=fields.pop("max_concurrency", 1),
        world_size=fields.pop("world_size", 1),
        local_world_size=fields.pop("local_world_size", 1),
        master_address="127.0.0.1",
        start_timeout_ms=start_timeout_ms,
        **fields,
    )


def stop_worker(
    start: agent_pb2.StartWorker,
    *,
    cancel_timeout_ms: int = 500,
    kill_timeout_ms: int = 5_000,
    checkpoint: bool = False,
) -> agent_pb2.StopWorker:
    """The stop command for what was started."""
    return agent_pb2.StopWorker(
        worker=start.worker,
        generation=start.generation,
        cancel_timeout_ms=cancel_timeout_ms,
        kill_timeout_ms=kill_timeout_ms,
        checkpoint=checkpoint,
        reason="the test wants it",
    )
