"""The agent's end of a session with the controller: what it is asked, and what it tells.

One bidi stream, opened again whenever it ends: Hello → Welcome, then heartbeats, commands, reports and their acks.
A refusal of Hello ends the agent; everything else is tried again for ever, with backoff. A stream that just ends is no
goodbye, to either side.

The stream and chance are handed in, so that the simulator runs this protocol as it ships, on a network of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc

from callboard.agents.link.lease import Lease, LeaseTerms
from callboard.agents.link.outbox import Outbox
from callboard.agents.options import AgentOptions
from callboard.agents.system.tasks import answer_within, cancelled, within
from callboard.model.durations import Backoff
from callboard.model.log import structlog
from callboard.security.dialing import KEEPALIVE, Channel, open_channel
from callboard.security.tokens import BadToken, find_token
from callboard.v1 import agent_pb2, agent_pb2_grpc, inspection_pb2
from callboard.wire.errors import why_lost

_log = structlog.get_logger(__name__)

_T = TypeVar("_T")


class Stream(Protocol):
    """What a session needs of ``grpc.aio.StreamStreamCall``."""

    async def write(self, request: agent_pb2.SessionRequest, /) -> None: ...

    async def read(self) -> agent_pb2.SessionResponse | Any: ...

    async def done_writing(self) -> None: ...

    async def code(self) -> grpc.StatusCode: ...

    async def details(self) -> str | None: ...

    def cancel(self) -> bool: ...


Connect = Callable[[], AbstractAsyncContextManager[Stream]]
"""Opens a stream."""

WELCOME_S = 20.0
"""For the first answer. Above a controller's slowest start; below anyone's patience."""

_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.1, 5.0
"""Between attempts, halved by jitter. At most a third of the default lease (15 s), so that a short outage of the
controller never costs one."""

_LOG_EVERY_S = 30.0
"""How often an ongoing outage is logged."""

_HEARTBEAT_MIN_S = 0.05
"""Whatever a controller asks for, heartbeats must not become a load."""

_MOST_INQUIRIES = 4
"""Looked into at one time: as many as the controller waits for."""

_GOODBYE_S = 2.0
"""For the controller to end the stream after a goodbye."""

_OPENING_S = 5.0
"""For an attempt under way to succeed or fail when the agent wants to go."""


class SessionRefused(Exception):
    """The controller doesn't want this agent; the text is its reason."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class _Lost(Exception):
    """The session ended; another one may be opened."""


