"""Searches for placements: children of the controller, a few at a time, ended with the call that asked."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from callboard.model.log import structlog
from callboard.wire.refusals import InternalError, LimitReached

MOST = 2
"""Most searches at a time: each takes a core."""

GRACE_S = 30.0
"""How much longer than its limit a search may take: the interpreter's start, and the check of what it found."""

MAX_LINE_BYTES = 16 << 20
"""Longest step: a plan for thousands of GPUs."""

log = structlog.get_logger(__name__)


class Searches:
    """The searches that run."""

    def __init__(self) -> None:
        self._running = 0

    async def run(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The steps of a search (:mod:`callboard.controller.searches.search_child`), the last of which ends it.

        Raises:
            LimitReached: too many searches run.
            InternalError: the search ended without an answer, a defect.
        """
        if self._running >= MOST:
            raise LimitReached(f"{MOST} searches run already; try again when one has ended, or search with the CLI")
        self._running += 1
        try:
            # Closed here and not when the collector comes by: the child must end with the call.
            async with aclosing(_steps(request)) as steps:
                async for step in steps:
                    yield step
        finally:
            self._running -= 1


async def _steps(request: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "callboard.controller.searches.search_child"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=MAX_LINE_BYTES,
        start_new_session=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    complaints = asyncio.create_task(child.stderr.read())
    try:
        child.stdin.write(json.dumps(request).encode())
        child.stdin.close()
        async with asyncio.timeout(request["time_limit_s"] * _searches_in(request) + GRACE_S):
            while line := await child.stdout.readline():
                step: dict[str, Any] = json.loads(line)
                yield step
                if "progress" not in step:
                    return
        log.error(
            "a defect: a search ended without an answer", said=(await complaints)[-2000:].decode(errors="replace")
        )
        raise InternalError("the search met a defect in the controller; see its log")
    except TimeoutError:
        log.exception("a defect: a search did not end in time")
        raise InternalError("the search did not end in time; see the controller's log") from None
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()
        await complaints


def _searches_in(request: dict[str, Any]) -> int:
    """How many problems one request may be: the plan, the one without restrictions, one for each staleness."""
    return 6 if "async" in request["config"] else 2
