"""Does the stop ladder end in time, whatever hooks and callers do?"""

from __future__ import annotations

import asyncio

from callboard.agents.host.framing import Json
from callboard.agents.worker.stop_ladder import StopOrder, ask_to_yield, unasked_stop
from callboard.security.processes import ProcessId

HOOKS = frozenset({"cancel", "checkpoint"})


class Host:
    """Answers when the test says so."""

    process = ProcessId(1, 1)
    actor_name = ""
    address = ""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self.asked = asyncio.Event()

    async def control(self, method: str, argument: Json = None) -> Json:
        self.asked.set()
        return await asyncio.shield(self.answer)

    peak_bytes = 0

    def exit_message(self) -> str:
        return ""

    def release(self) -> None:
        """Nothing to let go of."""


class Deaf(Host):
    """Its request takes no cancellation, as a hook that catches CancelledError."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled = 0

    async def control(self, method: str, argument: Json = None) -> Json:
        self.asked.set()
        while True:
            try:
                return await asyncio.shield(self.answer)
            except asyncio.CancelledError:
                self.cancelled += 1
                if self.answer.cancelled():
                    raise


def order(hooks_s: float) -> StopOrder:
    return unasked_stop("the test wants it", hooks_s=hooks_s)


async def test_pc_11_a_request_that_ignores_its_cancellation_does_not_move_the_timeout() -> None:
    host = Deaf()
    exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with asyncio.timeout(90):
        yielded = await ask_to_yield(host, HOOKS, order(0.05), exited)
    assert yielded.detail == "cancel() took too long"
    assert not host.answer.done(), "it was left alone, not waited for"
    host.answer.cancel()
    await asyncio.sleep(0)


async def test_pc_11_a_cancel_in_the_same_tick_as_the_answer_is_never_lost() -> None:
    for _ in range(1_000):
        host = Host()
        exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asking = asyncio.create_task(ask_to_yield(host, HOOKS, order(60), exited))
        await host.asked.wait()
        host.answer.set_result({"hook": True, "error": "", "in_flight": 0})
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()


async def test_pc_11_an_end_in_the_same_tick_as_the_deadline_is_no_hang() -> None:
    for _ in range(200):
        host = Host()
        exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asking = asyncio.create_task(ask_to_yield(host, HOOKS, order(0.001), exited))
        await asyncio.sleep(0.001)
        exited.set_result("")
        async with asyncio.timeout(90):
            yielded = await asking
        assert yielded.detail in {"the process ended by itself", "cancel() took too long"}


class Waits(Host):
    """Takes its checkpoint when the time for the calls in flight is over."""

    async def control(self, method: str, argument: Json = None) -> Json:
        self.asked.set()
        if method == "cancel":
            return {"hook": True, "error": ""}
        await asyncio.sleep(argument["wait_s"])
        return {"in_flight": 1, "error": "", "uri": "s3://kept"}


async def test_ft_d2_a_stop_that_is_shortened_still_takes_the_checkpoint() -> None:
    host, first = Waits(), order(100_000.0)
    exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = asyncio.ensure_future(ask_to_yield(host, HOOKS, first, exited))
    await host.asked.wait()
    await asyncio.sleep(0.05)
    first.join(order(4.0))
    async with asyncio.timeout(90):
        yielded = await running
    assert yielded.checkpoint is not None
    assert (yielded.checkpoint.uri, yielded.lost) == ("s3://kept", "")
