"""The output of this node's workers: where it lies, how long it stays, and how it is read.

One folder per worker and generation, `output/{job}/{attempt}.{generation}.{rank}.{component}` in the run directory,
with a file per stream that the worker itself writes to (`worker_output`) and `looks`: how long the streams were at
which time, which is how output is found by time and how two streams are put in order again (to a look). It stays
until the controller has forgotten the job; before that, only the bounds take some away, of each stream its beginning,
and of the node what ended longest ago. What is missing at the beginning of a file says how much was taken.

Guaranteed: no worker ever waits for a reader, and disk use is bounded by the node's total, by what is written between
two looks, and by one block per stream. Not guaranteed: output of a worker on a file system that can't free a part of a
file (it is cut to nothing at its bound, and how much that was isn't known).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import ClassVar, Protocol, TypeAlias

from callboard.agents.host.worker_output import CODE, FILES, MODULES, RESULTS, STDERR, STDOUT, TIMINGS, first_kept, trim
from callboard.agents.host.worker_secrets import Hide
from callboard.model.frozen import dataclass
from callboard.model.log import structlog
from callboard.v1 import agent_pb2, common_pb2

_log = structlog.get_logger(__name__)

LOOK_S = 0.25
"""Between looks at the files of living workers: what 100 MB/s can add to a bound is 25 MB, and a follower sees a line
that late at most."""

CHUNK_BYTES = 64 * 1024
"""Read and sent at once: far below a message's limit, and a tenth of a millisecond of the controller's time."""

MAX_JOBS = 10_000
"""Jobs whose output is kept, as many as a Hello may name; those that ended longest ago go first."""

TAIL_BYTES, TAIL_LINES = 4 * 1024, 40
"""Of stderr, told with a failure."""

_TAIL_READ = 64 * 1024
"""Of stderr, looked at for its tail: secrets are masked before it is cut."""

_MAX_LOOKS = 4096
"""Kept per worker: 17 minutes of writing all the time. Then every second one goes, and what is older is found less
exactly."""

_CATCHES = 3
"""Times that a reader whose output was freed before it came to it goes on with what is there then."""

_PART_OF_DISK = 4
"""The node's total is at most this part of its file system: a full one would fail the prints of all workers."""

_LEAST_SHARE = 64 * 1024
"""Of each stream of a living worker, however many there are."""

_LOOK = struct.Struct("<QQQ")
_LOOKS = "looks"

_FILES = {
    common_pb2.OUTPUT_STREAM_STDOUT: STDOUT,
    common_pb2.OUTPUT_STREAM_STDERR: STDERR,
    common_pb2.OUTPUT_STREAM_TIMINGS: TIMINGS,
    common_pb2.OUTPUT_STREAM_RESULTS: RESULTS,
}

Stream: TypeAlias = common_pb2.OutputStream.ValueType

_PRINTED: tuple[Stream, Stream] = (common_pb2.OUTPUT_STREAM_STDOUT, common_pb2.OUTPUT_STREAM_STDERR)


@dataclass(frozen=True, slots=True)
class OutputBounds:
    """How much output a node keeps, in bytes."""

    worker_bytes: int = 64 << 20
    """Of each stream of each worker."""
    total_bytes: int = 2 << 30
    """Of all workers together, of which those that ended longest ago give way first."""


@dataclass(frozen=True, slots=True, order=True)
class OutputOf:
    """Whose output it is."""

    job: str
    component: str
    rank: int
    attempt: int
    generation: int

    @classmethod
    def of(cls, start: agent_pb2.StartWorker) -> OutputOf:
        """Of the worker of a start command."""
        worker = start.worker
        return cls(worker.job_id, worker.component, worker.rank, start.attempt, start.generation)

    @property
    def folder(self) -> str:
        """Its folder below `output/`. A component may hold dots, so it comes last."""
        return f"{self.job}/{self.attempt}.{self.generation}.{self.rank}.{self.component}"

    @classmethod
    def at(cls, path: Path) -> OutputOf | None:
        """Whose output a folder holds; None: it isn't ours."""
        parts = path.name.split(".", 3)
        if len(parts) < 4 or not all(each.isdigit() for each in parts[:3]):
            return None
        attempt, generation, rank = (int(each) for each in parts[:3])
        return cls(path.parent.name, parts[3], rank, attempt, generation)


