"""Waits with a bound that holds.

`asyncio.wait` and not `wait_for` or `timeout`: those wait for as long as what they cancel ignores it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
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
