"""The progress watch: a wedged worker answers pings and makes no progress (NJ-02's other half).

What counts is what the user's ``progress()`` says: a worker is given up when it says the same for the component's
``progress_timeout`` while calls are in flight. Not answering proves nothing: native code may hold the interpreter for
minutes (docs/agents.md), so silence stops no clock and ends nobody; only an answer does.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import structlog

from callboard.agents.host.framing import Json
from callboard.agents.runtime import HostError
from callboard.agents.worker.worker_facts import WorkerFacts

LONGEST_PAUSE_S = 10.0
SHORTEST_PAUSE_S = 0.02
LOOKS = 4
"""Looks in one timeout, so that a stall is noticed at most a quarter late."""

log = structlog.get_logger(__name__)


async def watch_progress(facts: WorkerFacts) -> None:
    """Ends the worker once it has stalled; returns then, or at once if nobody asked for it."""
    timeout_s = facts.order.command.progress_timeout_ms / 1000
    if not timeout_s:
        return
    loop = asyncio.get_running_loop()
    pause_s = min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, timeout_s / LOOKS))
    said = trouble = ""
    since = loop.time()
    while True:
        await asyncio.sleep(pause_s)
        answer = await _ask(facts, timeout_s)
        if answer is None:
            continue
        if trouble != (trouble := str(answer.get("error") or "")) and trouble:
            log.warning("progress can't be told", worker=facts.order.launch.name, why=trouble[:200])
        progress = answer.get("progress")
        # As text: a loss of NaN is never equal to itself, and would look like progress for ever.
        text = json.dumps(progress, sort_keys=True)
        if progress is None or not answer.get("in_flight") or text != said:
            said, since = text, loop.time()
        elif loop.time() - since >= timeout_s:
            log.warning("a worker has stalled", worker=facts.order.launch.name, progress=str(progress)[:200])
            facts.signals.end(f"it made no progress for {timeout_s:g} s: progress() still says {str(progress)[:200]}")
            return


async def _ask(facts: WorkerFacts, patience_s: float) -> dict[str, Any] | None:
    """What the worker says of its progress; None: nothing."""
    if facts.hosted is None:
        return None
    asked: asyncio.Task[Json] = asyncio.ensure_future(facts.hosted.control("progress"))
    try:
        await asyncio.wait([asked], timeout=patience_s)
        if not asked.done():
            return None
        answer = asked.result()
    except HostError:
        return None  # the process is gone, which others notice
    finally:
        asked.cancel()
    return answer if isinstance(answer, dict) else None
