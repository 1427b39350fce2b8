"""The loop: nothing leaves before it is journaled, and nothing that fails is half done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from callboard.controller.journal.codec import Decision
from callboard.controller.journal.journal import Follower
from callboard.controller.journal.state_dir import StoreFailed
from callboard.controller.loop import driver as driver_module
from callboard.controller.loop.clock import Clock
from callboard.controller.loop.driver import Driver, Listener
from callboard.controller.loop.event_log import EventLog
from callboard.controller.loop.liveness import HELD_UP_S
from callboard.controller.options import ControllerOptions
from callboard.controller.services.event import EventService
from callboard.model.quantities import Resources
from callboard.model.specs import ComponentSpec, JobSpec, PgPoolSpec, PoolSpec
from callboard.scheduler import Outcome, Refusal, State
from callboard.scheduler.records.commands import Command, CreateGroup
from callboard.scheduler.records.events import (
    Event,
    GroupReady,
    JobCancelled,
    JobSubmitted,
    NodeJoined,
    PoolCreated,
    WorkerStarted,
)
from callboard.scheduler.records.job_records import Change, EventRecord, Record
from callboard.scheduler.records.refusals import ImpossibleTransition
from callboard.scheduler.records.states import JobState, WorkerState
from callboard.v1 import event_pb2
from callboard.wire.refusals import ErrorReason, InternalError, LimitReached, Unavailable


class FakeJournal:
    """A journal in memory whose commits can be held back or made to fail."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.events: list[EventRecord] = []
        self.commits = 0
        self.opened = 0
        self.closed = False
        self.wants_snapshot = False
        self.snapshots: list[int] = []
        self.failure: StoreFailed | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = asyncio.Event()

    async def lead(self, follower: Follower) -> bool:
        return True

    def check(self) -> None:
        """Nobody shares it."""

    async def open(self) -> State:
        self.opened += 1
        if self.failure is not None:
            raise self.failure
        state = State()
        for change in self.changes:
            state.apply(change)
        return state

    async def commit(
        self, changes: Sequence[Change], events: Sequence[EventRecord], decisions: Sequence[Decision]
    ) -> None:
        self.waiting.set()
        await self.gate.wait()
        self.waiting.clear()
        if self.failure is not None:
            raise self.failure
        self.commits += 1
        self.changes += changes
        self.events += events

    async def snapshot(self, records: Sequence[Record]) -> None:
        if self.failure is not None:
            raise self.failure
        self.snapshots.append(len(records))
        self.wants_snapshot = False

    async def newest_events(self, limit: int) -> list[EventRecord]:
        return self.events[-limit:]

    async def read_events(self, first_revision: int, limit: int) -> tuple[int, list[EventRecord]]:
        found = [event for event in self.events if event.revision >= first_revision]
        return (self.events[0].revision if self.events else 0), found[:limit]

    async def close(self) -> None:
        self.closed = True


