"""Does what a worker prints survive it, in bounds, and can it be read whoever else reads?"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from callboard.agents.files import output_store
from callboard.agents.files.output_store import CHUNK_BYTES, TAIL_BYTES, TAIL_LINES, OutputBounds, OutputOf, OutputStore
from callboard.agents.host import worker_output
from callboard.agents.host.framing import Requests
from callboard.agents.host.worker_output import first_kept, trim
from callboard.v1 import agent_pb2, common_pb2
from callboard.v1.common_pb2 import OUTPUT_STREAM_STDERR, OUTPUT_STREAM_STDOUT, OutputChunk
from tests.agents.conftest import StartAgent
from tests.agents.test_adoption import Lineage
from tests.support.fake_controller import FakeController, FakeSession, start_worker

KIB, MIB = 1 << 10, 1 << 20


def text_of(chunks: list[OutputChunk], stream: int = OUTPUT_STREAM_STDOUT) -> str:
    return b"".join(chunk.data for chunk in chunks if chunk.stream == stream).decode()


class Shelf:
    """A store, and workers that write."""

    def __init__(self, folder: Path, **bounds: int) -> None:
        self.folder = folder
        self.store = OutputStore(folder, OutputBounds(**bounds))
        self._files: dict[tuple[OutputOf, str], int] = {}

    def begin(self, rank: int = 0, *, job: str = "j1", attempt: int = 1) -> OutputOf:
        whose = OutputOf(job, "main", rank, attempt, 100 * attempt + rank)
        self.store.begin(whose)
        return whose

    def write(self, whose: OutputOf, data: bytes, to: str = "stdout") -> None:
        path = self.store.folder_of(whose) / to
        file = self._files.setdefault(
            (whose, to), os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        )
        os.write(file, data)

    def look(self, *, now: bool = True) -> None:
        """As the store does every quarter of a second."""
        assert now
        outputs = list(self.store._kept.values())
        _, surplus = self.store._look_around(outputs)
        self.store.forget(surplus)

    async def read(self, job: str = "j1", **selection: Any) -> list[OutputChunk]:
        asked = common_pb2.OutputSelection(**selection)
        return [chunk async for chunk in self.store.read(job, asked) if chunk is not None]

    def held(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_blocks * 512 for path in self.folder.glob("*/*/std*"))

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)


@pytest.fixture
async def shelf(tmp_path: Path) -> AsyncIterator[Shelf]:
    shelf = Shelf(tmp_path, worker_bytes=MIB, total_bytes=16 * MIB)
    yield shelf
    shelf.close()


def lines(first: int, count: int) -> bytes:
    return b"".join(b"line %08d\n" % number for number in range(first, first + count))


class TestBounds:
    async def test_ft_a1_a_stream_keeps_its_end_and_says_how_much_is_gone(self, shelf: Shelf) -> None:
        whose = shelf.begin()
        written = 0
        for block in range(64):
            shelf.write(whose, lines(block * 10_000, 10_000))
            written += 140_000
            shelf.look()
            assert shelf.held() <= MIB + MIB // 8 + 140_000
        chunks = await shelf.read()
        text = text_of(chunks)
        assert text.endswith("line 00639999\n")
        assert text.startswith("line "), "a line that lost its beginning is no line"
        assert sum(chunk.discarded_bytes for chunk in chunks) + len(text) == written
        assert len(text) >= MIB - 64 * KIB
        more = await shelf.read(tail_lines=600_000)
        assert sum(chunk.discarded_bytes for chunk in more) + len(text_of(more)) == written, "asked for what is gone"
        assert sum(chunk.discarded_bytes for chunk in await shelf.read(tail_lines=10)) == 0

    async def test_a_file_system_without_holes_begins_again(
        self, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_output, "_fallocate", lambda: lambda *_: -1)
        whose = shelf.begin()
        shelf.write(whose, lines(0, 100_000))
        shelf.look()
        shelf.write(whose, b"after\n")
        assert text_of(await shelf.read()) == "after\n"

    async def test_ft_a1_what_ended_longest_ago_gives_way_first_and_living_workers_share(self, tmp_path: Path) -> None:
        shelf = Shelf(tmp_path, worker_bytes=4 * MIB, total_bytes=8 * MIB)
        for rank in range(4):
            whose = shelf.begin(rank)
            shelf.write(whose, lines(0, 4 * MIB // 14))
            shelf.look()
            shelf.store.end(whose)
            shelf.store._kept[whose].ended_ms = 1000 + rank
        shelf.look()
        assert shelf.held() <= 8 * MIB
        by_rank = {rank: await shelf.read(rank=rank) for rank in range(4)}
        assert [text_of(by_rank[rank]) == "" for rank in range(4)] == [True, True, False, False]
        assert sum(chunk.discarded_bytes for chunk in by_rank[0]) == 4 * MIB // 14 * 14
        shelf.close()

    async def test_a_small_file_system_makes_the_bounds_smaller(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Small:
            f_blocks, f_frsize = 64 * 256, 4096  # 64 MiB

        monkeypatch.setattr("callboard.agents.files.output_store.os.statvfs", lambda _: Small)
        assert OutputStore(tmp_path, OutputBounds()).bounds == OutputBounds(8 * MIB, 16 * MIB)

    def test_a_trim_frees_whole_blocks_and_everything_when_told_so(self, tmp_path: Path) -> None:
        file = os.open(tmp_path / "out", os.O_RDWR | os.O_APPEND | os.O_CREAT)
        os.write(file, b"x" * (300 * KIB + 7))
        trim(file, 400 * KIB)
        assert first_kept(file) == 0
        trim(file, 100 * KIB)
        assert first_kept(file) == 192 * KIB
        trim(file, 0)
        assert first_kept(file) == 300 * KIB + 7
        os.write(file, b"more")
        assert os.pread(file, 10, 300 * KIB + 7) == b"more"
        os.close(file)


class TestSelection:
    async def test_streams_are_put_in_order_by_looks(self, shelf: Shelf) -> None:
        whose = shelf.begin()
        for number in range(3):
            shelf.write(whose, b"out %d\n" % number)
            shelf.look()
            shelf.write(whose, b"err %d\n" % number, "stderr")
            shelf.look()
        chunks = await shelf.read()
        assert [bytes(chunk.data) for chunk in chunks if chunk.data] == [
            b"out 0\n",
            b"err 0\n",
            b"out 1\n",
            b"err 1\n",
            b"out 2\n",
            b"err 2\n",
        ]

    @pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 6, 100])
    async def test_the_last_lines_are_those_of_both_streams_together(self, shelf: Shelf, count: int) -> None:
        whose = shelf.begin()
        for number in range(3):
            shelf.write(whose, b"out %d\n" % number)
            shelf.look()
            shelf.write(whose, b"err %d\n" % number, "stderr")
            shelf.look()
        both = [f"{name} {number}" for number in range(3) for name in ("out", "err")]
        chunks = await shelf.read(tail_lines=count)
        assert b"".join(chunk.data for chunk in chunks).decode().splitlines() == both[len(both) - min(count, 6) :]

    @pytest.mark.parametrize("size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
    async def test_the_last_line_may_be_longer_than_a_chunk_and_have_no_end(self, shelf: Shelf, size: int) -> None:
        whose = shelf.begin()
        shelf.write(whose, b"first\n" + b"x" * size)
        assert text_of(await shelf.read(tail_lines=1)) == "x" * size

    async def test_since_means_what_was_written_after_a_look(
        self, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = 1_000_000
        monkeypatch.setattr("callboard.agents.files.output_store._now_ms", lambda: now)
        whose = shelf.begin()
        for minute in range(10):
            now = 1_000_000 + minute * 60_000
            shelf.write(whose, b"minute %d\n" % minute)
            shelf.look()
        found = text_of(await shelf.read(since_ms=150_000))
        assert found == "minute 7\nminute 8\nminute 9\n"

    async def test_reading_goes_on_after_a_place_and_a_worker_without_one_is_read_whole(self, shelf: Shelf) -> None:
        first, second = shelf.begin(0), shelf.begin(1)
        shelf.write(first, b"one\ntwo\n")
        shelf.write(second, b"three\n")
        place = common_pb2.OutputPosition(
            component="main", rank=0, generation=first.generation, stream=OUTPUT_STREAM_STDOUT, offset=4
        )
        assert text_of(await shelf.read(after=[place], tail_lines=0)) == "two\nthree\n"

    async def test_every_worker_that_is_kept_shows_even_if_it_printed_nothing(self, shelf: Shelf) -> None:
        shelf.begin(0)
        shelf.begin(1, attempt=2)
        assert [(each.rank, each.attempt) for each in await shelf.read()] == [(0, 1), (1, 2)]
        assert [each.rank for each in await shelf.read(first_attempt=2)] == [1]
        assert [each.rank for each in await shelf.read(last_attempt=1)] == [0]

    async def test_looks_survive_the_agent_and_stay_few(self, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("callboard.agents.files.output_store._MAX_LOOKS", 16)
        whose = shelf.begin()
        for number in range(50):
            shelf.write(whose, b"%d\n" % number)
            shelf.look()
        assert len(shelf.store._kept[whose].looks) <= 16
        again = Shelf(shelf.folder, worker_bytes=MIB)
        assert again.store.jobs() == ["j1"]
        assert text_of(await again.read()) == "".join(f"{number}\n" for number in range(50))
        again.begin()
        again.write(whose, b"more\n")
        assert text_of(await again.read(tail_lines=1)) == "more\n"
        again.close()


class TestTail:
    async def test_it_is_short_masked_and_what_a_screen_would_show(self, shelf: Shelf) -> None:
        whose = shelf.begin()
        shelf.write(whose, b"the first of many\n" * 100, "stderr")
        shelf.write(whose, b" 10%\r 50%\r100%\nkey=hunter22 \x1b[31mred\x1b[0m \xff\n", "stderr")
        told = shelf.store.stderr_tail(whose, lambda text: text.replace("hunter22", "********"))
        assert len(told.splitlines()) == TAIL_LINES
        assert told.splitlines()[-2:] == ["100%", "key=******** [31mred[0m \N{REPLACEMENT CHARACTER}"]

    async def test_one_endless_line_is_cut(self, shelf: Shelf) -> None:
        whose = shelf.begin()
        shelf.write(whose, b"y" * MIB, "stderr")
        assert shelf.store.stderr_tail(whose, str) == "y" * TAIL_BYTES
        assert shelf.store.stderr_tail(shelf.begin(1), str) == ""


class TestFollowing:
    async def test_what_is_written_later_comes_also_of_workers_that_start_later(self, shelf: Shelf) -> None:
        finish = asyncio.Event()
        keeping = asyncio.create_task(shelf.store.keep())
        first = shelf.begin(0)
        shelf.write(first, b"early\n")
        async with aclosing(shelf.store.read("j1", common_pb2.OutputSelection(), finish=finish)) as reading:
            got: list[Any] = []

            async def until(text: bytes) -> None:
                while b"".join(each.data for each in got if each).endswith(text) is False:
                    got.append(await anext(reading))

            await until(b"early\n")
            assert await anext(reading) is None, "the reader has caught up"
            shelf.write(first, b"later\n")
            await until(b"later\n")
            second = shelf.begin(1)
            shelf.write(second, b"other\n")
            await until(b"other\n")
            shelf.store.end(second)
            shelf.write(first, b"last words\n")
            finish.set()
            await until(b"last words\n")
            with pytest.raises(StopAsyncIteration):
                await anext(reading)
        keeping.cancel()

    async def test_ft_a1_a_stream_that_is_trimmed_under_a_slow_reader_tells_what_it_missed(self, shelf: Shelf) -> None:
        whose = shelf.begin()
        shelf.write(whose, lines(0, 60_000))
        async with aclosing(shelf.store.read("j1", common_pb2.OutputSelection())) as reading:
            chunks = [await anext(reading), await anext(reading)]
            for block in range(1, 5):
                shelf.write(whose, lines(60_000 * block, 60_000))
                shelf.look()
            chunks += [chunk async for chunk in reading if chunk is not None]
        read = [chunk for chunk in chunks if chunk is not None]
        assert b"\0" not in b"".join(chunk.data for chunk in read), "what was freed is not read as zeros"
        assert sum(chunk.discarded_bytes for chunk in read) + sum(len(chunk.data) for chunk in read) == 300_000 * 14


@asynccontextmanager
async def called(node: Path, ready: agent_pb2.WorkerReady) -> AsyncIterator[Requests]:
    """The worker's own socket, as a caller of its methods."""
    del ready
    (socket,) = (node / "sockets").iterdir()
    requests = Requests(*await asyncio.open_unix_connection(str(socket)))
    try:
        yield requests
    finally:
        requests.close()


