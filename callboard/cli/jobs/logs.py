"""What `callboard job logs` does."""

from __future__ import annotations

import sys

from callboard.cli.options import reading
from callboard.cli.show import consoles
from callboard.cli.show.exits import CommandFailed
from callboard.cli.show.verb_guard import with_client
from callboard.client.calls.watching import MISSING, LogLine
from callboard.client.client import Client
from callboard.model.durations import parse_duration_ms
from callboard.v1.job_pb2 import Job

_ALL = -1
_TAIL = 100
"""Lines of each worker unless something else is said."""


def show(
    name: str, *, component: str, rank: int | None, attempt: int, follow: bool, since: str, tail: int | None
) -> None:
    """Shows the output of a job's workers, and goes on with ``follow``."""
    with reading("--since"):
        since_s = parse_duration_ms(since) / 1000 if since else 0.0
    lines_of_each = None if tail == _ALL or (tail is None and since) else _TAIL if tail is None else tail

    async def action(client: Client) -> None:
        job = await client.get_job(name)
        is_one = _is_one(job.job, component, rank)
        printed, missing = 0, 0
        lines = job.logs(
            component=component, rank=rank, attempt=attempt, follow=follow, since=since_s, tail=lines_of_each
        )
        async for line in lines:
            if line.stream == MISSING:
                missing += 1
                consoles.stderr().print(f"Missing: {line.text}.", soft_wrap=True)
            else:
                printed += 1
                _print(line, "" if is_one else f"{job.name}/{line.component}/{line.rank} | ")
        if missing and not printed:
            raise _nothing(await job.refresh())
        if not printed:
            when = f" in the last {since}" if since else "" if job.job.HasField("end_time") else " so far"
            consoles.stderr().print(f"Job {job.name} has printed nothing{when}.")

    with_client(action)


def _nothing(job: Job) -> CommandFailed:
    name = job.spec.name
    remedy = f"`callboard job get {name}` shows what is known of it."
    if job.stderr_tail:
        remedy = "This end of stderr came with the report of its failure:\n" + job.stderr_tail.rstrip()
    return CommandFailed(f"No output of job {name} can be shown.", "It is missing for the reasons above.", remedy)


def _is_one(job: Job, component: str, rank: int | None) -> bool:
    """Whether the output of no more than one worker can be meant."""
    counts: dict[str, int] = {}
    for each in job.spec.components:
        if component in ("", each.name, each.colocation_group):
            process = each.colocation_group or each.name
            counts[process] = max(each.workers, each.max_workers, 1)
    return len(counts) == 1 and (rank is not None or all(count == 1 for count in counts.values()))


def _print(line: LogLine, prefix: str) -> None:
    sys.stdout.write(f"{prefix}{line.text}\n")
    sys.stdout.flush()