class Session:
    """The agent's side of its sessions."""

    def __init__(
        self,
        controller: str,
        *,
        handler: SessionHandler,
        outbox: Outbox,
        lease: Lease,
        connect: Connect,
        uniform: Callable[[float, float], float],
        wall_ns: Callable[[], int],
    ) -> None:
        """
        Args:
            controller: its address, for people.
            connect: opens a stream.
            uniform: chance between two bounds.
            wall_ns: wall clock in nanoseconds since 1970.
        """
        self.leaving = False
        """Told with every heartbeat once set."""
        self.kill_at: float | None = None
        """Loop time at which what runs here is killed at the latest, while leaving; told with it."""
        self.epoch = 0
        self.term = 0
        self._controller = controller
        self._connect = connect
        self._uniform = uniform
        self._wall_ns = wall_ns
        self._handler = handler
        self._outbox = outbox
        self._lease = lease
        self._heartbeat_s = 5.0
        self._beat_now = asyncio.Event()
        self._stream: Stream | None = None
        self._writing = asyncio.Lock()
        self._ended = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._logged_at: float | None = None
        self._parted = asyncio.Event()
        self._beats: dict[int, float] = {}
        """When each heartbeat was sent that has no answer yet."""
        self._inquiries: set[asyncio.Task[None]] = set()
        self._looking: deque[asyncio.Task[None]] = deque()

    def beat(self) -> None:
        """Send a heartbeat now: something of it changed."""
        self._beat_now.set()

    async def run(self) -> None:
        """Keep a session open until goodbye was said.

        Raises:
            SessionRefused: the controller refused Hello.
        """
        backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S, uniform=self._uniform)  # spreads reconnects
        while not self._parted.is_set():
            opened_at = asyncio.get_running_loop().time()
            try:
                await self._one_session()
            except _Lost as error:
                if self._parted.is_set():
                    return
                self._log_outage(str(error))
            if asyncio.get_running_loop().time() - opened_at > _BACKOFF_MAX_S:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def settled(self) -> bool:
        """Whether a session is open, once an attempt that is under way has succeeded or failed: a controller that took
        our Hello counts on us, though its Welcome has yet to come."""
        await answer_within(self._settled.wait(), _OPENING_S)
        return self._stream is not None

    async def say_goodbye(self, reason: str) -> None:
        """Tell the controller that the agent leaves on purpose, if it can be told. No session is opened after that."""
        self._parted.set()
        await self.settled()
        stream = self._stream
        if stream is None:
            return
        goodbye = agent_pb2.SessionRequest(goodbye=agent_pb2.Goodbye(reason=reason))
        farewell = asyncio.create_task(self._farewell(stream, goodbye))
        await asyncio.wait([farewell], timeout=_GOODBYE_S)
        farewell.cancel()

    # One session.

    async def _one_session(self) -> None:
        async with self._connect() as stream:
            tasks: list[asyncio.Task[None]] = []
            self._settled.clear()
            try:
                await self._open(stream)
                self._settled.set()
                works = (self._receive(stream), self._beat(stream), self._report(stream))
                tasks = [asyncio.create_task(work) for work in works]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._stream = None
                self._settled.set()
                self._ended.set()
                stream.cancel()
                await cancelled([*tasks, *self._inquiries])
                self._looking.clear()
            for task in tasks:
                if not task.cancelled():
                    task.result()

    async def _open(self, stream: Stream) -> None:
        hello = self._handler.hello(self.epoch)
        sent_s = self._lease.now_s()
        await _in_time(stream.write(agent_pb2.SessionRequest(hello=hello)), stream)
        answer = _decoded(await _in_time(stream.read(), stream))
        if not isinstance(answer, agent_pb2.SessionResponse):  # grpc.aio.EOF
            code, details = await stream.code(), await stream.details()
            if code in REFUSALS:
                raise SessionRefused(code, details or code.name)
            raise _Lost(why_lost(code, details))
        welcome = answer.welcome
        if answer.WhichOneof("message") != "welcome":
            raise _Lost("the controller's first message was no Welcome")
        # I9: an answer from the past, or a controller that another one has replaced.
        if welcome.epoch <= self.epoch or welcome.term < self.term:
            raise _Lost(f"stale Welcome: epoch {welcome.epoch}, term {welcome.term}")
        self._begin(stream, welcome, sent_s)

    def _begin(self, stream: Stream, welcome: agent_pb2.Welcome, sent_s: float) -> None:
        self._lease.check()
        self.epoch, self.term = welcome.epoch, welcome.term
        self._heartbeat_s = max(_HEARTBEAT_MIN_S, welcome.heartbeat_ms / 1000)
        self._lease.grant(LeaseTerms(welcome.lease_ms / 1000, welcome.orphan_grace_ms / 1000), sent_s)
        self._beats.clear()
        self._outbox.acknowledge(welcome.known_report_ids)
        self._outbox.start_over()
        self._handler.welcomed(welcome)
        self._stream = stream
        self._ended.clear()
        self._logged_at = None
        _log.info("session_opened", epoch=self.epoch, term=self.term, rank=welcome.rank)

    async def _receive(self, stream: Stream) -> None:
        while True:
            response = _decoded(await _or_lost(stream.read(), stream))
            if not isinstance(response, agent_pb2.SessionResponse):  # grpc.aio.EOF
                raise _Lost(why_lost(await stream.code(), await stream.details()))
            # First act on what ran out while nothing was heard (this process may have been stopped).
            self._lease.check()
            self._lease.heard()
            match response.WhichOneof("message"):
                case "command":
                    self._handler.command(response.command)
                    await self._outbox.wait_room()
                case "ack":
                    self._outbox.acknowledge(response.ack.report_ids)
                case "ray_bootstrap":
                    self._handler.ray_bootstrap(response.ray_bootstrap)
                case "spare_target":
                    self._handler.spare_target(response.spare_target)
                case "read_output" | "start_exec" | "forget_jobs":
                    self._pass_on(response)
                case "inquiry":
                    self._answer(stream, response.inquiry)
                case "heartbeat_reply":
                    self._answered(response.heartbeat_reply.sequence)
                case "welcome":
                    raise _Lost("a second Welcome in one session")
                case _:
                    pass  # Of a newer version: it has said all that we know by coming.

    def _pass_on(self, response: agent_pb2.SessionResponse) -> None:
        """What concerns output and programs, and no decision."""
        if response.HasField("read_output"):
            self._handler.read_output(response.read_output)
        elif response.HasField("start_exec"):
            self._handler.start_exec(response.start_exec)
        else:
            self._handler.forget_jobs(response.forget_jobs.job_ids)

    def _answered(self, sequence: int) -> None:
        """The lease counts from when a heartbeat was sent, not from when its answer came."""
        sent_s = self._beats.pop(sequence, None)
        if sent_s is not None:
            self._lease.renew(sent_s)

    async def _beat(self, stream: Stream) -> None:
        sequence = 0
        while True:
            sequence += 1
            self._beat_now.clear()
            heartbeat = agent_pb2.Heartbeat(
                sequence=sequence,
                ray=self._handler.ray_node(),
                preloads=self._handler.preloads(),
                devices=self._handler.devices(),
                clock_ms=self._wall_ns() // 1_000_000,
                leaving=self.leaving,
            )
            if self.kill_at is not None:
                left_s = self.kill_at - asyncio.get_running_loop().time()
                heartbeat.kill_within_ms = max(0, round(left_s * 1000))
            self._beats[sequence] = self._lease.now_s()
            await self._write(stream, agent_pb2.SessionRequest(heartbeat=heartbeat))
            # Jitter, so that the agents of a restarted controller don't beat in step.
            interval_s = self._heartbeat_s * self._uniform(0.9, 1.1)
            await answer_within(self._beat_now.wait(), interval_s)
            if not self._lease.check():
                raise _Lost("the controller was silent for the whole lease")

    async def _report(self, stream: Stream) -> None:
        while True:
            report = await self._outbox.next()
            await self._write(stream, agent_pb2.SessionRequest(report=report))

    def _answer(self, stream: Stream, inquiry: agent_pb2.Inquiry) -> None:
        """Look around beside everything else; few at a time, for each costs a walk through the process table.

        The controller waits for no more than these. After an agent was stopped, those that it has given up come first:
        the oldest goes, never the newest.
        """
        if len(self._looking) >= _MOST_INQUIRIES:
            self._looking.popleft().cancel()

        async def answer() -> None:
            seen = await self._handler.inspect(inquiry.ask)
            self._looking.remove(task)  # To cancel a write would end the session.
            told = agent_pb2.InquiryAnswer(inquiry_id=inquiry.inquiry_id, inspection=seen)
            try:
                await self._write(stream, agent_pb2.SessionRequest(inquiry_answer=told))
            except _Lost as error:
                _log.info("inquiry_not_answered", why=str(error))

        task = asyncio.create_task(answer())
        self._looking.append(task)
        self._inquiries.add(task)
        task.add_done_callback(self._inquiries.discard)

    async def _farewell(self, stream: Stream, goodbye: agent_pb2.SessionRequest) -> None:
        await self._write(stream, goodbye)
        await stream.done_writing()
        await self._ended.wait()

    async def _write(self, stream: Stream, request: agent_pb2.SessionRequest) -> None:
        # gRPC allows one write at a time.
        async with self._writing:
            await _or_lost(stream.write(request), stream)

    def _log_outage(self, why: str) -> None:
        now = asyncio.get_running_loop().time()
        if self._logged_at is None or now - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            _log.warning("session_lost", controller=self._controller, why=why)


