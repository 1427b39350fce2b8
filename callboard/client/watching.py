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
from callboard.wire.errors import DeadlineExceeded

STREAM_DEADLINE_S = 3600.0
"""Deadline of one stream; at its end the next one goes on."""

AWAY_S = 60.0
"""How long a controller may be away before a watch gives up: long enough for a restart by hand."""


async def watch_events(
    connection: Connection, *, start_revision: int, event_filter: EventFilter
) -> AsyncIterator[Event]:
    """Events from ``start_revision`` on; 0: from now on. See :meth:`ClusterCalls.watch`."""
    revision = start_revision or await _next_revision(connection)
    while True:
        request = WatchRequest(start_revision=revision, filter=event_filter)
        try:
            async for response in connection.stream(methods.WATCH, request, timeout_s=STREAM_DEADLINE_S):
                for event in response.events:
                    revision = event.revision + 1
                    yield event
                revision = max(revision, response.revision + 1)
        except DeadlineExceeded:
            continue
        except Unreachable:
            if not await connection.ready(AWAY_S):
                raise
        # The server ended the stream, or was away: leave it the time to come up.
        await asyncio.sleep(0.05)


async def _next_revision(connection: Connection) -> int:
    """The revision of whatever happens next. Asked for, so that a reconnect before the first response
    can't lose what happened in between."""
    response = await connection.call(methods.LIST_EVENTS, ListEventsRequest(page_size=1, newest=True))
    return response.revision + 1