async def call(requests: Requests, method: str, *args: Any) -> Any:
    return await requests.ask("call", {"method": method, "args": args, "kwargs": {}})


class TestWorkers:
    async def test_ft_a1_a_failed_constructor_leaves_its_output_and_the_end_of_stderr_in_the_failure(
        self, agent: FakeSession, controller: FakeController
    ) -> None:
        start = start_worker("ChildFails", args_json='["hunter22"]', env={"ENGINE_TOKEN": "hunter22"})
        failed = (await controller.do(start_worker=start)).worker_start_failed
        assert failed.failure == agent_pb2.START_FAILURE_CONSTRUCTOR
        assert "ValueError: no such device" in failed.stderr_tail
        assert "hunter22" not in failed.stderr_tail
        chunks = await controller.all_output("job-1")
        assert text_of(chunks) == "about to start the engine\n"
        assert "ValueError: no such device" in text_of(chunks, OUTPUT_STREAM_STDERR)
        assert {(each.component, each.rank, each.attempt, each.generation) for each in chunks} == {("main", 0, 1, 1)}

    @pytest.mark.parametrize("result", ["raises", "dies"])
    async def test_ft_a1_an_entry_that_fails_and_a_death_carry_the_end_of_stderr(
        self, agent: FakeSession, controller: FakeController, result: str
    ) -> None:
        start = start_worker("Entry", args_json=f'["{result}"]', entry="run")
        ready = (await controller.do(start_worker=start)).worker_ready
        assert ready.pid
        said = await controller.said("worker_finished" if result == "raises" else "worker_exited")
        assert said.stderr_tail == ("about to raise" if result == "raises" else "about to die")

    async def test_ft_a1_output_is_kept_by_the_next_agent_until_its_job_is_forgotten(
        self, controller: FakeController, tmp_path: Path
    ) -> None:
        node = Lineage(controller, tmp_path)
        await node.begin()
        for generation in (1, 2):
            start = start_worker("ChildFails", generation=generation)
            assert (await controller.do(start_worker=start)).HasField("worker_start_failed")
        await node.leave()
        session = await node.begin()
        assert list(session.hello.output_jobs) == ["job-1"]
        chunks = await controller.all_output("job-1")
        assert text_of(chunks) == "about to start the engine\n" * 2
        await session.send(forget_jobs=agent_pb2.ForgetJobs(job_ids=["job-1", "../x", "job-2"]))
        assert await controller.all_output("job-1") == []
        await node.leave()
        assert not node.run_dir.exists()

    async def test_ft_a1_a_worker_that_outlives_its_agent_stays_in_bounds_and_is_read_on(
        self, controller: FakeController, tmp_path: Path
    ) -> None:
        node = Lineage(controller, tmp_path)
        await node.begin(output_worker_bytes=MIB)
        start = start_worker("Printer", env={"ENGINE_TOKEN": "hunter22"})
        ready = (await controller.do(start_worker=start)).worker_ready
        async with called(node.run_dir, ready) as worker:
            await call(worker, "say", "before")
            await node.kill()
            await call(worker, "burst", 8)
            (file,) = (node.run_dir / "output").glob("job-1/*/stdout")
            while file.stat().st_blocks * 512 > 2 * MIB:  # noqa: ASYNC110 - a file tells nobody
                await asyncio.sleep(0.05)  # Its host looks once a second.
            await node.begin(output_worker_bytes=MIB)
            await call(worker, "say", "after")
            await call(worker, "complain", "engine hunter22 failed")
        chunks = await controller.all_output("job-1")
        assert text_of(chunks).endswith(" \nafter\n")
        assert sum(chunk.discarded_bytes for chunk in chunks) > 6 * MIB
        os.kill(ready.pid, signal.SIGKILL)
        dead = await controller.said("worker_exited")
        assert dead.stderr_tail == "engine ******** failed", "its secrets are asked of a worker that is taken over"
        await node.leave()

    async def test_ft_a1_a_reader_that_takes_nothing_holds_up_no_worker_heartbeat_or_other_reader(
        self, controller: FakeController, start_agent: StartAgent, tmp_path: Path
    ) -> None:
        session = await start_agent(output_worker_bytes=4 * MIB)
        ready = (await controller.do(start_worker=start_worker("Printer"))).worker_ready
        async with called(tmp_path / "n0", ready) as worker:
            controller.reading.clear()
            slow = await controller.read_output("job-1", follow=True)
            await call(worker, "burst", 64)
            beats = len(session.heartbeats)
            await controller.until(lambda: len(session.heartbeats) > beats + 2)
            assert not controller.output.get(slow)
            controller.reading.set()
            chunks = await controller.all_output("job-1", tail_lines=1)
            assert text_of(chunks).strip() == f"{64 * 16 * 1024 - 1:062d}"
            await call(worker, "say", "the end")
            await controller.until(
                lambda: text_of([each.chunk for each in controller.output.get(slow, [])]).endswith("the end\n")
            )
        followed = [each.chunk for each in controller.output[slow]]
        assert sum(each.discarded_bytes + len(each.data) for each in followed) == 64 * MIB + len("the end\n")


def test_a_worker_that_ends_while_its_streams_are_looked_at_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks are taken in a thread; the end of the worker lets go of them on the loop."""
    output = output_store._Output(OutputOf("j", "w", 0, 1, 1), tmp_path)
    (tmp_path / "stdout").write_text("line\n")
    packed = output_store._packed

    def ends_meanwhile(look: output_store._Look) -> bytes:
        output.looks = []
        return packed(look)

    real_open = Path.open

    def opens(path: Path, *arguments: Any) -> Any:
        output.looks = []
        return real_open(path, *arguments)

    monkeypatch.setattr(output_store, "_packed", ends_meanwhile)
    monkeypatch.setattr(Path, "open", opens)
    assert output.look(5)
    monkeypatch.undo()
    output.ended_ms = 6
    assert [look.at_ms for look in output.noted()] == [5]
