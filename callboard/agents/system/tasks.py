"""Waits with a bound that holds: for work, for the ends of tasks, for what a program says.

`asyncio.wait` and not `wait_for` or `timeout`: those wait for as long as what they cancel ignores it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


async def within(work: Coroutine[Any, Any, T], seconds: float | None) -> T:
    """The result of `work`, which is cancelled if it takes longer.

    Args:
        work: what is waited for.
        seconds: for it to end; None: without limit.

    Raises:
        TimeoutError: it took longer.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()


async def answer_within(work: Coroutine[Any, Any, T], seconds: float | None) -> T | None:
    """As :func:`within`; None if it took longer."""
    try:
        return await within(work, seconds)
    except TimeoutError:
        return None


async def cancelled(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait for their ends, whatever those are."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    if ending:
        await asyncio.wait(ending)


@dataclass(frozen=True)
class Said:
    """What a program said.

    Attributes:
        code: its exit code.
        output: on its standard output.
        errors: on its standard error.
    """

    code: int
    output: bytes
    errors: bytes


async def ask(command: Sequence[str], environment: Mapping[str, str], *, within_s: float | None = None) -> Said:
    """Run a program to its end; it is killed where nobody waits for that any more.

    Args:
        command: the program and its arguments.
        environment: all of its variables.
        within_s: seconds for it to end; None: without limit.

    Raises:
        OSError: it can't be started.
        TimeoutError: it took longer.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        env=dict(environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(within_s):
            output, errors = await process.communicate()
        assert process.returncode is not None
        return Said(process.returncode, output, errors)
    finally:
        if process.returncode is None:
            process.kill()
