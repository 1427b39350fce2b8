"""The way between a program in a worker's environment and whoever asked for it.

The agent of the worker's node is asked on its session and answers with a stream of its own (`AttachExec`). Each piece
is passed on before the next is taken, in both directions, so nothing is kept here, and whoever is slow holds back only
what is theirs. The program ends when the client's call, the agent's stream or the worker does. Bounded are the
programs, those of one node, and the time for an agent to answer.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from callboard.controller.loop.driver import Driver
from callboard.controller.sessions.session import AgentSession
from callboard.model.log import structlog
from callboard.model.roles import member_names
from callboard.scheduler.records.job_records import JobRecord, WorkerRecord
from callboard.scheduler.records.states import ENDED, WorkerState
from callboard.v1 import agent_pb2, common_pb2
from callboard.wire.refusals import InvalidRequest, LimitReached, NotFound, Unavailable, WrongState

MOST_EXECS = 64
"""At one time, by all clients."""

MOST_OF_NODE = 16
"""Of one node at one time; its agent runs no more."""

OPEN_S = 10.0
"""For an agent to open its stream, and to name the program."""

MOST_ARGUMENTS = 4096
MOST_ARGUMENT_BYTES = 256 << 10
"""Of a command, as in a job."""

MOST_INPUT_BYTES = 64 << 10
"""In one message."""

_TERMINAL = range(1, 4097)
"""Rows and columns of one."""

Requests = AsyncIterator[agent_pb2.AttachExecRequest]
Write = Callable[[agent_pb2.AttachExecResponse], Awaitable[None]]

_log = structlog.get_logger(__name__)

_HEARD_S = 5.0
"""For a client to hear of the end and to write no more."""


class _Exec:
    """One program."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.id = secrets.token_hex(16)
        loop = asyncio.get_running_loop()
        self.attached: asyncio.Future[tuple[Requests, Write]] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()


class Execs:
    """Every program that runs in a worker's environment because somebody asked for it."""

    def __init__(self, driver: Driver, sessions: Mapping[str, AgentSession]) -> None:
        """
        Args:
            sessions: the agents that are connected, by node.
        """
        self._driver = driver
        self._sessions = sessions
        self._open: dict[str, _Exec] = {}
        self._of_node: Counter[str] = Counter()
        self.open_s = OPEN_S

    async def attach(self, requests: Requests, write: Write) -> None:
        """Serve the stream of an agent for as long as its program runs.

        Raises:
            NotFound: nobody waits for that program (any more).
        """
        try:
            async with asyncio.timeout(self.open_s):
                first = await anext(requests, None)
        except TimeoutError:
            raise InvalidRequest(f"no id of a program within {self.open_s:.0f} s") from None
        found = self._open.pop(first.exec_id, None) if first is not None else None
        if found is None:
            raise NotFound("nobody waits for this program")
        found.attached.set_result((requests, write))
        await found.over

    async def run(
        self,
        worker: WorkerRecord,
        command: common_pb2.ExecCommand,
        inputs: AsyncIterator[common_pb2.ExecInput],
        tell: Callable[[common_pb2.ExecOutput], Awaitable[None]],
    ) -> None:
        """Run a program to its end.

        Args:
            command: what to run; checked.
            tell: takes what comes from it, the last being its end.

        Raises:
            WrongState: the node's agent is not connected.
            LimitReached: too many programs run already.
            Unavailable: the agent did not answer, or broke off.
        """
        session = self._sessions.get(worker.node_id)
        if session is None or session.closed:
            raise WrongState(f"the agent of {worker.node_id} is not connected at this moment; try again")
        if self._of_node.total() >= MOST_EXECS or self._of_node[worker.node_id] >= MOST_OF_NODE:
            most = f"{MOST_OF_NODE} on a node, {MOST_EXECS} in all"
            raise LimitReached(f"too many programs run in workers already ({most}); end some, or try again later")
        asked = _Exec(worker.node_id)
        self._open[asked.id] = asked
        self._of_node[worker.node_id] += 1
        try:
            start = agent_pb2.StartExec(exec_id=asked.id, generation=worker.generation, command=command)
            start.worker.job_id, start.worker.component, start.worker.rank = worker.job, worker.component, worker.rank
            session.send(agent_pb2.SessionResponse(start_exec=start))
            try:
                async with asyncio.timeout(self.open_s):
                    requests, write = await asyncio.shield(asked.attached)
            except TimeoutError:
                what = f"the agent of {worker.node_id} did not answer within {self.open_s:g} s"
                raise Unavailable(f"{what}; try again, and if it is of an older version, update it") from None
            await self._pass(asked, requests, write, inputs, tell)
        finally:
            self._open.pop(asked.id, None)
            self._of_node[worker.node_id] -= 1
            asked.attached.cancel()
            asked.over.set_result(None)

    @staticmethod
    async def _pass(
        asked: _Exec,
        requests: Requests,
        write: Write,
        inputs: AsyncIterator[common_pb2.ExecInput],
        tell: Callable[[common_pb2.ExecOutput], Awaitable[None]],
    ) -> None:
        async def up() -> None:
            async for given in inputs:
                await write(agent_pb2.AttachExecResponse(input=given))
            # No end of input follows: of a client that is gone the messages just end.

        async def down() -> bool:
            async for request in requests:
                if request.HasField("output"):
                    await tell(request.output)
                    if request.output.HasField("end"):
                        return True
            return False

        giving, taking = asyncio.ensure_future(up()), asyncio.ensure_future(down())
        tasks: set[asyncio.Future[Any]] = {giving, taking}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if giving.done():
                giving.result()
                await asyncio.wait({taking})
            if not taking.result():
                raise Unavailable(f"the agent of {asked.node_id} broke off, and the program ended with its stream")
            # A client that writes to a call which has ended loses how it ended: it is let finish first.
            await asyncio.wait({giving}, timeout=_HEARD_S)
            if giving.done() and (error := giving.exception()) is not None:
                _log.info("exec_input_lost", node=asked.node_id, why=str(error))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


