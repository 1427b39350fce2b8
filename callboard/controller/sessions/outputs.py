"""The way of workers' output from the nodes that keep it to whoever reads it.

A read asks the agent of each node on its session; the agent answers with a stream of its own (`SendOutput`), which this
passes on piece by piece. Nothing is kept here: a reader that is slow holds back its own streams by their flow control,
down to the file, and delays neither agents nor other readers. Where the workers of a job ran is on record with the job
(`JobRecord.ran`), so that what can't be read is named. Bounded are the reads, the streams of one node, the pieces on
their way, the time for an agent to answer and for a reader to take a piece.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from callboard.controller.loop.driver import Driver, Listener
from callboard.controller.sessions.session import AgentSession
from callboard.model.frozen import dataclass
from callboard.model.log import structlog
from callboard.model.roles import member_names
from callboard.scheduler.records.commands import Command, StartWorker
from callboard.scheduler.records.job_records import EventRecord, JobRecord
from callboard.scheduler.records.states import ENDED, NodeState
from callboard.v1 import agent_pb2, common_pb2, job_pb2
from callboard.wire.refusals import CallboardError, InvalidRequest, LimitReached, NotFound, WrongState

MOST_READS = 64
"""At one time, by all clients."""

MOST_OF_NODE = 16
"""Streams of one node at one time; its agent opens no more."""

MOST_FOLLOWED = 64
"""Nodes that one follower reads at one time."""

OPEN_S = 10.0
"""For an agent to open its stream, and to name the read."""

AHEAD = 2
"""Pieces of one stream that wait here: the next ones wait at the agent."""

FORGOTTEN = "job.forgotten"
"""Type of the event that a job was forgotten."""

log = structlog.get_logger(__name__)

Response = job_pb2.ReadJobOutputResponse
Write = Callable[[agent_pb2.SendOutputResponse], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Ran:
    """Workers of one component that ran on one node in one attempt."""

    node_id: str
    attempt: int
    component: str
    ranks: tuple[int, ...]


class _Pull:
    """The stream of one node for one read."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.read_id = secrets.token_hex(16)
        self.opened = asyncio.Event()
        self.finish = asyncio.Event()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when nobody reads any more."""
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when nothing more comes; why, if that is too early."""
        self.items: asyncio.Queue[agent_pb2.SendOutputRequest] = asyncio.Queue(AHEAD)

    def end(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_result(why)

    def close(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)

    async def next(self) -> agent_pb2.SendOutputRequest | None:
        """What comes next; None: nothing more."""
        if self.items.empty() and not self.ended.done():
            getting = asyncio.ensure_future(self.items.get())
            try:
                signs: list[asyncio.Future[Any]] = [getting, self.ended]
                await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
                if getting.done():
                    return getting.result()
            finally:
                getting.cancel()
        return None if self.items.empty() else self.items.get_nowait()


class OutputReads(Listener):
    """Every read that is under way. Follows the driver to know of new workers, ended and forgotten jobs."""

    def __init__(self, driver: Driver, sessions: Mapping[str, AgentSession]) -> None:
        """
        Args:
            sessions: the agents that are connected, by node.
        """
        self.driver = driver
        self._sessions = sessions
        self._pulls: dict[str, _Pull] = {}
        self._of_node: dict[str, int] = {}
        self._kept_by: dict[str, set[str]] = {}
        self._followers: set[asyncio.Event] = set()
        self.closed: CallboardError | None = None
        self._reads = 0
        self.open_s = OPEN_S

    # ---- what the driver says ----

    def started(self, events: Sequence[EventRecord]) -> None:  # noqa: ARG002 - what is read is not in the log
        """A term began."""
        self._wake()

    def outage(self) -> None:
        """Files of workers are read whether or not the journal works; but where they are is on record."""
        self._wake()

    def deliver(self, commands: Sequence[Command]) -> None:
        """Note which nodes have output of which job."""
        for command in commands:
            if isinstance(command, StartWorker):
                self._kept_by.setdefault(command.worker.job, set()).add(command.node_id)

    def publish(self, events: Sequence[EventRecord]) -> None:
        """Wake followers, and have the output of forgotten jobs deleted."""
        for event in events:
            if event.type == FORGOTTEN:
                self._forget(dict(event.facts)["uid"])
        if any(event.subject.startswith(("jobs/", "nodes/")) for event in events):
            self._wake()

    # ---- what agents say ----

    def joined(self, session: AgentSession, jobs: Iterable[str]) -> None:
        """An agent joined that keeps output of these jobs: what was forgotten while it was away may go."""
        gone = []
        for job in jobs:
            if job in self.driver.state.jobs:
                self._kept_by.setdefault(job, set()).add(session.node_id)
            else:
                gone.append(job)
        if gone:
            session.send(agent_pb2.SessionResponse(forget_jobs=agent_pb2.ForgetJobs(job_ids=gone)))
        self._wake()

    async def take(self, requests: AsyncIterator[agent_pb2.SendOutputRequest], write: Write) -> None:
        """Serve the stream of an agent that answers a read.

        Raises:
            NotFound: nobody waits for that read (any more).
        """
        try:
            async with asyncio.timeout(self.open_s):
                first = await anext(requests, None)
        except TimeoutError:
            raise InvalidRequest(f"no id of a read within {self.open_s:.0f} s") from None
        pull = self._pulls.pop(first.read_id, None) if first is not None else None
        if pull is None:
            raise NotFound("nobody waits for this read")
        pull.opened.set()
        taking = asyncio.ensure_future(_take(pull, requests))
        finishing = asyncio.ensure_future(_finish(pull, write))
        try:
            signs: list[asyncio.Future[Any]] = [taking, pull.gone]
            await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (taking, finishing):
                task.cancel()
            await asyncio.wait({taking, finishing})
            if not finishing.cancelled() and (error := finishing.exception()) is not None:
                log.info("an agent could not be told to finish", node=pull.node_id, why=str(error))
            whole = taking.done() and not taking.cancelled() and taking.exception() is None and taking.result()
            pull.end("" if whole else f"the agent of {pull.node_id} broke off while its output was read")

    # ---- what clients ask ----

    async def read(
        self, uid: str, selection: common_pb2.OutputSelection, *, follow: bool
    ) -> AsyncIterator[job_pb2.ReadJobOutputResponse]:
        """Output of a job, and what of it can't be read.

        Raises:
            NotFound: there is no such attempt, component or rank.
            WrongState: it never started.
            LimitReached: too much is being read.
        """
        if self.closed is not None:
            raise self.closed
        if self._reads >= MOST_READS:
            raise LimitReached(f"output is being read {self._reads} times already; try again later")
        asked = self._settled(uid, selection, follow=follow)
        self._reads += 1
        try:
            responses = self._follow(uid, asked) if follow else self._read(uid, asked)
            async for response in responses:
                yield response
        finally:
            self._reads -= 1

    def close(self, why: CallboardError) -> None:
        self.closed = why
        self._wake()

    # ---- inside ----

    def _settled(self, uid: str, selection: common_pb2.OutputSelection, *, follow: bool) -> common_pb2.OutputSelection:
        """The selection with its attempts stated and a member named by its colocation group."""
        job = self.driver.state.jobs[uid]
        asked = common_pb2.OutputSelection()
        asked.CopyFrom(selection)
        subject = {"subject": f"workers/{job.name}"}
        if not job.attempt and not follow:
            raise WrongState(f"job {job.name} has not started yet (it is {job.state.value}), so it printed nothing")
        for attempt in (asked.first_attempt, asked.last_attempt):
            if attempt > max(job.attempt, 1):
                raise NotFound(
                    f"job {job.name} has no attempt {attempt}; its newest is {job.attempt}", metadata=subject
                )
        if not asked.first_attempt and not asked.last_attempt:
            asked.first_attempt = max(job.attempt, 1)
            asked.last_attempt = 0 if follow else job.attempt
        if asked.component:
            asked.component = self._process_of(job, asked.component)
        if asked.HasField("rank") and job.attempt and not follow and not self.ran(job, asked):
            whose = f"worker {asked.component}/{asked.rank}" if asked.component else f"worker of rank {asked.rank}"
            which = f"attempt {asked.first_attempt}" if asked.first_attempt == asked.last_attempt else "these attempts"
            raise NotFound(f"job {job.name} had no {whose} in {which}", metadata=subject)
        return asked

    def _process_of(self, job: JobRecord, component: str) -> str:
        """The component whose process is meant: its own, or the colocation group it is a member of."""
        known: list[str] = []
        for each in self.driver.state.specs[job.uid].spec.components:
            if component == each.name or component in member_names(each):
                return each.name
            known += [each.name, *member_names(each)]
        raise NotFound(
            f"job {job.name} has no component {component}; it has {', '.join(known)}",
            metadata={"subject": f"workers/{job.name}"},
        )

    def ran(self, job: JobRecord, asked: common_pb2.OutputSelection) -> list[Ran]:
        """Where the workers that are meant ran, in the order they are read in."""
        found = []
        for each in job.ran:
            ranks = tuple(rank for rank in each.ranks if not asked.HasField("rank") or rank == asked.rank)
            if (
                ranks
                and asked.component in ("", each.component)
                and asked.first_attempt <= each.attempt
                and (not asked.last_attempt or each.attempt <= asked.last_attempt)
            ):
                found.append(Ran(each.node_id, each.attempt, each.component, ranks))
        return sorted(found, key=lambda ran: (ran.attempt, ran.component, ran.ranks))

    async def _read(self, uid: str, asked: common_pb2.OutputSelection) -> AsyncIterator[Response]:
        """Node after node."""
        by_node: dict[str, list[Ran]] = {}
        for ran in self.ran(self.driver.state.jobs[uid], asked):
            by_node.setdefault(ran.node_id, []).append(ran)
        for node_id, there in by_node.items():
            seen: set[tuple[str, int, int]] = set()
            pull = self.ask(uid, node_id, asked, follow=False)
            if isinstance(pull, job_pb2.OutputGap):
                yield Response(gap=pull)
                continue
            try:
                async for item in self.items(pull):
                    if item.HasField("chunk"):
                        chunk = item.chunk
                        seen.add((chunk.component, chunk.rank, chunk.attempt))
                        yield Response(chunk=chunk)
            finally:
                self.let_go(pull)
            if pull.ended.result():
                yield Response(gap=_gap(pull.node_id, "CUT_OFF", pull.ended.result()))
                continue
            for ran in there:
                for rank in ran.ranks:
                    if (ran.component, rank, ran.attempt) not in seen:
                        yield Response(gap=_not_kept(ran, rank))

    async def _follow(self, uid: str, asked: common_pb2.OutputSelection) -> AsyncIterator[Response]:
        """All nodes beside each other, and those that come."""
        follower = _Follower(self, uid, asked)
        changed = asyncio.Event()
        self._followers.add(changed)
        try:
            async for response in follower.run(changed):
                yield response
        finally:
            self._followers.discard(changed)
            await follower.close()

    def ask(
        self, uid: str, node_id: str, asked: common_pb2.OutputSelection, *, follow: bool
    ) -> _Pull | job_pb2.OutputGap:
        """Ask a node for what it has; or say why it can't be asked."""
        session = self._sessions.get(node_id)
        if session is None or session.closed:
            return self._away(node_id)
        if self._of_node.get(node_id, 0) >= MOST_OF_NODE:
            return _gap(
                node_id, "NOT_ANSWERED", f"{node_id} is being read {MOST_OF_NODE} times already; try again later"
            )
        pull = _Pull(node_id)
        self._pulls[pull.read_id] = pull
        self._of_node[node_id] = self._of_node.get(node_id, 0) + 1
        ask = agent_pb2.ReadOutput(read_id=pull.read_id, job_id=uid, selection=asked, follow=follow)
        session.send(agent_pb2.SessionResponse(read_output=ask))
        return pull

    async def items(self, pull: _Pull) -> AsyncIterator[agent_pb2.SendOutputRequest]:
        """What a node sends."""
        try:
            async with asyncio.timeout(self.open_s):
                await pull.opened.wait()
        except TimeoutError:
            pull.end(f"the agent of {pull.node_id} did not answer within {self.open_s:g} s; try again")
            return
        while (item := await pull.next()) is not None:
            yield item

    def let_go(self, pull: _Pull) -> None:
        pull.close()
        pull.end("nobody reads any more")
        self._pulls.pop(pull.read_id, None)
        self._of_node[pull.node_id] -= 1
        if not self._of_node[pull.node_id]:
            del self._of_node[pull.node_id]

    def _away(self, node_id: str) -> job_pb2.OutputGap:
        """Why a node can't be asked."""
        node = self.driver.state.nodes.get(node_id)
        if node is None:
            why = f"{node_id} has been removed from the cluster, and with it the output of its workers"
            return _gap(node_id, "NODE_GONE", why)
        where = f"their output is on host {node.hostname or 'unknown'}"
        again = "and can be read once its agent is back with the same run directory"
        if node.state is NodeState.LOST:
            return _gap(node_id, "NODE_GONE", f"{node_id} is LOST ({node.reason}): {where} {again}")
        if node.state is NodeState.LEFT:
            return _gap(node_id, "NODE_GONE", f"{node_id} has LEFT the cluster ({node.reason}): {where} {again}")
        return _gap(node_id, "NODE_AWAY", f"the agent of {node_id} is not connected at this moment; try again")

    def _forget(self, uid: str) -> None:
        message = agent_pb2.SessionResponse(forget_jobs=agent_pb2.ForgetJobs(job_ids=[uid]))
        for node_id in sorted(self._kept_by.pop(uid, ())):
            session = self._sessions.get(node_id)
            if session is not None:
                session.send(message)

    def _wake(self) -> None:
        for changed in self._followers:
            changed.set()


class _Follower:
    """One read that goes on while the job does: through restarts of workers, agents and the job itself."""

    def __init__(self, reads: OutputReads, uid: str, asked: common_pb2.OutputSelection) -> None:
        self._reads = reads
        self._uid = uid
        self._asked = asked
        self._pumps: dict[str, asyncio.Task[None]] = {}
        self._pulls: dict[str, _Pull] = {}
        self._done: set[str] = set()
        self._gaps: dict[str, str] = {}
        self._behind: set[str] = set()
        self._places: dict[tuple[str, str, int, int, int], int] = {}
        """How far each stream of each worker was passed on, by node."""
        self._queue: asyncio.Queue[Response] = asyncio.Queue(AHEAD)

    async def run(self, changed: asyncio.Event) -> AsyncIterator[Response]:
        """Everything, until the job or the last attempt that is meant has ended."""
        caught_up = False
        while True:
            changed.clear()
            if self._reads.closed is not None:
                raise self._reads.closed
            over = self._is_over()
            for response in self._attend(over=over):
                yield response
            if not caught_up and not self._behind:
                caught_up = True
                yield Response(caught_up=True)
            if over and not self._pumps and self._queue.empty():
                return
            async for response in self._next(changed):
                yield response

    async def close(self) -> None:
        for pump in self._pumps.values():
            pump.cancel()
        if self._pumps:
            await asyncio.wait(self._pumps.values())

    async def _next(self, changed: asyncio.Event) -> AsyncIterator[Response]:
        """Wait for something; what came."""
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._queue.get()),
            asyncio.ensure_future(changed.wait()),
        ]
        try:
            await asyncio.wait([*waits, *self._pumps.values()], return_when=asyncio.FIRST_COMPLETED)
            if waits[0].done():
                yield waits[0].result()
        finally:
            for wait in waits:
                wait.cancel()
        self._reap()

    def _is_over(self) -> bool:
        job = self._reads.driver.state.jobs.get(self._uid)
        last = self._asked.last_attempt
        return job is None or job.state in ENDED or bool(last and job.attempt > last)

    def _attend(self, *, over: bool) -> list[Response]:
        """Ask nodes that aren't asked yet, and have those that are finish when the job is over; what can't be read."""
        job = self._reads.driver.state.jobs.get(self._uid)
        responses: list[Response] = []
        nodes = dict.fromkeys(ran.node_id for ran in self._reads.ran(job, self._asked)) if job is not None else {}
        for node_id in nodes:
            if node_id in self._pumps or node_id in self._done:
                continue
            if len(self._pumps) >= MOST_FOLLOWED:
                raise LimitReached(f"its workers are on more than {MOST_FOLLOWED} nodes; name a component or a rank")
            pull = self._reads.ask(self._uid, node_id, self._selection(node_id), follow=True)
            if isinstance(pull, _Pull):
                self._gaps.pop(node_id, None)
                self._pulls[node_id] = pull
                self._behind.add(node_id)
                self._pumps[node_id] = asyncio.create_task(self._pump(pull))
            elif over or pull.code != "NODE_AWAY":
                if self._gaps.get(node_id) != pull.message:
                    self._gaps[node_id] = pull.message
                    responses.append(Response(gap=pull))
                if over:
                    self._done.add(node_id)
        if over:
            for pull in self._pulls.values():
                pull.finish.set()
        return responses

    def _selection(self, node_id: str) -> common_pb2.OutputSelection:
        """What is still wanted of a node: at first what was asked for, then what comes after what was passed on."""
        places = [(key, offset) for key, offset in self._places.items() if key[0] == node_id]
        if not places:
            return self._asked
        asked = common_pb2.OutputSelection()
        asked.CopyFrom(self._asked)
        asked.ClearField("after")
        for (_, component, rank, generation, stream), offset in places:
            place = asked.after.add(component=component, rank=rank, generation=generation, offset=offset)
            place.stream = common_pb2.OutputStream.ValueType(stream)
        return asked

    async def _pump(self, pull: _Pull) -> None:
        try:
            async for item in self._reads.items(pull):
                if item.HasField("chunk"):
                    chunk = item.chunk
                    await self._queue.put(Response(chunk=chunk))
                    key = (pull.node_id, chunk.component, chunk.rank, chunk.generation, chunk.stream)
                    self._places[key] = chunk.offset + len(chunk.data)
                else:
                    self._behind.discard(pull.node_id)
        finally:
            self._reads.let_go(pull)

    def _reap(self) -> None:
        """Take out nodes whose stream has ended; one that broke off is asked again once its agent is back."""
        for node_id in [node_id for node_id, pump in self._pumps.items() if pump.done()]:
            self._pumps.pop(node_id).result()
            pull = self._pulls.pop(node_id)
            self._behind.discard(node_id)
            if not pull.ended.result():
                self._done.add(node_id)
            else:
                log.info("output stream broke off", node=node_id, why=pull.ended.result())


async def _take(pull: _Pull, requests: AsyncIterator[agent_pb2.SendOutputRequest]) -> bool:
    """Whether everything was sent: of an agent that is gone the requests just end."""
    async for request in requests:
        if request.complete:
            return True
        if request.HasField("chunk"):
            request.chunk.node_id = pull.node_id
        await pull.items.put(request)
    return False


async def _finish(pull: _Pull, write: Write) -> None:
    await pull.finish.wait()
    await write(agent_pb2.SendOutputResponse(finish=True))


def _gap(node_id: str, code: str, message: str) -> job_pb2.OutputGap:
    return job_pb2.OutputGap(rank=-1, node_id=node_id, code=code, message=message)


def _not_kept(ran: Ran, rank: int) -> job_pb2.OutputGap:
    whose = f"{ran.component}/{rank} (attempt {ran.attempt})"
    why = f"{ran.node_id} has nothing of {whose}: it was never started there, or the files of the node were removed"
    return job_pb2.OutputGap(
        component=ran.component, rank=rank, attempt=ran.attempt, node_id=ran.node_id, code="NOT_KEPT", message=why
    )
