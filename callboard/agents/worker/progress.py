"""Progress: what a worker says that it is at. A wedged worker answers pings and makes no progress (NJ-02's other half).

What counts is what the user's ``progress()`` says: a worker is given up when it says the same for the component's
``progress_timeout`` while calls are in flight. Not answering proves nothing: native code may hold the interpreter for
minutes (docs/agents.md), so silence stops no clock and ends nobody; only an answer does.
"""

from __future__ import annotations

import asyncio
import json

from callboard.agents.host.framing import Json
from callboard.agents.runtime import Hosted, HostError
from callboard.agents.system.tasks import answer_within
from callboard.model.log import structlog

LONGEST_PAUSE_S = 10.0
SHORTEST_PAUSE_S = 0.02
LOOKS = 4
"""Looks in one timeout, so that a stall is noticed at most a quarter late."""

LAST_QUESTION_S = 1.0
"""For a process that was given up to say what it was at."""

log = structlog.get_logger(__name__)


async def until_stalled(hosted: Hosted, name: str, timeout_s: float) -> str:
    """Return once the worker has stalled, with what to say of it."""
    loop = asyncio.get_running_loop()
    pause_s = min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, timeout_s / LOOKS))
    said = trouble = ""
    since = loop.time()
    while True:
        await asyncio.sleep(pause_s)
        answer = await ask_within(hosted, "progress", timeout_s)
        if not isinstance(answer, dict):
            continue
        if trouble != (trouble := str(answer.get("error") or "")) and trouble:
            log.warning("progress can't be told", worker=name, why=trouble[:200])
        progress = answer.get("progress")
        # As text: a loss of NaN is never equal to itself, and would look like progress for ever.
        text = json.dumps(progress, sort_keys=True)
        if progress is None or not answer.get("in_flight") or text != said:
            said, since = text, loop.time()
        elif loop.time() - since >= timeout_s:
            log.warning("a worker has stalled", worker=name, progress=str(progress)[:200])
            return f"it made no progress for {timeout_s:g} s: progress() still says {str(progress)[:200]}"


async def being_built(hosted: Hosted) -> str:
    """Which member of a group holds the others up; empty: it is no group, or its process doesn't say."""
    answer = await ask_within(hosted, "ping", LAST_QUESTION_S)
    return str(answer.get("building", "")) if isinstance(answer, dict) else ""


async def ask_within(hosted: Hosted, method: str, within_s: float) -> Json:
    """What a host answers; None if it doesn't in time, or ended."""
    try:
        return await answer_within(hosted.control(method), within_s)
    except HostError:
        return None
