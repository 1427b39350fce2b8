"""How is the event log followed through reconnects? By the revision after the last one seen.

Guaranteed: every event that matches is yielded once, in order. A stream that ends, silently or with
an error, is opened again where it stopped; only a compacted log ends the watch, with an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from callboard.client import methods
from callboard.client.connection import Connection
from callboard.client.errors import Unreachable
from callboard.v1.event_pb2 import Event, EventFilter, ListEventsRequest, WatchRequest
from callboard.wire.errors import DeadlineExceeded, Unavailable

STREAM_DEADLINE_S = 3600.0
"""Deadline of one stream; at its end the next one goes on."""

AWAY_S = 60.0
"""How long a controller may be away before a watch gives up: long enough for a restart by hand."""


async def watch_events(
    connection: Connection, *, start_revision: int, event_filter: EventFilter
) -> AsyncIterator[Event]:
    """Events from ``start_revision`` on; 0: from now on. See :meth:`ClusterCalls.watch`."""
    revision = start_revision or await _next_revision(connection)
    loop, away_since = asyncio.get_running_loop(), None
    while True:
        request = WatchRequest(start_revision=revision, filter=event_filter)
        try:
            async for response in connection.stream(methods.WATCH, request, timeout_s=STREAM_DEADLINE_S):
                away_since = None
                for event in response.events:
                    revision = event.revision + 1
                    yield event
                revision = max(revision, response.revision + 1)
        except DeadlineExceeded:
            continue
        except Unavailable as error:
            # One that answers why it can't (it stops, it can't write its journal) is tried again for as long.
            away_since = loop.time() if away_since is None else away_since
            left_s = away_since + AWAY_S - loop.time()
            if left_s <= 0 or (isinstance(error, Unreachable) and not await connection.ready(left_s)):
                raise
        # The server ended the stream, or was away: leave it the time to come up.
        await asyncio.sleep(0.05)


async def _next_revision(connection: Connection) -> int:
    """The revision of whatever happens next. Asked for, so that a reconnect before the first response
    can't lose what happened in between."""
    response = await connection.call(methods.LIST_EVENTS, ListEventsRequest(page_size=1, newest=True))
    return response.revision + 1
