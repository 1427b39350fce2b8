"""The event log: read and followed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from callboard.controller.journal.journal import not_leader
from callboard.controller.loop.driver import Driver
from callboard.controller.loop.event_log import EventLog, Filter, Progress
from callboard.controller.options import ControllerOptions
from callboard.controller.services.request_parts import LARGEST_PAGE, Context, is_member, is_member_of, page_of
from callboard.scheduler.records.job_records import EventRecord
from callboard.security.caller_roles import Identity, caller
from callboard.v1 import event_pb2, event_pb2_grpc
from callboard.wire.alike import message_of, timestamp
from callboard.wire.refusals import invalid

MOST_TYPES = 32
LOOKED_AT = 10_000
"""Most events looked at for one page; a filter that selects few then yields a short page and where to go on."""


class EventService(event_pb2_grpc.EventServiceServicer):
    """The log as clients see it."""

    def __init__(self, events: EventLog, driver: Driver, options: ControllerOptions) -> None:
        self._events = events
        self._driver = driver
        self._options = options

    async def Watch(self, request: event_pb2.WatchRequest, context: Context) -> AsyncIterator[event_pb2.WatchResponse]:
        self._driver.check_readable()  # a log that was not read yet has an end that says nothing
        wanted = self._filter(request.filter)
        following = self._driver.following
        if following is not None and request.start_revision > self._events.revision + 1:
            raise not_leader(following.leader)  # it is not there yet; the leader is
        watch = self._events.watch(request.start_revision, wanted, progress_s=self._options.progress_ms / 1000)
        async for progress in watch:
            yield _response(progress)

    async def ListEvents(self, request: event_pb2.ListEventsRequest, context: Context) -> event_pb2.ListEventsResponse:
        self._driver.check_readable()
        size = page_of(request.page_size, "", "events").size
        if request.start_revision < 0:
            raise invalid("start_revision", "must not be negative")
        wanted = self._filter(request.filter)
        revision = self._events.revision
        if request.newest:
            newest = self._events.newest(size, wanted)
            return event_pb2.ListEventsResponse(events=[event_message(event) for event in newest], revision=revision)
        found, following = await self._page(request.start_revision, size, wanted)
        return event_pb2.ListEventsResponse(
            events=[event_message(event) for event in found], revision=revision, next_revision=following
        )

    async def _page(self, start: int, size: int, wanted: Filter) -> tuple[list[EventRecord], int]:
        """Selected events from ``start`` (0: the oldest kept) and the revision to go on at (0: the end)."""
        position = start or await self._events.oldest()
        found: list[EventRecord] = []
        looked_at = 0
        while looked_at < LOOKED_AT:
            chunk = await self._events.read(position, LARGEST_PAGE)
            if not chunk:
                return found, 0
            looked_at += len(chunk)
            for event in chunk:
                if len(found) == size:
                    return found, event.revision
                if wanted.selects(event):
                    found.append(event)
            position = chunk[-1].revision + 1
        return found, position

    def _filter(self, message: event_pb2.EventFilter) -> Filter:
        if len(message.types) > MOST_TYPES:
            raise invalid("filter.types", f"{len(message.types)} types; at most {MOST_TYPES} are allowed")
        if len(message.subject) > 512:
            raise invalid("filter.subject", "has more than 512 characters")
        return Filter(tuple(message.types), message.subject, may_see(self._driver, caller()))


def _response(progress: Progress) -> event_pb2.WatchResponse:
    return event_pb2.WatchResponse(
        revision=progress.revision, events=[event_message(event) for event in progress.events]
    )


def may_see(driver: Driver, who: Identity) -> Callable[[str], bool] | None:
    """Which subjects a reader may see; None: every one. For a trainer: jobs of pools that name it, and those pools.
    Events of nodes and groups name jobs of others."""
    if not who.in_pools_only:
        return None

    def sees(subject: str) -> bool:
        kind, _, rest = subject.partition("/")
        state, key = driver.state, rest.partition("/")[0]
        if kind == "pools":
            return is_member(state, key, who.name)
        return kind == "jobs" and is_member_of(state, key, who.name)

    return sees


def event_message(event: EventRecord) -> event_pb2.Event:
    return message_of(event_pb2.Event, event, time=timestamp(event.at_ms))