class Told(Listener):
    """A listener that writes down what it is told, in order."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.events: list[EventRecord] = []
        self.notes: list[str] = []
        self.changed = asyncio.Event()

    def started(self, events: Sequence[EventRecord]) -> None:
        self.notes.append(f"started after {len(events)} events")
        self.changed.set()

    def outage(self) -> None:
        self.notes.append("outage")
        self.changed.set()

    def deliver(self, commands: Sequence[Command]) -> None:
        self.commands += commands
        self.changed.set()

    def publish(self, events: Sequence[EventRecord]) -> None:
        self.events += events
        self.changed.set()

    async def until(self, note: str) -> None:
        while note not in self.notes:
            self.changed.clear()
            await self.changed.wait()


class Time:
    """A clock that stands until a test moves it."""

    def __init__(self) -> None:
        self.ms = 1_000_000

    def clock(self, not_before_ms: int) -> Clock:
        return Clock(not_before_ms, wall_ns=lambda: self.ms * 1_000_000, monotonic_ns=lambda: self.ms * 1_000_000)


@asynccontextmanager
async def driving(journal: FakeJournal, **options: Any) -> AsyncIterator[tuple[Driver, Told]]:
    driver = Driver(journal, reconcile_grace_ms=0, **options)
    told = Told()
    driver.subscribe(told)
    await driver.start()
    running = asyncio.create_task(driver.run())
    try:
        yield driver, told
    finally:
        journal.gate.set()
        driver.stop()
        await running


POOL = PoolSpec(name="p", nominal=(("cpu", 4000),), pg_pool=PgPoolSpec())


def spec(name: str, pool: str = "p") -> JobSpec:
    component = ComponentSpec(name="w", actor="a:B", resources=Resources(cpu_milli=1000))
    return JobSpec(name=name, pool=pool, components=(component,))


async def make_pool(driver: Driver) -> None:
    await driver.ask(
        lambda now_ms, cause: PoolCreated(now_ms=now_ms, cause=cause, spec=POOL), lambda _: None, source="test"
    )


async def join(driver: Driver, node_id: str = "n0") -> None:
    def make(now_ms: int, cause: str) -> NodeJoined:
        return NodeJoined(
            now_ms=now_ms,
            cause=cause,
            node_id=node_id,
            instance="i",
            runtime="process",
            capacity=Resources(cpu_milli=4000),
        )

    await driver.ask(make, lambda _: None, source="test")


async def submit(driver: Driver, name: str, pool: str = "p") -> str:
    def make(now_ms: int, cause: str) -> JobSubmitted:
        return JobSubmitted(now_ms=now_ms, cause=cause, uid=f"j-{name}", spec=spec(name, pool))

    return await driver.ask(make, lambda outcome: str(outcome.result), source="test")


async def started(driver: Driver, told: Told) -> Callable[[], Coroutine[Any, Any, None]]:
    """A job whose worker is asked of its agent; what is returned reports that it started."""
    await make_pool(driver)
    await join(driver)
    await submit(driver, "a")
    for command in list(told.commands):
        if isinstance(command, CreateGroup):
            made = GroupReady(now_ms=driver.now_ms(), group_id=command.group_id, attempt=command.attempt)
            await driver.ask(partial(replace_time, made), lambda _: None, source="test")
    (worker,) = driver.state.workers.values()
    assert worker.state is WorkerState.STARTING
    event = WorkerStarted(now_ms=0, node_id=worker.node_id, generation=worker.generation)

    async def report() -> None:
        await driver.ask(partial(replace_time, event), lambda _: None, source="report")

    return report


def replace_time(event: Event, now_ms: int, cause: str) -> Event:
    return replace(event, now_ms=now_ms, cause=cause)


class TestWhatCameInTimeIsInTime:
    async def test_a_report_that_came_before_its_deadline_and_waited_is_decided_before_that_is_judged(self) -> None:
        journal, time = FakeJournal(), Time()
        async with driving(journal, new_clock=time.clock) as (driver, told):
            report = await started(driver, told)
            journal.gate.clear()
            journal.waiting.clear()
            slow = asyncio.create_task(submit(driver, "b"))
            await journal.waiting.wait()
            reported = asyncio.create_task(report())
            await asyncio.sleep(0)
            time.ms += 10_000_000
            late = asyncio.create_task(submit(driver, "c"))  # its deadline is over when this comes
            await asyncio.sleep(0)
            journal.gate.set()
            await asyncio.gather(slow, reported, late)
            assert driver.state.jobs["j-a"].state is JobState.RUNNING

    async def test_nor_is_one_that_lay_unread_while_the_program_was_held_up(self) -> None:
        journal, time = FakeJournal(), Time()
        async with driving(journal, new_clock=time.clock) as (driver, told):
            report = await started(driver, told)
            loop = asyncio.get_running_loop()
            driver._disarm()
            driver._timer = loop.call_at(loop.time() - 10 * HELD_UP_S, driver._inbox.wake)
            time.ms += 10_000_000
            await submit(driver, "c")  # what the sockets held is not read at once
            await report()
            assert driver.state.jobs["j-a"].state is JobState.RUNNING

    async def test_time_passes_all_the_same(self) -> None:
        journal, time = FakeJournal(), Time()
        async with driving(journal, new_clock=time.clock) as (driver, told):
            report = await started(driver, told)
            time.ms += 10_000_000
            await report()
            assert driver.state.jobs["j-a"].state is not JobState.RUNNING

    async def test_nobody_is_overdue_right_after_a_restart(self) -> None:
        journal, time = FakeJournal(), Time()
        async with driving(journal, new_clock=time.clock) as (driver, told):
            await started(driver, told)
        time.ms += 10_000_000
        async with driving(journal, new_clock=time.clock) as (driver, told):
            await make_pool(driver)
            (worker,) = driver.state.workers.values()
            assert worker.state is WorkerState.STARTING, "its agent could not say anything meanwhile"
            time.ms += 10_000_000
            await make_pool(driver)
            (worker,) = driver.state.workers.values()
            assert worker.state is WorkerState.STOPPING


class TestNothingLeavesBeforeItIsJournaled:
    async def test_neither_answers_nor_commands_nor_events(self) -> None:
        journal = FakeJournal()
        async with driving(journal) as (driver, told):
            await make_pool(driver)
            await join(driver)
            before = (len(told.commands), len(told.events))
            journal.gate.clear()
            journal.waiting.clear()
            submitted = asyncio.create_task(submit(driver, "a"))
            await journal.waiting.wait()
            assert "j-a" in driver.state.jobs  # decided
            assert not submitted.done()
            assert (len(told.commands), len(told.events)) == before
            journal.gate.set()
            assert await submitted == "j-a"
            assert len(told.commands) == before[0] + 1
            assert [event.revision for event in told.events] == [event.revision for event in journal.events]

    async def test_a_read_waits_for_what_it_saw(self) -> None:
        journal = FakeJournal()
        async with driving(journal) as (driver, _):
            await make_pool(driver)
            await join(driver)
            journal.gate.clear()
            journal.waiting.clear()
            submitted = asyncio.create_task(submit(driver, "a"))
            await journal.waiting.wait()
            read = asyncio.create_task(driver.read(lambda state: "j-a" in state.jobs))
            await asyncio.sleep(0)
            assert not read.done()
            journal.gate.set()
            assert await read
            await submitted

    async def test_a_read_of_what_was_never_journaled_fails(self) -> None:
        journal = FakeJournal()
        async with driving(journal) as (driver, _):
            await make_pool(driver)
            await join(driver)
            journal.gate.clear()
            journal.waiting.clear()
            submitted = asyncio.create_task(submit(driver, "a"))
            await journal.waiting.wait()
            read = asyncio.create_task(driver.read(lambda state: list(state.jobs)))
            await asyncio.sleep(0)
            journal.failure = StoreFailed(Path("j"), "is full", "Free some.")
            journal.gate.set()
            for task in (submitted, read):
                with pytest.raises(Unavailable, match="is full"):
                    await task

    async def test_asks_that_arrive_together_are_one_commit(self) -> None:
        journal = FakeJournal()
        async with driving(journal) as (driver, _):
            await make_pool(driver)
            await join(driver)
            commits = journal.commits
            uids = await asyncio.gather(*[submit(driver, f"job{number}") for number in range(20)])
            assert uids == [f"j-job{number}" for number in range(20)]
            assert journal.commits - commits < 10


class TestARefusalAnswersItsCallOnly:
    async def test_the_others_of_its_batch_go_through(self) -> None:
        journal = FakeJournal()
        async with driving(journal) as (driver, _):
            await make_pool(driver)
            await join(driver)
            results = await asyncio.gather(
                submit(driver, "a"), submit(driver, "b", "nowhere"), submit(driver, "c"), return_exceptions=True
            )
            assert results[0] == "j-a"
            assert isinstance(results[1], Refusal)
            assert results[2] == "j-c"
            assert "j-b" not in driver.state.jobs

    async def test_it_is_not_journaled(self) -> None:
        journal = FakeJournal()
        async with driving(journal) as (driver, _):
            before = (journal.commits, len(journal.changes))
            with pytest.raises(Refusal):
                await submit(driver, "a")
            assert (journal.commits, len(journal.changes)) == before


class TestADefectStopsNobodyElse:
    async def test_an_impossible_transition_is_internal_and_the_loop_goes_on(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        journal = FakeJournal()
        async with driving(journal) as (driver, _):
            await make_pool(driver)
            await join(driver)
            handle = driver.scheduler.handle

            def fails(event: Any) -> Outcome:
                if isinstance(event, JobCancelled):
                    raise ImpossibleTransition("jobs/a cannot go from X to Y; its story: …")
                if isinstance(event, WorkerStarted):
                    raise KeyError("a plain defect")
                return handle(event)

            monkeypatch.setattr(driver.scheduler, "handle", fails)
            with pytest.raises(InternalError, match="its story"):
                await driver.ask(
                    lambda now_ms, cause: JobCancelled(now_ms=now_ms, cause=cause, uid="x"),
                    lambda _: None,
                    source="test",
                )
            with pytest.raises(InternalError, match="nothing changed"):
                await driver.ask(
                    lambda now_ms, cause: WorkerStarted(now_ms=now_ms, cause=cause, node_id="n", generation=1),
                    lambda _: None,
                    source="test",
                )
            assert await submit(driver, "a") == "j-a"

    async def test_an_answer_that_cant_be_made_fails_its_call_only(self) -> None:
        journal = FakeJournal()
        async with driving(journal) as (driver, _):
            with pytest.raises(InternalError):
                await driver.ask(
                    lambda now_ms, cause: PoolCreated(now_ms=now_ms, cause=cause, spec=POOL),
                    lambda outcome: 1 // 0,
                    source="test",
                )
            assert "p" in driver.state.pools  # it was decided and journaled
            await join(driver)


class TestTheJournalFails:
    async def test_everything_is_refused_until_it_works_then_goes_on_from_the_last_good_state(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(driver_module, "RETRY_FIRST_S", 0.01)
        journal = FakeJournal()
        async with driving(journal) as (driver, told):
            await make_pool(driver)
            await join(driver)
            await submit(driver, "kept")
            journal.failure = StoreFailed(Path("journal.sqlite"), "can't be written, the disk is full", "Free some.")
            with pytest.raises(Unavailable) as caught:
                await submit(driver, "lost")
            assert caught.value.error.reason is ErrorReason.STORE_FAILED
            await told.until("outage")
            with pytest.raises(Unavailable):
                await driver.read(lambda state: None)
            with pytest.raises(Unavailable):
                await submit(driver, "later")
            told.notes.clear()
            journal.failure = None
            while not told.notes:
                told.changed.clear()
                await told.changed.wait()
            assert list(driver.state.jobs) == ["j-kept"]
            assert driver.state.meta.term == 2
            assert await submit(driver, "new") == "j-new"

    async def test_a_start_without_a_journal_fails(self) -> None:
        journal = FakeJournal()
        journal.failure = StoreFailed(Path("j"), "is damaged", "Restore it.")
        driver = Driver(journal, reconcile_grace_ms=0)
        with pytest.raises(StoreFailed, match="damaged"):
            await driver.start()

    async def test_a_snapshot_that_fails_stops_nothing(self) -> None:
        journal = FakeJournal()
        async with driving(journal) as (driver, _):
            await make_pool(driver)

            async def fails(records: Sequence[Record]) -> None:
                raise StoreFailed(Path("j"), "is full", "Free some.")

            journal.snapshot = fails  # type: ignore[method-assign]
            journal.wants_snapshot = True
            await join(driver)
            assert await submit(driver, "a") == "j-a"


class TestTime:
    async def test_what_is_due_happens_without_anybody_asking(self) -> None:
        async with driving(FakeJournal()) as (driver, told):
            await make_pool(driver)
            waits = replace(spec("a"), wait_for_nodes_ms=30)
            await driver.ask(
                lambda now_ms, cause: JobSubmitted(now_ms=now_ms, cause=cause, uid="j-a", spec=waits),
                lambda _: None,
                source="test",
            )
            while not any(event.type == "job.failed" for event in told.events):
                told.changed.clear()
                await told.changed.wait()

    def test_it_never_goes_back_nor_jumps(self) -> None:
        wall, monotonic = 5_000, 100
        clock = Clock(9_000, wall_ns=lambda: wall * 1_000_000, monotonic_ns=lambda: monotonic * 1_000_000)
        assert clock.now_ms() == 9_000  # an earlier controller journaled that time already
        monotonic += 250
        wall = 1
        assert clock.now_ms() == 9_250

    async def test_the_journaled_time_is_never_passed_backwards(self) -> None:
        journal, time = FakeJournal(), Time()
        async with driving(journal, new_clock=time.clock) as (driver, _):
            await make_pool(driver)
        time.ms -= 500_000
        async with driving(journal, new_clock=time.clock) as (driver, _):
            assert driver.now_ms() >= 1_000_000


class TestBounds:
    async def test_a_full_inbox_refuses_calls_and_holds_reports_back(self) -> None:
        journal = FakeJournal()
        async with driving(journal, inbox=2) as (driver, _):
            await make_pool(driver)
            await join(driver)
            journal.gate.clear()
            journal.waiting.clear()
            first = asyncio.create_task(submit(driver, "a"))
            await journal.waiting.wait()
            waiting = [asyncio.create_task(submit(driver, name)) for name in ("b", "c")]
            await asyncio.sleep(0)
            with pytest.raises(LimitReached):
                await submit(driver, "d")
            patient = asyncio.create_task(
                driver.enqueue(
                    lambda now_ms, cause: JobCancelled(now_ms=now_ms, cause=cause, uid="j-a"),
                    lambda outcome: outcome.result,
                    source="test",
                )
            )
            await asyncio.sleep(0)
            assert not patient.done()
            journal.gate.set()
            assert await first == "j-a"
            assert [await task for task in waiting] == ["j-b", "j-c"]
            assert await (await patient) == "j-a"

    async def test_a_caller_that_went_away_costs_nothing(self) -> None:
        journal = FakeJournal()
        async with driving(journal) as (driver, _):
            await make_pool(driver)
            await join(driver)
            gone = asyncio.create_task(submit(driver, "gone"))
            await asyncio.sleep(0)
            gone.cancel()
            assert await submit(driver, "a") == "j-a"


class TestTheEnd:
    async def test_what_was_accepted_is_still_answered(self) -> None:
        journal = FakeJournal()
        driver = Driver(journal, reconcile_grace_ms=0)
        await driver.start()
        running = asyncio.create_task(driver.run())
        await make_pool(driver)
        await join(driver)
        asked = [asyncio.create_task(submit(driver, name)) for name in ("a", "b")]
        await asyncio.sleep(0)
        driver.stop()
        assert [await task for task in asked] == ["j-a", "j-b"]
        with pytest.raises(Unavailable) as caught:
            await submit(driver, "c")
        assert caught.value.error.reason is ErrorReason.STOPPING
        await running
        assert journal.closed
        assert len(journal.snapshots) == 1

    async def test_nobody_waits_for_ever_when_it_stops_during_an_outage(self) -> None:
        journal = FakeJournal()
        driver = Driver(journal, reconcile_grace_ms=0)
        told = Told()
        driver.subscribe(told)
        await driver.start()
        running = asyncio.create_task(driver.run())
        journal.failure = StoreFailed(Path("j"), "is full", "Free some.")
        with pytest.raises(Unavailable):
            await make_pool(driver)
        await told.until("outage")
        driver.stop()
        await running
        assert journal.closed
        assert not journal.snapshots


async def test_before_the_journal_was_read_nothing_is_said_of_its_events() -> None:
    """A server that shares its journal listens first: whoever follows from a revision on must not be told that it lies
    beyond the log."""
    driver = Driver(FakeJournal(), reconcile_grace_ms=0)
    events = EventLog(driver.read_events, in_memory=10, watchers=10)
    service, context = EventService(events, driver, ControllerOptions(state_dir=Path("/nowhere"))), Mock()
    with pytest.raises(Unavailable, match="starting"):
        await anext(service.Watch(event_pb2.WatchRequest(start_revision=443), context))
    with pytest.raises(Unavailable, match="starting"):
        await service.ListEvents(event_pb2.ListEventsRequest(newest=True), context)
