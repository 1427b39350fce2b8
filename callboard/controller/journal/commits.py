"""Commits as the driver makes them: one at a time, with those who wait for it to end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from callboard.controller.journal.codec import Decision
from callboard.controller.journal.journal import Follower, Journal
from callboard.controller.journal.state_dir import StoreFailed
from callboard.model.log import structlog
from callboard.scheduler import State
from callboard.scheduler.records.job_records import Change, EventRecord
from callboard.wire.refusals import ErrorReason, Unavailable

SNAPSHOT_RETRY_S = 60.0
"""How long after a failed snapshot the next is tried; until then the log only grows."""

log = structlog.get_logger(__name__)


class Commits:
    """The driver's hand on the journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._on_its_way: asyncio.Future[None] | None = None
        self._no_snapshot_before = 0.0

    async def lead(self, follower: Follower) -> bool:
        """Returns True once this process may write; False: it is not wanted any more.

        Raises:
            StoreFailed: the journal can't be read.
        """
        return await self._journal.lead(follower)

    def check_leading(self) -> None:
        """
        Raises:
            StoreFailed: this process may not write any more.
        """
        self._journal.check()

    def check(self) -> None:
        """
        Raises:
            Unavailable: as above.
        """
        try:
            self._journal.check()
        except StoreFailed as failure:
            raise store_failed(failure) from failure

    async def open(self, events: int) -> tuple[State, list[EventRecord]]:
        """The last good state and the newest ``events`` events.

        Raises:
            StoreFailed: the journal can't be read or written.
        """
        state = await self._journal.open()
        return state, await self._journal.newest_events(events)

    async def write(
        self, changes: Sequence[Change], events: Sequence[EventRecord], decisions: Sequence[Decision]
    ) -> None:
        """Writes a batch, with the events that led to it; once this returns, it survives.

        Raises:
            StoreFailed: it could not be written.
        """
        if not changes and not events:
            return
        self._on_its_way = asyncio.get_running_loop().create_future()
        try:
            await self._journal.commit(changes, events, decisions)
        except StoreFailed as failure:
            self._on_its_way.set_exception(store_failed(failure))
            self._on_its_way.exception()  # read, so that asyncio does not complain where nobody waits
            raise
        else:
            self._on_its_way.set_result(None)
        finally:
            self._on_its_way = None

    async def settled(self) -> None:
        """Returns once the batch on its way, if any, is on disk.

        Raises:
            Unavailable: it could not be written.
        """
        if self._on_its_way is not None:
            await asyncio.shield(self._on_its_way)

    async def compact(self, state: State) -> None:
        """Takes a snapshot when the log has grown enough for it to pay."""
        if not self._journal.wants_snapshot or asyncio.get_running_loop().time() < self._no_snapshot_before:
            return
        if not await self._snapshot(state):
            self._no_snapshot_before = asyncio.get_running_loop().time() + SNAPSHOT_RETRY_S

    async def close(self, state: State | None) -> None:
        """Closes the journal, after a snapshot of ``state`` unless that is None."""
        if state is not None:
            await self._snapshot(state)
        await self._journal.close()

    async def read_events(self, first_revision: int, limit: int) -> tuple[int, list[EventRecord]]:
        """The oldest revision kept on disk and events from a revision on, oldest first.

        Raises:
            Unavailable: the journal can't be read.
        """
        try:
            return await self._journal.read_events(first_revision, limit)
        except StoreFailed as failure:
            raise store_failed(failure) from failure

    async def _snapshot(self, state: State) -> bool:
        try:
            await self._journal.snapshot(list(state.records()))
        except StoreFailed as failure:
            # The log is complete without it. Should the disk be full, the next commit says so.
            log.warning("no snapshot could be taken", why=str(failure))
            return False
        return True


def store_failed(failure: StoreFailed) -> Unavailable:
    """What callers are told."""
    return Unavailable(f"the controller can't use its journal: {failure}", reason=ErrorReason.STORE_FAILED)
