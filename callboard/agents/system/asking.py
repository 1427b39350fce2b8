"""Asking a program: it is started, and what it says is read to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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
