"""The board: what the page shows, kept up to date row by row, and who reads it.

A row is made again when a record that it is made of changed, and sent when it differs from what was sent: a browser
gets the whole board once and from then on what changes. A reader is only a position in the changes: it costs no buffer
and delays nobody, and one that reads too slowly, or comes back after a pause, goes on where it stopped, or takes the
board anew when that is no longer kept. Nothing is sent before it is journaled.

There is one board for all who see everything, and one for each trainer, whom some of it is not shown. A board that
nobody reads is forgotten.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from callboard.controller.loop.driver import Driver, Listener
from callboard.controller.loop.event_log import EventLog, Filter, happens
from callboard.controller.page.rows import Row, event_row, figures, group_row, job_row, node_row, pool_row
from callboard.controller.services.event import may_see
from callboard.controller.services.request_parts import sees_job
from callboard.model.log import structlog
from callboard.scheduler.records.job_records import Change, Drop, EventRecord, JobRecord, SpecRecord, WorkerRecord
from callboard.scheduler.records.node_record import NodeRecord
from callboard.scheduler.records.pool_records import GroupRecord, PoolRecord
from callboard.scheduler.records.states import ENDED, JobState
from callboard.security.caller_roles import Identity
from callboard.wire.refusals import CallboardError, LimitReached, Unavailable

KINDS = ("nodes", "jobs", "pools", "groups")

PAUSE_S = 0.04
"""Shortest time between two messages: what changes meanwhile goes out together. A screen shows 25 in a second well."""

SLOW_S = 0.5
"""Shortest time between two looks at pools, whose sums go over all that they hold."""

TURN_S = 0.002
"""Longest time that rows are made without giving others their turn."""

FORGOTTEN_S = 60.0
"""How long a board is kept for readers who come back."""

EVENTS_SHOWN = 1_000
"""Newest events that a browser begins with."""

KEPT = 4_096
KEPT_BYTES = 16 << 20
"""Most messages, and most bytes of them, that a reader may lag behind."""

MOST_BOARDS = 100
"""Most boards: one for each trainer who looks at the page."""

log = structlog.get_logger(__name__)


class Board:
    """What one kind of reader sees."""

    def __init__(self, driver: Driver, events: EventLog, reader: Identity) -> None:
        """
        Args:
            reader: who reads it; a trainer, or one of those who see everything.
        """
        self._driver = driver
        self._events = events
        self._trainer = reader.name if reader.in_pools_only else ""
        self._wanted = Filter(may_see=may_see(driver, reader))
        self._dirty: dict[str, dict[Any, None]] = {kind: {} for kind in KINDS}
        self._rows: dict[str, dict[Any, str]] = {kind: {} for kind in KINDS}
        self._pool_of: dict[str, tuple[tuple[str, ...], str]] = {}
        """Pools of each job and whether it waits ("pending"), holds something ("active") or has ended (""), by uid."""
        self._inside: dict[str, Counter[str]] = {"pending": Counter(), "active": Counter()}
        self._number: dict[str, int] = {}
        """Number of each job that is shown, by uid."""
        self._nodes_of: dict[str, list[str]] = {}
        """Nodes of each placement group: its end frees room there."""
        self._fresh: list[EventRecord] = []
        self._figures = ""
        self._pools_s = 0.0
        self._sent: deque[tuple[int, bytes]] = deque()
        self._sent_bytes = 0
        self._woken = asyncio.Event()
        self._more = asyncio.Event()
        self._whole = asyncio.Event()
        self._closed: CallboardError | None = None
        self.id = secrets.token_hex(4)
        self.seq = 0
        self.readers = 0
        self.idle_since_s = time.monotonic()
        self._begin()
        self._task = asyncio.create_task(self._run())

    # ---- what changes ----

    def changed(self, changes: Sequence[Change]) -> None:
        """Records changed, and are journaled."""
        for change in changes:
            if isinstance(change, Drop):
                self._dropped(change)
            else:
                self._put(change.record)
        self._woken.set()

    def happened(self, events: Iterable[EventRecord]) -> None:
        """Entries of the log."""
        self._fresh += events
        if len(self._fresh) > 2 * EVENTS_SHOWN:
            del self._fresh[:-EVENTS_SHOWN]
        self._woken.set()

    def begin_anew(self) -> None:
        """The state is another one: a new term."""
        for kind in KINDS:
            self._rows[kind].clear()
        self._sent.clear()
        self._sent_bytes, self._figures = 0, ""
        self._whole.clear()
        self.id, self.seq = secrets.token_hex(4), 0
        self._begin()
        self._wake_readers()
        self._woken.set()

    def close(self, why: CallboardError) -> None:
        """Ends every reader with ``why``."""
        self._closed = why
        self._task.cancel()
        self._wake_readers()
        self._whole.set()

    # ---- who reads ----

    async def whole(self) -> bytes:
        """Everything there is now: JSON.

        Raises:
            Unavailable: the controller stops.
        """
        await self._whole.wait()
        if self._closed is not None:
            raise self._closed
        events = [_text(event_row(event)) for event in self._events.newest(EVENTS_SHOWN, self._wanted)]
        lists = {kind: list(self._rows[kind].values()) for kind in KINDS} | {"events": events}
        parts = [f'"{name}":[{",".join(rows)}]' for name, rows in lists.items()]
        head = f'"board":"{self.id}","seq":{self.seq},"now":{self._driver.now_ms()},"figures":{self._figures}'
        return f"{{{head},{','.join(parts)}}}".encode()

    async def follow(self, board: str, seq: int, *, tick_s: float) -> AsyncIterator[bytes]:
        """The messages of an event stream from a position on; "reset" when it is not one of this board, or is no
        longer kept.

        Args:
            board: id of the board that the reader has.
            seq: number of the last change that it has.
            tick_s: longest silence in seconds.

        Raises:
            Unavailable: the controller stops.
        """
        while True:
            if self._closed is not None:
                raise self._closed
            more = self._more
            first = self._sent[0][0] if self._sent else self.seq + 1
            if board != self.id or not first - 1 <= seq <= self.seq:
                yield b"event: reset\ndata: {}\n\n"
                return
            # A message that is sent may lie in the queue of the network for long; others come meanwhile.
            waiting = _from(self._sent, seq + 1 - first)
            for number, message in waiting:
                yield message
                seq = number
            if not waiting and not await happens(more, tick_s):
                yield b'event: tick\ndata: {"now":%d}\n\n' % self._driver.now_ms()

    # ---- how rows are made ----

    def _begin(self) -> None:
        state = self._driver.state
        self._pool_of.clear()
        self._inside = {"pending": Counter(), "active": Counter()}
        self._dirty = {
            "nodes": dict.fromkeys(state.nodes),
            "jobs": dict.fromkeys(state.jobs),
            "pools": dict.fromkeys(state.pools),
            "groups": dict.fromkeys(state.groups) if not self._trainer else {},
        }
        self._nodes_of = {key: [bundle.node_id for bundle in group.bundles] for key, group in state.groups.items()}
        self._number = {}
        self._fresh = []
        self._woken.set()

    def _put(self, record: object) -> None:
        state = self._driver.state
        if isinstance(record, WorkerRecord):
            self._dirty["jobs"][record.job] = None
            self._dirty["nodes"][record.node_id] = None
            self._dirty["pools"][record.pool] = None
        elif isinstance(record, JobRecord | SpecRecord):
            self._dirty["jobs"][record.uid] = None
        elif isinstance(record, GroupRecord):
            self._dirty["groups"][record.group_id] = None
            self._dirty["pools"][record.pool] = None
            self._nodes_of[record.group_id] = [bundle.node_id for bundle in record.bundles]
            self._dirty["nodes"].update(dict.fromkeys(self._nodes_of[record.group_id]))
        elif isinstance(record, NodeRecord):
            self._dirty["nodes"][record.node_id] = None
        elif isinstance(record, PoolRecord):
            self._dirty["pools"][record.spec.name] = None
            if self._trainer:
                # Its members may have changed, and with them what may be seen.
                self._dirty["jobs"].update(dict.fromkeys(state.jobs))
                self._dirty["nodes"].update(dict.fromkeys(state.nodes))

    def _dropped(self, change: Drop) -> None:
        kind = f"{change.kind}s"
        if kind not in self._dirty:
            return
        self._dirty[kind][change.key] = None
        if kind == "groups":
            self._dirty["nodes"].update(dict.fromkeys(self._nodes_of.pop(str(change.key), ())))

    async def _run(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            try:
                await self._catch_up()
            except Unavailable:
                continue  # the journal failed: what was made may not be true, and a new term begins anew
            except Exception:
                log.exception("a defect: the web page could not be brought up to date")
                self.begin_anew()
                await asyncio.sleep(1)
            await asyncio.sleep(PAUSE_S)

    async def _catch_up(self) -> None:
        """Makes every row that is not up to date, and a message of those that are others now."""
        board, fresh, self._fresh = self.id, self._fresh, []
        found = await self._look()
        sums = _text(figures(self._driver.state))
        await self._driver.journaled()
        if board != self.id or found is None:
            return
        put, gone = found
        for kind in KINDS:
            self._rows[kind].update(put[kind])
            for key in gone[kind]:
                self._rows[kind].pop(key, None)
        is_first, changed = not self._whole.is_set(), sums != self._figures
        self._figures = sums
        if is_first:
            self._whole.set()
            return
        parts = [f'"{kind}":[{",".join(put[kind].values())}]' for kind in KINDS if put[kind]]
        if any(gone.values()):
            parts.append(f'"gone":{_text({kind: keys for kind, keys in gone.items() if keys})}')
        if selected := [_text(event_row(event)) for event in fresh if self._wanted.selects(event)]:
            parts.append(f'"events":[{",".join(selected)}]')
        if changed:
            parts.append(f'"figures":{sums}')
        if parts:
            self._send(parts)

    async def _look(self) -> tuple[dict[str, dict[Any, str]], dict[str, list[Any]]] | None:
        """Rows that are others than those sent, and what is gone; None: the state is another one."""
        board = self.id
        put: dict[str, dict[Any, str]] = {kind: {} for kind in KINDS}
        gone: dict[str, list[Any]] = {kind: [] for kind in KINDS}
        turn_ends = time.monotonic() + TURN_S
        for kind, key in self._to_look_at():
            row = self._row(kind, key)
            shown = self._number.get(key, 0) if kind == "jobs" else key
            if row is not None:
                text = _text(row)
                if self._rows[kind].get(row["id"]) != text:
                    put[kind][row["id"]] = text
            elif shown in self._rows[kind]:
                gone[kind].append(shown)
                self._number.pop(key, None)
            if time.monotonic() >= turn_ends:
                await asyncio.sleep(0)
                if board != self.id:
                    return None
                turn_ends = time.monotonic() + TURN_S
        return put, gone

    def _to_look_at(self) -> Iterator[tuple[str, Any]]:
        """What is not up to date, one after another; what becomes so meanwhile comes, too."""
        for kind in ("nodes", "jobs", "groups"):
            while self._dirty[kind]:
                key = next(iter(self._dirty[kind]))
                del self._dirty[kind][key]
                yield kind, key
        if not self._dirty["pools"]:
            return
        wait_s = self._pools_s + SLOW_S - time.monotonic()
        if wait_s > 0:
            asyncio.get_running_loop().call_later(wait_s, self._woken.set)
            return
        self._pools_s = time.monotonic()
        pools, self._dirty["pools"] = self._dirty["pools"], {}
        for key in pools:
            yield "pools", key

    def _row(self, kind: str, key: Any) -> Row | None:
        state = self._driver.state
        if kind == "jobs":
            job = state.jobs.get(key)
            self._count(key, job)
            if job is None or not self._sees(job):
                return None
            self._number[key] = job.order
            return job_row(job, state)
        if kind == "nodes":
            node = state.nodes.get(key)
            return node_row(node, state, self._sees) if node is not None else None
        if kind == "groups":
            group = state.groups.get(key)
            return group_row(group, state) if group is not None and not self._trainer else None
        pool = state.pools.get(key)
        if pool is None:
            return None
        return pool_row(pool, state, self._inside["pending"][key], self._inside["active"][key])

    def _sees(self, job: JobRecord) -> bool:
        return not self._trainer or sees_job(self._driver.state, job, self._trainer)

    def _count(self, uid: str, job: JobRecord | None) -> None:
        """Follows how many jobs wait in a pool, and how many hold something."""
        old = self._pool_of.pop(uid, ((), ""))
        new: tuple[tuple[str, ...], str] = ((), "")
        if job is not None and job.state not in ENDED:
            spec = self._driver.state.specs[uid].spec
            pools = tuple(sorted({spec.pool, *spec.pools}))
            new = (pools, "pending" if job.state is JobState.PENDING else "active")
            self._pool_of[uid] = new
        if old == new:
            return
        for (pools, what), step in ((old, -1), (new, 1)):
            for pool in pools:
                self._inside[what][pool] += step
                self._dirty["pools"][pool] = None

    def _send(self, parts: Sequence[str]) -> None:
        self.seq += 1
        data = f'{{"seq":{self.seq},"now":{self._driver.now_ms()},{",".join(parts)}}}'
        message = f"id: {self.id}-{self.seq}\ndata: {data}\n\n".encode()
        self._sent.append((self.seq, message))
        self._sent_bytes += len(message)
        while len(self._sent) > KEPT or (self._sent_bytes > KEPT_BYTES and len(self._sent) > 1):
            self._sent_bytes -= len(self._sent.popleft()[1])
        self._wake_readers()

    def _wake_readers(self) -> None:
        self._more.set()
        self._more = asyncio.Event()


class Boards(Listener):
    """The boards that somebody reads. Is told by the driver what changed."""

    def __init__(self, driver: Driver, events: EventLog, *, most_readers: int) -> None:
        """
        Args:
            most_readers: most event streams at one time, over all boards.
        """
        self._driver = driver
        self._events = events
        self._most_readers = most_readers
        self._boards: dict[str, Board] = {}
        self._closed: CallboardError | None = None
        driver.subscribe(self)
        driver.follow_changes(self._changed)

    def of(self, reader: Identity) -> Board:
        """The board for a reader.

        Raises:
            LimitReached: too many trainers look at the page.
        """
        if self._closed is not None:
            raise self._closed
        self._driver.check_serving()
        self._tidy()
        key = reader.name if reader.in_pools_only else ""
        if key not in self._boards:
            if len(self._boards) >= MOST_BOARDS:
                raise LimitReached(f"{MOST_BOARDS} trainers look at the page already; try again in a minute")
            self._boards[key] = Board(self._driver, self._events, reader)
        board = self._boards[key]
        board.idle_since_s = time.monotonic()
        return board

    @contextmanager
    def reading(self, board: Board) -> Iterator[None]:
        """Counts a stream as long as the block runs.

        Raises:
            LimitReached: too many are open.
        """
        if sum(each.readers for each in self._boards.values()) >= self._most_readers:
            raise LimitReached(
                f"{self._most_readers} browsers follow the page already; close some, or raise --limit page_streams"
            )
        board.readers += 1
        try:
            yield
        finally:
            board.readers -= 1
            board.idle_since_s = time.monotonic()
            asyncio.get_running_loop().call_later(FORGOTTEN_S + 1, self._tidy)

    def close(self, why: CallboardError) -> None:
        """Ends every reader with ``why``."""
        self._closed = why
        for board in self._boards.values():
            board.close(why)
        self._boards.clear()

    # ---- what the driver tells ----

    def started(self, events: Sequence[EventRecord]) -> None:  # noqa: ARG002 - as every listener
        """A term began."""
        for board in self._boards.values():
            board.begin_anew()

    def publish(self, events: Sequence[EventRecord]) -> None:
        """Entries of the log."""
        if events:
            for board in self._boards.values():
                board.happened(events)

    def _changed(self, changes: Sequence[Change]) -> None:
        for board in self._boards.values():
            board.changed(changes)

    def _tidy(self) -> None:
        now_s = time.monotonic()
        for key, board in list(self._boards.items()):
            if not board.readers and now_s - board.idle_since_s > FORGOTTEN_S:
                del self._boards[key]
                board.close(Unavailable("nobody read the board any more; load the page again"))


def _from(sent: deque[tuple[int, bytes]], place: int) -> list[tuple[int, bytes]]:
    """Those from a place on, a few at a time."""
    return [sent[index] for index in range(place, min(len(sent), place + 64))]


def _text(row: Row) -> str:
    return json.dumps(row, separators=(",", ":"))
