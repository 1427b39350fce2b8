"""What `callboard run` does: it makes jobs of commands, follows them, and ends as they do."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path, PurePath
from typing import Any

import typer

from callboard.cli.jobs.executing import interact, tell
from callboard.cli.layouts.config_source import read_text
from callboard.cli.local.interrupts import taking
from callboard.cli.options import reading, wishes
from callboard.cli.show.exits import FAILED, INTERRUPTED
from callboard.cli.show.failures import EXPECTED, failure_of
from callboard.cli.show.verb_guard import failing_in_words, with_client
from callboard.client.calls.watching import MISSING, LogLine
from callboard.client.client import Client
from callboard.client.jobs import ENDED, JobHandle
from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs import job_spec
from callboard.model.names import is_name
from callboard.model.quantities import parse_memory
from callboard.model.requests import fresh_name
from callboard.model.specs import JobSpec

MOST_RUNS = 1_000
"""Of one array or file."""

_FOLLOWED = 8
"""Runs that are followed at one time: a controller serves 64 reads of output, to everybody."""

_WAITS = frozenset({"PENDING", "NOMINATED", "RECOVERING"})
"""States in which the reason is shown."""

_LOOK_S = 5.0
"""Between questions why a job waits, where nothing happens to the job itself: others come and go."""

_NOT_FOUND = frozenset({2, 126, 127})
"""Exit codes of interpreters and shells for a file that they don't find."""

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?")
_INDEX = "{index}"


def run(
    command: Sequence[str],
    *,
    file: Path | None,
    array: str,
    name: str,
    job: Mapping[str, Any],
    component: Mapping[str, Any],
    memory: tuple[str, int],
    env: Sequence[str],
    rank: int | None,
    detach: bool,
) -> None:
    """Submits one job for each run and follows them; the first exit code that isn't 0 is the program's."""
    variables = dict(map(_variable, env))
    if memory[0]:
        with reading("--memory-per-node"):
            resources = {**component["resources"], "memory": parse_memory(memory[0]) // memory[1]}
        component = {**component, "resources": resources}
    if file is not None:
        with failing_in_words():
            commands = _lines(file)
        base = name or fresh_name(_word(file.stem))
        runs = [(f"{base}-{number}", each, variables) for number, each in enumerate(commands, 1)]
    elif array:
        base = name or fresh_name(_word(_program(command)))
        runs = [
            (
                f"{base}-{index}",
                [each.replace(_INDEX, str(index)) for each in command],
                {**variables, "ARRAY_INDEX": str(index)},
            )
            for index in _indexes(array)
        ]
    else:
        runs = [(name or fresh_name(_word(_program(command))), list(command), variables)]

    async def action(client: Client) -> None:
        handles: list[JobHandle] = []
        # Once, whatever the number of runs.
        sent: Any = await client.send_code({"components": [component]})
        # All are read before the first is sent: a fault of one leaves nothing half done.
        asked = [
            {**job, "name": name, "components": [{**sent["components"][0], "command": each, "env": own}]}
            for name, each, own in runs
        ]
        specs = [_spec(each) if len(runs) > 1 else job_spec(each) for each in asked]
        for spec in specs:
            try:
                handles.append(await client.submit(spec))
            except EXPECTED:
                if handles:
                    names = f"{handles[0].name} … {handles[-1].name}"
                    tell(f"{len(handles)} of {len(runs)} runs were submitted and go on: {names}")
                raise
            if detach:
                typer.echo(spec.name)
        if detach:
            return
        if component.get("tty"):
            raise typer.Exit(await _shown_here(handles[0]))
        is_one = len(handles) == 1 and (rank is not None or component.get("workers") == 1)
        with _cancelling(handles):
            slots = asyncio.Semaphore(_FOLLOWED)
            codes = await asyncio.gather(*(_Following(each, rank=rank, plain=is_one).run(slots) for each in handles))
        code, arguments = next(((code, each[1]) for code, each in zip(codes, runs, strict=True) if code), (0, []))
        _name_what_stayed(code, arguments, component)
        raise typer.Exit(code)

    with_client(action)


def _spec(asked: Mapping[str, Any]) -> JobSpec:
    """The spec of one of several runs; its faults say which it is."""
    try:
        return job_spec(asked)
    except InvalidInput as error:
        raise InvalidInput(Fault(f"{asked['name']}: {fault.field}", fault.message) for fault in error.faults) from error


def _name_what_stayed(code: int, command: Sequence[str], component: Mapping[str, Any]) -> None:
    """A file that is here needn't be where the workers run, who may not have found it."""
    # Arguments may be what no file can be called; this form never raises.
    relative = (each for each in command if not each.startswith("/") and os.path.isfile(each))  # noqa: PTH113
    stayed = next(relative, None)
    if stayed is not None and code in _NOT_FOUND and not component.get("working_dir"):
        tell(f"{stayed} is in {Path.cwd()} here; `--working-dir .` sends that folder along with the job")


async def _shown_here(job: JobHandle) -> int:
    """The exit code of a job whose terminal is shown here; why it waits is said meanwhile."""
    following = _Following(job, rank=0, plain=True)
    telling = asyncio.ensure_future(following.follow())
    try:
        with _cancelling([job]):
            return await interact(job)
    finally:
        telling.cancel()
        await asyncio.wait([telling])


class _Following:
    """One job on the screen, from its submit to its end."""

    def __init__(self, job: JobHandle, *, rank: int | None, plain: bool) -> None:
        self._job = job
        self._rank = rank
        self._plain = plain
        self._said = ""

    async def run(self, slots: asyncio.Semaphore) -> int:
        """Shows it once there is a slot (what it prints meanwhile is kept); returns the exit code of its program."""
        async with slots:
            return await self._run()

    async def _run(self) -> int:
        telling = asyncio.ensure_future(self.follow())
        try:
            async with aclosing(self._job.logs(rank=self._rank, follow=True)) as lines:
                async for line in lines:
                    self._print(line)
            job = await self._job.finished()
        finally:
            telling.cancel()
            await asyncio.wait([telling])
        if not telling.cancelled():
            telling.result()
        if self._job.state == "SUCCEEDED":
            return 0
        # Also where little is to be said: an exit code without a reason helps nobody.
        self._say(f"is {self._job.state}: {job.state_reason}", always=True)
        return job.exit_code or (INTERRUPTED if self._job.state == "CANCELLED" else FAILED)

    async def follow(self) -> None:
        """Says why it waits, whenever that changes; that it is stopping only where that takes a while."""
        lasts = False
        while self._job.state not in ENDED:
            before = self._job.job.revision
            if self._job.state in _WAITS:
                explanation = await self._job.explain()
                reasons = "; ".join(reason.message for reason in explanation.reasons) or explanation.summary
                self._say(f"waits: {reasons}" if reasons else "waits")
            elif self._job.job.attempt and (self._job.state != "STOPPING" or lasts):
                workers = self._job.job.workers
                nodes = ", ".join(dict.fromkeys(each.allocation.node_id for each in workers))
                takes_long = next((each.state_reason for each in workers if " builds " in each.state_reason), "")
                self._say(": ".join(filter(None, (f"is {self._job.state}" + f" on {nodes}" * bool(nodes), takes_long))))
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._job.until(lambda job, seen=before: job.revision > seen, "a change")  # type: ignore[misc]
                lasts = False
            except TimeoutError:
                lasts = True
                await self._job.refresh()

    def _say(self, text: str, *, always: bool = False) -> None:
        if text != self._said and (always or not wishes.quiet):
            tell(f"{self._job.name} {text}")
        self._said = text

    def _print(self, line: LogLine) -> None:
        if line.stream == MISSING:
            self._say(f"output is missing: {line.text}", always=True)
            return
        stream = sys.stderr if line.stream == "stderr" else sys.stdout
        stream.write(line.text + "\n" if self._plain else f"{self._job.name}/{line.rank} | {line.text}\n")
        stream.flush()


@contextmanager
def _cancelling(jobs: Sequence[JobHandle]) -> Iterator[None]:
    """Ctrl-C and SIGTERM cancel the jobs, a second one at once; after a third nobody waits for them."""
    waiting = asyncio.current_task()
    assert waiting is not None
    cancels: list[asyncio.Task[Any]] = []
    asked = 0

    def take(number: signal.Signals) -> None:
        nonlocal asked
        asked += 1
        if asked > 2:
            waiting.cancel()
            return
        text = "cancelling; once more ends it at once" if asked == 1 else "ending it at once"
        tell(text)
        grace = None if asked == 1 else 0
        reason = f"`callboard run` got {number.name}"
        cancels.extend(asyncio.create_task(_cancel(each, reason, grace)) for each in jobs)

    try:
        with taking((signal.SIGINT, signal.SIGTERM), take):
            yield
    except asyncio.CancelledError:
        if asked <= 2:
            raise
        raise typer.Exit(INTERRUPTED) from None
    finally:
        for task in cancels:
            task.cancel()


async def _cancel(job: JobHandle, reason: str, grace: float | None) -> None:
    try:
        await job.cancel(reason, grace=grace)
    except EXPECTED as error:
        tell(f"{job.name} was not cancelled: {failure_of(error).why}")


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"{text!r} reads NAME=VALUE", param_hint="--env")
    return name, value


