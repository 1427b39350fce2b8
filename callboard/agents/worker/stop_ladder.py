"""The stop ladder: how a worker is asked to yield before it is killed.

`cancel()` on the control group; then the calls in flight may end; then `checkpoint()` when they have, or at half of the
time; then the kill: at once where there is nothing to ask, at `cancel_timeout` at the latest (docs/agents.md).
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from callboard.agents.files.checkpoints import Yielded
from callboard.agents.host.framing import Json
from callboard.agents.runtime import Hosted, HostError
from callboard.agents.system.process_tree import ProcessId
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
    kind: str = "agent"
    """What it is for, as the hooks are told."""
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


ENDED_FIRST = "its process ended before it left one"
"""Why a checkpoint was lost."""

_EXIT_SETTLE_S = 1.0


class _TimeIsUp(Exception):
    """The hooks took too long, or the process ended meanwhile."""


class Signal(Protocol):
    """The signal that a stop begins with."""

    name: str

    async def send(self) -> Sequence[ProcessId]:
        """Send it to what the worker started; returns the processes that got it."""

    async def gone(self, process: ProcessId) -> None:
        """Return once one of them has ended."""


async def ask_to_yield(
    hosted: Hosted,
    hooks: frozenset[str],
    order: StopOrder,
    exited: asyncio.Future[str],
    signal: Signal | None = None,
) -> Yielded:
    """Send the signal, run the hooks and wait for what got the signal; returns by `order.hooks_until`, whatever they
    do."""
    can_cancel = "cancel" in hooks
    can_checkpoint = order.checkpoint and "checkpoint" in hooks
    if not can_cancel and not can_checkpoint and signal is None:
        at_once = "checkpoint" in hooks and order.kind == StopOrder.kind
        return Yielded(lost=f"it was stopped at once: {order.reason}") if at_once else Yielded()
    yielded = await _asked(hosted, order, exited, signal, take=can_checkpoint)
    if can_checkpoint and yielded.checkpoint is None and not yielded.lost and not yielded.cooperative:
        return replace(yielded, lost=yielded.detail)
    return yielded


async def _asked(
    hosted: Hosted, order: StopOrder, exited: asyncio.Future[str], signal: Signal | None, *, take: bool
) -> Yielded:
    loop = asyncio.get_running_loop()
    given_s = order.hooks_until - order.asked_at
    if given_s <= 0:
        return Yielded(detail="it was stopped at once, without time for its hooks")

    def notice() -> Json:
        return {"reason": order.reason, "kind": order.kind, "left_s": max(0.0, order.hooks_until - loop.time())}

    def wait() -> Json:
        until = order.asked_at + (order.hooks_until - order.asked_at) / 2 if take else order.hooks_until
        return {"wait_s": max(0.0, until - loop.time()), "take": take, "notice": notice()}

    ended = Yielded(
        cooperative=True,
        detail="the process ended by itself",
        lost=ENDED_FIRST if take else "",
    )
    step = "cancel()"
    answer: Json = {}
    try:
        signalled = () if signal is None else await signal.send()
        asked = {"notice": notice(), "signal_name": "" if signal is None else signal.name}
        cancelled = await _within(lambda: hosted.control("cancel", asked), order, exited)
        step = "checkpoint()" if take else "a call in flight"
        answer = await _within(lambda: hosted.control("checkpoint", wait()), order, exited)
        for process in signalled:
            assert signal is not None
            step = f"process {process.pid}, which got {signal.name},"
            await _within(partial(_gone, signal, process), order, exited)
    except _TimeIsUp:
        if exited.done():
            return ended
        return Yielded(False, _checkpoint(answer), f"{step} took too long")
    except HostError as error:
        # The socket of a process that ends closes before its pidfd says so.
        await asyncio.wait([exited], timeout=min(_EXIT_SETTLE_S, max(0.0, order.hooks_until - loop.time())))
        return ended if exited.done() else Yielded(detail=f"{step} could not be asked: {error}")
    errors = [text for text in (cancelled["error"], answer["error"]) if text]
    if answer["in_flight"]:
        errors.append(f"{answer['in_flight']} calls went on")
    return Yielded(not errors, _checkpoint(answer), "; ".join(errors), answer["error"] if take else "")


async def _gone(signal: Signal, process: ProcessId) -> Json:
    await signal.gone(process)
    return None


async def _within(
    request: Callable[[], Coroutine[object, object, Json]], order: StopOrder, exited: asyncio.Future[str]
) -> Json:
    """The answer, unless the order's deadline (which may move) or the end of the process comes first.

    `asyncio.wait` and not `wait_for`: the latter waits for as long as the task ignores its cancellation.
    """
    loop = asyncio.get_running_loop()
    asked = [asyncio.ensure_future(request())]
    moved = asyncio.ensure_future(order.shortened.wait())
    try:
        while not any(each.done() for each in asked) and not exited.done():
            left_s = order.hooks_until - loop.time()
            if left_s <= 0:
                break
            if moved.done():
                order.shortened.clear()
                moved = asyncio.ensure_future(order.shortened.wait())
                # What was asked goes on by the longer time; hooks run once, however often they are asked for.
                asked.append(asyncio.ensure_future(request()))
            await asyncio.wait([*asked, exited, moved], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        for each in asked:
            if each.done():
                return each.result()
        raise _TimeIsUp
    finally:
        for task in (*asked, moved):
            task.cancel()


def _checkpoint(answer: Json) -> agent_pb2.Checkpoint | None:
    if "uri" in answer:
        return agent_pb2.Checkpoint(uri=answer["uri"])
    if "data" in answer:
        return agent_pb2.Checkpoint(data=base64.b64decode(answer["data"]))
    return None
