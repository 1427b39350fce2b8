"""What a client follows through lost connections: the event log, and the output of a job's workers.

Guaranteed: every event that matches is yielded once, in order, and each byte of output is read once, also when the
controller is restarted meanwhile. A stream that ends, silently or with an error, is opened again where it stopped; only
a compacted log ends a watch, with an error, and output that can't be read is reported. Lines of one worker come in
order, standard output and standard error against each other to a quarter of a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from callboard.client.calls import methods
from callboard.client.calls.connection import Connection, reconnect_backoff
from callboard.model.frozen import dataclass
from callboard.v1.common_pb2 import OutputChunk, OutputSelection, OutputStream
from callboard.v1.event_pb2 import Event, EventFilter
from callboard.v1.job_pb2 import OutputGap
from callboard.wire.refusals import DeadlineExceeded, Unavailable

STREAM_DEADLINE_S = 3600.0
"""Deadline of one stream; at its end the next one goes on."""

AWAY_S = 60.0
"""How long a controller may be away before a watch gives up: long enough for a restart by hand."""


class Reopening:
    """The patience of a reader whose stream ends before it should: it opens the next one where the last one stopped."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._away_since: float | None = None
        self._backoff = reconnect_backoff()

    def heard(self) -> None:
        """The controller sent something."""
        self._away_since = None
        self._backoff.reset()

    async def wait(self, why: Unavailable | None = None) -> None:
        """Leaves the controller the time to come up.

        Args:
            why: how the stream ended; None: the server ended it without a word.

        Raises:
            Unavailable: ``why``, once the controller stayed away for :data:`AWAY_S`.
        """
        loop = asyncio.get_running_loop()
        if why is not None:
            self._away_since = loop.time() if self._away_since is None else self._away_since
            rest_s = self._away_since + AWAY_S - loop.time()
            # One that answers why it can't (it stops, it can't write its journal) is tried again for as long.
            if rest_s <= 0 or not await self._connection.ready(rest_s):
                raise why
        await asyncio.sleep(self._backoff.next_s())


async def watch_events(
    connection: Connection, *, start_revision: int, event_filter: EventFilter
) -> AsyncIterator[Event]:
    """Events from ``start_revision`` on; 0: from now on. See :meth:`ClusterCalls.watch`."""
    revision = start_revision or await _next_revision(connection)
    reopening = Reopening(connection)
    while True:
        request = methods.WATCH.request(start_revision=revision, filter=event_filter)
        try:
            async for response in connection.stream(methods.WATCH, request, timeout_s=STREAM_DEADLINE_S):
                for event in response.events:
                    revision = event.revision + 1
                    yield event
                revision = max(revision, response.revision + 1)
                reopening.heard()
        except DeadlineExceeded:
            continue
        except Unavailable as error:
            await reopening.wait(error)
        else:
            await reopening.wait()


async def _next_revision(connection: Connection) -> int:
    """The revision of whatever happens next. Asked for, so that a reconnect before the first response
    can't lose what happened in between."""
    response = await connection.ask(methods.LIST_EVENTS, page_size=1, newest=True)
    return response.revision + 1


MISSING = "missing"
"""`LogLine.stream` of a line that says what can't be read."""

_LONGEST_LINE = 1 << 20
"""Of a longer line the parts come as lines: a program that never ends a line must not fill the memory."""

_Source = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line that a worker printed, or what is known of lines that can't be read.

    Attributes:
        text: the line, without its end; of ``missing`` why and what helps.
        stream: "stdout", "stderr", "timings", "results" or "missing".
        component: component of the worker, or its colocation group; empty: all of the node's.
        rank: its rank; -1: all.
        attempt: attempt of the job; 0: any.
        generation: generation of the worker; 0: any.
        node: node it ran on.
    """

    text: str
    stream: str
    component: str
    rank: int
    attempt: int
    generation: int
    node: str


async def job_lines(
    connection: Connection, name: str, selection: OutputSelection, *, follow: bool
) -> AsyncIterator[LogLine]:
    """Lines of a job. Closing the iterator ends the read.

    Args:
        connection: to the controller.
        name: "jobs/{job}".
        selection: which part of its output.
        follow: go on with what is printed from now on, until the job has ended.

    Raises:
        NotFound: there is no such job, attempt, component or rank.
        WrongState: it never started.
        Unreachable: the controller stayed away for a minute.
    """
    rests: dict[_Source, tuple[OutputChunk, bytes]] = {}
    async for content in _content(connection, name, selection, follow=follow):
        if isinstance(content, OutputGap):
            yield LogLine(
                text=content.message,
                stream=MISSING,
                component=content.component,
                rank=content.rank,
                attempt=content.attempt,
                generation=0,
                node=content.node_id,
            )
            continue
        source = _source_of(content)
        if content.discarded_bytes:
            amount = f"{content.discarded_bytes / 2**20:.1f} MiB" if content.discarded_bytes >> 20 else ""
            amount = amount or f"{content.discarded_bytes} bytes"
            why = f"{amount} of older {_name_of(content)} were discarded, because {content.node_id} keeps only so much"
            yield _line(content, why, MISSING)
        data = rests.pop(source, (content, b""))[1] + content.data
        *whole, rest = data.split(b"\n")
        for each in whole:
            yield _line(content, each.decode(errors="replace"))
        if len(rest) > _LONGEST_LINE:
            yield _line(content, rest.decode(errors="replace"))
        elif rest:
            rests[source] = (content, rest)
    for chunk, rest in rests.values():
        yield _line(chunk, rest.decode(errors="replace"))


async def _content(
    connection: Connection, name: str, selection: OutputSelection, *, follow: bool
) -> AsyncIterator[OutputChunk | OutputGap]:
    """Pieces and gaps, each once; opened again where it stopped."""
    places: dict[_Source, int] = {}
    gaps: set[str] = set()
    asked, reopening = selection, Reopening(connection)
    while True:
        request = methods.READ_JOB_OUTPUT.request(name=name, selection=asked, follow=follow)
        try:
            async for response in connection.stream(methods.READ_JOB_OUTPUT, request, timeout_s=STREAM_DEADLINE_S):
                reopening.heard()
                if response.HasField("chunk"):
                    chunk = response.chunk
                    places[_source_of(chunk)] = chunk.offset + len(chunk.data)
                    yield chunk
                elif response.HasField("gap") and response.gap.message not in gaps:
                    gaps.add(response.gap.message)
                    yield response.gap
        except DeadlineExceeded:
            pass
        except Unavailable as error:
            await reopening.wait(error)
        else:
            return
        asked = OutputSelection()
        asked.CopyFrom(selection)
        for (component, rank, generation, stream), offset in places.items():
            asked.after.add(
                component=component,
                rank=rank,
                generation=generation,
                stream=OutputStream.ValueType(stream),
                offset=offset,
            )


def _source_of(chunk: OutputChunk) -> _Source:
    return (chunk.component, chunk.rank, chunk.generation, chunk.stream)


def _name_of(chunk: OutputChunk) -> str:
    return OutputStream.Name(chunk.stream).removeprefix("OUTPUT_STREAM_").lower()


def _line(chunk: OutputChunk, text: str, stream: str = "") -> LogLine:
    return LogLine(
        text=text,
        stream=stream or _name_of(chunk),
        component=chunk.component,
        rank=chunk.rank,
        attempt=chunk.attempt,
        generation=chunk.generation,
        node=chunk.node_id,
    )
