"""A watch of the event log that goes on through reconnects, by the revision after the last one seen.

Guaranteed: every event that matches is yielded once, in order. A stream that ends, silently or with
an error, is opened again where it stopped; only a compacted log ends the watch, with an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from callboard.client import methods
from callboard.client.connection import Connection, reconnect_backoff
from callboard.v1.event_pb2 import Event, EventFilter, ListEventsRequest, WatchRequest
from callboard.wire.errors import DeadlineExceeded, Unavailable

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
        request = WatchRequest(start_revision=revision, filter=event_filter)
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
    response = await connection.call(methods.LIST_EVENTS, ListEventsRequest(page_size=1, newest=True))
    return response.revision + 1
