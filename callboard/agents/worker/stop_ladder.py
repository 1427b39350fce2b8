"""The stop ladder: how a worker is asked to yield before it is killed.

`cancel()` on the control group; then the calls in flight may end; then `checkpoint()` when they have, or at half of the
time; then the kill: at once where there is nothing to ask, at `cancel_timeout` at the latest (docs/agents.md).
"""

from __future__ import annotations

import asyncio
import base64
import signal
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from callboard.agents.files.checkpoints import Yielded
from callboard.agents.host.framing import Json
from callboard.agents.runtime import Hosted, HostError
from callboard.agents.system.process_tree import NotOurProcess
from callboard.agents.system.processes import Processes
from callboard.model.log import structlog
from callboard.security.processes import ProcessId
from callboard.v1 import agent_pb2

_log = structlog.get_logger(__name__)

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


def unasked_stop(reason: str, hooks_s: float = 0.0) -> StopOrder:
    """A stop by the agent itself. Without time for hooks none is asked."""
    now = asyncio.get_running_loop().time()
    return StopOrder(now, now + hooks_s, UNASKED_KILL_S, checkpoint=hooks_s > 0, reason=reason)


ENDED_FIRST = "its process ended before it left one"
"""Why a checkpoint was lost."""

EXIT_SETTLE_S = 1.0
"""The socket of a dying process closes before its pidfd says so; a host that hangs up without dying is broken."""


class _TimeIsUp(Exception):
    """The hooks took too long, or the process ended meanwhile."""


def wake(tree: Iterable[ProcessId], processes: Processes) -> None:
    """Let go on what somebody stopped (SIGSTOP): it could not answer, and its time would pass in vain."""
    for process in tree:
        _sent(process, signal.SIGCONT, processes)


def _sent(process: ProcessId, number: signal.Signals, processes: Processes) -> bool:
    try:
        return processes.send_signal(process, number)
    except (NotOurProcess, PermissionError) as error:
        _log.info("stop_signal_not_sent", pid=process.pid, why=str(error))
        return False


@dataclass(frozen=True)
class Signal:
    """The signal that a stop of a worker begins with, for what it started; its own process gets it from its host,
    which knows whether the user's code handles it: where nothing does, it would end before its hooks."""

    name: str
    process: ProcessId
    processes: Processes

    async def send(self) -> Sequence[ProcessId]:
        """Send it; returns the processes that got it."""
        if self.name not in signal.Signals.__members__:
            return ()
        trees = await self.processes.trees([self.process])
        number = signal.Signals[self.name]
        below = sorted(trees[self.process] - {self.process})
        return [each for each in below if _sent(each, number, self.processes)]


async def ask_to_yield(
    hosted: Hosted,
    hooks: frozenset[str],
    order: StopOrder,
    exited: asyncio.Future[str],
    *,
    sign: Signal | None = None,
    on_cancelled: Callable[[], None] = lambda: None,
) -> Yielded:
    """Send the signal, run the hooks and wait for what got the signal; returns by `order.hooks_until`, whatever they
    do. Calls `on_cancelled` when `cancel()` has returned."""
    take = order.checkpoint and "checkpoint" in hooks
    if "cancel" not in hooks and not take and sign is None:
        at_once = "checkpoint" in hooks and order.kind == StopOrder.kind
        return Yielded(lost=f"it was stopped at once: {order.reason}") if at_once else Yielded()

    loop = asyncio.get_running_loop()
    answer: Json = {}

    def failed(detail: str) -> Yielded:
        checkpoint = _checkpoint(answer)
        return Yielded(False, checkpoint, detail, detail if take and checkpoint is None else "")

    if order.hooks_until <= order.asked_at:
        return failed("it was stopped at once, without time for its hooks")

    def notice() -> Json:
        return {"reason": order.reason, "kind": order.kind, "left_s": max(0.0, order.hooks_until - loop.time())}

    def wait() -> Json:
        until = order.asked_at + (order.hooks_until - order.asked_at) / 2 if take else order.hooks_until
        return {"wait_s": max(0.0, until - loop.time()), "take": take, "notice": notice()}

    ended = Yielded(True, None, "the process ended by itself", ENDED_FIRST if take else "")
    step = "cancel()"
    try:
        signalled = () if sign is None else await sign.send()
        asked = {"notice": notice(), "signal_name": "" if sign is None else sign.name}
        cancelled = await _within(lambda: hosted.control("cancel", asked), order, exited)
        on_cancelled()
        step = "checkpoint()" if take else "a call in flight"
        answer = await _within(lambda: hosted.control("checkpoint", wait()), order, exited)
        for process in signalled:
            assert sign is not None
            step = f"process {process.pid}, which got {sign.name},"
            await _within(partial(sign.processes.exited, process), order, exited)
    except _TimeIsUp:
        if exited.done():
            return ended
        return failed(f"{step} took too long")
    except HostError as error:
        await asyncio.wait([exited], timeout=min(EXIT_SETTLE_S, max(0.0, order.hooks_until - loop.time())))
        return ended if exited.done() else failed(f"{step} could not be asked: {error}")
    errors = [text for text in (cancelled["error"], answer["error"]) if text]
    if answer["in_flight"]:
        errors.append(f"{answer['in_flight']} calls went on")
    checkpoint, detail = _checkpoint(answer), "; ".join(errors)
    lost = answer["error"] or (detail if checkpoint is None else "")
    return Yielded(not errors, checkpoint, detail, lost if take else "")


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