@dataclass(slots=True)
class _Look:
    """How long the streams were at one time."""

    at_ms: int
    ends: dict[Stream, int]


@dataclass(slots=True)
class _Output:
    """The output of one worker."""

    NOTHING: ClassVar[dict[Stream, int]] = dict.fromkeys(_PRINTED, 0)

    whose: OutputOf
    folder: Path
    ended_ms: int = 0
    """When nothing more was written; 0: its worker lives."""
    held_bytes: int = 0
    looks: list[_Look] = field(default_factory=list)
    """Of a living worker; of others they are read when they are needed."""

    def size(self, stream: Stream) -> int:
        """Bytes ever written to a stream."""
        try:
            return (self.folder / _FILES[stream]).stat().st_size
        except OSError:
            return 0

    @contextmanager
    def opened(self, stream: Stream, flags: int) -> Iterator[int | None]:
        """A descriptor of a stream; None: nothing was written."""
        try:
            file = os.open(self.folder / _FILES[stream], flags | os.O_CLOEXEC)
        except OSError:
            yield None
            return
        try:
            yield file
        finally:
            os.close(file)

    def noted(self) -> list[_Look]:
        """What was noted of it, also by an earlier agent."""
        if not self.ended_ms:
            return list(self.looks)
        try:
            noted = (self.folder / _LOOKS).read_bytes()
        except OSError:
            return []
        whole = noted[: len(noted) // _LOOK.size * _LOOK.size]
        return [_Look(at, dict(zip(_PRINTED, ends, strict=True))) for at, *ends in _LOOK.iter_unpack(whole)]

    def trim(self, limit_bytes: int) -> None:
        """Keep the streams at their bound."""
        held = 0
        for stream in _FILES:
            with self.opened(stream, os.O_WRONLY) as file:
                if file is not None:
                    trim(file, limit_bytes)
                    held += os.fstat(file).st_blocks * 512
        self.held_bytes = held

    def look(self, now_ms: int) -> bool:
        """Note how long the streams are; whether something was written since the last look."""
        ends = {stream: self.size(stream) for stream in _PRINTED}
        looks = self.looks  # Its worker may end meanwhile: this runs in a thread, and `looks` is let go of then.
        if ends == (looks[-1].ends if looks else self.NOTHING):
            return False
        looks.append(_Look(now_ms, ends))
        if len(looks) > _MAX_LOOKS:
            self.looks = looks = looks[1::2]
            (self.folder / _LOOKS).write_bytes(b"".join(map(_packed, looks)))
        else:
            with (self.folder / _LOOKS).open("ab") as file_of_looks:
                file_of_looks.write(_packed(looks[-1]))
        return True

    def pieces(self, streams: Iterable[Stream], after: Mapping[Stream, int]) -> list[tuple[Stream, int, int]]:
        """What was written after these places so far, in order: (stream, from, to)."""
        wanted = [stream for stream in _FILES if stream in set(streams)]
        found: list[tuple[Stream, int, int]] = []
        at = {stream: after.get(stream, 0) for stream in wanted}
        now = _Look(0, {stream: self.size(stream) for stream in wanted})
        looks = [now]
        if len(wanted) > 1 and any(now.ends[stream] > at[stream] for stream in wanted):
            for look in reversed(self.noted()):
                if all(look.ends.get(stream, 0) <= at[stream] for stream in wanted):
                    break
                looks.append(look)
        for look in reversed(looks):
            for stream in wanted:
                end = min(look.ends.get(stream, at[stream]), now.ends[stream])
                if end > at[stream]:
                    if found and found[-1][0] == stream:
                        found[-1] = (stream, found[-1][1], end)
                    else:
                        found.append((stream, at[stream], end))
                    at[stream] = end
        return found

    def before(self, since_ms: int, now_ms: int) -> dict[Stream, int]:
        """How long the streams were so many milliseconds ago, at most."""
        older = [look for look in self.noted() if look.at_ms <= now_ms - since_ms]
        return dict(older[-1].ends) if older else {}

    def last_lines(self, count: int, streams: Iterable[Stream]) -> dict[Stream, int]:
        """Where the last `count` lines begin, by stream."""
        starts = {stream: self.size(stream) for stream in streams}
        left, newest = count, True
        for stream, start, end in reversed(self.pieces(streams, {})):
            if left <= 0:
                break
            with self.opened(stream, os.O_RDONLY) as file:
                if file is None:
                    continue
                first, upto = max(start, first_kept(file)), end
                while left > 0 and upto > first:
                    begin = max(first, upto - CHUNK_BYTES)
                    block = os.pread(file, upto - begin, begin)
                    if newest:
                        # The end of the last line ends no line before it.
                        left += block.endswith(b"\n")
                        newest = False
                    begins, found = _back(block, left)
                    left -= found
                    upto = begin if left > 0 else first
                    starts[stream] = begin + begins
                if left > 0 and first > start:
                    starts[stream] = start  # More was asked for than is left: reading says how much is gone.
        return starts

    def place(self, stream: Stream, offset: int) -> common_pb2.OutputChunk:
        """A piece that begins there and is empty."""
        return common_pb2.OutputChunk(
            component=self.whose.component,
            rank=self.whose.rank,
            attempt=self.whose.attempt,
            generation=self.whose.generation,
            stream=stream,
            offset=offset,
        )

    def read(self, stream: Stream, start: int, end: int) -> common_pb2.OutputChunk:
        """A piece that begins at `start` or, when that is gone, at the first whole line that is still there."""
        chunk = self.place(stream, start)
        with self.opened(stream, os.O_RDONLY) as file:
            if file is None:
                chunk.offset, chunk.discarded_bytes = end, end - start
                return chunk
            begin = max(start, first_kept(file))
            data = os.pread(file, min(CHUNK_BYTES, max(0, end - begin)), begin)
            # Freed while it was read: then what was read is nothing but zeros.
            kept = first_kept(file)
            if kept > begin:
                begin = kept
                data = os.pread(file, min(CHUNK_BYTES, max(0, end - begin)), begin)
        if begin > start:
            half = data.find(b"\n") + 1
            begin, data = begin + half, data[half:]
            chunk.discarded_bytes = begin - start
        chunk.offset, chunk.data = begin, data
        return chunk


def _back(block: bytes, count: int) -> tuple[int, int]:
    """The place after the `count`-th end of line from the end, or the beginning; and how many there were, at most."""
    place, found = len(block), 0
    while found < count:
        place = block.rfind(b"\n", 0, place)
        if place < 0:
            return 0, found
        found += 1
    return place + 1, found


def _packed(look: _Look) -> bytes:
    return _LOOK.pack(look.at_ms, *(look.ends[stream] for stream in _PRINTED))


class Outputs(Protocol):
    """What the parts of an agent ask of the output of workers."""

    bounds: OutputBounds

    def jobs(self) -> list[str]:
        """Jobs that have output here."""

    def folder_of(self, whose: OutputOf) -> Path:
        """Where a worker writes to."""

    def begin(self, whose: OutputOf) -> None:
        """A worker is about to write."""

    def end(self, whose: OutputOf, scratch: Path | None = None) -> None:
        """A worker is gone: nothing more is written, and what it kept for itself goes."""

    def forget(self, jobs: Iterable[str]) -> None:
        """Delete the output of jobs."""

    def stderr_tail(self, whose: OutputOf, hide: Hide) -> str:
        """The last lines that a worker wrote to stderr, masked."""

    async def keep(self) -> None:
        """Look at what is written and keep it in bounds; runs until cancelled."""


class OutputStore:
    """The output that one node keeps."""

    def __init__(self, folder: Path, bounds: OutputBounds) -> None:
        """Go on with what an earlier agent of the node kept.

        Args:
            folder: where it lies, ours alone.
            bounds: how much is kept.
        """
        self.bounds = _fitting(bounds, folder)
        self._folder = folder
        self._kept: dict[OutputOf, _Output] = {}
        self._changed = asyncio.Event()
        self._look_again = asyncio.Event()
        self._deleting: set[asyncio.Future[None]] = set()
        for path in sorted(folder.glob("*/*")):
            whose = OutputOf.at(path)
            if whose is not None:
                self._kept[whose] = output = _Output(whose, path)
                output.trim(self.bounds.worker_bytes)
                output.ended_ms = int(path.stat().st_mtime * 1000)

    def jobs(self) -> list[str]:
        return sorted({whose.job for whose in self._kept})[:MAX_JOBS]

    def folder_of(self, whose: OutputOf) -> Path:
        return self._folder / whose.folder

    def begin(self, whose: OutputOf) -> None:
        output = self._kept.get(whose)
        if output is None:
            output = self._kept[whose] = _Output(whose, self.folder_of(whose))
            try:
                output.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                # A full disk must not keep a worker from starting (R10).
                _log.error("output_not_kept", worker=whose.folder, why=str(error))
        if output.ended_ms:
            output.looks = output.noted()
            output.ended_ms = 0
        self._look_again.set()

    def end(self, whose: OutputOf, scratch: Path | None = None) -> None:
        """A worker is gone: nothing more is written. What it kept for itself is deleted, its `scratch` folder too."""
        output = self._kept.get(whose)
        if output is not None and not output.ended_ms:
            self._look(output, self.bounds.worker_bytes)
            output.ended_ms, output.looks = _now_ms(), []
            for folder in (*(output.folder / name for name in (FILES, CODE, MODULES)), scratch):
                if folder is not None and folder.exists():
                    self._deleting.add(asyncio.get_running_loop().run_in_executor(None, _delete, folder))
            self._look_again.set()
            self._tell()

    def forget(self, jobs: Iterable[str]) -> None:
        gone = frozenset(jobs)
        for whose in [each for each in self._kept if each.job in gone]:
            del self._kept[whose]
        folders = [path for path in self._folder.iterdir() if path.name in gone]
        for folder in folders:
            _log.info("output_forgotten", job=folder.name)
            self._deleting.add(asyncio.get_running_loop().run_in_executor(None, _delete, folder))
        self._deleting = {each for each in self._deleting if not each.done()}
        self._tell()

    def stderr_tail(self, whose: OutputOf, hide: Hide) -> str:
        output = self._kept.get(whose)
        if output is None:
            return ""
        stream = common_pb2.OUTPUT_STREAM_STDERR
        size = output.size(stream)
        data = output.read(stream, max(0, size - _TAIL_READ), size).data
        # What a progress bar wrote over isn't there any more for who looks at a screen.
        lines = [line.rsplit("\r", 1)[-1] for line in hide(data.decode(errors="replace")).rstrip().split("\n")]
        text = "\n".join("".join(filter(_is_shown, line)) for line in lines[-TAIL_LINES:])
        return text.encode()[-TAIL_BYTES:].decode(errors="ignore")

    async def keep(self) -> None:
        while True:
            self._look_again.clear()
            written, surplus = await asyncio.to_thread(self._look_around, list(self._kept.values()))
            if written:
                self._tell()
            self.forget(surplus)
            if all(output.ended_ms for output in self._kept.values()):
                await self._look_again.wait()
            await asyncio.sleep(LOOK_S)

    async def read(
        self, job: str, selection: common_pb2.OutputSelection, *, finish: asyncio.Event | None = None
    ) -> AsyncGenerator[common_pb2.OutputChunk | None, None]:
        """Output of a job, worker by worker; then None, and with `finish` what is written until that is set.

        What nobody takes waits in its file: this reads no more than it is asked for.
        """
        places: dict[OutputOf, dict[Stream, int]] = {}
        async for chunk in self._read_on(job, selection, places, first=True):
            yield chunk
        yield None
        while finish is not None:
            last = finish.is_set()
            changed = self._changed
            async for chunk in self._read_on(job, selection, places, first=False):
                yield chunk
            if last:
                return
            waits = [asyncio.ensure_future(each.wait()) for each in (changed, finish)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in waits:
                    each.cancel()

    # Inside.

    async def _read_on(
        self,
        job: str,
        selection: common_pb2.OutputSelection,
        places: dict[OutputOf, dict[Stream, int]],
        *,
        first: bool,
    ) -> AsyncIterator[common_pb2.OutputChunk]:
        streams = tuple(selection.streams) or _PRINTED
        chosen = [
            output for whose, output in sorted(self._kept.items()) if whose.job == job and _is_in(whose, selection)
        ]
        for output in chosen:
            if output.whose not in places:
                starts = await asyncio.to_thread(_starts, output, selection, streams, first=first)
                places[output.whose] = starts
                # Empty pieces: there is output of it, and where it begins for whoever goes on after a lost connection.
                for stream, start in (starts or {streams[0]: 0}).items():
                    yield output.place(stream, start)
            place = places[output.whose]
            if not first and all(output.size(stream) <= place.get(stream, 0) for stream in streams):
                continue
            for _ in range(_CATCHES):
                overtaken = False
                for stream, start, end in await asyncio.to_thread(output.pieces, streams, place):
                    at = max(start, place.get(stream, 0))
                    while at < end:
                        chunk = await asyncio.to_thread(output.read, stream, at, end)
                        at = chunk.offset + len(chunk.data)
                        if not chunk.data and not chunk.discarded_bytes:
                            break
                        place[stream] = at
                        yield chunk
                    overtaken = overtaken or at > end
                if not overtaken:
                    break

    def _look_around(self, outputs: list[_Output]) -> tuple[bool, list[str]]:
        """Look at every living worker and at the total; whether something was written, and which jobs are too many."""
        living = [output for output in outputs if not output.ended_ms]
        # Under pressure the living share what there is, so that one can't take it all.
        share = max(_LEAST_SHARE, self.bounds.total_bytes // max(1, 2 * len(living)))
        written = [self._look(output, min(self.bounds.worker_bytes, share)) for output in living]
        ended = sorted((output for output in outputs if output.ended_ms), key=lambda each: (each.ended_ms, each.whose))
        surplus = sum(output.held_bytes for output in outputs) - self.bounds.total_bytes
        for output in ended:
            if surplus <= 0:
                break
            if output.held_bytes:
                surplus -= output.held_bytes
                output.trim(0)
                _log.info("output_shed", worker=output.whose.folder)
        jobs = list(dict.fromkeys(output.whose.job for output in ended))
        return any(written), jobs[: max(0, len(jobs) - MAX_JOBS)]

    def _look(self, output: _Output, limit_bytes: int) -> bool:
        try:
            output.trim(limit_bytes)
            return output.look(_now_ms())
        except OSError as error:
            _log.warning("output_not_looked_at", worker=output.whose.folder, why=str(error))
            return False

    def _tell(self) -> None:
        """Wake who follows."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _fitting(bounds: OutputBounds, folder: Path) -> OutputBounds:
    """The bounds, made smaller for a file system that is small itself: run directories often lie in memory."""
    facts = os.statvfs(folder)
    total_bytes = min(bounds.total_bytes, facts.f_blocks * facts.f_frsize // _PART_OF_DISK)
    return OutputBounds(min(bounds.worker_bytes, max(total_bytes // 2, _LEAST_SHARE)), total_bytes)


def _starts(
    output: _Output, selection: common_pb2.OutputSelection, streams: tuple[Stream, ...], *, first: bool
) -> dict[Stream, int]:
    """Where reading begins, by stream; 0 is left out."""
    whose = output.whose
    if selection.after:
        return {
            place.stream: place.offset
            for place in selection.after
            if (place.component, place.rank, place.generation) == (whose.component, whose.rank, whose.generation)
        }
    if not first:
        return {}
    starts: dict[Stream, int] = {}
    if selection.since_ms:
        starts = output.before(selection.since_ms, _now_ms())
    if selection.HasField("tail_lines"):
        tail = output.last_lines(selection.tail_lines, streams)
        starts = {stream: max(start, starts.get(stream, 0)) for stream, start in tail.items()}
    return {stream: start for stream, start in starts.items() if stream in streams}


def _is_in(whose: OutputOf, selection: common_pb2.OutputSelection) -> bool:
    return (
        selection.component in ("", whose.component)
        and (not selection.HasField("rank") or selection.rank == whose.rank)
        and selection.first_attempt <= whose.attempt
        and (not selection.last_attempt or whose.attempt <= selection.last_attempt)
    )


def _delete(folder: Path) -> None:
    # What can't be deleted is found, and deleted, by the next Hello.
    shutil.rmtree(folder, ignore_errors=True)


def _is_shown(character: str) -> bool:
    return character == "\t" or character.isprintable()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