def _decoded(message: _T) -> _T:
    """What was read. grpc.aio gives None for what it can't decode, of a stream that goes on."""
    if message is None:
        raise _Lost("the controller sent a message that can't be decoded; is it of another version?")
    return message


@asynccontextmanager
async def open_stream(dial: Callable[[], Channel]) -> AsyncIterator[Stream]:
    """A session's stream, by gRPC."""
    try:
        channel = dial()
        channel.metadata()
    except BadToken as error:
        # A file of it is being replaced just now, or is broken: whoever mends it need not start the agent again.
        raise _Lost(str(error)) from error
    async with channel:
        # No deadline: a session lasts. The lease and keepalive notice when it is dead.
        stream = agent_pb2_grpc.AgentServiceStub(channel).Session()
        try:
            yield stream
        except _Lost:
            if stream.done():
                channel.moved(
                    grpc.aio.AioRpcError(await stream.code(), grpc.aio.Metadata(), await stream.trailing_metadata())
                )
            else:
                channel.moved()  # it said nothing for too long
            raise
        except SessionRefused as refused:
            # It may have looked before a controller that was just starting had registered its token.
            if refused.code is grpc.StatusCode.UNAUTHENTICATED and channel.renew():
                raise _Lost("the controller's token is another one now") from refused
            raise