def _lines(file: Path) -> list[list[str]]:
    """The commands of a file, one a line; empty lines and those that begin with # say nothing."""
    commands = []
    for number, line in enumerate(read_text(file).splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise typer.BadParameter(f"{file}, line {number}: {error}", param_hint="--file") from error
        if words:
            commands.append(words)
    if not 0 < len(commands) <= MOST_RUNS:
        why = f"{len(commands)} commands; 1 to {MOST_RUNS} are allowed"
        raise typer.BadParameter(f"{file} has {why}", param_hint="--file")
    return commands


def _indexes(text: str) -> list[int]:
    """The numbers of an array: ``0-9``, ``0-9:2``, ``1,4,7``."""
    found: dict[int, None] = {}
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or match[3] == "0":
            raise typer.BadParameter(
                f"{part!r} is neither a number nor a range such as 0-9 or 0-9:2", param_hint="--array"
            )
        first = int(match[1])
        indexes = range(first, int(match[2] or first) + 1, int(match[3] or 1))
        if not 0 < len(indexes) <= MOST_RUNS - len(found):
            raise typer.BadParameter(
                f"{part!r} has {len(indexes)} numbers; 1 to {MOST_RUNS} are allowed", param_hint="--array"
            )
        found |= dict.fromkeys(indexes)
    return list(found)


def _program(command: Sequence[str]) -> str:
    """What people call a command: its script, its module, or the program."""
    for before, word in zip(("", *command), command, strict=False):
        if word.endswith((".py", ".sh")) or before == "-m":
            return PurePath(word).stem if before != "-m" else word.rpartition(".")[2]
    return PurePath(command[0]).name


def _word(text: str) -> str:
    """The text as a name may begin."""
    word = re.sub(r"[^A-Za-z0-9-]+", "-", text).strip("-")
    return word if is_name(word) else "run"
