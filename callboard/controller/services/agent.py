"""The agents' service: the stream of one agent, read message by message (docs/agents.md)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from callboard.controller.convert.hello import device_states
from callboard.controller.convert.reports import event_of, refused_event
from callboard.controller.loop.driver import Driver
from callboard.controller.options import ControllerOptions
from callboard.controller.package_store import Packages
from callboard.controller.services.request_parts import Context
from callboard.controller.sessions.execs import Execs
from callboard.controller.sessions.outputs import OutputReads
from callboard.controller.sessions.session import AgentSession
from callboard.controller.sessions.sessions import Sessions
from callboard.model.durations import Backoff
from callboard.model.log import structlog
from callboard.model.names import is_name
from callboard.scheduler import Outcome
from callboard.scheduler.records.commands import Command
from callboard.scheduler.records.events import Make, NodeLeft
from callboard.security.caller_roles import caller, check_node
from callboard.security.grants import BadGrant
from callboard.security.issued import BadCertificate
from callboard.security.joining import Joining
from callboard.security.places import UnsafeFile
from callboard.v1 import agent_pb2, agent_pb2_grpc
from callboard.wire.refusals import InternalError, InvalidRequest, Unavailable, invalid

HELLO_TIMEOUT_S = 10.0
"""How long an open stream may stay silent before its Hello. It holds a slot and no node yet."""

RESEND_FIRST_S = 1.0
RESEND_LONGEST_S = 30.0
"""How soon a refused stop or removal is asked for again: it stays owed as long as the node lives (PG-05)."""

MAX_REPORT_ID = 128

ONLY_AGENTS = "connect with `callboard agent` of this controller's version"

log = structlog.get_logger(__name__)


class AgentService(agent_pb2_grpc.AgentServiceServicer):
    """The agents' streams."""

    def __init__(self, driver: Driver, sessions: Sessions, outputs: OutputReads, options: ControllerOptions) -> None:
        self._driver = driver
        self._outputs = outputs
        self.execs = Execs(driver, sessions.live)
        self._sessions = sessions
        self._options = options
        self.resend_first_s = RESEND_FIRST_S
        self.packages: Packages | None = None
        self.joining: Joining | None = None

    # A coroutine that writes, not a generator: a generator stuck in a write could not be told to end.
    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[agent_pb2.SessionRequest], context: Context
    ) -> None:
        """One session of one agent."""
        self._driver.check_serving()
        hello = await self._hello(request_iterator)
        check_node(hello.node_id)
        session = AgentSession(
            hello.node_id,
            hello.instance,
            _host(context.peer()),
            queue=self._options.limits.session_queue,
            warm_spares=hello.warm_spares,
            devices=list(device_states(hello.devices.states).values()),
        )
        try:
            await self._sessions.join(session, hello)
            self._outputs.joined(session, hello.output_jobs)
            del hello  # with the token of Ray in it
            await session.serve(self._read(session, request_iterator), context.write)
        finally:
            session.close()
            self._sessions.leave(session)
            if session.epoch:  # else it never joined, and the guard notes why
                log.info("agent stream ended", node=session.node_id, epoch=session.epoch)

    async def SendOutput(  # type: ignore[override]
        self, request_iterator: AsyncIterator[agent_pb2.SendOutputRequest], context: Context
    ) -> None:
        """Output of workers that was asked for."""
        await self._outputs.take(request_iterator, context.write)

    async def AttachExec(  # type: ignore[override]
        self, request_iterator: AsyncIterator[agent_pb2.AttachExecRequest], context: Context
    ) -> None:
        """A program in a worker's environment that was asked for."""
        await self.execs.attach(request_iterator, context.write)

    async def GetPackage(self, request: agent_pb2.GetPackageRequest, context: Context) -> agent_pb2.GetPackageResponse:
        """A piece of code that a job brings along."""
        assert self.packages is not None, "this controller has no state directory"
        size, data = await self.packages.read(request.package, request.offset)
        return agent_pb2.GetPackageResponse(size_bytes=size, data=data)

    async def Join(self, request: agent_pb2.JoinRequest, context: Context) -> agent_pb2.JoinResponse:
        """Credentials for an agent that has a join token."""
        assert self.joining is not None, "this controller has no state directory"
        self._driver.check_serving()  # a standby's credentials are the leader's
        if not is_name(request.node_id):
            raise invalid("node_id", f"{request.node_id[:63]!r} can't be a node's id")
        try:
            return await asyncio.to_thread(self.joining.join, caller(), request)
        except (BadGrant, BadCertificate) as error:
            raise InvalidRequest(str(error)) from error
        except (OSError, UnsafeFile) as error:
            log.exception("an agent can't join", node=request.node_id)
            raise Unavailable("the controller can't write its credentials; its log says why") from error

    async def _hello(self, requests: AsyncIterator[agent_pb2.SessionRequest]) -> agent_pb2.Hello:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await anext(requests, None)
        except TimeoutError:
            raise InvalidRequest(
                f"the stream said nothing for {HELLO_TIMEOUT_S:.0f} s, and an agent's first message is a Hello; if an "
                "agent opened it, look for what delays its messages on the way"
            ) from None
        said = first.WhichOneof("message") if first is not None else None
        if first is None or said != "hello":
            why = f"the first message of an agent is a Hello, and here {said or 'none'} came; {ONLY_AGENTS}"
            raise invalid("message", why)
        return first.hello

    async def _read(self, session: AgentSession, requests: AsyncIterator[agent_pb2.SessionRequest]) -> None:
        async for request in requests:
            if session.closed or not self._sessions.is_current(session):
                return  # a newer session speaks for the node (I9)
            await session.pace()
            what = request.WhichOneof("message")
            if what == "heartbeat":
                self._heartbeat(session, request.heartbeat)
            elif what == "report":
                self._sessions.heard(session)
                await self._report(session, request.report)
            elif what == "inquiry_answer":
                self._sessions.heard(session)
                session.answered(request.inquiry_answer)
            elif what == "goodbye":
                await self._goodbye(session, request.goodbye.reason)
                return
            else:
                raise invalid("message", f"{what or 'nothing'} is not expected after a Hello; {ONLY_AGENTS}")

    def _heartbeat(self, session: AgentSession, heartbeat: agent_pb2.Heartbeat) -> None:
        self._sessions.heard(session)
        if heartbeat.HasField("ray"):
            self._sessions.ray_changed(session, heartbeat.ray)
        if heartbeat.HasField("preloads"):
            self._sessions.preloads_changed(session, heartbeat.preloads.states)
        if heartbeat.HasField("devices"):
            self._sessions.devices_changed(session, heartbeat.devices.states)
        if heartbeat.leaving:
            self._sessions.leaves(session, heartbeat.kill_within_ms if heartbeat.HasField("kill_within_ms") else None)
        reply = agent_pb2.HeartbeatReply(sequence=heartbeat.sequence)
        session.send(agent_pb2.SessionResponse(heartbeat_reply=reply))

    async def _goodbye(self, session: AgentSession, reason: str) -> None:
        make = partial(NodeLeft, node_id=session.node_id, epoch=session.epoch, reason=reason[:512])
        answer = await self._driver.enqueue(make, lambda _: self._sessions.goodbye(session), source="goodbye")
        answer.add_done_callback(_read)
        # The agent waits for no answer: it counts also when its stream ends first.
        await asyncio.shield(answer)

    async def _report(self, session: AgentSession, report: agent_pb2.Report) -> None:
        if not report.report_id or len(report.report_id) > MAX_REPORT_ID:
            raise invalid("report.report_id", f"must have 1 to {MAX_REPORT_ID} characters")
        if self._sessions.was_seen(session.node_id, report.report_id):
            session.acknowledge(report.report_id)
            return
        command = session.awaited.pop(report.command_id, None)
        if command is not None and self._is_owed_again(session, report, command):
            session.acknowledge(report.report_id)  # and not remembered: the same answer may come again
            return
        makes = self._makes(session, report, command)
        if not makes:
            self._settle(session, report.report_id, None)
        for place, make in enumerate(makes, 1):
            await session.room.acquire()
            try:
                answer = await self._driver.enqueue(make, _nothing, source="report")
            except BaseException:
                session.room.release()
                raise
            answer.add_done_callback(lambda _: session.room.release())
            if place == len(makes):
                answer.add_done_callback(lambda done: self._settle(session, report.report_id, done))
            else:
                answer.add_done_callback(_read)

    def _makes(self, session: AgentSession, report: agent_pb2.Report, command: Command | None) -> list[Make]:
        what = report.WhichOneof("content")
        if what == "ray_node_exited":
            log.warning("a Ray node ended by itself", node=session.node_id, why=report.ray_node_exited.message[:512])
            return self._sessions.ray_events(session, agent_pb2.RayNode())
        if what == "command_refused":
            return self._refused(session, command, report.command_refused.message)
        make = event_of(report, session.node_id)
        if make is None:
            log.warning("a report of an unknown kind is ignored", node=session.node_id, kind=what)
            return []
        return [make]

    def _is_owed_again(self, session: AgentSession, report: agent_pb2.Report, command: Command) -> bool:
        """Whether the report refuses a stop or a removal: that stays owed, and is asked for again after a while."""
        message = report.command_refused.message
        if not report.HasField("command_refused") or refused_event(command, session.node_id, message):
            return False
        fresh = Backoff(self.resend_first_s, RESEND_LONGEST_S)
        wait_s = session.refusals.setdefault(command.command_id, fresh).next_s()
        asyncio.get_running_loop().call_later(wait_s, self._sessions.send_again, session, command.command_id)
        log.warning("asked again", node=session.node_id, command=command.command_id, in_s=wait_s, why=message[:512])
        return True

    def _refused(self, session: AgentSession, command: Command | None, message: str) -> list[Make]:
        if command is None:
            return []
        log.warning("a command was refused", node=session.node_id, command=command.command_id, why=message[:512])
        make = refused_event(command, session.node_id, message)
        assert make is not None, "what stays owed is asked for again"
        return [make]

    def _settle(self, session: AgentSession, report_id: str, done: asyncio.Future[None] | None) -> None:
        """Acknowledges a report that is journaled, or that no repetition would change."""
        if done is not None:
            if done.cancelled():
                return
            error = done.exception()
            if isinstance(error, Unavailable):
                return  # not journaled: the agent sends it again when it joins again
            if error is not None:
                note = log.error if isinstance(error, InternalError) else log.info
                note("a report changed nothing", node=session.node_id, report=report_id, why=str(error))
        self._sessions.mark_seen(session.node_id, report_id)
        session.acknowledge(report_id)


def _nothing(_outcome: Outcome) -> None:
    """The acknowledgement is the answer."""


def _read(done: asyncio.Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.info("a part of a report changed nothing", why=str(error))


def _host(peer: str) -> str:
    """The address in gRPC's "ipv4:10.0.0.1:53412" or "ipv6:%5B::1%5D:53412"; empty for anything else."""
    kind, _, rest = peer.partition(":")
    if kind not in {"ipv4", "ipv6"}:
        return ""
    return rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "")