def worker_meant(driver: Driver, job: JobRecord, component: str, rank: int) -> WorkerRecord:
    """The worker of a job that is meant.

    Raises:
        NotFound: the job has no such worker.
        WrongState: it isn't ready, or its pool doesn't allow it.
    """
    state = driver.state
    subject, part = {"subject": f"jobs/{job.name}"}, {"subject": f"workers/{job.name}"}
    spec = state.specs[job.uid].spec
    meant = [each for each in spec.components if component in ("", each.name) or component in member_names(each)]
    known = ", ".join(each.name for each in spec.components)
    if not meant:
        raise NotFound(f"job {job.name} has no component {component}; it has {known}", metadata=part)
    if len(meant) > 1:
        raise InvalidRequest(f"job {job.name} has several components; name one of {known}")
    pool = spec.pool_of(meant[0])
    found = state.pools.get(pool)
    if found is not None and not found.spec.exec:
        raise WrongState(
            f"pool {pool} does not allow programs beside its workers (exec: false); ask an operator to change that",
            metadata=subject,
        )
    if job.state in ENDED:
        raise WrongState(f"job {job.name} is {job.state.value}, and its workers are gone", metadata=subject)
    if rank >= meant[0].max_workers:
        raise NotFound(
            f"component {meant[0].name} of job {job.name} has ranks 0 to {meant[0].max_workers - 1}", metadata=part
        )
    for worker in state.workers_of(job.uid):
        if (worker.component, worker.rank, worker.state) == (meant[0].name, rank, WorkerState.READY):
            return worker
    what = f"worker {meant[0].name}/{rank} of job {job.name} is not ready; the job is {job.state.value}"
    raise WrongState(f"{what}. `callboard job explain {job.name}` says why", metadata=subject)


def checked_command(command: common_pb2.ExecCommand) -> common_pb2.ExecCommand:
    """The command, if it can be meant.

    Raises:
        InvalidRequest: it is none, or too large.
    """
    words = command.arguments
    if command.attach == bool(words and words[0]):
        raise InvalidRequest("name a program to run, or attach to the terminal of the worker's command")
    if len(words) > MOST_ARGUMENTS or sum(len(each.encode()) for each in words) > MOST_ARGUMENT_BYTES:
        raise InvalidRequest(f"a command has at most {MOST_ARGUMENTS} words and {MOST_ARGUMENT_BYTES} bytes")
    if any("\0" in each for each in (*words, command.terminal_type)) or len(command.terminal_type) > 100:
        raise InvalidRequest("a command has no null characters, and the kind of a terminal at most 100 characters")
    if command.HasField("size"):
        _check_size(command.size)
    return command


def checked_input(given: common_pb2.ExecInput) -> common_pb2.ExecInput:
    """What goes to a program, if it can be meant.

    Raises:
        InvalidRequest: it can't.
    """
    what = given.WhichOneof("content")
    if what == "data" and len(given.data) > MOST_INPUT_BYTES:
        raise InvalidRequest(f"{len(given.data)} bytes of input in one message; at most {MOST_INPUT_BYTES}")
    if what == "size":
        _check_size(given.size)
    if what == "signal" and given.signal not in signal.Signals.__members__.values():
        raise InvalidRequest(f"{given.signal} is not a signal")
    if what is None:
        raise InvalidRequest("an input holds data, its end, a size or a signal")
    return given


def _check_size(size: common_pb2.TerminalSize) -> None:
    if size.rows not in _TERMINAL or size.columns not in _TERMINAL:
        raise InvalidRequest(f"a terminal has 1 to {_TERMINAL[-1]} rows and columns, not {size.rows} × {size.columns}")
