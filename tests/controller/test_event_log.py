"""Watches: every event once and in order, old ones from disk, and a slow reader costs nobody anything (R7)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from callboard.controller.loop.event_log import CHUNK, TURN_S, EventLog, Filter, Progress
from callboard.scheduler.records.job_records import EventRecord
from callboard.wire.refusals import ErrorReason, InvalidRequest, LimitReached, RevisionCompacted, Unavailable

PATIENT_S = 60.0


def event(revision: int, kind: str = "job.pending", subject: str = "jobs/a") -> EventRecord:
    return EventRecord(revision=revision, at_ms=0, type=kind, subject=subject, state="", reason="", cause="")


class Disk:
    """What the journal keeps."""

    def __init__(self, kept: int) -> None:
        self.events: list[EventRecord] = []
        self.kept = kept
        self.reads = 0

    def add(self, *events: EventRecord) -> None:
        self.events = [*self.events, *events][-self.kept :]

    async def read(self, first: int, limit: int) -> tuple[int, list[EventRecord]]:
        self.reads += 1
        found = [one for one in self.events if one.revision >= first][:limit]
        return (self.events[0].revision if self.events else 0), found


class World:
    """A log over a disk, fed as the driver does: disk first."""

    def __init__(self, *, in_memory: int = 1000, kept: int = 10_000, watchers: int = 100) -> None:
        self.disk = Disk(kept)
        self.log = EventLog(self.disk.read, in_memory=in_memory, watchers=watchers)

    def happen(self, *events: EventRecord) -> None:
        self.disk.add(*events)
        self.log.publish(events)

    def watch(
        self, start: int = 1, wanted: Filter | None = None, *, progress_s: float = PATIENT_S
    ) -> AsyncIterator[Progress]:
        return self.log.watch(start, wanted or Filter(), progress_s=progress_s)


async def revisions(watch: AsyncIterator[Progress], until: int) -> list[int]:
    found: list[int] = []
    async for progress in watch:
        found += [one.revision for one in progress.events]
        if progress.revision >= until:
            break
    return found


async def test_old_events_come_from_disk_and_new_ones_from_memory() -> None:
    world = World(in_memory=10)
    for number in range(1, 101):
        world.happen(event(number))
    assert await revisions(world.watch(), 100) == list(range(1, 101))
    assert world.disk.reads
    world.disk.reads = 0
    assert await revisions(world.watch(95), 100) == list(range(95, 101))
    assert not world.disk.reads


async def test_the_first_message_comes_at_once_and_says_where_the_log_is() -> None:
    world = World()
    world.happen(event(1), event(2))
    assert await anext(world.watch(0)) == Progress(2, ())


async def test_a_filtered_watch_moves_on_over_what_it_does_not_show() -> None:
    world = World()
    watch = world.watch(1, Filter(types=("node.",)))
    world.happen(*[event(number) for number in range(1, 50)], event(50, "node.ready", "nodes/n"))
    found = [await anext(watch)]
    assert [one.revision for one in found[0].events] == [50]
    assert found[0].revision == 50


async def test_many_events_come_in_bounded_messages() -> None:
    world = World(in_memory=10_000)
    world.happen(*[event(number) for number in range(1, 3 * CHUNK)])
    sizes = []
    async for progress in world.watch():
        sizes.append(len(progress.events))
        if progress.revision == 3 * CHUNK - 1:
            break
    assert max(sizes) == CHUNK


async def test_r7_all_who_catch_up_share_one_pace() -> None:
    world = World(in_memory=10_000)
    last = 4 * CHUNK
    world.happen(*[event(number) for number in range(1, last + 1)])
    began = asyncio.get_running_loop().time()
    # Those whom nothing selects look at as many.
    nothing = Filter(types=("none.",))
    read = [revisions(world.watch(), last) for _ in range(3)]
    read.append(revisions(world.watch(wanted=nothing, progress_s=TURN_S), last))
    await asyncio.gather(*read)
    assert asyncio.get_running_loop().time() - began >= 0.9 * 4 * 4 * TURN_S


async def test_revisions_without_an_event_are_passed() -> None:
    world = World()
    world.happen(event(1), event(5))
    watch = world.watch(2)
    assert await anext(watch) == Progress(5, (event(5),))
    world.happen(event(9))
    assert await anext(watch) == Progress(9, (event(9),))


async def test_a_watcher_that_stopped_reading_is_dropped_when_what_it_missed_is_gone() -> None:
    world = World(in_memory=10, kept=20)
    world.happen(event(1))
    slow, quick = world.watch(), world.watch()
    await anext(slow)
    await anext(quick)
    for number in range(2, 60):
        world.happen(event(number))
        assert (await anext(quick)).revision == number
    with pytest.raises(RevisionCompacted) as caught:
        await anext(slow)
    assert caught.value.error.metadata["oldest_revision"] == "40"


async def test_one_that_was_slow_for_a_while_misses_nothing() -> None:
    world = World(in_memory=10, kept=1000)
    world.happen(event(1))
    slow = world.watch()
    await anext(slow)
    for number in range(2, 200):
        world.happen(event(number))
    assert await revisions(slow, 199) == list(range(2, 200))


async def test_what_is_on_disk_and_not_published_is_not_shown() -> None:
    world = World(in_memory=5)
    for number in range(1, 51):
        world.happen(event(number))
    world.disk.add(event(51))  # written, not yet told to anybody
    assert [one.revision for one in await world.log.read(30, 100)] == list(range(30, 51))


async def test_memory_is_bounded() -> None:
    world = World(in_memory=100)
    for number in range(1, 1000):
        world.happen(event(number))
        assert len(world.log._newest) <= 200


async def test_the_newest_are_given_oldest_first() -> None:
    world = World()
    world.happen(*[event(number, "node.ready" if number % 2 else "job.pending") for number in range(1, 10)])
    assert [one.revision for one in world.log.newest(2, Filter(types=("node.ready",)))] == [7, 9]


async def test_a_waiting_watch_is_woken_by_what_happens_and_by_the_end() -> None:
    world = World()
    watch = world.watch(0)
    await anext(watch)
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    world.happen(event(1))
    assert (await waiting).revision == 1
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    world.log.close(Unavailable("stopping", reason=ErrorReason.STOPPING))
    with pytest.raises(Unavailable, match="stopping"):
        await waiting


async def test_it_goes_on_after_an_outage_from_what_is_on_disk() -> None:
    world = World()
    world.happen(event(1))
    world.log.close(Unavailable("the journal failed", reason=ErrorReason.STORE_FAILED))
    world.disk.add(event(2))  # the commit whose answer was lost
    world.log.load(world.disk.events)
    assert await revisions(world.watch(), 2) == [1, 2]


async def test_bounds() -> None:
    world = World(watchers=1)
    watch = world.watch(0)
    await anext(watch)
    with pytest.raises(LimitReached):
        await anext(world.watch(0))
    await watch.aclose()  # type: ignore[attr-defined]
    await anext(world.watch(0))
    with pytest.raises(InvalidRequest):
        await anext(world.watch(7))


@pytest.mark.parametrize(
    ("wanted", "selected"),
    [
        (Filter(), True),
        (Filter(types=("worker.ready",)), True),
        (Filter(types=("worker.",)), True),
        (Filter(types=("work",)), False),
        (Filter(types=("job.", "worker.ready")), True),
        (Filter(subject="jobs/a"), True),
        (Filter(subject="jobs/a/workers/w/0"), True),
        (Filter(subject="jobs/a/workers/w/0/x"), False),
        (Filter(subject="jobs/ab"), False),
        (Filter(subject="jobs"), True),
        (Filter(types=("job.",), subject="jobs/a"), False),
    ],
)
def test_filters(wanted: Filter, selected: bool) -> None:
    assert wanted.selects(event(1, "worker.ready", "jobs/a/workers/w/0")) is selected
