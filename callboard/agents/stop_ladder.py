"""How is a worker asked to yield before it is killed?

`cancel()` on the control group; then the calls in flight may end; then `checkpoint()` when they have, or at half of the
time; then the kill: at once where there is nothing to ask, at `cancel_timeout` at the latest (docs/agents.md).
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Coroutine
from dataclasses import dataclass, field

from callboard.agents.checkpoints import Yielded
from callboard.agents.framing import Json
from callboard.agents.runtime import Hosted, HostError
from callboard.v1 import agent_pb2

UNASKED_KILL_S = 10.0
"""For the kill of a worker that nobody gave a time for: one that died alone or failed to start."""


@dataclass
class StopOrder:
    """A stop that was asked for. Later orders for the same worker join it and only shorten it."""

    asked_at: float
    """Loop time of the first order, in seconds."""
    hooks_until: float
    """Loop time at which the hooks are over."""
    kill_s: float
    """Seconds for the kill and its proof."""
    checkpoint: bool
    reason: str
    command_ids: list[str] = field(default_factory=list)
    shortened: asyncio.Event = field(default_factory=asyncio.Event)

    def join(self, other: StopOrder) -> None:
        """Answer the other order too, by the earlier of both deadlines."""
        self.command_ids.extend(other.command_ids)
        self.checkpoint = self.checkpoint or other.checkpoint
        self.kill_s = min(self.kill_s, other.kill_s)
        if other.hooks_until < self.hooks_until:
            self.hooks_until = other.hooks_until
            self.shortened.set()


def unasked_stop(reason: str, *, hooks_s: float = 0.0, kill_s: float = UNASKED_KILL_S) -> StopOrder:
    """A stop by the agent itself, in `hooks_s` + `kill_s` seconds. Without time for hooks none is asked."""
    now = asyncio.get_running_loop().time()
    return StopOrder(
        asked_at=now,
        hooks_until=now + hooks_s,
        kill_s=kill_s,
        checkpoint=hooks_s > 0,
        reason=reason,
    )


_ENDED_BY_ITSELF = Yielded(cooperative=True, detail="the process ended by itself")

_EXIT_SETTLE_S = 1.0


class _TimeIsUp(Exception):
    """The hooks took too long, or the process ended meanwhile."""


async def ask_to_yield(hosted: Hosted, hooks: frozenset[str], order: StopOrder, exited: asyncio.Future[str]) -> Yielded:
    """Run the hooks; returns by `order.hooks_until`, whatever they do."""
    can_cancel = "cancel" in hooks
    can_checkpoint = order.checkpoint and "checkpoint" in hooks
    if not can_cancel and not can_checkpoint:
        return Yielded()
    half = order.asked_at + (order.hooks_until - order.asked_at) / 2
    loop = asyncio.get_running_loop()
    step = "cancel()"
    answer: Json = {}
    try:
        cancelled = await _within(hosted.control("cancel"), order, exited)
        step = "checkpoint()" if can_checkpoint else "a call in flight"
        until = half if can_checkpoint else order.hooks_until
        wait = {"wait_s": max(0.0, until - loop.time()), "take": can_checkpoint}
        answer = await _within(hosted.control("checkpoint", wait), order, exited)
    except _TimeIsUp:
        if exited.done():
            return _ENDED_BY_ITSELF
        return Yielded(detail=f"{step} took too long")
    except HostError as error:
        # The socket of a process that ends closes before its pidfd says so.
        await asyncio.wait([exited], timeout=min(_EXIT_SETTLE_S, max(0.0, order.hooks_until - loop.time())))
        return _ENDED_BY_ITSELF if exited.done() else Yielded(detail=f"{step} could not be asked: {error}")
    errors = [text for text in (cancelled["error"], answer["error"]) if text]
    if answer["in_flight"]:
        errors.append(f"{answer['in_flight']} calls went on")
    return Yielded(not errors, _checkpoint(answer), "; ".join(errors))


async def _within(request: Coroutine[object, object, Json], order: StopOrder, exited: asyncio.Future[str]) -> Json:
    """The answer, unless the order's deadline (which may move) or the end of the process comes first.

    `asyncio.wait` and not `wait_for`: the latter waits for as long as the task ignores its cancellation.
    """
    loop = asyncio.get_running_loop()
    asked = asyncio.ensure_future(request)
    moved = asyncio.ensure_future(order.shortened.wait())
    try:
        while not asked.done() and not exited.done():
            left_s = order.hooks_until - loop.time()
            if left_s <= 0:
                break
            if moved.done():
                order.shortened.clear()
                moved = asyncio.ensure_future(order.shortened.wait())
            await asyncio.wait([asked, exited, moved], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        raise _TimeIsUp
    finally:
        for task in (asked, moved):
            task.cancel()


def _checkpoint(answer: Json) -> agent_pb2.Checkpoint | None:
    if "uri" in answer:
        return agent_pb2.Checkpoint(uri=answer["uri"])
    if "data" in answer:
        return agent_pb2.Checkpoint(data=base64.b64decode(answer["data"]))
    return None
