"""A watch of the event log that goes on through reconnects, by the revision after the last one seen.

Guaranteed: every event that matches is yielded once, in order. A stream that ends, silently or with
an error, is opened again where it stopped; only a compacted log ends the watch, with an error.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

from callboard.client import methods
from callboard.client.connection import Connection
from callboard.v1.event_pb2 import Event, EventFilter, ListEventsRequest, WatchRequest
from callboard.wire.errors import DeadlineExceeded, Unavailable

STREAM_DEADLINE_S = 3600.0
"""Deadline of one stream; at its end the next one goes on."""

AWAY_S = 60.0
"""How long a controller may be away before a watch gives up: long enough for a restart by hand."""

_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 1.0


async def watch_events(
    connection: Connection, *, start_revision: int, event_filter: EventFilter
) -> AsyncIterator[Event]:
    """Events from ``start_revision`` on; 0: from now on. See :meth:`ClusterCalls.watch`."""
    revision = start_revision or await _next_revision(connection)
    loop = asyncio.get_running_loop()
    backoff_s = _FIRST_BACKOFF_S
    away_since: float | None = None
    while True:
        request = WatchRequest(start_revision=revision, filter=event_filter)
        try:
            async for response in connection.stream(methods.WATCH, request, timeout_s=STREAM_DEADLINE_S):
                away_since = None
                for event in response.events:
                    revision = event.revision + 1
                    yield event
                revision = max(revision, response.revision + 1)
                away_since, backoff_s = None, _FIRST_BACKOFF_S
        except DeadlineExceeded:
            continue
        except Unavailable:
            away_since = away_since or loop.time()
            rest_s = away_since + AWAY_S - loop.time()
            if rest_s <= 0 or not await connection.ready(rest_s):
                raise
        # The server ended the stream, or was away: leave it the time to come up. Jittered, so that the watches of a
        # restarted controller don't come back as one.
        await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311
        backoff_s = min(backoff_s * 2, _LAST_BACKOFF_S)


async def _next_revision(connection: Connection) -> int:
    """The revision of whatever happens next. Asked for, so that a reconnect before the first response
    can't lose what happened in between."""
    response = await connection.call(methods.LIST_EVENTS, ListEventsRequest(page_size=1, newest=True))
    return response.revision + 1
