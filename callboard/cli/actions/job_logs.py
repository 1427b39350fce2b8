"""What `callboard job logs` does."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Sequence
from io import BufferedReader

from callboard.cli import screen
from callboard.cli.failing import CommandFailed, Failure
from callboard.cli.file_changes import FileChanges
from callboard.cli.session import with_client
from callboard.cli.worker_logs import WorkerLogs, logs_of, logs_of_ended
from callboard.client.client import Client
from callboard.client.clusters import run_directory
from callboard.client.jobs import ENDED, JobHandle

_CHUNK_BYTES = 1 << 20


def show(name: str, *, component: str, rank: int | None, follow: bool, tail: int, controller: str) -> None:
    """Shows the logs of a job's workers, and goes on with ``follow``."""

    async def action(client: Client) -> None:
        job = await client.get_job(name)
        found = await _find(client, job, component, rank)
        readable = [each for each in found if each.files]
        for each in found:
            if each.elsewhere:
                screen.stderr().print(f"{job.name}/{each.label}: {each.elsewhere}.", markup=False, soft_wrap=True)
        if not readable:
            raise CommandFailed(_nothing(job, any_found=bool(found)))
        sources = _sources(job, readable, several=sum(len(each.files) for each in readable) > 1)
        try:
            # Watched before the first read: what is written in between is not missed.
            with FileChanges(file for each in readable for file in each.files) as changes:
                for source in sources:
                    source.print_tail(tail)
                if follow and job.state not in ENDED:
                    await _follow(job, sources, changes)
            if all(source.is_empty() for source in sources):
                screen.stderr().print(f"Job {job.name} has printed nothing so far.")
        finally:
            for source in sources:
                source.close()

    with_client(controller, action)


def _nothing(job: JobHandle, *, any_found: bool) -> Failure:
    what = f"No log of job {job.name} can be shown here."
    if any_found:
        why = "Logs are files on the machine of the worker."
        return Failure(what, why, "Look on the host that is named above.")
    why = f"It is {job.state} and has no such worker on this machine."
    if job.state in ENDED:
        return Failure(
            what,
            f"It is {job.state}: which workers it had is forgotten, and no file is named after it.",
            "Look at `callboard job get` for its traceback, or among the logs of Ray's session on its nodes.",
        )
    return Failure(what, why, "Look at `callboard job get` for its workers.")


async def _find(client: Client, job: JobHandle, component: str, rank: int | None) -> list[WorkerLogs]:
    if job.state in ENDED and not job.job.workers:
        return logs_of_ended(job.job.uid, run_directory())
    nodes = {node.name.removeprefix("nodes/"): node for node in await client.list_nodes()}
    base = run_directory()
    return [
        logs_of(worker, nodes.get(worker.allocation.node_id), base)
        for worker in job.job.workers
        if component in ("", worker.key.component) and rank in (None, worker.key.rank)
    ]


async def _follow(job: JobHandle, sources: Sequence[_Source], changes: FileChanges) -> None:
    """Prints what is written until the job has ended."""
    ended = asyncio.create_task(job.finished())
    try:
        while not ended.done():
            waiting = asyncio.create_task(changes.wait())
            await asyncio.wait({waiting, ended}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            for source in sources:
                source.print_new()
        ended.result()
    finally:
        ended.cancel()


def _sources(job: JobHandle, found: Sequence[WorkerLogs], *, several: bool) -> list[_Source]:
    return [
        _Source(file.open("rb"), f"{job.name}/{each.label}" if several else "") for each in found for file in each.files
    ]


class _Source:
    """One file that is printed line by line."""

    def __init__(self, file: BufferedReader, label: str) -> None:
        self._file = file
        self._prefix = f"{label} | ".encode() if label else b""
        self._rest = b""

    def print_tail(self, lines: int) -> None:
        """The last lines of what is there; a long file is read from its last MiB per 1 000 lines on."""
        size = os.fstat(self._file.fileno()).st_size
        self._file.seek(max(size - _CHUNK_BYTES * (1 + lines // 1000), 0))
        if self._file.tell():
            self._file.readline()  # Half a line.
        kept: deque[bytes] = deque(self._file.read(size - self._file.tell()).splitlines(keepends=True), maxlen=lines)
        self._print(list(kept))

    def print_new(self) -> None:
        """Whole lines that were written since."""
        while chunk := self._file.read(_CHUNK_BYTES):
            lines = (self._rest + chunk).splitlines(keepends=True)
            self._rest = lines.pop() if not lines[-1].endswith(b"\n") else b""
            self._print(lines)

    def is_empty(self) -> bool:
        """Whether nothing was ever written."""
        return os.fstat(self._file.fileno()).st_size == 0

    def close(self) -> None:
        """What is left without an end of line, and the file."""
        if self._rest:
            self._print([self._rest + b"\n"])
        self._file.close()

    def _print(self, lines: Sequence[bytes]) -> None:
        sys.stdout.write(b"".join(self._prefix + line for line in lines).decode(errors="replace"))
        sys.stdout.flush()
