"""What sends output of this node's workers to the controller, one stream for each read that was asked for.

Each has a connection of its own beside the session's: on one connection bulk output would go before heartbeats, and a
node that prints much would be taken for lost. The stream's flow control holds this side back when the reader is slow;
then the output waits in its file and nothing in memory. What breaks off is asked for again by the controller.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc

from callboard.agents.files.output_store import OutputStore
from callboard.agents.system.tasks import cancelled
from callboard.model.log import structlog
from callboard.security.dialing import Channel
from callboard.security.tokens import BadToken
from callboard.v1 import agent_pb2, agent_pb2_grpc

_log = structlog.get_logger(__name__)

MOST_READS = 16
"""At one time; the controller asks for no more of one node. Each costs a connection and 64 KiB."""


class OutputSender:
    """Answers what the controller wants to read."""

    def __init__(self, store: OutputStore, node_id: str, dial: Callable[[], Channel]) -> None:
        self._store = store
        self._node_id = node_id
        self._dial = dial
        self._reads: set[asyncio.Task[None]] = set()

    def begin(self, ask: agent_pb2.ReadOutput) -> None:
        """Send what is asked for, beside everything else."""
        if len(self._reads) >= MOST_READS:
            _log.warning("output_not_sent", job=ask.job_id, why=f"{MOST_READS} reads are under way")
            return
        task = asyncio.create_task(self._send(ask), name=f"output {ask.job_id}")
        self._reads.add(task)
        task.add_done_callback(self._reads.discard)

    async def close(self) -> None:
        """Break off what is under way."""
        await cancelled(self._reads)

    async def _send(self, ask: agent_pb2.ReadOutput) -> None:
        try:
            async with self._dial() as channel:
                finish = asyncio.Event()
                # No deadline: a follower follows as long as it likes. Keepalive notices when the controller is gone.
                stream = agent_pb2_grpc.AgentServiceStub(channel).SendOutput(self._requests(ask, finish))
                async for response in stream:
                    if response.finish:
                        finish.set()
        except grpc.aio.AioRpcError as error:
            _log.info("output_broken_off", job=ask.job_id, why=f"{error.code().name}: {error.details()}")
        except BadToken as error:
            _log.warning("output_not_sent", job=ask.job_id, why=str(error))

    async def _requests(
        self, ask: agent_pb2.ReadOutput, finish: asyncio.Event
    ) -> AsyncIterator[agent_pb2.SendOutputRequest]:
        """Everything that is sent; asked for one by one, as the stream has room."""
        yield agent_pb2.SendOutputRequest(read_id=ask.read_id)
        followed = finish if ask.follow else None
        async for chunk in self._store.read(ask.job_id, ask.selection, finish=followed):
            if chunk is None:
                yield agent_pb2.SendOutputRequest(caught_up=True)
            else:
                chunk.node_id = self._node_id
                yield agent_pb2.SendOutputRequest(chunk=chunk)
        yield agent_pb2.SendOutputRequest(complete=True)