async def _or_lost(work: Awaitable[_T], stream: Stream) -> _T:
    try:
        return await work
    except grpc.aio.AioRpcError as error:
        raise _Lost(why_lost(error.code(), error.details())) from error
    except asyncio.InvalidStateError as error:
        # grpc.aio's way to say that the stream ended before this was sent.
        raise _Lost(why_lost(await stream.code(), await stream.details())) from error


async def _in_time(work: Coroutine[Any, Any, _T], stream: Stream) -> _T:
    """The result of one step of opening, within `WELCOME_S`; a refusal becomes `SessionRefused`."""
    try:
        return await within(work, WELCOME_S)
    except TimeoutError as error:
        raise _Lost(f"no Welcome within {WELCOME_S:g} s") from error
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
        code, details = await stream.code(), await stream.details()
        if code in REFUSALS:
            raise SessionRefused(code, details or code.name) from error
        raise _Lost(why_lost(code, details)) from error


class SessionHandler(Protocol):
    """What a session is about."""

    def hello(self, epoch_seen: int) -> agent_pb2.Hello:
        """Who the agent is and what runs here, at this moment."""

    def ray_node(self) -> agent_pb2.RayNode | None:
        """The node's part in Ray, if it changed since it was last asked for in this session."""

    def welcomed(self, welcome: agent_pb2.Welcome) -> None:
        """A session began."""

    def command(self, command: agent_pb2.Command) -> None:
        """Something to do."""

    def ray_bootstrap(self, bootstrap: agent_pb2.RayBootstrap) -> None:
        """Where to find Ray."""

    def spare_target(self, target: agent_pb2.SpareTarget) -> None:
        """How many warm spares to keep, and what they import."""

    def devices(self) -> agent_pb2.DeviceStates | None:
        """What the driver says of the devices, if it changed since it was last asked for in this session."""

    def preloads(self) -> agent_pb2.PreloadStates | None:
        """What became of preloads, if it changed since it was last asked for in this session."""

    def read_output(self, ask: agent_pb2.ReadOutput) -> None:
        """Send output of workers."""

    def start_exec(self, ask: agent_pb2.StartExec) -> None:
        """Run a program in the environment of a worker."""

    def forget_jobs(self, jobs: Sequence[str]) -> None:
        """Jobs were forgotten: their output may go."""

    async def inspect(self, ask: inspection_pb2.InspectionAsk) -> inspection_pb2.NodeInspection:
        """What the node sees now."""


REFUSALS = frozenset(
    {
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Statuses that say "not you" or "not so": asking again changes nothing."""


def controller_channel(options: AgentOptions) -> Channel:
    """A channel to the controller; the keepalive matches the minimum the controller sets."""
    of_channel = [
        *KEEPALIVE,
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_http_proxy", int(options.http_proxy)),
        # A channel a session: what one learned of a dead controller must not delay the next.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    stated = Path(options.token_file) if options.token_file else None
    return open_channel(options.controller, of_channel, find=lambda at: find_token(at, stated))
