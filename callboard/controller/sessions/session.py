"""One agent's stream: its queue, its writer, and how it ends.

The writer is a task of its own: an agent that stops reading fills its own queue and delays nobody (R7).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from callboard.model.durations import Backoff
from callboard.scheduler.records.commands import Command
from callboard.v1 import agent_pb2, common_pb2, inspection_pb2
from callboard.wire.refusals import CallboardError, LimitReached, Unavailable

MOST_INQUIRIES = 4
"""Inspections of one node at one time; its agent answers no more."""

MESSAGES_S = 1_000
"""Messages of one agent that are read in a second, over two seconds: so a node's thousands of reports after an outage
are read before its lease ends, and a flood takes a part of the loop's time and not all."""

PATIENCE_S = 2.0
"""For so long an agent's messages may come faster than that: twice as many at once."""

PAUSE_S = 0.01
"""Shortest pause of a stream that is read no further: a timer for each message would cost as much as the message."""

MOST_UNDECIDED = 16
"""Events of one agent that wait to be decided; its stream is read no further meanwhile, so that a flood of reports
holds up its own sender and nobody else's calls."""

FLUSH_S = 1.0
"""How long a stream that ends may take to send what is queued."""

Write = Callable[[agent_pb2.SessionResponse], Awaitable[None]]


class AgentSession:
    """One stream of one agent, from its Hello on.

    Attributes:
        instance: run of the agent program.
        address: address the stream comes from, without the port.
        epoch: number of the session; 0 until it is admitted.
        awaited: commands that were sent and not answered, by id.
        room: for events that wait to be decided.
        refusals: pauses before a command that was refused is sent again, by its id.
        leaving: the agent said that it is about to go.
        warm_spares: how many its node keeps while work is about, by its own setting.
        warnings: what is unusual about the node and does not keep it out.
        spare_target: what it was told to keep; None: nothing yet.
        preloads: what became of the modules that it was told.
        devices: what the driver of its devices says of each, by index.
    """

    def __init__(
        self,
        node_id: str,
        instance: str,
        address: str,
        *,
        queue: int,
        warm_spares: int = 0,
        devices: Sequence[common_pb2.DeviceState] = (),
    ) -> None:
        self.node_id = node_id
        self.instance = instance
        self.address = address
        self.epoch = 0
        self.awaited: dict[str, Command] = {}
        self.room = asyncio.Semaphore(MOST_UNDECIDED)
        self._read_until_s = 0.0
        """When as many messages as were read would have come at the rate that one agent has."""
        self.refusals: dict[str, Backoff] = {}
        self.leaving = False
        self.warm_spares = warm_spares
        # What an earlier session was told isn't known; an agent that keeps none needn't hear of it.
        self.spare_target = None if warm_spares else agent_pb2.SpareTarget()
        self.preloads: Sequence[common_pb2.PreloadState] = ()
        self.devices: Mapping[int, common_pb2.DeviceState] = {state.index: state for state in devices}
        self.warnings: list[str] = []
        self._inquiries: dict[str, asyncio.Future[inspection_pb2.NodeInspection]] = {}
        self._asked = 0
        self._queue: asyncio.Queue[agent_pb2.SessionResponse | None] = asyncio.Queue(queue)
        self._acks: list[str] = []
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def closed(self) -> bool:
        """Whether the stream ends or ended."""
        return self._closed.done()

    def send(self, message: agent_pb2.SessionResponse) -> None:
        """Queues a message. An agent that let the queue fill up is cut off: it gets what it is owed when it joins
        again."""
        if self.closed:
            return
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self.close(LimitReached(f"node {self.node_id} does not read its stream; join again"))

    async def inspect(self, ask: inspection_pb2.InspectionAsk, *, within_s: float) -> inspection_pb2.NodeInspection:
        """What the agent sees now.

        Raises:
            Unavailable: it did not answer in time, or its stream ended meanwhile.
        """
        if len(self._inquiries) >= MOST_INQUIRIES:
            raise LimitReached(f"node {self.node_id} is being inspected {len(self._inquiries)} times already")
        self._asked += 1
        inquiry_id = str(self._asked)
        answer: asyncio.Future[inspection_pb2.NodeInspection] = asyncio.get_running_loop().create_future()
        self._inquiries[inquiry_id] = answer
        try:
            self.send(agent_pb2.SessionResponse(inquiry=agent_pb2.Inquiry(inquiry_id=inquiry_id, ask=ask)))
            signs: set[asyncio.Future[Any]] = {answer, self._closed}
            await asyncio.wait(signs, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            what = "left" if self.closed else f"did not answer within {within_s:g} s"
            raise Unavailable(f"the agent of node {self.node_id} {what}; try again")
        finally:
            del self._inquiries[inquiry_id]
            answer.cancel()

    def answered(self, answer: agent_pb2.InquiryAnswer) -> None:
        """The agent answers an inquiry; one that nobody waits for any more is dropped."""
        waiting = self._inquiries.get(answer.inquiry_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer.inspection)

    async def pace(self) -> None:
        """Waits until another message of the agent may be read."""
        now_s = asyncio.get_running_loop().time()
        self._read_until_s = max(self._read_until_s, now_s - PATIENCE_S) + 1 / MESSAGES_S
        if self._read_until_s >= now_s + PAUSE_S:
            await asyncio.sleep(self._read_until_s - now_s)

    def acknowledge(self, report_id: str) -> None:
        """Queues an acknowledgement; those of one batch travel together."""
        if not self._acks:
            asyncio.get_running_loop().call_soon(self._send_acks)
        self._acks.append(report_id)

    def close(self, why: CallboardError | None = None) -> None:
        """Ends the stream, with an error or (None) well."""
        if self._closed.done():
            return
        if why is None:
            self._closed.set_result(None)
        else:
            self._closed.set_exception(why)
            self._closed.exception()  # read, in case that nobody waits any more

    async def serve(self, read: Awaitable[None], write: Write) -> None:
        """Runs the stream until it is closed, ``read`` ended or writing failed.

        Raises:
            CallboardError: why it was closed.
        """
        reader = asyncio.ensure_future(read)
        writer = asyncio.ensure_future(self._write(write))
        try:
            await asyncio.wait({reader, writer, self._closed}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done() and not self.closed and not self._queue.full():
                # The agent said all it had to say: what it is told last (acknowledgements) should still reach it.
                self._queue.put_nowait(None)
                await asyncio.wait({writer, self._closed}, timeout=FLUSH_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reader, writer):
                task.cancel()
            await asyncio.wait({reader, writer})
            ended = self._closed.done()
            self.close()
        if ended:
            self._closed.result()
        for task in (reader, writer):
            if not task.cancelled():
                task.result()

    async def _write(self, write: Write) -> None:
        while (message := await self._queue.get()) is not None:
            await write(message)

    def _send_acks(self) -> None:
        acks, self._acks = self._acks, []
        self.send(agent_pb2.SessionResponse(ack=agent_pb2.Ack(report_ids=acks)))
